//! From what the engine thread sees to metrics.

use std::sync::Arc;

use kv_core::Time;
use kv_scheduler::RequestId;

use crate::engine_thread::{Observer, Turn};

#[derive(Debug, Default)]
pub(crate) struct Metrics {}

impl Metrics {
    pub(crate) fn encode(&self) -> String {
        String::new()
    }
}

#[derive(Debug)]
pub(crate) struct Recorder {
    metrics: Arc<Metrics>,
}
impl Recorder {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics }
    }
}
impl Observer for Recorder {
    fn turn(&mut self, now: Time, turn: &Turn<'_>) {}
    fn accepted(&mut self, now: Time, id: RequestId) {}
    fn over(&mut self, id: RequestId) {}
}
