//! A pool in plain memory, slow steps over it, and short ways to make commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_core::host::{Clock, PlainMemory};
use kv_core::testing::Rng;
use kv_core::{
    Backend, BlockId, BlockMove, Command, Completion, DigestWork, Direction, Fence, Layout,
    SlotIndex, TicketId, Time,
};
use parking_lot::{Condvar, Mutex};

/// What must happen happens within this.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// How long a slow step stays half done if nobody tells it to go on.
pub(crate) const SLOW: Duration = Duration::from_millis(10);

/// Two layers, K and V apart, of odd length.
pub(crate) fn layout(blocks: u32) -> Layout {
    Layout::per_layer(2, blocks, 4, 3, 5, 2).unwrap()
}

/// A clock that goes on by a nanosecond whenever somebody looks at it.
pub(crate) fn clock() -> Clock {
    let ticks = AtomicU64::new(1);
    Arc::new(move || Time::from_nanos(ticks.fetch_add(1, Ordering::Relaxed)))
}

/// Something that happens once, in either thread.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(crate) fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }

    /// Says whether it opened within the limit.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let mut open = self.open.lock();
        self.opened.wait_while_for(&mut open, |open| !*open, limit);
        *open
    }
}

/// Counts wake-ups.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    count: Mutex<u64>,
    woken: Condvar,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        *self.count.lock() += 1;
        self.woken.notify_all();
    }
}

impl Wakes {
    pub(crate) fn attach(backend: &mut impl Backend) -> Arc<Self> {
        let wakes = Arc::new(Self::default());
        backend.set_waker(Waker::from(Arc::clone(&wakes)));
        wakes
    }

    pub(crate) fn count(&self) -> u64 {
        *self.count.lock()
    }

    /// Polls whenever woken, until there are that many completions.
    pub(crate) fn collect(&self, backend: &mut impl Backend, count: usize) -> Vec<Completion> {
        let mut ended = Vec::new();
        let mut seen = 0;
        loop {
            backend.poll(&mut ended);
            if ended.len() >= count {
                return ended;
            }
            let mut wakes = self.count.lock();
            self.woken
                .wait_while_for(&mut wakes, |wakes| *wakes <= seen, LIMIT);
            assert!(
                *wakes > seen,
                "{} of {count} ended, and nobody is woken",
                ended.len()
            );
            seen = *wakes;
        }
    }
}

/// A command with a ticket of its own.
pub(crate) fn command(
    memory: &PlainMemory,
    direction: Direction,
    moves: &[(u32, u32)],
    after: Fence,
    digest: DigestWork,
) -> Command {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let ticket = TicketId::for_testing(NEXT.fetch_add(1, Ordering::Relaxed));
    let moves = moves
        .iter()
        .map(|&(block, slot)| BlockMove {
            block: BlockId::new(block),
            slot: SlotIndex::new(slot),
        })
        .collect();
    let block_bytes = memory.layout().block_bytes();
    Command::for_testing(ticket, direction, moves, after, block_bytes, digest)
}

pub(crate) fn out(memory: &PlainMemory, moves: &[(u32, u32)]) -> Command {
    command(memory, Direction::Out, moves, Fence::NONE, DigestWork::Skip)
}

pub(crate) fn back_in(memory: &PlainMemory, moves: &[(u32, u32)]) -> Command {
    command(memory, Direction::In, moves, Fence::NONE, DigestWork::Skip)
}

pub(crate) fn pattern(memory: &PlainMemory, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.layout().block_bytes()).unwrap()];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

pub(crate) fn write(memory: &PlainMemory, block: u32, bytes: &[u8]) {
    let mut block = memory
        .write(BlockId::new(block))
        .expect("nobody else has the block");
    block.bytes_mut().copy_from_slice(bytes);
}

pub(crate) fn fill(memory: &PlainMemory, block: u32, seed: u64) -> Vec<u8> {
    let bytes = pattern(memory, seed);
    write(memory, block, &bytes);
    bytes
}

pub(crate) fn read(memory: &PlainMemory, block: u32) -> Vec<u8> {
    memory
        .read(BlockId::new(block))
        .expect("nobody else has the block")
        .bytes()
        .to_vec()
}

/// A step that stays half done until `go_on`, or until its patience is over.
pub(crate) struct SlowStep<T> {
    pub(crate) fence: Fence,
    pub(crate) go_on: Arc<Gate>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> SlowStep<T> {
    /// Runs `first`, gives the caller time, runs `second` and ends the step. Returns after
    /// `first`.
    fn start(
        memory: &Arc<PlainMemory>,
        patience: Duration,
        first: impl FnOnce(&PlainMemory) -> T + Send + 'static,
        second: impl FnOnce(&PlainMemory, T) -> T + Send + 'static,
    ) -> Self {
        let fence = memory.begin_step();
        let (half_done, go_on) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
        let thread = {
            let (memory, half_done) = (Arc::clone(memory), Arc::clone(&half_done));
            let go_on = Arc::clone(&go_on);
            std::thread::spawn(move || {
                let so_far = first(&memory);
                half_done.open();
                go_on.wait(patience);
                let whole = second(&memory, so_far);
                memory.end_step(fence);
                whole
            })
        };
        assert!(half_done.wait(LIMIT), "the step did not get half way");
        Self {
            fence,
            go_on,
            thread,
        }
    }

    pub(crate) fn join(self) -> T {
        self.thread.join().unwrap()
    }
}

/// Writes half of each block, then the other half, in one step.
pub(crate) fn slow_write(
    memory: &Arc<PlainMemory>,
    patience: Duration,
    blocks: Vec<(u32, Vec<u8>)>,
) -> SlowStep<()> {
    let whole = blocks.clone();
    let part = move |memory: &PlainMemory, blocks: &[(u32, Vec<u8>)], first: bool| {
        for (block, bytes) in blocks {
            let half = bytes.len() / 2;
            let range = if first { 0..half } else { half..bytes.len() };
            // A copy that does not wait for the step may hold the block for a moment.
            let mut block = until_free(|| memory.write(BlockId::new(*block)));
            block.bytes_mut()[range.clone()].copy_from_slice(&bytes[range]);
        }
    };
    SlowStep::start(
        memory,
        patience,
        move |memory| part(memory, &blocks, true),
        move |memory, ()| part(memory, &whole, false),
    )
}

/// Reads half of each block, then the other half, in one step.
pub(crate) fn slow_read(
    memory: &Arc<PlainMemory>,
    patience: Duration,
    blocks: Vec<u32>,
) -> SlowStep<Vec<Vec<u8>>> {
    let again = blocks.clone();
    let first = move |memory: &PlainMemory| {
        let half = |block: &u32| {
            let bytes = until_free(|| memory.read(BlockId::new(*block)))
                .bytes()
                .to_vec();
            bytes[..bytes.len() / 2].to_vec()
        };
        blocks.iter().map(half).collect::<Vec<_>>()
    };
    let second = move |memory: &PlainMemory, mut halves: Vec<Vec<u8>>| {
        for (block, seen) in again.iter().zip(&mut halves) {
            let block = until_free(|| memory.read(BlockId::new(*block)));
            seen.extend_from_slice(&block.bytes()[block.bytes().len() / 2..]);
        }
        halves
    };
    SlowStep::start(memory, patience, first, second)
}

/// Tries until nobody else has the block; only steps that race against a copy on purpose need it.
fn until_free<T>(mut open: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(block) = open() {
            return block;
        }
        std::thread::yield_now();
    }
}
