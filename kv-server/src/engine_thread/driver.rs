//! The thread's own loop: messages, a step, what it brought, and again.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use kv_core::{Event, Span, Time};
use kv_scheduler::{Next, Output, RequestId};
use kv_telemetry::Ended;

use super::live::{Live, Update, Verdict};
use super::{Core, Message, Observer, Shared, Snapshot, Submission, Turn, WakeSignal};
use crate::telemetry::StallMeter;

/// How long the end waits for running copies.
const CLOSE_LIMIT: Span = Span::from_secs(5);

/// What the thread works with.
pub(super) struct Driver<C, O> {
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
pub(super) fn run<C: Core, O: Observer>(driver: Driver<C, O>) {
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
    pub(super) const fn new(
        core: C,
        observer: O,
        stalls: Arc<StallMeter>,
        receiver: Receiver<Message>,
        signal: Arc<WakeSignal>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            core,
            observer,
            stalls,
            receiver,
            signal,
            shared,
            outputs: Vec::new(),
            events: Vec::new(),
            draining: false,
        }
    }

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
        let before = std::mem::replace(&mut *self.shared.snapshot.lock(), snapshot);
        if engine.swap_given_up && !before.engine.swap_given_up {
            tracing::error!(
                gpu_blocks = kv.gpu.lost,
                host_slots = kv.host.lost,
                "too much memory is lost: nothing is swapped any more, victims are computed again"
            );
        }
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
