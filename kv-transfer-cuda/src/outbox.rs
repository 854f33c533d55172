//! Where ended commands wait for [`Backend::poll`](kv_core::Backend::poll), and what is open.
//!
//! Who may touch what: everything is behind one lock, held for a few list operations and never
//! during a wait for the device or a wake-up. A command is opened once and ended at most once: who
//! ends it takes it off the list of open ones, and whoever comes second finds nothing.

use core::task::Waker;
use core::time::Duration;
use std::collections::BTreeMap;

use kv_core::{Closed, Completion};
use parking_lot::{Condvar, Mutex};

use crate::clock::instant;

/// No wait is longer than a day, so that no sum with a clock's reading overflows.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

/// Names one command inside a backend; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Number(u64);

/// Ended and open commands.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Payload of each open command, bytes.
    open: BTreeMap<Number, u64>,
    ended: Vec<Completion>,
    waker: Option<Waker>,
    closed: Option<Closed>,
}

impl Outbox {
    /// Opens a command.
    pub(crate) fn open(&self, payload_bytes: u64) -> Number {
        let mut state = self.state.lock();
        let number = Number(state.next);
        state.next += 1;
        state.open.insert(number, payload_bytes);
        number
    }

    /// Ends a command, unless it was given up before, and wakes.
    pub(crate) fn end(&self, number: Number, completion: Completion) {
        let mut state = self.state.lock();
        if state.open.remove(&number).is_none() {
            return;
        }
        state.ended.push(completion);
        let waker = state.waker.clone();
        let idle = state.open.is_empty();
        drop(state);
        if idle {
            self.idle.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether no command is open.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.open.is_empty() && state.closed.is_none_or(|closed| closed.unconfirmed == 0)
    }

    /// Moves all ended commands to the end of `out`.
    pub(crate) fn take(&self, out: &mut Vec<Completion>) {
        out.append(&mut self.state.lock().ended);
    }

    /// Sets whom to wake; wakes at once if something has ended already.
    pub(crate) fn set_waker(&self, waker: Waker) {
        let mut state = self.state.lock();
        let due = !state.ended.is_empty();
        let replaced = state.waker.replace(waker.clone());
        drop(state);
        drop(replaced);
        if due {
            waker.wake();
        }
    }

    /// Waits until nothing is open, at most `limit`, and gives up what still is.
    ///
    /// The second value says whether this call gave something up: the first one that does.
    pub(crate) fn close(&self, limit: Duration) -> (Closed, bool) {
        let mut state = self.state.lock();
        if let Some(closed) = state.closed {
            return (closed, false);
        }
        let until = instant() + limit.min(WAIT_MAX);
        while !state.open.is_empty() {
            if self.idle.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let closed = Closed {
            unconfirmed: u32::try_from(state.open.len()).unwrap_or(u32::MAX),
            leaked_bytes: state.open.values().sum(),
        };
        state.open.clear();
        state.closed = Some(closed);
        (closed, closed.unconfirmed > 0)
    }
}

#[cfg(test)]
mod tests {
    use core::task::Waker;
    use core::time::Duration;
    use std::sync::Arc;
    use std::task::Wake;

    use kv_core::{Closed, CommandId, Completion, Outcome, TicketId, Time};
    use parking_lot::Mutex;

    use super::Outbox;

    fn completion(ticket: u64) -> Completion {
        Completion {
            id: CommandId::for_testing(TicketId::for_testing(ticket), 0),
            outcome: Outcome::Done,
            fault: None,
            bytes: 10,
            submitted_at: Time::ZERO,
            completed_at: Time::ZERO,
            digests: Vec::new(),
        }
    }

    struct Looks(Arc<Outbox>, Mutex<Vec<Completion>>);

    impl Wake for Looks {
        fn wake(self: Arc<Self>) {
            self.0.take(&mut self.1.lock());
        }
    }

    #[test]
    fn i13_a_command_ends_once() {
        let outbox = Outbox::default();
        let number = outbox.open(10);
        outbox.end(number, completion(1));
        outbox.end(number, completion(1));
        let mut out = Vec::new();
        outbox.take(&mut out);
        assert_eq!(out.len(), 1);
    }

    #[test]
    fn a_completion_is_visible_before_the_wake_up() {
        let outbox = Arc::new(Outbox::default());
        let looks = Arc::new(Looks(Arc::clone(&outbox), Mutex::default()));
        outbox.set_waker(Waker::from(Arc::clone(&looks)));
        let number = outbox.open(10);
        outbox.end(number, completion(1));
        assert_eq!(looks.1.lock().len(), 1);
    }

    #[test]
    fn what_is_open_at_the_limit_is_given_up_for_good() {
        let outbox = Outbox::default();
        let (first, second) = (outbox.open(10), outbox.open(20));
        outbox.end(first, completion(1));
        let closed = Closed {
            unconfirmed: 1,
            leaked_bytes: 20,
        };
        assert_eq!(outbox.close(Duration::ZERO), (closed, true));
        assert_eq!(outbox.close(Duration::ZERO), (closed, false));
        outbox.end(second, completion(2));
        let mut out = Vec::new();
        outbox.take(&mut out);
        assert_eq!(out.len(), 1, "what was given up does not end");
    }
}
