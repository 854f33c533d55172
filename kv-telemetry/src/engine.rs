//! The engine's series: queues, steps, tokens.

use kv_core::Span;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::defs;
use crate::series::{Number, Series};

/// What an engine counts, as plain numbers: gauges of now and counters since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineSample {
    /// Requests that wait for admission.
    pub waiting: u32,
    /// Requests that have blocks and can run.
    pub running: u32,
    /// Requests that are swapped out, on their way out or on their way in.
    pub swapped: u32,
    /// Requests that wait to be computed again.
    pub recompute_pending: u32,
    /// Requests accepted.
    pub accepted: u64,
    /// Requests refused.
    pub rejected: u64,
    /// Requests that ended by themselves.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Tokens emitted.
    pub tokens: u64,
    /// Prompt tokens prefilled for the first time.
    pub prefill_tokens: u64,
    /// Tokens prefilled again after a recompute.
    pub recomputed_tokens: u64,
    /// Groups swapped out.
    pub preempted_swap: u64,
    /// Groups whose blocks were dropped to be computed again.
    pub preempted_recompute: u64,
    /// Groups resumed from the host.
    pub resumed: u64,
    /// Rows that had to wait in a step because no block was free.
    pub stalled_rows: u64,
    /// Steps executed.
    pub steps: u64,
    /// Passes after which nothing could ever have happened.
    pub stuck_passes: u64,
    /// Events that nobody collected in time.
    pub dropped_events: u64,
    /// Whether swapping was given up for good because too much memory is lost.
    pub swap_given_up: bool,
}

#[derive(Debug)]
pub(crate) struct EngineSeries {
    queues: Series<Number>,
    accepted: Series<Counter>,
    rejected: Series<Counter>,
    ended: Series<Counter>,
    tokens: Series<Counter>,
    prefill_tokens: Series<Counter>,
    recomputed_tokens: Series<Counter>,
    preemptions: Series<Counter>,
    resumed: Series<Counter>,
    stalled_rows: Series<Counter>,
    steps: Series<Counter>,
    stuck_passes: Series<Counter>,
    dropped_events: Series<Counter>,
    swap_given_up: Series<Number>,
    step_seconds: Series<Histogram>,
    host_stall_seconds: Series<Histogram>,
}

impl EngineSeries {
    /// Registers in the order of [`defs::ALL`].
    pub(crate) fn new(registry: &mut Registry) -> Self {
        Self {
            queues: Series::gauge(registry, &defs::QUEUES),
            accepted: Series::counter(registry, &defs::REQUESTS_ACCEPTED),
            rejected: Series::counter(registry, &defs::REQUESTS_REJECTED),
            ended: Series::counter(registry, &defs::REQUESTS_ENDED),
            tokens: Series::counter(registry, &defs::TOKENS),
            prefill_tokens: Series::counter(registry, &defs::PREFILL_TOKENS),
            recomputed_tokens: Series::counter(registry, &defs::RECOMPUTED_TOKENS),
            preemptions: Series::counter(registry, &defs::PREEMPTIONS),
            resumed: Series::counter(registry, &defs::RESUMED),
            stalled_rows: Series::counter(registry, &defs::STALLED_ROWS),
            steps: Series::counter(registry, &defs::STEPS),
            stuck_passes: Series::counter(registry, &defs::STUCK_PASSES),
            dropped_events: Series::counter(registry, &defs::DROPPED_EVENTS),
            swap_given_up: Series::gauge(registry, &defs::SWAP_GIVEN_UP),
            step_seconds: Series::histogram(registry, &defs::STEP_SPAN),
            host_stall_seconds: Series::histogram(registry, &defs::HOST_STALL),
        }
    }

    pub(crate) fn mirror(&self, sample: &EngineSample) {
        let queues = [
            sample.waiting,
            sample.running,
            sample.swapped,
            sample.recompute_pending,
        ];
        self.queues.set(queues.map(u64::from));
        self.accepted.raise([sample.accepted]);
        self.rejected.raise([sample.rejected]);
        self.ended
            .raise([sample.finished, sample.cancelled, sample.failed]);
        self.tokens.raise([sample.tokens]);
        self.prefill_tokens.raise([sample.prefill_tokens]);
        self.recomputed_tokens.raise([sample.recomputed_tokens]);
        self.preemptions
            .raise([sample.preempted_swap, sample.preempted_recompute]);
        self.resumed.raise([sample.resumed]);
        self.stalled_rows.raise([sample.stalled_rows]);
        self.steps.raise([sample.steps]);
        self.stuck_passes.raise([sample.stuck_passes]);
        self.dropped_events.raise([sample.dropped_events]);
        self.swap_given_up.set([u64::from(sample.swap_given_up)]);
    }

    pub(crate) fn observe_step(&self, span: Span) {
        self.step_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }

    pub(crate) fn observe_host_stall(&self, span: Span) {
        self.host_stall_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }
}
