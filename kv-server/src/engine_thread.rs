//! The engine on its own thread, and the way to it.
//!
//! Who touches what: the engine, its backend and its executor belong to this thread alone.
//! Handlers send messages over one channel and read what the thread publishes in [`Shared`].
//! The thread blocks on that channel whenever nothing can go on; it never polls.
//!
//! The channel is bounded by construction: a request adds one `Submit` and at most one `Cancel`,
//! requests at the door are counted, and a wake-up is sent only if none is under way.

mod driver;
mod handle;
mod live;
#[cfg(test)]
mod tests;
mod traits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use kv_scheduler::{EngineStats, Rejection, Request, RequestId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use self::driver::Driver;
pub(crate) use self::handle::{EngineHandle, Health};
pub(crate) use self::live::{Finish, Piece, TextRules, TokenReport, Update};
pub(crate) use self::traits::{Core, Observer, Turn};
use crate::clock::Clock;
use crate::telemetry::StallMeter;

/// What handlers and signals tell the thread.
#[derive(Debug)]
enum Message {
    /// Give everything up, tell everybody and end.
    Abort,
    /// Nobody listens to this request any more.
    Cancel(RequestId),
    /// Refuse new requests, finish the others and end.
    Drain,
    /// A new request.
    Submit(Box<Submission>),
    /// Something happened to a copy.
    Wake,
}

/// A request on its way to the engine.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) rules: TextRules,
    /// Index of its first choice within the call.
    pub(crate) first_index: u32,
    /// Must have room for one update per token of all choices.
    pub(crate) updates: mpsc::Sender<Update>,
    /// Whether the engine took it.
    pub(crate) answer: oneshot::Sender<Result<(), Rejection>>,
}

/// What the thread publishes after each turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) engine: EngineStats,
    pub(crate) kv: kv_core::Stats,
}

/// What the thread shares with everybody.
#[derive(Debug)]
struct Shared {
    clock: Clock,
    snapshot: Mutex<Snapshot>,
    draining: AtomicBool,
    dead: AtomicBool,
    wedged: AtomicBool,
    /// Turns since the last token in which requests failed.
    failed_turns: AtomicU32,
    /// When the running turn began, in nanoseconds, plus 1; 0 while the thread waits.
    turn_since: AtomicU64,
}

/// Sends one wake-up, unless one is under way.
struct WakeSignal {
    under_way: AtomicBool,
    sender: Sender<Message>,
}

impl Wake for WakeSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // If the thread is gone there is nobody to wake.
        if !self.under_way.swap(true, Ordering::AcqRel) && self.sender.send(Message::Wake).is_err()
        {
            tracing::debug!("a copy ended after the engine");
        }
    }
}

/// The ends of the channel before there is an engine: a backend needs the waker to be built.
#[derive(Debug)]
pub(crate) struct EnginePort {
    sender: Sender<Message>,
    receiver: Receiver<Message>,
    signal: Arc<WakeSignal>,
    clock: Clock,
}

impl std::fmt::Debug for WakeSignal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WakeSignal")
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}

impl EnginePort {
    pub(crate) fn new(clock: Clock) -> Self {
        let (sender, receiver) = unbounded();
        let under_way = AtomicBool::new(false);
        let signal = Arc::new(WakeSignal {
            under_way,
            sender: sender.clone(),
        });
        Self {
            sender,
            receiver,
            signal,
            clock,
        }
    }

    /// Wakes the engine thread; for the backend.
    pub(crate) fn waker(&self) -> Waker {
        Arc::clone(&self.signal).into()
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The system gave no thread.
    pub(crate) fn start(
        self,
        core: impl Core,
        observer: impl Observer,
        stalls: Arc<StallMeter>,
    ) -> std::io::Result<EngineHandle> {
        let shared = Arc::new(Shared {
            clock: self.clock,
            snapshot: Mutex::default(),
            draining: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            wedged: AtomicBool::new(false),
            failed_turns: AtomicU32::new(0),
            turn_since: AtomicU64::new(0),
        });
        let (ended_sender, ended) = watch::channel(false);
        let handle = EngineHandle::new(self.sender, Arc::clone(&shared), ended);
        let driver = Driver::new(core, observer, stalls, self.receiver, self.signal, shared);
        let body = move || {
            driver::run(driver);
            // Nobody may be left to hear it.
            ended_sender.send_replace(true);
        };
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(body)?;
        Ok(handle)
    }
}
