//! The engine on its own thread, and the way to it.
//!
//! Who touches what: the engine, its backend and its executor belong to this thread alone.
//! Handlers send messages over one channel and read what the thread publishes in [`Shared`].
//! The thread blocks on that channel whenever nothing can go on; it never polls.
//!
//! The channel is bounded by construction: a request adds one `Submit` and at most one `Cancel`,
//! requests at the door are counted, and a wake-up is sent only if none is under way.

mod live;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::thread;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use kv_core::{Backend, Choice, Closed, Event, Span, Time};
use kv_scheduler::{Engine, EngineStats, Executor, Next, Output, Rejection, Request, RequestId};
use kv_telemetry::Ended;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

pub(crate) use self::live::{Finish, Piece, TextRules, TokenReport, Update};
use self::live::{Live, Verdict};
use crate::clock::Clock;
use crate::telemetry::StallMeter;

/// How long the end waits for running copies.
const CLOSE_LIMIT: Span = Span::from_secs(5);

/// A step that takes longer makes the server unhealthy.
const STEP_LIMIT: Span = Span::from_secs(120);

/// After so many turns in a row in which requests failed and no token came, the server is
/// unhealthy, until the next token.
const FAILED_TURNS_MAX: u32 = 3;

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

/// Whether the engine can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// It is gone for good.
    Dead,
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

/// The engine as this thread sees it. A trait, so that tests can have it fail in ways in which
/// the real one doesn't.
pub(crate) trait Core: Send + 'static {
    fn submit(&mut self, now: Time, request: Request) -> Result<(), Rejection>;
    fn cancel(&mut self, now: Time, id: RequestId) -> bool;
    fn stop(&mut self, now: Time, id: RequestId, choice: Choice);
    fn step(&mut self, now: Time, outputs: &mut Vec<Output>) -> Next;
    fn drain(&mut self);
    fn is_idle(&self) -> bool;
    fn shutdown(&mut self, now: Time, limit: Span) -> Closed;
    fn stats(&self) -> (EngineStats, kv_core::Stats);
    fn drain_events(&mut self, events: &mut Vec<Event>);
}

impl<E: Executor + Send + 'static, B: Backend + Send + 'static> Core for Engine<E, B> {
    fn submit(&mut self, now: Time, request: Request) -> Result<(), Rejection> {
        Self::submit(self, now, request).map_err(|refused| refused.why)
    }

    fn cancel(&mut self, now: Time, id: RequestId) -> bool {
        Self::cancel(self, now, id)
    }

    fn stop(&mut self, now: Time, id: RequestId, choice: Choice) {
        Self::stop(self, now, id, choice);
    }

    fn step(&mut self, now: Time, outputs: &mut Vec<Output>) -> Next {
        Self::step(self, now, outputs)
    }

    fn drain(&mut self) {
        Self::drain(self);
    }

    fn is_idle(&self) -> bool {
        Self::is_idle(self)
    }

    fn shutdown(&mut self, now: Time, limit: Span) -> Closed {
        Self::shutdown(self, now, limit)
    }

    fn stats(&self) -> (EngineStats, kv_core::Stats) {
        Self::stats(self)
    }

    fn drain_events(&mut self, events: &mut Vec<Event>) {
        Self::drain_events(self, events);
    }
}

/// Hears what happens on the engine thread. Called on that thread; must be quick.
pub(crate) trait Observer: Send + 'static {
    /// A request was accepted.
    fn accepted(&mut self, now: Time, id: RequestId);
    /// Something came out of a step.
    fn output(&mut self, now: Time, output: &Output);
    /// A request is over.
    fn over(&mut self, now: Time, id: RequestId, how: Ended);
    /// A turn is over, and what it brought is on its way to the clients.
    fn turn(&mut self, turn: &Turn<'_>);
}

/// What one turn brought.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    pub(crate) events: &'a [Event],
    pub(crate) snapshot: &'a Snapshot,
    /// How long its step took.
    pub(crate) span: Span,
    /// How long of that the thread was inside the backend.
    pub(crate) stall: Span,
}

/// The way to the engine thread.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    sender: Sender<Message>,
    shared: Arc<Shared>,
    ended: watch::Receiver<bool>,
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
        let handle = EngineHandle {
            sender: self.sender,
            shared: Arc::clone(&shared),
            ended,
        };
        let driver = Driver {
            core,
            observer,
            stalls,
            receiver: self.receiver,
            signal: self.signal,
            shared,
            outputs: Vec::new(),
            events: Vec::new(),
            draining: false,
        };
        let body = move || {
            run(driver);
            // Nobody may be left to hear it.
            ended_sender.send_replace(true);
        };
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(body)?;
        Ok(handle)
    }
}

