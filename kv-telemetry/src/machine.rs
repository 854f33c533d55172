//! The machine's series: memory and swaps.

use kv_core::{CopyFault, Direction, Event, Outcome, Settled, Stats};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::defs;
use crate::series::{Number, Series};

#[derive(Debug)]
pub(crate) struct MachineSeries {
    gpu_blocks: Series<Number>,
    gpu_capacity: Series<Number>,
    host_slots: Series<Number>,
    host_capacity: Series<Number>,
    host_peak: Series<Number>,
    host_used_bytes: Series<Number>,
    host_capacity_bytes: Series<Number>,
    block_bytes: Series<Number>,
    group_records: Series<Number>,
    flights: Series<Number>,
    inflight_bytes: Series<Number>,
    started: Series<Counter>,
    settled: Series<Counter>,
    bytes: Series<Counter>,
    cancelled: Series<Counter>,
    refusals: Series<Counter>,
    faults: Series<Counter>,
    checksum_failures: Series<Counter>,
    stale_completions: Series<Counter>,
    clean_kept: Series<Counter>,
    clean_reclaimed: Series<Counter>,
    copy_seconds: Series<Histogram>,
    notice_seconds: Series<Histogram>,
    flight_bytes: Series<Histogram>,
}

impl MachineSeries {
    /// Registers in the order of [`defs::ALL`].
    pub(crate) fn new(registry: &mut Registry) -> Self {
        Self {
            gpu_blocks: Series::gauge(registry, &defs::GPU_BLOCKS),
            gpu_capacity: Series::gauge(registry, &defs::GPU_CAPACITY),
            host_slots: Series::gauge(registry, &defs::HOST_SLOTS),
            host_capacity: Series::gauge(registry, &defs::HOST_CAPACITY),
            host_peak: Series::gauge(registry, &defs::HOST_PEAK),
            host_used_bytes: Series::gauge(registry, &defs::HOST_USED_BYTES),
            host_capacity_bytes: Series::gauge(registry, &defs::HOST_CAPACITY_BYTES),
            block_bytes: Series::gauge(registry, &defs::BLOCK_BYTES),
            group_records: Series::gauge(registry, &defs::GROUP_RECORDS),
            flights: Series::gauge(registry, &defs::FLIGHTS),
            inflight_bytes: Series::gauge(registry, &defs::INFLIGHT_BYTES),
            started: Series::counter(registry, &defs::SWAP_STARTED),
            settled: Series::counter(registry, &defs::SWAP_SETTLED),
            bytes: Series::counter(registry, &defs::SWAP_BYTES),
            cancelled: Series::counter(registry, &defs::SWAP_CANCELLED),
            refusals: Series::counter(registry, &defs::SWAP_REFUSALS),
            faults: Series::counter(registry, &defs::SWAP_FAULTS),
            checksum_failures: Series::counter(registry, &defs::CHECKSUM_FAILURES),
            stale_completions: Series::counter(registry, &defs::STALE_COMPLETIONS),
            clean_kept: Series::counter(registry, &defs::CLEAN_KEPT),
            clean_reclaimed: Series::counter(registry, &defs::CLEAN_RECLAIMED),
            copy_seconds: Series::histogram(registry, &defs::COPY_SECONDS),
            notice_seconds: Series::histogram(registry, &defs::NOTICE_SECONDS),
            flight_bytes: Series::histogram(registry, &defs::FLIGHT_PAYLOAD),
        }
    }

    pub(crate) fn mirror(&self, stats: &Stats) {
        let gpu = stats.gpu;
        let parts = [
            gpu.free,
            gpu.allocated,
            gpu.evicting,
            gpu.restoring,
            gpu.lost,
        ];
        self.gpu_blocks.set(parts.map(u64::from));
        self.gpu_capacity.set([gpu.total.into()]);

        let host = stats.host;
        let parts = [
            host.free,
            host.unready,
            host.parked,
            host.filling,
            host.clean,
            host.lost,
        ];
        self.host_slots.set(parts.map(u64::from));
        self.host_capacity.set([host.total.into()]);
        self.host_peak.set([host.peak.into()]);
        let used = [host.parked, host.filling, host.clean, host.lost]
            .map(u64::from)
            .iter()
            .sum();
        let bytes = |slots: u64| slots.saturating_mul(stats.block_bytes);
        self.host_used_bytes.set([bytes(used)]);
        self.host_capacity_bytes.set([bytes(host.total.into())]);
        self.block_bytes.set([stats.block_bytes]);

        let groups = stats.groups;
        let records = [
            groups.gpu_resident,
            groups.swap_out_in_flight,
            groups.host_resident,
            groups.swap_in_in_flight,
            groups.cancel_pending,
            groups.failed,
        ];
        self.group_records.set(records.map(u64::from));
        self.flights.set([stats.flights.into()]);
        self.inflight_bytes.set([stats.inflight_bytes]);

        let (out, back_in) = (stats.out, stats.back_in);
        self.started.raise([out.started, back_in.started]);
        self.settled.raise([
            out.done,
            out.failed,
            out.unknown,
            back_in.done,
            back_in.failed,
            back_in.unknown,
        ]);
        self.bytes.raise([out.bytes, back_in.bytes]);
        self.cancelled.raise([stats.cancelled]);
        self.refusals
            .raise([stats.host_backpressure, stats.inflight_backpressure]);
        self.checksum_failures.raise([stats.checksum_failures]);
        self.stale_completions.raise([stats.stale_completions]);
        self.clean_kept.raise([stats.clean_blocks_kept]);
        self.clean_reclaimed.raise([stats.clean_copies_reclaimed]);
    }

    pub(crate) fn observe(&self, event: &Event) {
        // All other events are counted by the machine too, and mirrored.
        if let Event::Settled(settled) = event {
            self.settled(settled);
        }
    }

    fn settled(&self, settled: &Settled) {
        let direction = match settled.direction {
            Direction::Out => 0,
            Direction::In => 1,
        };
        let outcome = match settled.outcome {
            Outcome::Done => 0,
            Outcome::Failed => 1,
            Outcome::Unknown => 2,
        };
        let seconds = settled.copy_span.as_duration().as_secs_f64();
        self.copy_seconds
            .at(direction * 3 + outcome)
            .observe(seconds);
        if let Some(fault) = settled.fault {
            self.faults.at(place_of(fault)).inc();
        }
        if settled.outcome == Outcome::Done {
            let seconds = settled.notice_span.as_duration().as_secs_f64();
            self.notice_seconds.at(direction).observe(seconds);
            #[expect(
                clippy::cast_precision_loss,
                reason = "a bucket is wider than the error"
            )]
            self.flight_bytes
                .at(direction)
                .observe(settled.bytes as f64);
        }
    }
}

/// Place among the values of the label of [`defs::SWAP_FAULTS`].
const fn place_of(fault: CopyFault) -> usize {
    match fault {
        CopyFault::Closed => 0,
        CopyFault::DigestMismatch { .. } => 1,
        CopyFault::Device { .. } => 2,
        CopyFault::FenceTimeout => 3,
        CopyFault::BlockBusy { .. } | CopyFault::SlotBusy { .. } | CopyFault::SlotEmpty { .. } => 4,
        CopyFault::Panicked => 5,
        CopyFault::Injected => 6,
        _ => 7,
    }
}
