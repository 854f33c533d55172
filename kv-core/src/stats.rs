//! Gauges and counters of the machine, as plain numbers.

use crate::Span;

/// Where the GPU blocks are. The parts sum up to `total` after every operation (I01).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuBlocks {
    /// All blocks.
    pub total: u32,
    /// In no table and no flight.
    pub free: u32,
    /// In the table of a group.
    pub allocated: u32,
    /// Being copied out.
    pub evicting: u32,
    /// Being copied in.
    pub restoring: u32,
    /// Never to be used again.
    pub lost: u32,
}

/// Where the host slots are. The parts sum up to `total` after every operation (I01).
///
/// All zero when the host side is pageable (I15).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSlots {
    /// All slots, the ones that are not ready yet included.
    pub total: u32,
    /// Usable and held by nobody.
    pub free: u32,
    /// Not set up yet.
    pub unready: u32,
    /// The only copy of a parked group's block, or the copy behind a running `In`.
    pub parked: u32,
    /// Being written by an `Out`.
    pub filling: u32,
    /// Clean copies of blocks that are on the GPU too.
    pub clean: u32,
    /// Never to be used again.
    pub lost: u32,
    /// Most slots that were ever taken at the same time (neither free nor unready).
    pub peak: u32,
}

/// What went one way, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionCounters {
    /// Flights accepted.
    pub started: u64,
    /// Flights that ended `Done`.
    pub done: u64,
    /// Flights that ended `Failed`.
    pub failed: u64,
    /// Flights that ended `Unknown`.
    pub unknown: u64,
    /// Payload of pieces that ended `Done`, bytes.
    pub bytes: u64,
    /// Sum over flights that ended `Done`: from the request to the end of the last copy.
    pub copy_span: Span,
    /// Sum over the same flights: from the end of the last copy to the machine hearing of it.
    pub notice_span: Span,
}

/// Groups by record state, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStates {
    /// On the GPU.
    pub gpu_resident: u32,
    /// On their way out.
    pub swap_out_in_flight: u32,
    /// Parked on the host.
    pub host_resident: u32,
    /// On their way in.
    pub swap_in_in_flight: u32,
    /// Tombstones: cancelled while a flight was under way.
    pub cancel_pending: u32,
    /// Failed and not yet taken back by their holder.
    pub failed: u32,
}

/// Everything that can be counted about a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// GPU blocks.
    pub gpu: GpuBlocks,
    /// Host slots.
    pub host: HostSlots,
    /// Bytes per block and per slot.
    pub block_bytes: u64,
    /// Records.
    pub groups: GroupStates,
    /// Flights that are not settled.
    pub flights: u32,
    /// Bytes submitted to the backend and unsettled. At most the in-flight cap (I03).
    pub inflight_bytes: u64,
    /// Flights into host memory.
    pub out: DirectionCounters,
    /// Flights back.
    pub back_in: DirectionCounters,
    /// Tombstones retired.
    pub cancelled: u64,
    /// Blocks whose host bytes did not have their digest, counted per flight.
    pub checksum_failures: u64,
    /// Completions that were dead, repeated or contradictory.
    pub stale_completions: u64,
    /// Swaps refused for lack of host slots.
    pub host_backpressure: u64,
    /// Swaps refused for lack of in-flight budget.
    pub inflight_backpressure: u64,
    /// Blocks that were on the host already when their group was swapped out.
    pub clean_blocks_kept: u64,
    /// Clean copies given up because slots were needed.
    pub clean_copies_reclaimed: u64,
}