impl EngineHandle {
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
        match shared.turn_since.load(Ordering::Acquire).checked_sub(1) {
            Some(since) => {
                let span = shared.clock.now().since(Time::from_nanos(since));
                if span > STEP_LIMIT {
                    Health::Stuck(span)
                } else {
                    Health::Healthy
                }
            }
            None => Health::Healthy,
        }
    }

    /// What the thread published last.
    pub(crate) fn snapshot(&self) -> Snapshot {
        *self.shared.snapshot.lock()
    }
}

/// What the thread works with.
struct Driver<C, O> {
    core: C,
    observer: O,
    stalls: Arc<StallMeter>,
    receiver: Receiver<Message>,
    signal: Arc<WakeSignal>,
    shared: Arc<Shared>,
    outputs: Vec<Output>,
    events: Vec<Event>,
    /// Whether the engine was told to drain; the shared flag is ahead of the channel.
    draining: bool,
}

/// Whether the thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// Give everything up.
    Abort,
    /// Go on.
    Continue,
}

/// Runs until the end, and tells everybody whatever happens.
fn run<C: Core, O: Observer>(driver: Driver<C, O>) {
    let shared = Arc::clone(&driver.shared);
    let receiver = driver.receiver.clone();
    let mut live = BTreeMap::new();
    // The map of live requests is only read afterwards, to tell them; the rest is dropped.
    let result = catch_unwind(AssertUnwindSafe(|| driver.run(&mut live)));
    if result.is_err() {
        shared.dead.store(true, Ordering::Release);
        tracing::error!(
            "the engine thread panicked; every request is told, the server is unhealthy"
        );
    }
    shared.turn_since.store(0, Ordering::Release);
    abandon(&mut live);
    // What was sent in the meantime is dropped with the channel, and with it the answers.
    drop(receiver);
}

/// Tells everybody that nothing more comes.
fn abandon(live: &mut BTreeMap<RequestId, Live>) {
    for (_, request) in std::mem::take(live) {
        if request.tell(Update::Abandoned).is_err() {
            tracing::debug!("a client left before it could be told");
        }
    }
}

impl<C: Core, O: Observer> Driver<C, O> {
    fn run(mut self, live: &mut BTreeMap<RequestId, Live>) {
        let mut next = Next::Again;
        loop {
            if self.receive(next, live) == Flow::Abort {
                break;
            }
            let now = self.shared.clock.now();
            self.shared
                .turn_since
                .store(now.as_nanos().saturating_add(1), Ordering::Release);
            next = self.core.step(now, &mut self.outputs);
            self.deliver(now, live);
            if self.draining && self.core.is_idle() {
                break;
            }
        }
        let now = self.shared.clock.now();
        for &id in live.keys() {
            self.observer.over(now, id, Ended::Cancelled);
        }
        abandon(live);
        let closed = self.core.shutdown(now, CLOSE_LIMIT);
        self.deliver(now, live);
        if closed.unconfirmed > 0 {
            tracing::warn!(
                copies = closed.unconfirmed,
                bytes = closed.leaked_bytes,
                "copies were not confirmed in time; their memory is left alone"
            );
        }
    }

    /// Takes the messages that are there; waits for one if nothing else can go on.
    fn receive(&mut self, next: Next, live: &mut BTreeMap<RequestId, Live>) -> Flow {
        let mut flow = Flow::Continue;
        if let Next::Wait(until) = next {
            let stuck = until.is_none()
                && !self.core.is_idle()
                && self.shared.snapshot.lock().kv.flights == 0
                && self.receiver.is_empty();
            if stuck && !self.shared.wedged.swap(true, Ordering::AcqRel) {
                tracing::error!("the engine has work but nothing to wait for");
            }
            self.shared.turn_since.store(0, Ordering::Release);
            let message = match until {
                None => self
                    .receiver
                    .recv()
                    .map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => {
                    let span = until.since(self.shared.clock.now());
                    self.receiver.recv_timeout(span.as_duration())
                }
            };
            match message {
                Ok(message) => flow = self.handle(message, live),
                Err(RecvTimeoutError::Timeout) => {}
                // The backend's waker keeps a sender, so this happens only when it is gone too.
                Err(RecvTimeoutError::Disconnected) => return Flow::Abort,
            }
            self.shared.wedged.store(false, Ordering::Release);
        }
        // Not more than are there now: a flood of messages must not keep the engine from its step.
        for _ in 0..self.receiver.len() {
            let Ok(message) = self.receiver.try_recv() else {
                break;
            };
            if self.handle(message, live) == Flow::Abort {
                flow = Flow::Abort;
            }
        }
        flow
    }

