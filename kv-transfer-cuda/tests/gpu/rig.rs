//! What the tests share: the GPU, kernels that delay and check, and a backend with its waker.

#![expect(
    unsafe_code,
    reason = "launches kernels and writes a flag that a kernel reads"
)]

use core::ffi::c_void;
use core::ptr::NonNull;
use core::task::Waker;
use core::time::Duration;
use std::ffi::CStr;
use std::sync::{Arc, OnceLock};
use std::task::Wake;
use std::time::Instant;

use cudarc::driver::sys;
use kv_core::testing::Rng;
use kv_core::{
    Backend, BlockId, BlockMove, Command, Completion, DigestWork, Direction, Fence, Layout,
    SlotIndex, Span, TicketId, Time,
};
use kv_transfer_cuda::{
    CudaBackend, CudaConfig, Device, DeviceBytes, GpuMemory, LoadedKernel, StepFences, Stream,
    StreamPriority, being_freed,
};
use parking_lot::{Condvar, Mutex};

/// What takes longer than this never comes.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A stream that is held goes on after this, whatever happens.
pub(crate) const HOLD: Duration = Duration::from_secs(8);

const PTX: &CStr = {
    let text = concat!(include_str!("kernels.ptx"), "\0");
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text has no NUL inside"),
    }
};

/// The kernels of `kernels.cu`.
pub(crate) struct Kernels {
    hold: LoadedKernel,
    fill_late: LoadedKernel,
    check_late: LoadedKernel,
    trespass: LoadedKernel,
}

/// The GPU that the tests run on. Without one they fail.
pub(crate) fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE
        .get_or_init(|| Device::open(0).expect("these tests need a GPU"))
        .clone()
}

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let names = [c"hold", c"fill_late", c"check_late", c"trespass"];
        let loaded = device()
            .load(PTX, &names)
            .expect("the driver takes the text");
        let [hold, fill_late, check_late, trespass] =
            <[LoadedKernel; 4]>::try_from(loaded).expect("four kernels");
        Kernels {
            hold,
            fill_late,
            check_late,
            trespass,
        }
    })
}

/// Rounds of a long test: the default, or what `KV_GPU_ROUNDS` says if that is fewer.
pub(crate) fn rounds(default: u32) -> u32 {
    let asked = std::env::var("KV_GPU_ROUNDS")
        .ok()
        .and_then(|text| text.parse().ok());
    asked.map_or(default, |asked: u32| asked.min(default))
}

/// A word in memory that host and GPU both see.
pub(crate) struct Flag(NonNull<u32>);

// SAFETY: the word is only touched by volatile accesses.
unsafe impl Send for Flag {}
// SAFETY: as above.
unsafe impl Sync for Flag {}

impl Flag {
    pub(crate) fn new() -> Self {
        device().bind().expect("a sound context");
        let mut word: *mut c_void = core::ptr::null_mut();
        // SAFETY: a context is current; the place is valid.
        let answer = unsafe { sys::cuMemHostAlloc(&raw mut word, 4, 0) };
        assert_eq!(answer, sys::CUresult::CUDA_SUCCESS);
        let flag = Self(NonNull::new(word.cast()).expect("allocated"));
        flag.set(0);
        flag
    }

    pub(crate) fn raise(&self) {
        self.set(1);
    }

    fn set(&self, value: u32) {
        // SAFETY: allocated by `new` and never freed, because a kernel may read it for long.
        unsafe { self.0.as_ptr().write_volatile(value) };
    }
}

impl Drop for Flag {
    /// A test that fails holds up nothing.
    fn drop(&mut self) {
        self.raise();
    }
}

/// Holds the stream until the flag is raised, at most `limit`.
///
/// First waits until no dropped backend is giving memory back any more: the driver may wait until
/// the GPU is idle for that, and hold up everybody else.
pub(crate) fn hold(stream: &Stream, flag: &Flag, limit: Duration) {
    let until = clock() + LIMIT;
    while being_freed() > 0 {
        assert!(clock() < until, "a backend is never given back");
        std::thread::yield_now();
    }
    let mut address = flag.0.as_ptr();
    let mut nanos = u64::try_from(limit.as_nanos()).expect("short");
    let mut params = [(&raw mut address).cast(), (&raw mut nanos).cast()];
    // SAFETY: the kernel takes a pointer and a number; the flag is never freed.
    let launched = unsafe { kernels().hold.launch(stream, 1, 1, &mut params) };
    launched.expect("a sound context");
}

/// Holds the stream for so long.
pub(crate) fn delay(stream: &Stream, time: Duration) {
    static NEVER: OnceLock<Flag> = OnceLock::new();
    hold(stream, NEVER.get_or_init(Flag::new), time);
}

