//! The way to the engine thread, and whether it is well.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::Sender;
use kv_core::{Span, Time};
use kv_scheduler::RequestId;
use tokio::sync::watch;

use super::{Message, Shared, Snapshot, Submission};

/// A step that takes longer makes the server unhealthy.
const STEP_LIMIT: Span = Span::from_secs(120);

/// After so many turns in a row in which requests failed and no token came, the server is
/// unhealthy, until the next token.
const FAILED_TURNS_MAX: u32 = 3;

/// Whether the engine can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// It is gone for good.
    Dead,
    /// It serves, but has lost so much memory that it swaps no more.
    Degraded,
    /// It finishes what it has.
    Draining,
    /// In that many turns in a row requests failed and no token came.
    Failing(u32),
    /// It serves.
    Healthy,
    /// It has not come back from one step for that long.
    Stuck(Span),
    /// It has work and waits for nothing: a mistake of ours.
    Wedged,
}

/// The way to the engine thread.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    sender: Sender<Message>,
    shared: Arc<Shared>,
    ended: watch::Receiver<bool>,
}

impl EngineHandle {
    pub(super) const fn new(
        sender: Sender<Message>,
        shared: Arc<Shared>,
        ended: watch::Receiver<bool>,
    ) -> Self {
        Self {
            sender,
            shared,
            ended,
        }
    }

    /// Messages that the thread has not taken yet.
    #[cfg(test)]
    pub(super) fn backlog(&self) -> usize {
        self.sender.len()
    }

    /// Hands a request to the engine. Its `answer` is dropped if the engine is gone.
    pub(crate) fn submit(&self, submission: Submission) {
        self.send(Message::Submit(Box::new(submission)));
    }

    /// Nobody listens to this request any more.
    pub(crate) fn cancel(&self, id: RequestId) {
        self.send(Message::Cancel(id));
    }

    /// Refuses new requests from now on; the thread ends when the others are finished.
    pub(crate) fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        self.send(Message::Drain);
    }

    /// Gives everything up, tells everybody; the thread ends.
    pub(crate) fn abort(&self) {
        self.shared.draining.store(true, Ordering::Release);
        self.send(Message::Abort);
    }

    fn send(&self, message: Message) {
        if self.sender.send(message).is_err() {
            tracing::debug!("a message came after the end of the engine");
        }
    }

    /// Waits for the end of the thread.
    pub(crate) async fn ended(&self) {
        let mut ended = self.ended.clone();
        // An error means that the thread is gone, too.
        if ended.wait_for(|&ended| ended).await.is_err() {
            tracing::debug!("the engine thread ended without a word");
        }
    }

    /// Whether the engine can serve, now.
    pub(crate) fn health(&self) -> Health {
        let shared = &self.shared;
        if shared.dead.load(Ordering::Acquire) {
            return Health::Dead;
        }
        if shared.draining.load(Ordering::Acquire) {
            return Health::Draining;
        }
        if shared.wedged.load(Ordering::Acquire) {
            return Health::Wedged;
        }
        let failed = shared.failed_turns.load(Ordering::Acquire);
        if failed >= FAILED_TURNS_MAX {
            return Health::Failing(failed);
        }
        if let Some(since) = shared.turn_since.load(Ordering::Acquire).checked_sub(1) {
            let span = shared.clock.now().since(Time::from_nanos(since));
            if span > STEP_LIMIT {
                return Health::Stuck(span);
            }
        }
        if shared.snapshot.lock().engine.swap_given_up {
            return Health::Degraded;
        }
        Health::Healthy
    }

    /// What the thread published last.
    pub(crate) fn snapshot(&self) -> Snapshot {
        *self.shared.snapshot.lock()
    }
}