    fn handle(&mut self, message: Message, live: &mut BTreeMap<RequestId, Live>) -> Flow {
        let now = self.shared.clock.now();
        match message {
            Message::Abort => return Flow::Abort,
            Message::Cancel(id) => {
                if live.remove(&id).is_some() {
                    self.core.cancel(now, id);
                    self.observer.over(now, id, Ended::Cancelled);
                }
            }
            Message::Drain => {
                self.draining = true;
                self.core.drain();
            }
            Message::Submit(submission) => self.submit(now, *submission, live),
            // Before the step that looks for completions: one that comes later wakes again.
            Message::Wake => self.signal.under_way.store(false, Ordering::Release),
        }
        Flow::Continue
    }

    fn submit(&mut self, now: Time, submission: Submission, live: &mut BTreeMap<RequestId, Live>) {
        let Submission {
            request,
            rules,
            first_index,
            updates,
            answer,
        } = submission;
        let (id, n) = (request.id, request.n);
        let result = self.core.submit(now, request);
        if result.is_ok() {
            live.insert(id, Live::new(rules, updates, first_index, n));
            self.observer.accepted(now, id);
        }
        let accepted = result.is_ok();
        // A handler that left in the meantime sends no cancellation of its own.
        if answer.send(result).is_err() && accepted {
            live.remove(&id);
            self.core.cancel(now, id);
            self.observer.over(now, id, Ended::Cancelled);
        }
    }

    /// Turns what a step brought into text, and publishes the numbers.
    ///
    /// The numbers come last: who reads them there finds the metrics up to date, and whatever a
    /// stop string or a client who left has changed.
    fn deliver(&mut self, started: Time, live: &mut BTreeMap<RequestId, Live>) {
        let now = self.shared.clock.now();
        let stall = self.stalls.take();
        let mut outputs = std::mem::take(&mut self.outputs);
        self.note_failures(&outputs);
        for output in outputs.drain(..) {
            self.observer.output(now, &output);
            self.output(now, output, live);
        }
        self.outputs = outputs;
        self.core.drain_events(&mut self.events);
        let (engine, kv) = self.core.stats();
        let snapshot = Snapshot { engine, kv };
        let span = now.since(started);
        self.observer.turn(&Turn {
            events: &self.events,
            snapshot: &snapshot,
            span,
            stall,
        });
        self.events.clear();
        *self.shared.snapshot.lock() = snapshot;
    }

    /// Counts turns that only failed.
    fn note_failures(&self, outputs: &[Output]) {
        let any = |wanted: fn(&Output) -> bool| outputs.iter().any(wanted);
        if any(|output| matches!(output, Output::Token { .. })) {
            self.shared.failed_turns.store(0, Ordering::Release);
        } else if any(|output| matches!(output, Output::Failed { .. })) {
            self.shared.failed_turns.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Tells a client; tells the engine what became of it.
    fn output(&mut self, now: Time, output: Output, live: &mut BTreeMap<RequestId, Live>) {
        match output {
            Output::Token {
                request: id,
                choice,
                sampled,
                finish,
            } => {
                let Some(request) = live.get_mut(&id) else {
                    return;
                };
                match request.token(choice, &sampled, finish) {
                    Verdict::Continue => {}
                    Verdict::Gone => {
                        live.remove(&id);
                        self.core.cancel(now, id);
                        self.observer.over(now, id, Ended::Cancelled);
                        return;
                    }
                    Verdict::StopChoice => self.core.stop(now, id, choice),
                }
                if request.is_over() {
                    live.remove(&id);
                    self.observer.over(now, id, Ended::Finished);
                }
            }
            Output::Failed { request: id, what } => {
                tracing::error!(%what, "a request failed");
                let Some(request) = live.remove(&id) else {
                    return;
                };
                self.observer.over(now, id, Ended::Failed);
                if request.tell(Update::Failed).is_err() {
                    tracing::debug!("a client left before it could be told");
                }
            }
            // Only the observer cares; and what a newer engine may add is no text.
            _ => {}
        }
    }
}
