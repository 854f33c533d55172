//! The machine: requests in, commands out; completions in, events out.
//!
//! It owns the table of every block and slot. Callers hold linear handles; nothing here waits,
//! reads a clock or touches bytes.

#[cfg(any(test, feature = "testing"))]
mod audit;
mod blocks;
mod commands;
mod settle;
mod swap;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::flight::Flight;
use crate::pool::{GpuPool, HostPool};
use crate::record::Record;
use crate::{
    Command, ConfigError, Event, Generation, GroupId, HostSide, Layout, Lease, OnGpu, Place,
    RecordKey, RecordState, Refusal, Span, Stats, Stimulus, TicketId, Time,
};

pub use blocks::CopyOnWrite;
pub use commands::Accepted;

/// Whether every block is digested on its way out and verified on its way in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// No digests.
    #[default]
    Off,
    /// XXH3-64 per block.
    On,
}

/// When a flight that doesn't end is given up: `base` plus `factor` times what its bytes need at
/// the measured rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Granted to every flight.
    pub base: Span,
    /// Multiple of the expected copy time.
    pub factor: u32,
    /// Rate assumed until the first flight was measured, bytes per second.
    pub assumed_rate: u64,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            base: Span::from_secs(30),
            factor: 10,
            assumed_rate: 1 << 30,
        }
    }
}

/// Settings of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineConfig {
    /// Blocks in the GPU pool.
    pub gpu_blocks: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes per block, and per host slot.
    pub block_bytes: u64,
    /// [`Layout::fingerprint`] of the pool.
    pub layout_fingerprint: u64,
    /// What the host side is.
    pub host: HostSide,
    /// Most bytes that are submitted and unsettled at any moment, both directions together.
    pub inflight_bytes_max: u64,
    /// Digests.
    pub checksum: Checksum,
    /// When a flight is given up.
    pub deadlines: Deadlines,
}

impl MachineConfig {
    /// Settings for a pool of that layout; no digests, default deadlines.
    #[must_use]
    pub fn new(layout: &Layout, host: HostSide, inflight_bytes_max: u64) -> Self {
        Self {
            gpu_blocks: layout.blocks(),
            block_tokens: layout.block_tokens(),
            block_bytes: layout.block_bytes(),
            layout_fingerprint: layout.fingerprint(),
            host,
            inflight_bytes_max,
            checksum: Checksum::Off,
            deadlines: Deadlines::default(),
        }
    }
}

/// Owner of all blocks, slots, records and budgets.
#[derive(Debug)]
pub struct Machine {
    id: u64,
    config: MachineConfig,
    gpu: GpuPool,
    host: HostPool,
    records: Vec<Option<Record>>,
    unused_records: Vec<u32>,
    live: BTreeMap<GroupId, u32>,
    last_generation: u64,
    last_ticket: u64,
    flights: BTreeMap<TicketId, Flight>,
    deadlines: BTreeSet<(Time, TicketId)>,
    /// Flights that may have a piece to issue.
    issuing: VecDeque<TicketId>,
    /// Commands that the backend handed back because it was busy.
    handed_back: VecDeque<Command>,
    /// Budget held by unsettled flights, bytes.
    reserved_bytes: u64,
    /// Restoring blocks of tombstones: they come back when their flight settles.
    retiring_blocks: u32,
    draining: bool,
    events: VecDeque<Event>,
    stats: Stats,
}

/// Ids of machines; handles carry them, so that a foreign handle is refused.
static LAST_MACHINE: AtomicU64 = AtomicU64::new(0);

impl Machine {
    /// Builds a machine with all blocks free. Host slots become usable with
    /// [`handle_slots_ready`](Self::handle_slots_ready).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the setting that can't work.
    pub fn new(config: MachineConfig) -> Result<Self, ConfigError> {
        let MachineConfig {
            gpu_blocks,
            block_bytes,
            inflight_bytes_max: cap,
            ..
        } = config;
        if gpu_blocks == 0 {
            return Err(ConfigError::NoBlocks);
        }
        if cap < block_bytes || cap == 0 {
            return Err(ConfigError::InflightCap { cap, block_bytes });
        }
        if config.deadlines.assumed_rate == 0 {
            return Err(ConfigError::NoRate);
        }
        Ok(Self {
            id: LAST_MACHINE.fetch_add(1, Ordering::Relaxed) + 1,
            config,
            gpu: GpuPool::new(gpu_blocks),
            host: HostPool::new(config.host),
            records: Vec::new(),
            unused_records: Vec::new(),
            live: BTreeMap::new(),
            last_generation: 0,
            last_ticket: 0,
            flights: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            issuing: VecDeque::new(),
            handed_back: VecDeque::new(),
            reserved_bytes: 0,
            retiring_blocks: 0,
            draining: false,
            events: VecDeque::new(),
            stats: Stats {
                block_bytes,
                ..Stats::default()
            },
        })
    }

    /// The settings.
    #[must_use]
    pub const fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The host slots below `ready` can be used from now on. Numbers above the pool size mean all
    /// of them; smaller numbers than before change nothing.
    pub fn handle_slots_ready(&mut self, ready: u32) {
        self.host.set_ready(ready);
    }

