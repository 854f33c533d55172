//! What the plain-memory backend can be told: threads, queue, limits, and a link to imitate.

use alloc::sync::Arc;
use core::num::{NonZeroU32, NonZeroU64};

use crate::{Span, Time};

/// Tells the time, from the same origin as the `now` that is passed to
/// [`Backend::submit`](crate::Backend::submit).
pub type Clock = Arc<dyn Fn() -> Time + Send + Sync>;

/// A link to imitate. The default is as fast as memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Payload per second, at most. Each of several threads gets an equal share.
    pub bandwidth_bytes_per_second: Option<NonZeroU64>,
    /// Waited once per copy, before its first byte moves.
    pub delay: Span,
}

impl Link {
    /// How long `bytes` take on a share of the link.
    pub(super) fn span_of(&self, bytes: u64, shares: NonZeroU32) -> Span {
        let Some(bandwidth) = self.bandwidth_bytes_per_second else {
            return Span::ZERO;
        };
        let nanos = u128::from(bytes) * 1_000_000_000 * u128::from(shares.get())
            / u128::from(bandwidth.get());
        Span::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// How a [`HostBackend`](super::HostBackend) works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Host slots, one block each.
    pub slots: u32,
    /// Threads that copy one way; as many copy the other way.
    pub threads_per_direction: NonZeroU32,
    /// Commands of one direction that may be unfinished; the next one is refused as busy.
    pub queue_max: NonZeroU32,
    /// How long a copy waits for the end of the step it must come after.
    pub fence_limit: Span,
    /// The link into host memory.
    pub link_out: Link,
    /// The link back.
    pub link_in: Link,
}

impl HostConfig {
    /// `slots` slots, one thread per direction, 1,024 unfinished commands per direction, a
    /// minute for a step to end, and a link as fast as memory.
    #[must_use]
    pub const fn new(slots: u32) -> Self {
        const QUEUE_MAX: NonZeroU32 = NonZeroU32::new(1_024).expect("1,024 is not 0");
        let link = Link {
            bandwidth_bytes_per_second: None,
            delay: Span::ZERO,
        };
        Self {
            slots,
            threads_per_direction: NonZeroU32::MIN,
            queue_max: QUEUE_MAX,
            fence_limit: Span::from_secs(60),
            link_out: link,
            link_in: link,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_a_link_takes_as_much_longer() {
        let link = Link {
            bandwidth_bytes_per_second: NonZeroU64::new(1_000_000),
            delay: Span::ZERO,
        };
        let three = NonZeroU32::new(3).unwrap();
        assert_eq!(link.span_of(1_000, NonZeroU32::MIN), Span::from_millis(1));
        assert_eq!(link.span_of(1_000, three), Span::from_millis(3));
        assert_eq!(link.span_of(0, three), Span::ZERO);
        assert_eq!(Link::default().span_of(u64::MAX, three), Span::ZERO);
    }

    #[test]
    fn a_span_beyond_all_times_is_the_longest() {
        let link = Link {
            bandwidth_bytes_per_second: Some(NonZeroU64::MIN),
            delay: Span::ZERO,
        };
        assert_eq!(
            link.span_of(u64::MAX, NonZeroU32::MAX),
            Span::from_nanos(u64::MAX)
        );
    }
}
