//! The suite of the contract, over every backend of this crate.

use std::num::NonZeroU32;
use std::sync::Arc;

use kv_core::host::{Clock, HostBackend, HostConfig, Link, PlainMemory, SyncBackend};
use kv_core::testing::conformance::{self, Harness, SubmitMode};
use kv_core::testing::{CopyAt, SimBackend, SimConfig, SimControl};
use kv_core::{Backend, BlockId, Fence, Layout, SlotIndex, Span, Time};

use crate::world::{self, SlowStep};

/// What differs between the backends.
trait Kind: Sized {
    type Backend: Backend;
    const MODE: SubmitMode;
    const QUEUE_MAX: Option<usize>;

    fn make(&mut self, memory: &Arc<PlainMemory>, clock: &Clock) -> Self::Backend;
    fn read_slot(&self, backend: &Self::Backend, slot: SlotIndex) -> Option<Vec<u8>>;
    fn flip(&self, backend: &mut Self::Backend, slot: SlotIndex, bit: usize) -> bool;
    /// Before and after the steps of a simulated world went on.
    fn pump(&self, _now: Time) {}
    /// Whether steps run on threads, or when pumped.
    const STEPS: Steps = Steps::Threads;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Steps {
    Pumped,
    Threads,
}

struct Plain<K> {
    kind: K,
    memory: Arc<PlainMemory>,
    clock: Clock,
    slow_read: Option<SlowStep<Vec<Vec<u8>>>>,
    /// Steps that a simulated world still has to do: what to write, or to read.
    todo: Vec<(Fence, BlockId, Option<Vec<u8>>)>,
    saw: Vec<u8>,
}

impl<K: Kind> Plain<K> {
    fn new(kind: K, layout: Layout) -> Self {
        Self {
            kind,
            memory: Arc::new(PlainMemory::new(layout)),
            clock: world::clock(),
            slow_read: None,
            todo: Vec::new(),
            saw: Vec::new(),
        }
    }
}

impl<K: Kind> Harness for Plain<K> {
    type Backend = K::Backend;

    fn backend(&mut self) -> K::Backend {
        self.kind.make(&self.memory, &self.clock)
    }

    fn submit_mode(&self) -> SubmitMode {
        K::MODE
    }

    fn block_bytes(&self) -> u64 {
        self.memory.layout().block_bytes()
    }

    fn queue_max(&self) -> Option<usize> {
        K::QUEUE_MAX
    }

    fn now(&self) -> Time {
        (self.clock)()
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
        world::write(&self.memory, block.value(), bytes);
    }

    fn read_block(&mut self, block: BlockId) -> Vec<u8> {
        world::read(&self.memory, block.value())
    }

    fn read_slot(&mut self, backend: &K::Backend, slot: SlotIndex) -> Option<Vec<u8>> {
        self.kind.read_slot(backend, slot)
    }

    fn flip_slot_bit(&mut self, backend: &mut K::Backend, slot: SlotIndex, bit: usize) -> bool {
        self.kind.flip(backend, slot, bit)
    }

    fn begin_step(&mut self) -> Fence {
        self.memory.begin_step()
    }

    fn end_step(&mut self, step: Fence) {
        self.memory.end_step(step);
    }

    fn slow_write(&mut self, block: BlockId, bytes: Vec<u8>) -> Fence {
        match K::STEPS {
            Steps::Pumped => {
                let fence = self.memory.begin_step();
                self.todo.push((fence, block, Some(bytes)));
                fence
            }
            Steps::Threads => {
                let blocks = vec![(block.value(), bytes)];
                world::slow_write(&self.memory, world::SLOW, blocks).fence
            }
        }
    }

    fn slow_read(&mut self, block: BlockId) -> Fence {
        match K::STEPS {
            Steps::Pumped => {
                let fence = self.memory.begin_step();
                self.todo.push((fence, block, None));
                fence
            }
            Steps::Threads => {
                let step = world::slow_read(&self.memory, world::SLOW, vec![block.value()]);
                let fence = step.fence;
                self.slow_read = Some(step);
                fence
            }
        }
    }

    fn slow_read_saw(&mut self) -> Vec<u8> {
        match self.slow_read.take() {
            Some(step) => step.join().remove(0),
            None => std::mem::take(&mut self.saw),
        }
    }

    fn pump(&mut self) {
        let now = (self.clock)();
        self.kind.pump(now);
        for (fence, block, bytes) in std::mem::take(&mut self.todo) {
            match bytes {
                Some(bytes) => world::write(&self.memory, block.value(), &bytes),
                None => self.saw = world::read(&self.memory, block.value()),
            }
            self.memory.end_step(fence);
        }
        self.kind.pump(now);
    }
}

/// [`HostBackend`] with a few threads, and maybe a slow link.
struct Host {
    threads: u32,
    link: Link,
}

impl Kind for Host {
    type Backend = HostBackend;
    const MODE: SubmitMode = SubmitMode::Queued;
    const QUEUE_MAX: Option<usize> = Some(6);

