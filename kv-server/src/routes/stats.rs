//! `GET /admin/stats`: the numbers behind the metrics, as JSON.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use kv_core::{DirectionCounters, Span, Stats};
use serde_json::{Value, json};

use crate::engine_thread::Snapshot;
use crate::state::{AppState, SwapFacts};

/// What the engine thread published last.
pub(super) async fn handle(State(state): State<Arc<AppState>>) -> Response {
    super::json_answer(stats(&state.engine.snapshot(), &state.swap).to_string())
}

fn stats(snapshot: &Snapshot, swap: &SwapFacts) -> Value {
    let Snapshot { engine, kv } = snapshot;
    json!({
        "engine": {
            "waiting": engine.waiting,
            "running": engine.running,
            "swapped": engine.swapped,
            "recompute_pending": engine.recompute_pending,
            "steps": engine.steps,
            "tokens": engine.tokens,
            "prefill_tokens": engine.prefill_tokens,
            "recomputed_tokens": engine.recomputed_tokens,
            "accepted": engine.accepted,
            "rejected": engine.rejected,
            "finished": engine.finished,
            "cancelled": engine.cancelled,
            "failed": engine.failed,
            "preempted_swap": engine.preempted_swap,
            "preempted_recompute": engine.preempted_recompute,
            "resumed": engine.resumed,
            "stalled_rows": engine.stalled_rows,
            "stuck_passes": engine.stuck_passes,
            "dropped_events": engine.dropped_events,
            "swap_given_up": engine.swap_given_up,
        },
        "gpu_blocks": {
            "total": kv.gpu.total,
            "free": kv.gpu.free,
            "allocated": kv.gpu.allocated,
            "evicting": kv.gpu.evicting,
            "restoring": kv.gpu.restoring,
            "lost": kv.gpu.lost,
        },
        "host_slots": {
            "total": kv.host.total,
            "free": kv.host.free,
            "unready": kv.host.unready,
            "parked": kv.host.parked,
            "filling": kv.host.filling,
            "clean": kv.host.clean,
            "lost": kv.host.lost,
            "peak": kv.host.peak,
        },
        "groups": {
            "gpu_resident": kv.groups.gpu_resident,
            "swap_out_in_flight": kv.groups.swap_out_in_flight,
            "host_resident": kv.groups.host_resident,
            "swap_in_in_flight": kv.groups.swap_in_in_flight,
            "cancel_pending": kv.groups.cancel_pending,
            "failed": kv.groups.failed,
        },
        "block_bytes": kv.block_bytes,
        "flights": kv.flights,
        "inflight_bytes": kv.inflight_bytes,
        "out": direction(&kv.out),
        "in": direction(&kv.back_in),
        "cancelled_flights": kv.cancelled,
        "checksum_failures": kv.checksum_failures,
        "stale_completions": kv.stale_completions,
        "host_backpressure": kv.host_backpressure,
        "inflight_backpressure": kv.inflight_backpressure,
        "clean_blocks_kept": kv.clean_blocks_kept,
        "clean_copies_reclaimed": kv.clean_copies_reclaimed,
        "kv_swap": kv_swap(kv, swap),
    })
}

fn direction(counters: &DirectionCounters) -> Value {
    json!({
        "started": counters.started,
        "done": counters.done,
        "failed": counters.failed,
        "unknown": counters.unknown,
        "bytes": counters.bytes,
        "copy_ms_sum": millis(counters.copy_span),
        "notice_ms_sum": millis(counters.notice_span),
    })
}

/// The 22 keys that tools around such servers read.
fn kv_swap(kv: &Stats, swap: &SwapFacts) -> Value {
    let bytes = |slots: u32| u64::from(slots) * kv.block_bytes;
    let failed = |counters: &DirectionCounters| counters.failed + counters.unknown;
    json!({
        "mode": swap.mode.name(),
        "fallback_reason": swap.fallback_reason,
        "host_capacity_bytes": bytes(kv.host.total),
        "host_in_use_bytes": bytes(kv.host.parked + kv.host.filling + kv.host.clean),
        "host_peak_in_use_bytes": bytes(kv.host.peak),
        "inflight": kv.flights,
        "inflight_bytes": kv.inflight_bytes,
        "retiring_records": kv.groups.cancel_pending,
        "host_resident": kv.groups.host_resident,
        "backpressure_total": kv.host_backpressure + kv.inflight_backpressure,
        "swap_out_started_total": kv.out.started,
        "swap_out_completed_total": kv.out.done,
        "swap_out_failed_total": failed(&kv.out),
        "swap_in_started_total": kv.back_in.started,
        "swap_in_completed_total": kv.back_in.done,
        "swap_in_failed_total": failed(&kv.back_in),
        "cancelled_total": kv.cancelled,
        "checksum_failures_total": kv.checksum_failures,
        "d2h_bytes_total": kv.out.bytes,
        "h2d_bytes_total": kv.back_in.bytes,
        "d2h_duration_ms_sum": millis(kv.out.copy_span),
        "h2d_duration_ms_sum": millis(kv.back_in.copy_span),
    })
}

fn millis(span: Span) -> f64 {
    span.as_duration().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SwapMode;

    #[test]
    fn kv_swap_has_its_22_keys() {
        let facts = SwapFacts {
            mode: SwapMode::Sync,
            fallback_reason: Some("why".to_owned()),
        };
        let mut kv = Stats {
            block_bytes: 10,
            ..Stats::default()
        };
        kv.host.parked = 1;
        kv.host.filling = 2;
        kv.host.clean = 3;
        kv.out.copy_span = Span::from_millis(1500);
        let value = kv_swap(&kv, &facts);
        assert_eq!(value.as_object().unwrap().len(), 22);
        assert_eq!(value["mode"], "sync");
        assert_eq!(value["fallback_reason"], "why");
        assert_eq!(value["host_in_use_bytes"], 60);
        assert_eq!(value["d2h_duration_ms_sum"], 1500.0);
    }
}
