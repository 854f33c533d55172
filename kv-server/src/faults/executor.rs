//! A model that fails in one step, around one that doesn't.

use std::num::NonZeroU64;

use kv_scheduler::{Batch, ExecuteError, Executor, StepOutput};

/// Runs every step but one.
pub(crate) struct FaultyExecutor<E> {
    inner: E,
    steps: u64,
    fails_at: NonZeroU64,
}

impl<E: Executor> FaultyExecutor<E> {
    pub(crate) const fn new(inner: E, fails_at: NonZeroU64) -> Self {
        Self {
            inner,
            steps: 0,
            fails_at,
        }
    }
}

impl<E: Executor> Executor for FaultyExecutor<E> {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        self.steps += 1;
        if self.steps == self.fails_at.get() {
            tracing::warn!(step = self.steps, "fault: this step fails");
            return Err(ExecuteError {
                what: "injected fault".to_owned(),
            });
        }
        self.inner.execute(batch)
    }
}
