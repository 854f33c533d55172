//! The asynchronous backend: two lanes over one pinned pool.

use core::num::NonZeroUsize;
use core::task::Waker;
use core::{fmt, mem};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kv_core::{
    Backend, Closed, Command, Completion, CopyFault, Digest, DigestWork, Direction, Refused,
    SlotIndex, Span, SubmitRefusal, Time,
};

use crate::CudaError;
use crate::arena::{HostArena, PoolTimes, grow};
use crate::clock::Anchor;
use crate::config::CudaConfig;
use crate::copy::{Common, Mover};
use crate::cost::{Costs, Path};
use crate::digest::DigestPool;
use crate::fences::StepFences;
use crate::flight::Flight;
use crate::graveyard::{BeingFreed, bury_backend};
use crate::lane::Lane;
use crate::memory::GpuMemory;
use crate::outbox::Outbox;

/// Moves blocks between a pool on a GPU and a pinned pool on the host.
///
/// Made by [`CudaBackend::new`], which takes the first chunk of the pinned pool; the rest follows
/// in the background, see [`Backend::slots_ready`]. Dropping it waits for nothing: what is under
/// way then is given up as [`Backend::close`] with a limit of zero does, and everything else is
/// given back on a thread of its own, see [`being_freed`](crate::being_freed).
pub struct CudaBackend {
    common: Arc<Common>,
    out: Arc<Lane>,
    back_in: Arc<Lane>,
    outbox: Arc<Outbox>,
    digests: Arc<DigestPool>,
    threads: Vec<JoinHandle<()>>,
    config: CudaConfig,
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend")
            .field("memory", &self.common.memory)
            .field("arena", &self.common.arena)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// What the measurement at construction found, and what it means for this layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Findings {
    /// Copies out.
    pub out: Costs,
    /// Copies in.
    pub back_in: Costs,
}

impl CudaBackend {
    /// Takes streams, staging slabs, the first chunk of the pinned pool and two threads, and
    /// measures for a few milliseconds what the link can do.
    ///
    /// `fences` are those that the executor over `memory` records.
    ///
    /// # Errors
    ///
    /// If a setting can't be used, a limit forbids the pool, or the driver refuses. Everything
    /// that was taken is given back.
    pub fn new(
        memory: Arc<GpuMemory>,
        fences: Arc<StepFences>,
        config: &CudaConfig,
    ) -> Result<Self, CudaError> {
        config.check()?;
        let device = memory.device().clone();
        device.bind()?;
        let slot_bytes = memory.layout().block_bytes();
        let arena = HostArena::reserve(slot_bytes, &config.arena, Box::new(device.clone()))?;
        grow(&arena, &config.arena, &device.facts().pci_bus_id)?;
        let common = Arc::new(Common::new(memory, arena, fences)?);
        let out = Mover::new(Arc::clone(&common), Direction::Out, config)?;
        let back_in = Mover::new(Arc::clone(&common), Direction::In, config)?;
        let outbox = Arc::new(Outbox::default());
        let digests = Arc::new(DigestPool::new(config.digest_threads));
        let lane = |mover| Lane::new(mover, Arc::clone(&outbox), Arc::clone(&digests), config);
        let (out, back_in) = (lane(out), lane(back_in));
        let mut threads = vec![out.start("kv-copy-out")?];
        match back_in.start("kv-copy-in") {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                out.close();
                return Err(error);
            }
        }
        Ok(Self {
            common,
            out,
            back_in,
            outbox,
            digests,
            threads,
            config: *config,
        })
    }

    /// What the measurement at construction found.
    #[must_use]
    pub fn findings(&self) -> Findings {
        Findings {
            out: *self.out.costs(),
            back_in: *self.back_in.costs(),
        }
    }

    /// Which way a command of so many blocks would take; a name for people.
    #[must_use]
    pub fn way(&self, direction: Direction, blocks: NonZeroUsize) -> &'static str {
        match self.path(direction, blocks.get()) {
            Path::Ring => "staging ring",
            Path::Rows => "one copy per row",
        }
    }

    /// Fixed memory of the GPU that staging takes, bytes.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.config.staging_bytes()
    }

    /// Waits until the pinned pool has stopped growing, at most `limit`, and says how many slots
    /// are ready.
    ///
    /// # Errors
    ///
    /// Why the pool is smaller than asked for, if it is; the slots that are ready stay usable.
    pub fn wait_slots(&self, limit: Span) -> Result<u32, CudaError> {
        self.common.arena.wait_grown(limit.as_duration())
    }

    /// What setting up the pinned pool has taken so far.
    #[must_use]
    pub fn pool_times(&self) -> PoolTimes {
        self.common.arena.times()
    }

    /// Why the pinned pool is smaller than asked for, if it is.
    #[must_use]
    pub fn pool_failure(&self) -> Option<CudaError> {
        self.common.arena.failure()
    }

    /// A copy of the bytes of a host slot, for tests.
    ///
    /// Meaningful only while no command that writes the slot is under way.
    ///
    /// # Errors
    ///
    /// [`CudaError::SlotBusy`] if the slot is not ready, or a command is under way.
    pub fn slot_bytes(&self, slot: SlotIndex) -> Result<Vec<u8>, CudaError> {
        self.at_rest(slot)?;
        Ok(self.common.arena.bytes_at_rest(slot))
    }

    /// Flips one bit of a host slot, for tests of what protects against damage.
    ///
    /// # Errors
    ///
    /// [`CudaError::SlotBusy`] if the slot is not ready, or a command is under way.
    pub fn flip_slot_bit(&mut self, slot: SlotIndex, bit: usize) -> Result<(), CudaError> {
        self.at_rest(slot)?;
        self.common.arena.flip_bit_at_rest(slot, bit);
        Ok(())
    }

    /// Whether the driver knows the slot's memory as page-locked.
    ///
    /// # Panics
    ///
    /// If the slot is not ready.
    #[must_use]
    pub fn slot_is_page_locked(&self, slot: SlotIndex) -> bool {
        let (address, _) = self.common.arena.place(slot);
        self.common.device().is_page_locked(address)
    }

    /// Address of a host slot, for measurements that watch its bytes arrive.
    ///
    /// # Panics
    ///
    /// If the slot is not ready.
    #[must_use]
    pub fn slot_address(&self, slot: SlotIndex) -> u64 {
        self.common.arena.place(slot).0
    }

    fn at_rest(&self, slot: SlotIndex) -> Result<(), CudaError> {
        if slot.value() < self.common.arena.slots_ready() && self.outbox.is_idle() {
            Ok(())
        } else {
            Err(CudaError::SlotBusy { slot })
        }
    }

    fn lane(&self, direction: Direction) -> &Arc<Lane> {
        match direction {
            Direction::In => &self.back_in,
            Direction::Out => &self.out,
        }
    }

    fn path(&self, direction: Direction, blocks: usize) -> Path {
        let costs = self.lane(direction).costs();
        self.common.ways.choose(self.config.path, costs, blocks)
    }

    /// Asserts what the machine promises about every command: the copies rely on it.
    fn check(&self, command: &Command) {
        let (layout, ready) = (self.common.memory.layout(), self.common.arena.slots_ready());
        let moves = command.moves().len() as u64;
        assert!(moves > 0, "{:?} moves nothing", command.id());
        assert_eq!(
            command.bytes(),
            moves * layout.block_bytes(),
            "{:?}",
            command.id()
        );
        for step in command.moves() {
            assert!(
                step.block.value() < layout.blocks(),
                "{:?} is not in the pool",
                step.block
            );
            assert!(
                step.slot.value() < ready,
                "{:?}, but {ready} slots are ready",
                step.slot
            );
        }
        if let DigestWork::Verify(expected) = command.digest() {
            assert_eq!(
                expected.len() as u64,
                moves,
                "digests of {:?}",
                command.id()
            );
        }
    }

    /// Compares the digests first; the flight enters its lane only if all are right.
    fn verify(&self, flight: Flight, expected: Vec<Digest>) {
        let slots = flight.moves.iter().map(|step| step.slot).collect();
        let lane = Arc::clone(&self.back_in);
        self.digests.run(&self.common.arena, slots, move |found| {
            let wrong = found
                .iter()
                .zip(&expected)
                .position(|(found, right)| found != right);
            match wrong.map(u32::try_from) {
                None => lane.enqueue(flight),
                Some(index) => {
                    let index = index.unwrap_or(u32::MAX);
                    lane.fail(&flight, CopyFault::DigestMismatch { index });
                }
            }
        });
    }
}