    /// Refuses new groups and new flights from now on; running flights go on. Idempotent.
    pub const fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether nothing is held and nothing is under way any more (I11).
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.draining && self.live.is_empty() && self.flights.is_empty()
    }

    /// The next thing that happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// All gauges and counters. Costs nothing that grows with the pools.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.gpu = self.gpu.counts();
        stats.host = self.host.counts();
        stats.flights = u32::try_from(self.flights.len()).unwrap_or(u32::MAX);
        stats
    }

    /// Free GPU blocks.
    #[must_use]
    pub const fn free_blocks(&self) -> u32 {
        self.gpu.free()
    }

    /// GPU blocks that become free by themselves when running flights settle.
    #[must_use]
    pub const fn arriving_blocks(&self) -> u32 {
        self.gpu.counts().evicting + self.retiring_blocks
    }

    /// Bytes per second in that direction, as measured; the assumed rate at first.
    #[must_use]
    pub fn rate(&self, direction: crate::Direction) -> u64 {
        let assumed = self.config.deadlines.assumed_rate;
        self.measured_rate(direction).unwrap_or(assumed)
    }

    /// Bytes per second in that direction; `None` until something was measured.
    #[must_use]
    pub fn measured_rate(&self, direction: crate::Direction) -> Option<u64> {
        let counters = match direction {
            crate::Direction::In => &self.stats.back_in,
            crate::Direction::Out => &self.stats.out,
        };
        let nanos = u128::from(counters.copy_span.as_nanos());
        if counters.done == 0 || nanos == 0 {
            return None;
        }
        let rate = u128::from(counters.bytes) * 1_000_000_000 / nanos;
        Some(u64::try_from(rate).unwrap_or(u64::MAX).max(1))
    }

    fn record(&self, index: u32) -> &Record {
        self.records[index as usize]
            .as_ref()
            .expect("handles and flights name live records")
    }

    fn record_mut(&mut self, index: u32) -> &mut Record {
        self.records[index as usize]
            .as_mut()
            .expect("handles and flights name live records")
    }

    /// Moves a record along the table; an illegal move is a bug in this crate.
    fn advance(&mut self, index: u32, stimulus: Stimulus) {
        let record = self.record_mut(index);
        let from = record.state;
        let to = from.on(stimulus);
        assert!(to.is_some(), "{from:?} does not go on {stimulus:?}");
        let to = to.unwrap_or(from);
        record.state = to;
        if let Some(count) = self.state_count(from) {
            *count -= 1;
        }
        if let Some(count) = self.state_count(to) {
            *count += 1;
        }
    }

    const fn state_count(&mut self, state: RecordState) -> Option<&mut u32> {
        let groups = &mut self.stats.groups;
        match state {
            RecordState::GpuResident => Some(&mut groups.gpu_resident),
            RecordState::SwapOutInFlight => Some(&mut groups.swap_out_in_flight),
            RecordState::HostResident => Some(&mut groups.host_resident),
            RecordState::SwapInInFlight => Some(&mut groups.swap_in_in_flight),
            RecordState::CancelPending => Some(&mut groups.cancel_pending),
            RecordState::Failed => Some(&mut groups.failed),
            RecordState::Cancelled => None,
        }
    }

    /// Starts a new life of a group, on the GPU, without blocks.
    ///
    /// # Errors
    ///
    /// [`Refusal::Draining`], [`Refusal::NoChoices`], or [`Refusal::GroupExists`] if a live group
    /// has this id; a tombstone with this id is no obstacle.
    pub fn allocate(&mut self, group: GroupId, choices: u32) -> Result<Lease<OnGpu>, Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        if choices == 0 {
            return Err(Refusal::NoChoices);
        }
        if self.live.contains_key(&group) {
            return Err(Refusal::GroupExists);
        }
        self.last_generation += 1;
        let key = RecordKey {
            group,
            generation: Generation(self.last_generation),
        };
        let record = Some(Record::new(key, choices));
        let index = if let Some(index) = self.unused_records.pop() {
            self.records[index as usize] = record;
            index
        } else {
            self.records.push(record);
            u32::try_from(self.records.len() - 1).expect("fewer than 2^32 groups")
        };
        self.live.insert(group, index);
        self.stats.groups.gpu_resident += 1;
        Ok(Lease::new(self.id, index, key))
    }

    /// Whether the handle is one of this machine's live ones.
    fn owns<P: Place>(&self, lease: &Lease<P>) -> bool {
        self.is_live(lease.machine, lease.index, lease.key)
    }

    fn is_live(&self, machine: u64, index: u32, key: RecordKey) -> bool {
        let record = self.records.get(index as usize).and_then(Option::as_ref);
        machine == self.id && record.is_some_and(|record| record.key == key)
    }

    const fn next_ticket(&mut self) -> TicketId {
        self.last_ticket += 1;
        // 2^40 flights of 2^24 machines: neither is reached in the life of a process.
        TicketId((self.id << 40) | self.last_ticket)
    }
}
