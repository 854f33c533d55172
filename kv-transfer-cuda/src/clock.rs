//! The one clock of this crate.

use std::time::Instant;

use kv_core::{Span, Time};

/// Tells the caller's time after the caller told it once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Anchor {
    told: Time,
    at: Instant,
}

impl Anchor {
    /// It is `now` at this moment.
    pub(crate) fn new(now: Time) -> Self {
        Self {
            told: now,
            at: instant(),
        }
    }

    /// What the caller told.
    pub(crate) const fn told(self) -> Time {
        self.told
    }

    /// The caller's time at this moment.
    pub(crate) fn now(self) -> Time {
        self.told + Span::from(self.at.elapsed())
    }
}

/// This moment.
#[expect(clippy::disallowed_methods, reason = "the one clock of this crate")]
pub(crate) fn instant() -> Instant {
    Instant::now()
}
