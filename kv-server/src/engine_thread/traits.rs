//! Whom the thread works with: an engine, and somebody who counts.

use kv_core::{Backend, Choice, Closed, Event, Span, Time};
use kv_scheduler::{Engine, EngineStats, Executor, Next, Output, Rejection, Request, RequestId};
use kv_telemetry::Ended;

use super::Snapshot;

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
