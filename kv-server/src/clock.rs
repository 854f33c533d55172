//! The one clock of the process; everybody else gets time as an argument.

use std::time::{Instant, SystemTime};

use kv_core::Time;

/// Tells the time since it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock that starts at [`Time::ZERO`] now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the one clock")]
    pub(crate) fn start() -> Self {
        Self {
            origin: Instant::now(),
        }
    }

    /// The time now.
    #[must_use]
    pub(crate) fn now(&self) -> Time {
        let nanos = self.origin.elapsed().as_nanos();
        Time::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Seconds since 1970, for the `created` of an answer; 0 on a machine whose date is before that.
#[expect(clippy::disallowed_methods, reason = "clients want the date")]
pub(crate) fn epoch_s() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |age| age.as_secs())
}
