//! The conformance suite of kv-core, on both backends.

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use kv_core::testing::conformance::{Harness, SubmitMode, run};
use kv_core::{BlockId, Fence, Layout, SlotIndex, Span, Time};
use kv_transfer_cuda::{
    BlockingCudaBackend, CudaBackend, CudaConfig, DeviceBytes, GpuMemory, PathChoice, StepFences,
    Stream, StreamPriority,
};

use crate::rig::{Flag, HOLD, clock, copy_on_gpu, delay, device, hold};

/// The suite fills the queue with as many commands as it needs blocks.
const QUEUE_MAX: usize = 8;

/// A step on a stream of its own, so that a held one holds up nothing else.
struct World {
    memory: Arc<GpuMemory>,
    fences: Arc<StepFences>,
    held: BTreeMap<Fence, (Flag, Stream)>,
    compute: Stream,
    scratch: DeviceBytes,
    start: Instant,
}

impl World {
    fn new() -> Self {
        let device = device();
        let layout = Layout::stacked(3, 16, 16, 2, 64, 2).expect("valid");
        let memory = GpuMemory::allocate(&device, layout).expect("room on the GPU");
        let block_bytes = memory.layout().block_bytes();
        Self {
            memory: Arc::new(memory),
            fences: Arc::new(StepFences::new(&device).expect("events")),
            held: BTreeMap::new(),
            compute: Stream::new(&device, StreamPriority::High).expect("a stream"),
            scratch: DeviceBytes::new(&device, block_bytes).expect("room on the GPU"),
            start: clock(),
        }
    }

    fn begin_step(&mut self) -> Fence {
        let stream = Stream::new(&device(), StreamPriority::High).expect("a stream");
        let flag = Flag::new();
        hold(&stream, &flag, HOLD);
        let fence = self.fences.record(&stream).expect("a sound context");
        self.held.insert(fence, (flag, stream));
        fence
    }

    fn end_step(&mut self, step: Fence) {
        let (flag, stream) = self.held.remove(&step).expect("a step that was begun");
        flag.raise();
        stream.synchronize().expect("a sound context");
    }

    fn slow(&self) {
        delay(&self.compute, Duration::from_millis(20));
    }

    fn slow_write(&self, block: BlockId, bytes: &[u8]) -> Fence {
        self.compute.synchronize().expect("a sound context");
        self.scratch.write(0, bytes).expect("fits");
        device().synchronize().expect("a sound context");
        self.slow();
        copy_on_gpu(&self.compute, &self.memory, block, &self.scratch, true);
        self.fences.record(&self.compute).expect("a sound context")
    }

    fn slow_read(&self, block: BlockId) -> Fence {
        self.slow();
        copy_on_gpu(&self.compute, &self.memory, block, &self.scratch, false);
        self.fences.record(&self.compute).expect("a sound context")
    }

    fn slow_read_saw(&self) -> Vec<u8> {
        self.compute.synchronize().expect("a sound context");
        let mut bytes = vec![0; usize::try_from(self.scratch.len()).expect("small")];
        self.scratch.read(0, &mut bytes).expect("fits");
        bytes
    }

    /// Whatever a dropped backend still does is over before the pool is looked at.
    fn read_block(&self, block: BlockId) -> Vec<u8> {
        device().synchronize().expect("a sound context");
        self.memory.read_block(block).expect("a sound context")
    }
}

struct Asynchronous {
    world: World,
    config: CudaConfig,
}

macro_rules! delegate {
    () => {
        fn block_bytes(&self) -> u64 {
            self.world.memory.layout().block_bytes()
        }

        fn now(&self) -> Time {
            Time::ZERO + Span::from(self.world.start.elapsed())
        }

        fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
            self.world
                .memory
                .write_block(block, bytes)
                .expect("a sound context");
        }

        fn read_block(&mut self, block: BlockId) -> Vec<u8> {
            self.world.read_block(block)
        }

        fn begin_step(&mut self) -> Fence {
            self.world.begin_step()
        }

        fn end_step(&mut self, step: Fence) {
            self.world.end_step(step);
        }

        fn slow_write(&mut self, block: BlockId, bytes: Vec<u8>) -> Fence {
            self.world.slow_write(block, &bytes)
        }

        fn slow_read(&mut self, block: BlockId) -> Fence {
            self.world.slow_read(block)
        }

        fn slow_read_saw(&mut self) -> Vec<u8> {
            self.world.slow_read_saw()
        }
    };
}

impl Harness for Asynchronous {
    type Backend = CudaBackend;

    delegate!();

    fn backend(&mut self) -> CudaBackend {
        let (memory, fences) = (
            Arc::clone(&self.world.memory),
            Arc::clone(&self.world.fences),
        );
        CudaBackend::new(memory, fences, &self.config).expect("a backend")
    }

    fn submit_mode(&self) -> SubmitMode {
        SubmitMode::Queued
    }

    fn queue_max(&self) -> Option<usize> {
        Some(QUEUE_MAX)
    }

    fn read_slot(&mut self, backend: &CudaBackend, slot: SlotIndex) -> Option<Vec<u8>> {
        Some(backend.slot_bytes(slot).expect("at rest"))
    }

    fn flip_slot_bit(&mut self, backend: &mut CudaBackend, slot: SlotIndex, bit: usize) -> bool {
        backend.flip_slot_bit(slot, bit).expect("at rest");
        true
    }
}

struct Blocking {
    world: World,
}

impl Harness for Blocking {
    type Backend = BlockingCudaBackend;

    delegate!();

    fn backend(&mut self) -> BlockingCudaBackend {
        let (memory, fences) = (
            Arc::clone(&self.world.memory),
            Arc::clone(&self.world.fences),
        );
        BlockingCudaBackend::new(memory, fences).expect("a backend")
    }

    fn submit_mode(&self) -> SubmitMode {
        SubmitMode::Blocking
    }

    fn queue_max(&self) -> Option<usize> {
        None
    }

    fn read_slot(&mut self, backend: &BlockingCudaBackend, slot: SlotIndex) -> Option<Vec<u8>> {
        backend.slot_bytes(slot).map(<[u8]>::to_vec)
    }

    fn flip_slot_bit(
        &mut self,
        backend: &mut BlockingCudaBackend,
        slot: SlotIndex,
        bit: usize,
    ) -> bool {
        backend.slot_bytes_mut(slot).is_some_and(|bytes| {
            bytes[bit / 8] ^= 1 << (bit % 8);
            true
        })
    }
}

fn conform(path: PathChoice) {
    let mut config = CudaConfig::new(16);
    config.path = path;
    config.queue_max = QUEUE_MAX;
    run(&mut Asynchronous {
        world: World::new(),
        config,
    });
}

#[test]
fn the_ring_conforms() {
    conform(PathChoice::Ring);
}

#[test]
fn direct_rows_conform() {
    conform(PathChoice::Rows);
}

#[test]
fn the_measured_ways_conform() {
    conform(PathChoice::Measured);
}

#[test]
fn the_blocking_backend_conforms() {
    run(&mut Blocking {
        world: World::new(),
    });
}