impl Backend for CudaBackend {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        self.check(&command);
        let direction = command.direction();
        if let Err(why) = self.lane(direction).reserve() {
            return Err(Refused { why, back: command });
        }
        let number = self.outbox.open(command.bytes());
        let path = self.path(direction, command.moves().len());
        let mut flight = Flight::new(number, &command, path, Anchor::new(now));
        match (
            direction,
            mem::replace(&mut flight.digest, DigestWork::Skip),
        ) {
            (Direction::In, DigestWork::Verify(expected)) => self.verify(flight, expected),
            (Direction::Out, DigestWork::Compute) => {
                flight.digest = DigestWork::Compute;
                self.out.enqueue(flight);
            }
            _ => self.lane(direction).enqueue(flight),
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.outbox.take(out);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.outbox.set_waker(waker);
    }

    fn slots_ready(&self) -> u32 {
        self.common.arena.slots_ready()
    }

    fn close(&mut self, limit: Span) -> Closed {
        self.out.close();
        self.back_in.close();
        let (closed, gave_up) = self.outbox.close(limit.as_duration());
        if gave_up {
            let owned = (Arc::clone(&self.out), Arc::clone(&self.back_in));
            bury_backend(owned, closed.unconfirmed.into(), closed.leaked_bytes);
        }
        closed
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let closed = self.close(Span::ZERO);
        // Giving back memory takes a while, and whoever drops must not wait.
        let owned = (
            Arc::clone(&self.common),
            Arc::clone(&self.out),
            Arc::clone(&self.back_in),
        );
        let threads = mem::take(&mut self.threads);
        let counted = BeingFreed::new();
        let freed = thread::Builder::new()
            .name(String::from("kv-free"))
            .spawn(move || {
                // With something unconfirmed the threads may sleep for ever; what they own is kept.
                if closed.unconfirmed == 0 {
                    for thread in threads {
                        drop(thread.join());
                    }
                }
                drop(owned);
                drop(counted);
            });
        // Without a thread it is freed here, late rather than never.
        drop(freed);
    }
}
