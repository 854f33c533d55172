//! A backend whose callers are timed: what swapping costs the engine thread.

use std::sync::Arc;
use std::task::Waker;

use kv_core::{
    Backend, Closed, Command, Completion, Refused, SlotIndex, Span, SubmitRefusal, Time,
};

use crate::clock::Clock;
use crate::telemetry::StallMeter;

/// Passes everything on and takes the time.
pub(super) struct Timed<B> {
    pub(super) inner: B,
    pub(super) clock: Clock,
    pub(super) meter: Arc<StallMeter>,
}

impl<B> Timed<B> {
    fn time<T>(&mut self, work: impl FnOnce(&mut B) -> T) -> T {
        let start = self.clock.now();
        let result = work(&mut self.inner);
        self.meter.add(self.clock.now().since(start));
        result
    }
}

impl<B: Backend> Backend for Timed<B> {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        self.time(|backend| backend.submit(now, command))
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.time(|backend| backend.poll(out));
    }

    fn set_waker(&mut self, waker: Waker) {
        self.inner.set_waker(waker);
    }

    fn forget(&mut self, slots: &[SlotIndex]) {
        self.time(|backend| backend.forget(slots));
    }

    fn slots_ready(&self) -> u32 {
        self.inner.slots_ready()
    }

    fn close(&mut self, limit: Span) -> Closed {
        self.inner.close(limit)
    }
}
