//! The contract between the machine and whatever really moves bytes.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::task::Waker;

use crate::{Command, Completion, SlotIndex, Span, Time};

/// A refusal that changed nothing: the reason, and what was passed, untouched.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused<T, W> {
    /// The reason.
    pub why: W,
    /// What was passed.
    pub back: T,
}

impl<T, W: fmt::Display> fmt::Display for Refused<T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl<T: fmt::Debug, W: fmt::Debug + fmt::Display> core::error::Error for Refused<T, W> {}

/// Why a backend did not take a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitRefusal {
    /// Its queue is full; offer the command again after the next completion.
    #[error("the backend's queue is full")]
    Busy,
    /// It takes nothing any more.
    #[error("the backend is closed or broken")]
    Closed,
}

/// What [`Backend::close`] left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// Commands whose end was never confirmed; their memory is leaked on purpose.
    pub unconfirmed: u32,
    /// Bytes leaked on purpose.
    pub leaked_bytes: u64,
}

/// Moves blocks between the GPU pool and the host pool.
///
/// The contract, clause by clause; `testing::conformance` checks it on any implementation:
///
/// 1. [`submit`](Self::submit) never blocks on the device or on a copy; it takes the command or
///    refuses and hands it back. (The blocking backend is the one exception: there the copy is
///    over when `submit` returns.)
/// 2. One completion per command, in any order, from any thread, announced through the waker.
/// 3. [`Outcome::Failed`](crate::Outcome::Failed) only when the device has surely stopped
///    touching both sides; in doubt [`Outcome::Unknown`](crate::Outcome::Unknown).
/// 4. A copy starts after the step named by [`Command::after`].
/// 5. Memory named by a running command is kept alive by the backend, whatever is dropped
///    elsewhere.
/// 6. The two directions run at the same time.
/// 7. Exact payload bytes, the submit time and the completion time are reported.
/// 8. [`close`](Self::close) waits only up to its limit; what is unconfirmed then is leaked and
///    counted, never freed.
pub trait Backend {
    /// Takes a command.
    ///
    /// # Errors
    ///
    /// Hands the command back if it can't be queued now. Nothing was started then.
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>>;

    /// Moves all completions that have arrived to the end of `out`. Never blocks.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Sets whom to wake, from any thread, after a completion has become visible to `poll`.
    fn set_waker(&mut self, waker: Waker);

    /// These slots hold nothing of value any more and may be given to others.
    ///
    /// Backends with a fixed slab have nothing to do. The blocking backend frees its buffers.
    fn forget(&mut self, _slots: &[SlotIndex]) {}

    /// How many host slots, counted from slot 0, can be used by now. Never goes down.
    ///
    /// A backend whose pool is set up in the background answers less than its capacity at first.
    fn slots_ready(&self) -> u32 {
        u32::MAX
    }

    /// Takes no more commands and waits for the running ones, at most `limit`. Idempotent.
    fn close(&mut self, limit: Span) -> Closed;
}

impl<B: Backend + ?Sized> Backend for Box<B> {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        (**self).submit(now, command)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        (**self).poll(out);
    }

    fn set_waker(&mut self, waker: Waker) {
        (**self).set_waker(waker);
    }

    fn forget(&mut self, slots: &[SlotIndex]) {
        (**self).forget(slots);
    }

    fn slots_ready(&self) -> u32 {
        (**self).slots_ready()
    }

    fn close(&mut self, limit: Span) -> Closed {
        (**self).close(limit)
    }
}