/// After a delay writes a value to every word of four blocks of a pool of contiguous blocks.
pub(crate) fn fill_late(
    stream: &Stream,
    pool: &GpuMemory,
    blocks: [u32; 4],
    value: u32,
    delay: Duration,
) {
    let mut at = blocks.map(|block| block_address(pool, block));
    let mut words = u32::try_from(pool.layout().block_bytes() / 4).expect("small");
    let (mut value, mut nanos) = (value, u64::try_from(delay.as_nanos()).expect("short"));
    let [a, b, c, d] = &mut at;
    let mut params: [*mut c_void; 7] = [
        (&raw mut *a).cast(),
        (&raw mut *b).cast(),
        (&raw mut *c).cast(),
        (&raw mut *d).cast(),
        (&raw mut words).cast(),
        (&raw mut value).cast(),
        (&raw mut nanos).cast(),
    ];
    // SAFETY: four pointers and three numbers, as the kernel declares them; the blocks lie in the
    // pool, which the tests keep until the stream was waited for.
    let launched = unsafe { kernels().fill_late.launch(stream, 8, 256, &mut params) };
    launched.expect("a sound context");
}

/// After a delay counts the words of four blocks that don't hold the value.
pub(crate) fn check_late(
    stream: &Stream,
    pool: &GpuMemory,
    blocks: [u32; 4],
    value: u32,
    delay: Duration,
    wrong: &DeviceBytes,
) {
    let mut at = blocks.map(|block| block_address(pool, block));
    let mut words = u32::try_from(pool.layout().block_bytes() / 4).expect("small");
    let (mut value, mut nanos) = (value, u64::try_from(delay.as_nanos()).expect("short"));
    let mut count = wrong.address();
    let [a, b, c, d] = &mut at;
    let mut params: [*mut c_void; 8] = [
        (&raw mut *a).cast(),
        (&raw mut *b).cast(),
        (&raw mut *c).cast(),
        (&raw mut *d).cast(),
        (&raw mut words).cast(),
        (&raw mut value).cast(),
        (&raw mut nanos).cast(),
        (&raw mut count).cast(),
    ];
    // SAFETY: as in `fill_late`, and a pointer to a word that the caller keeps.
    let launched = unsafe { kernels().check_late.launch(stream, 8, 256, &mut params) };
    launched.expect("a sound context");
}

/// Breaks the context of this process.
pub(crate) fn trespass(stream: &Stream) {
    let mut nowhere: u64 = 0x10;
    let mut params = [(&raw mut nowhere).cast()];
    // SAFETY: one pointer, as the kernel declares it. That it may not be written is the point.
    let launched = unsafe { kernels().trespass.launch(stream, 1, 1, &mut params) };
    launched.expect("the launch itself is sound");
}

fn block_address(pool: &GpuMemory, block: u32) -> u64 {
    assert_eq!(pool.layout().rows_per_block(), 1, "blocks in one piece");
    let row = pool
        .layout()
        .rows(BlockId::new(block))
        .next()
        .expect("one row");
    pool.region_address(row.region) + row.offset
}

/// Copies a block's rows to other memory of the GPU or back, on the stream.
pub(crate) fn copy_on_gpu(
    stream: &Stream,
    pool: &GpuMemory,
    block: BlockId,
    other: &DeviceBytes,
    into_pool: bool,
) {
    stream.device().bind().expect("a sound context");
    for row in pool.layout().rows(block) {
        let inside = pool.region_address(row.region) + row.offset;
        let outside = other.address() + row.slot_offset;
        assert!(row.slot_offset + row.bytes <= other.len());
        let (to, from) = if into_pool {
            (inside, outside)
        } else {
            (outside, inside)
        };
        let bytes = usize::try_from(row.bytes).expect("small");
        // SAFETY: both ranges lie in allocations that the tests keep until the stream was waited
        // for.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.handle()) };
        assert_eq!(answer, sys::CUresult::CUDA_SUCCESS);
    }
}

/// A pool in memory that somebody else allocated, at an offset into one allocation.
pub(crate) fn foreign_pool(layout: Layout) -> GpuMemory {
    let bytes: u64 = layout
        .regions()
        .iter()
        .map(|bytes| bytes.next_multiple_of(512))
        .sum();
    let owner = DeviceBytes::new(&device(), bytes + 512).expect("room on the GPU");
    let mut at = owner.address() + 512;
    let bases = layout.regions().iter().map(|bytes| {
        let base = at;
        at += bytes.next_multiple_of(512);
        base
    });
    let bases: Vec<u64> = bases.collect();
    // SAFETY: the regions lie behind each other in the allocation, which is kept; the tests order
    // what touches it.
    let pool = unsafe { GpuMemory::foreign(&device(), layout, bases, Arc::new(owner)) };
    pool.expect("one base per region")
}

