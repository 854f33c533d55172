//! The one place of this crate that reads the clock.

use std::time::Instant;

/// Now.
#[expect(
    clippy::disallowed_methods,
    reason = "tasks measure real programs on the real clock"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}