    fn make(&mut self, memory: &Arc<PlainMemory>, clock: &Clock) -> HostBackend {
        let config = HostConfig {
            threads_per_direction: NonZeroU32::new(self.threads).unwrap(),
            queue_max: NonZeroU32::new(6).unwrap(),
            link_out: self.link,
            link_in: self.link,
            ..HostConfig::new(8)
        };
        HostBackend::new(Arc::clone(memory), config, Arc::clone(clock)).unwrap()
    }

    fn read_slot(&self, backend: &HostBackend, slot: SlotIndex) -> Option<Vec<u8>> {
        Some(backend.probe().bytes(slot))
    }

    fn flip(&self, backend: &mut HostBackend, slot: SlotIndex, bit: usize) -> bool {
        backend.probe().flip_bit(slot, bit);
        true
    }
}

/// [`SyncBackend`].
struct Blocking;

impl Kind for Blocking {
    type Backend = SyncBackend;
    const MODE: SubmitMode = SubmitMode::Blocking;
    const QUEUE_MAX: Option<usize> = None;

    fn make(&mut self, memory: &Arc<PlainMemory>, clock: &Clock) -> SyncBackend {
        SyncBackend::new(Arc::clone(memory), Span::from_secs(60), Arc::clone(clock))
    }

    fn read_slot(&self, backend: &SyncBackend, slot: SlotIndex) -> Option<Vec<u8>> {
        backend.slot_bytes(slot)
    }

    fn flip(&self, backend: &mut SyncBackend, slot: SlotIndex, bit: usize) -> bool {
        backend.flip_slot_bit(slot, bit)
    }
}

/// [`SimBackend`], ended whenever the suite pumps.
struct Sim {
    config: SimConfig,
    control: Option<SimControl>,
}

impl Kind for Sim {
    type Backend = SimBackend;
    const MODE: SubmitMode = SubmitMode::Queued;
    const QUEUE_MAX: Option<usize> = Some(8);
    const STEPS: Steps = Steps::Pumped;

    fn make(&mut self, memory: &Arc<PlainMemory>, _clock: &Clock) -> SimBackend {
        let backend = SimBackend::new(Arc::clone(memory), self.config);
        self.control = Some(backend.control());
        backend
    }

    fn read_slot(&self, _backend: &SimBackend, slot: SlotIndex) -> Option<Vec<u8>> {
        self.control
            .as_ref()
            .map(|control| control.slot_bytes(slot))
    }

    fn flip(&self, _backend: &mut SimBackend, slot: SlotIndex, bit: usize) -> bool {
        let Some(control) = &self.control else {
            return false;
        };
        control.flip_host_bit(slot, bit);
        true
    }

    fn pump(&self, now: Time) {
        if let Some(control) = &self.control {
            control.complete_all(now);
        }
    }
}

#[test]
fn host_backend_honours_the_contract() {
    let link = Link::default();
    conformance::run(&mut Plain::new(Host { threads: 1, link }, world::layout(8)));
}

#[test]
fn host_backend_with_several_threads_honours_the_contract() {
    let link = Link::default();
    conformance::run(&mut Plain::new(Host { threads: 3, link }, world::layout(8)));
}

#[test]
fn host_backend_on_a_slow_link_honours_the_contract() {
    let link = Link {
        bandwidth_bytes_per_second: std::num::NonZeroU64::new(1 << 20),
        delay: Span::from_micros(200),
    };
    conformance::run(&mut Plain::new(Host { threads: 1, link }, world::layout(8)));
}

#[test]
fn host_backend_honours_the_contract_over_a_stacked_tensor() {
    let layout = Layout::stacked(3, 9, 16, 2, 8, 2).unwrap();
    let link = Link::default();
    conformance::run(&mut Plain::new(Host { threads: 1, link }, layout));
}

#[test]
fn sync_backend_honours_the_contract() {
    conformance::run(&mut Plain::new(Blocking, world::layout(8)));
}

#[test]
fn simulated_backend_honours_the_contract() {
    for copy_at in [CopyAt::End, CopyAt::Start] {
        let config = SimConfig {
            queue_max: 8,
            copy_at,
            ..SimConfig::new(8)
        };
        let control = None;
        conformance::run(&mut Plain::new(Sim { config, control }, world::layout(8)));
    }
}