/// Wakes a thread that waits for it.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<u64>,
    ring: Condvar,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock() += 1;
        self.ring.notify_all();
    }
}

/// A backend over a pool, with an executor's stream.
pub(crate) struct Rig {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) fences: Arc<StepFences>,
    pub(crate) stream: Stream,
    pub(crate) backend: CudaBackend,
    pub(crate) ended: Vec<Completion>,
    bell: Arc<Bell>,
    next_ticket: u64,
    start: Instant,
}

impl Rig {
    pub(crate) fn new(layout: Layout, config: &CudaConfig) -> Self {
        let memory = GpuMemory::allocate(&device(), layout).expect("room on the GPU");
        Self::over(memory, config)
    }

    pub(crate) fn over(memory: GpuMemory, config: &CudaConfig) -> Self {
        let device = device();
        let memory = Arc::new(memory);
        let fences = Arc::new(StepFences::new(&device).expect("events"));
        let mut backend =
            CudaBackend::new(Arc::clone(&memory), Arc::clone(&fences), config).expect("a backend");
        backend.wait_slots(Span::from(LIMIT)).expect("all slots");
        let bell = Arc::new(Bell::default());
        backend.set_waker(Waker::from(Arc::clone(&bell)));
        let stream = Stream::new(&device, StreamPriority::High).expect("a stream");
        let ended = Vec::new();
        let start = clock();
        Self {
            memory,
            fences,
            stream,
            backend,
            ended,
            bell,
            next_ticket: 1,
            start,
        }
    }

    pub(crate) fn now(&self) -> Time {
        Time::ZERO + Span::from(self.start.elapsed())
    }

    pub(crate) fn command(
        &mut self,
        direction: Direction,
        moves: &[(u32, u32)],
        after: Fence,
        digest: DigestWork,
    ) -> Command {
        let ticket = TicketId::for_testing(self.next_ticket);
        self.next_ticket += 1;
        let moves = moves.iter().map(|&(block, slot)| BlockMove {
            block: BlockId::new(block),
            slot: SlotIndex::new(slot),
        });
        let block_bytes = self.memory.layout().block_bytes();
        Command::for_testing(
            ticket,
            direction,
            moves.collect(),
            after,
            block_bytes,
            digest,
        )
    }

    /// Submits; the completion will carry the ticket.
    pub(crate) fn submit(
        &mut self,
        direction: Direction,
        moves: &[(u32, u32)],
        after: Fence,
        digest: DigestWork,
    ) -> TicketId {
        let command = self.command(direction, moves, after, digest);
        let ticket = command.id().ticket();
        let now = self.now();
        self.backend.submit(now, command).expect("taken");
        ticket
    }

    /// Waits for a command, by wake-ups alone.
    pub(crate) fn wait(&mut self, ticket: TicketId) -> Completion {
        let until = clock() + LIMIT;
        loop {
            let seen = *self.bell.rung.lock();
            self.backend.poll(&mut self.ended);
            if let Some(place) = self.ended.iter().position(|e| e.id.ticket() == ticket) {
                return self.ended.swap_remove(place);
            }
            let mut rung = self.bell.rung.lock();
            while *rung == seen {
                let timed_out = self.bell.ring.wait_until(&mut rung, until).timed_out();
                assert!(!timed_out, "{ticket:?} never ends");
            }
        }
    }

    /// Waits for completions, by wake-ups alone.
    pub(crate) fn wait_any(&mut self) -> Vec<Completion> {
        let until = clock() + LIMIT;
        loop {
            let seen = *self.bell.rung.lock();
            self.backend.poll(&mut self.ended);
            if !self.ended.is_empty() {
                return std::mem::take(&mut self.ended);
            }
            let mut rung = self.bell.rung.lock();
            while *rung == seen {
                let timed_out = self.bell.ring.wait_until(&mut rung, until).timed_out();
                assert!(!timed_out, "nothing ever ends");
            }
        }
    }

    /// Moves and waits; must be done.
    pub(crate) fn finish(&mut self, direction: Direction, moves: &[(u32, u32)]) -> Completion {
        let ticket = self.submit(direction, moves, Fence::NONE, DigestWork::Skip);
        let ended = self.wait(ticket);
        assert_eq!(ended.outcome, kv_core::Outcome::Done, "{ended:?}");
        ended
    }

    /// Ends a step on the executor's stream.
    pub(crate) fn fence(&self) -> Fence {
        self.fences.record(&self.stream).expect("a sound context")
    }
}

/// Random bytes.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// This moment, for limits of waits.
#[expect(clippy::disallowed_methods, reason = "limits of waits in tests")]
pub(crate) fn clock() -> Instant {
    Instant::now()
}
