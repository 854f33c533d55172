//! From what the engine thread sees to metrics: spans of requests, the engine's numbers, the
//! machine's events.
//!
//! The ids of requests stay in here; nothing of them reaches a metric.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::{Choice, Span, Time};
use kv_scheduler::{EngineStats, Output, RequestId};
use kv_telemetry::{Ended, EngineSample, Telemetry};

use crate::engine_thread::{Observer, Turn};

/// Times of one request.
#[derive(Debug)]
struct Track {
    accepted: Time,
    /// When each choice had its last token.
    tokens: BTreeMap<Choice, Time>,
}

/// Writes metrics; lives on the engine thread.
#[derive(Debug)]
pub(crate) struct Recorder {
    telemetry: Arc<Telemetry>,
    tracks: BTreeMap<RequestId, Track>,
    steps: u64,
}

impl Recorder {
    pub(crate) const fn new(telemetry: Arc<Telemetry>) -> Self {
        Self {
            telemetry,
            tracks: BTreeMap::new(),
            steps: 0,
        }
    }
}

impl Observer for Recorder {
    fn output(&mut self, now: Time, output: &Output) {
        match output {
            Output::Admitted { waited, .. } => self.telemetry.observe_queue_wait(*waited),
            Output::Resumed { pause, .. } => self.telemetry.observe_pause(*pause),
            Output::Token {
                request, choice, ..
            } => {
                let Some(track) = self.tracks.get_mut(request) else {
                    return;
                };
                if track.tokens.is_empty() {
                    self.telemetry
                        .observe_first_token(now.since(track.accepted));
                }
                if let Some(before) = track.tokens.insert(*choice, now) {
                    self.telemetry.observe_inter_token(now.since(before));
                }
            }
            // Failures are counted when their request is over.
            _ => {}
        }
    }

    fn turn(&mut self, turn: &Turn<'_>) {
        self.telemetry.mirror_machine(&turn.snapshot.kv);
        self.telemetry.mirror_engine(&sample(&turn.snapshot.engine));
        for event in turn.events {
            self.telemetry.observe_event(event);
        }
        // A turn in which the model didn't run is no step.
        if turn.snapshot.engine.steps > self.steps {
            self.steps = turn.snapshot.engine.steps;
            self.telemetry.observe_step(turn.span);
            self.telemetry.observe_host_stall(turn.stall);
        }
    }

    fn accepted(&mut self, now: Time, id: RequestId) {
        self.tracks.insert(
            id,
            Track {
                accepted: now,
                tokens: BTreeMap::new(),
            },
        );
    }

    fn over(&mut self, now: Time, id: RequestId, how: Ended) {
        if let Some(track) = self.tracks.remove(&id) {
            self.telemetry.observe_end(how, now.since(track.accepted));
        }
    }
}

/// The engine's numbers in the words of the metrics.
fn sample(stats: &EngineStats) -> EngineSample {
    EngineSample {
        waiting: stats.waiting,
        running: stats.running,
        swapped: stats.swapped,
        recompute_pending: stats.recompute_pending,
        accepted: stats.accepted,
        rejected: stats.rejected,
        finished: stats.finished,
        cancelled: stats.cancelled,
        failed: stats.failed,
        tokens: stats.tokens,
        prefill_tokens: stats.prefill_tokens,
        recomputed_tokens: stats.recomputed_tokens,
        preempted_swap: stats.preempted_swap,
        preempted_recompute: stats.preempted_recompute,
        resumed: stats.resumed,
        stalled_rows: stats.stalled_rows,
        steps: stats.steps,
        stuck_passes: stats.stuck_passes,
        dropped_events: stats.dropped_events,
        swap_given_up: stats.swap_given_up,
    }
}

/// Adds up how long the engine thread was inside its backend.
#[derive(Debug, Default)]
pub(crate) struct StallMeter(std::sync::atomic::AtomicU64);

impl StallMeter {
    pub(crate) fn add(&self, span: Span) {
        self.0
            .fetch_add(span.as_nanos(), std::sync::atomic::Ordering::Relaxed);
    }

    /// What was added since the last call.
    pub(crate) fn take(&self) -> Span {
        Span::from_nanos(self.0.swap(0, std::sync::atomic::Ordering::Relaxed))
    }
}
