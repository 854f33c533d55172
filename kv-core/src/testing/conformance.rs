//! A suite that any [`Backend`] must pass, clause by clause of its contract.
//!
//! Whoever implements a backend implements [`Harness`] beside it and calls [`run`]; each clause
//! is also a function of its own. A breach panics with what was seen.
//!
//! Nothing here measures time. What must not have happened yet is held up by a step that is under
//! way; what must happen is waited for with a limit.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::task::Wake;
use alloc::vec;
use alloc::vec::Vec;
use core::task::Waker;
use core::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Rng;
use crate::{
    Backend, BlockId, BlockMove, Command, CommandId, Completion, CopyFault, Digest, DigestWork,
    Direction, Fence, Outcome, SlotIndex, Span, SubmitRefusal, TicketId, Time,
};

/// A completion that takes longer than this never comes.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Whether `submit` comes back before the copy is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitMode {
    /// The copy is over when `submit` returns; clauses 1 and 6 don't apply.
    Blocking,
    /// `submit` queues.
    Queued,
}

/// What the suite needs to know and to do besides the backend. Bytes go in and out by value, so
/// that the pool may be anywhere.
///
/// The pool must have at least [`BLOCKS_MIN`] blocks and the host side as many slots.
pub trait Harness {
    /// What is tested.
    type Backend: Backend;

    /// A fresh backend over the harness's pool, with nothing under way. The one before it is
    /// closed or dropped.
    fn backend(&mut self) -> Self::Backend;

    /// Which kind it is.
    fn submit_mode(&self) -> SubmitMode;

    /// Length of a block, bytes.
    fn block_bytes(&self) -> u64;

    /// Commands of one direction after which the backend must say that it is busy, if that is
    /// at most [`BLOCKS_MIN`]. At least 4, because the suite has so many under way.
    fn queue_max(&self) -> Option<usize>;

    /// The time as the backend's clock tells it.
    fn now(&self) -> Time;

    /// Writes a whole block at once, outside any step.
    fn write_block(&mut self, block: BlockId, bytes: &[u8]);

    /// Reads a whole block at once, outside any step.
    fn read_block(&mut self, block: BlockId) -> Vec<u8>;

    /// The bytes of a host slot, or `None` if they can't be seen.
    fn read_slot(&mut self, backend: &Self::Backend, slot: SlotIndex) -> Option<Vec<u8>>;

    /// Damages one bit of a host slot; says whether it could.
    fn flip_slot_bit(&mut self, backend: &mut Self::Backend, slot: SlotIndex, bit: usize) -> bool;

    /// Starts a step that touches no block and does not end before
    /// [`end_step`](Self::end_step).
    fn begin_step(&mut self) -> Fence;

    /// Ends that step.
    fn end_step(&mut self, step: Fence);

    /// Starts a step that slowly writes these bytes into the block and then ends by itself.
    ///
    /// It must be slow enough that a copy which doesn't wait for it is over or under way first,
    /// also if `submit` blocks.
    fn slow_write(&mut self, block: BlockId, bytes: Vec<u8>) -> Fence;

    /// Starts a step that slowly reads the block and then ends by itself.
    fn slow_read(&mut self, block: BlockId) -> Fence;

    /// What the latest [`slow_read`](Self::slow_read) saw, once it is over; waits for it.
    fn slow_read_saw(&mut self) -> Vec<u8>;

    /// Lets a simulated world go on. Real ones do so by themselves.
    fn pump(&mut self) {}
}

/// Blocks, and slots, that a harness must have.
pub const BLOCKS_MIN: u32 = 8;

/// Runs every clause.
pub fn run<H: Harness>(harness: &mut H) {
    bytes_survive_a_round_trip(harness);
    clause_1_submit_never_blocks(harness);
    clause_1_a_refusal_hands_the_command_back(harness);
    clause_2_one_completion_per_command(harness);
    clause_2_the_waker_is_woken_by_each_completion(harness);
    clause_3_failed_means_nothing_is_touched(harness);
    clause_3_a_digest_mismatch_never_reaches_the_gpu(harness);
    clause_4_an_out_comes_after_the_step_that_writes(harness);
    clause_4_an_in_comes_after_the_step_that_reads(harness);
    clause_5_dropping_the_backend_harms_nothing(harness);
    clause_6_directions_do_not_wait_for_each_other(harness);
    clause_7_bytes_times_and_digests_are_exact(harness);
    clause_8_close_is_bounded_and_idempotent(harness);
}

/// Counts wake-ups and lets a thread wait for the next one.
#[derive(Debug, Default)]
struct Signal {
    wakes: Mutex<u64>,
    woken: Condvar,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        *self.wakes.lock() += 1;
        self.woken.notify_all();
    }
}

impl Signal {
    /// Waits for a wake-up beyond the first `seen`.
    fn wait_beyond(&self, seen: u64) -> u64 {
        let mut wakes = self.wakes.lock();
        self.woken
            .wait_while_for(&mut wakes, |wakes| *wakes <= seen, WAIT_MAX);
        assert!(*wakes > seen, "no wake-up although commands are unfinished");
        *wakes
    }
}

/// A backend under test, and what came out of it.
struct Bench<'a, H: Harness> {
    harness: &'a mut H,
    backend: H::Backend,
    signal: Arc<Signal>,
    next_ticket: u64,
    ended: Vec<Completion>,
}

impl<'a, H: Harness> Bench<'a, H> {
    fn new(harness: &'a mut H) -> Self {
        let mut backend = harness.backend();
        assert!(
            backend.slots_ready() >= BLOCKS_MIN,
            "the suite needs {BLOCKS_MIN} slots"
        );
        let signal = Arc::new(Signal::default());
        backend.set_waker(Waker::from(Arc::clone(&signal)));
        Self {
            harness,
            backend,
            signal,
            next_ticket: 1,
            ended: Vec::new(),
        }
    }

    fn command(
        &mut self,
        direction: Direction,
        moves: &[(u32, u32)],
        after: Fence,
        digest: DigestWork,
    ) -> Command {
        let ticket = TicketId::for_testing(self.next_ticket);
        self.next_ticket += 1;
        let moves = moves
            .iter()
            .map(|&(block, slot)| BlockMove {
                block: BlockId::new(block),
                slot: SlotIndex::new(slot),
            })
            .collect();
        Command::for_testing(
            ticket,
            direction,
            moves,
            after,
            self.harness.block_bytes(),
            digest,
        )
    }

    fn submit(&mut self, command: Command) -> CommandId {
        let id = command.id();
        let now = self.harness.now();
        let taken = self.backend.submit(now, command);
        assert!(taken.is_ok(), "{id:?} was refused: {taken:?}");
        id
    }

    fn start(
        &mut self,
        direction: Direction,
        moves: &[(u32, u32)],
        after: Fence,
        digest: DigestWork,
    ) -> CommandId {
        let command = self.command(direction, moves, after, digest);
        self.submit(command)
    }

    /// Waits, by wake-ups alone, until that command has ended.
    fn wait(&mut self, id: CommandId) -> Completion {
        let mut seen = 0;
        loop {
            self.harness.pump();
            self.backend.poll(&mut self.ended);
            if let Some(place) = self.ended.iter().position(|ended| ended.id == id) {
                return self.ended.swap_remove(place);
            }
            seen = self.signal.wait_beyond(seen);
        }
    }

    fn wait_done(&mut self, id: CommandId) -> Completion {
        let ended = self.wait(id);
        assert_eq!(ended.outcome, Outcome::Done, "{ended:?}");
        ended
    }

    /// Moves at once, and waits.
    fn finish(&mut self, direction: Direction, moves: &[(u32, u32)]) -> Completion {
        let id = self.start(direction, moves, Fence::NONE, DigestWork::Skip);
        self.wait_done(id)
    }

    /// Whatever has ended by now.
    fn ended_by_now(&mut self) -> &[Completion] {
        self.harness.pump();
        self.backend.poll(&mut self.ended);
        &self.ended
    }

    fn write(&mut self, block: u32, seed: u64) -> Vec<u8> {
        let bytes = self.pattern(seed);
        self.harness.write_block(BlockId::new(block), &bytes);
        bytes
    }

    fn read(&mut self, block: u32) -> Vec<u8> {
        self.harness.read_block(BlockId::new(block))
    }

    fn pattern(&self, seed: u64) -> Vec<u8> {
        let len = usize::try_from(self.harness.block_bytes()).expect("a block fits into memory");
        let mut bytes = vec![0; len];
        Rng::new(seed).fill(&mut bytes);
        bytes
    }

    fn close(mut self) {
        let closed = self.backend.close(Span::from_secs(30));
        assert_eq!(closed.unconfirmed, 0, "idle, but not all is confirmed");
        assert_eq!(closed.leaked_bytes, 0, "idle, but bytes are leaked");
    }
}

/// Bytes that went out come back into other blocks, whatever happened to the old ones.
pub fn bytes_survive_a_round_trip<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let written: Vec<_> = (0..4)
        .map(|block| bench.write(block, u64::from(block) + 1))
        .collect();
    bench.finish(Direction::Out, &[(0, 3), (1, 2), (2, 1), (3, 0)]);
    for block in 0..8 {
        bench.write(block, 99);
    }
    bench.finish(Direction::In, &[(7, 3), (5, 2), (6, 1), (4, 0)]);
    for (block, bytes) in [7, 5, 6, 4].into_iter().zip(written) {
        assert!(
            bench.read(block) == bytes,
            "block {block} came back with other bytes"
        );
    }
    let untouched = bench.pattern(99);
    for block in 0..4 {
        assert!(
            bench.read(block) == untouched,
            "block {block} is not named by any command"
        );
    }
    bench.close();
}

/// Clause 1: `submit` comes back although no copy can start.
pub fn clause_1_submit_never_blocks<H: Harness>(harness: &mut H) {
    if harness.submit_mode() == SubmitMode::Blocking {
        return;
    }
    let mut bench = Bench::new(harness);
    bench.finish(Direction::Out, &[(4, 4), (5, 5)]);
    let step = bench.harness.begin_step();
    let out_a = bench.start(Direction::Out, &[(0, 0)], step, DigestWork::Skip);
    let out_b = bench.start(Direction::Out, &[(1, 1)], step, DigestWork::Compute);
    let in_a = bench.start(Direction::In, &[(2, 4)], step, DigestWork::Skip);
    let in_b = bench.start(Direction::In, &[(3, 5)], step, DigestWork::Skip);
    assert!(
        bench.ended_by_now().is_empty(),
        "a copy ended before the step it comes after"
    );
    bench.harness.end_step(step);
    for id in [in_b, out_a, in_a, out_b] {
        bench.wait_done(id);
    }
    bench.close();
}

/// Clause 1: a backend that is busy or closed hands back the very command.
pub fn clause_1_a_refusal_hands_the_command_back<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    if let (SubmitMode::Queued, Some(queue_max)) =
        (bench.harness.submit_mode(), bench.harness.queue_max())
    {
        let step = bench.harness.begin_step();
        let mut taken = Vec::new();
        for place in (0..BLOCKS_MIN).take(queue_max) {
            let moves = [(place, place)];
            taken.push(bench.start(Direction::Out, &moves, step, DigestWork::Skip));
        }
        let command = bench.command(Direction::Out, &[(0, 0), (1, 1)], step, DigestWork::Compute);
        let now = bench.harness.now();
        let refused = bench
            .backend
            .submit(now, command)
            .expect_err("the queue is full");
        assert_eq!(refused.why, SubmitRefusal::Busy);
        assert_eq!(
            refused.back.moves().len(),
            2,
            "the command came back changed"
        );
        assert_eq!(
            refused.back.digest(),
            &DigestWork::Compute,
            "the command came back changed"
        );
        bench.harness.end_step(step);
        for id in taken {
            bench.wait_done(id);
        }
        let id = bench.submit(refused.back);
        assert_eq!(bench.wait_done(id).digests.len(), 2);
    }
    bench.backend.close(Span::from_secs(30));
    let command = bench.command(Direction::Out, &[(2, 2)], Fence::NONE, DigestWork::Skip);
    let id = command.id();
    let now = bench.harness.now();
    let refused = bench
        .backend
        .submit(now, command)
        .expect_err("it is closed");
    assert_eq!(
        (refused.why, refused.back.id()),
        (SubmitRefusal::Closed, id)
    );
}

/// Clause 2: many commands, each ends once, and nothing comes after that.
pub fn clause_2_one_completion_per_command<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    for round in 0..8 {
        bench.finish(Direction::Out, &[(4, 4), (5, 5), (6, 6), (7, 7)]);
        let mut expected = Vec::new();
        for lane in 0..4 {
            let out = [(lane, lane)];
            expected.push(bench.start(Direction::Out, &out, Fence::NONE, DigestWork::Skip));
            let back = [(lane + 4, lane + 4)];
            expected.push(bench.start(Direction::In, &back, Fence::NONE, DigestWork::Skip));
        }
        Rng::new(round).shuffle(&mut expected);
        for id in expected {
            bench.wait_done(id);
        }
        assert!(
            bench.ended.is_empty(),
            "ended twice or never submitted: {:?}",
            bench.ended
        );
    }
    bench.backend.close(Span::from_secs(30));
    assert!(
        bench.ended_by_now().is_empty(),
        "a command ended a second time"
    );
}

/// Clause 2: each completion wakes, after it has become visible.
pub fn clause_2_the_waker_is_woken_by_each_completion<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let mut wakes = *bench.signal.wakes.lock();
    for round in 0..16 {
        let slot = round % 8;
        let id = bench.start(Direction::Out, &[(0, slot)], Fence::NONE, DigestWork::Skip);
        bench.harness.pump();
        wakes = bench.signal.wait_beyond(wakes);
        let ended = bench.ended_by_now();
        assert_eq!(ended.len(), 1, "woken before the completion can be seen");
        assert_eq!(ended[0].id, id);
        bench.ended.clear();
    }
    bench.close();
}

/// Clause 3: a command that fails because the backend is closed touches neither side, even when
/// its step ends later.
pub fn clause_3_failed_means_nothing_is_touched<H: Harness>(harness: &mut H) {
    if harness.submit_mode() == SubmitMode::Blocking {
        return;
    }
    let mut bench = Bench::new(harness);
    bench.write(0, 1);
    bench.finish(Direction::Out, &[(0, 0)]);
    let kept = bench.write(1, 2);
    let step = bench.harness.begin_step();
    let id = bench.start(Direction::In, &[(1, 0)], step, DigestWork::Skip);
    bench.backend.close(Span::ZERO);
    bench.backend.poll(&mut bench.ended);
    let failed = bench.ended.iter().any(|ended| {
        assert_eq!(ended.id, id);
        assert_ne!(ended.outcome, Outcome::Done, "the step is still under way");
        ended.outcome == Outcome::Failed
    });
    bench.harness.end_step(step);
    if failed {
        bench.harness.pump();
        assert!(bench.read(1) == kept, "a failed command wrote a block");
    }
}

/// Clause 3 and the digests: damage on the host fails the whole command before any byte moves.
pub fn clause_3_a_digest_mismatch_never_reaches_the_gpu<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let written = [bench.write(0, 11), bench.write(1, 12), bench.write(2, 13)];
    let moves = [(0, 0), (1, 1), (2, 2)];
    let id = bench.start(Direction::Out, &moves, Fence::NONE, DigestWork::Compute);
    let digests = bench.wait_done(id).digests;
    let kept = bench.write(3, 5);
    for block in 4..6 {
        bench.write(block, 5);
    }
    let bit = kept.len() * 8 - 1;
    if bench
        .harness
        .flip_slot_bit(&mut bench.backend, SlotIndex::new(2), bit)
    {
        let back = [(3, 0), (4, 1), (5, 2)];
        let verify = DigestWork::Verify(digests.clone());
        let id = bench.start(Direction::In, &back, Fence::NONE, verify);
        let ended = bench.wait(id);
        assert_eq!(ended.outcome, Outcome::Failed);
        assert_eq!(ended.fault, Some(CopyFault::DigestMismatch { index: 2 }));
        assert_eq!(ended.bytes, 0);
        for block in 3..6 {
            assert!(
                bench.read(block) == kept,
                "damage on the host reached block {block}"
            );
        }
        bench
            .harness
            .flip_slot_bit(&mut bench.backend, SlotIndex::new(2), bit);
    }
    let id = bench.start(
        Direction::In,
        &[(3, 0), (4, 1), (5, 2)],
        Fence::NONE,
        DigestWork::Verify(digests),
    );
    bench.wait_done(id);
    for (block, bytes) in (3..6).zip(written) {
        assert!(
            bench.read(block) == bytes,
            "sound bytes did not arrive in block {block}"
        );
    }
    bench.close();
}

/// Clause 4: what a running step writes goes out, not what was there before.
pub fn clause_4_an_out_comes_after_the_step_that_writes<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    for round in 0..8 {
        bench.write(0, 1_000 + round);
        let new = bench.pattern(2_000 + round);
        let step = bench.harness.slow_write(BlockId::new(0), new.clone());
        let id = bench.start(Direction::Out, &[(0, 1)], step, DigestWork::Compute);
        let digests = bench.wait_done(id).digests;
        assert_eq!(
            digests,
            [Digest::of(&new)],
            "round {round}: the copy did not wait"
        );
        if let Some(bytes) = bench.harness.read_slot(&bench.backend, SlotIndex::new(1)) {
            assert!(
                bytes == new,
                "round {round}: the digest is right, the bytes are not"
            );
        }
    }
    bench.close();
}

/// Clause 4: what a running step reads is not overwritten under its hands.
pub fn clause_4_an_in_comes_after_the_step_that_reads<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    for round in 0..8 {
        let incoming = bench.write(1, 3_000 + round);
        bench.finish(Direction::Out, &[(1, 0)]);
        let old = bench.write(0, 4_000 + round);
        let step = bench.harness.slow_read(BlockId::new(0));
        let id = bench.start(Direction::In, &[(0, 0)], step, DigestWork::Skip);
        bench.wait_done(id);
        assert!(
            bench.harness.slow_read_saw() == old,
            "round {round}: the copy did not wait"
        );
        assert!(
            bench.read(0) == incoming,
            "round {round}: the copy did not arrive"
        );
    }
    bench.close();
}

/// Clause 5: a backend that is dropped with commands under way harms nobody, and a block is never
/// torn by it afterwards.
pub fn clause_5_dropping_the_backend_harms_nothing<H: Harness>(harness: &mut H) {
    if harness.submit_mode() == SubmitMode::Blocking {
        return;
    }
    let mut bench = Bench::new(harness);
    let incoming = bench.write(0, 21);
    bench.finish(Direction::Out, &[(0, 0)]);
    let old = bench.write(1, 22);
    let step = bench.harness.begin_step();
    bench.start(Direction::In, &[(1, 0)], step, DigestWork::Skip);
    bench.start(Direction::Out, &[(0, 1)], step, DigestWork::Skip);
    let Bench {
        harness, backend, ..
    } = bench;
    drop(backend);
    harness.end_step(step);
    // The next backend's copies are ordered after whatever the dropped one still does.
    let mut bench = Bench::new(harness);
    bench.finish(Direction::Out, &[(2, 2)]);
    let now = bench.read(1);
    assert!(
        now == old || now == incoming,
        "a block was torn by a backend that is gone"
    );
    bench.close();
}

/// Clause 6: a direction that is held up does not hold up the other one.
pub fn clause_6_directions_do_not_wait_for_each_other<H: Harness>(harness: &mut H) {
    if harness.submit_mode() == SubmitMode::Blocking {
        return;
    }
    let mut bench = Bench::new(harness);
    bench.finish(Direction::Out, &[(0, 0), (1, 1)]);
    let step = bench.harness.begin_step();
    let held = bench.start(Direction::In, &[(2, 0)], step, DigestWork::Skip);
    bench.finish(Direction::Out, &[(3, 3)]);
    bench.harness.end_step(step);
    bench.wait_done(held);
    let step = bench.harness.begin_step();
    let held = bench.start(Direction::Out, &[(4, 4)], step, DigestWork::Skip);
    bench.finish(Direction::In, &[(5, 1)]);
    bench.harness.end_step(step);
    bench.wait_done(held);
    bench.close();
}

/// Clause 7: payload, times and digests.
pub fn clause_7_bytes_times_and_digests_are_exact<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let block_bytes = bench.harness.block_bytes();
    for blocks in 1..=4 {
        let moves: Vec<_> = (0..blocks).map(|block| (block, block)).collect();
        let expected: Vec<_> = (0..blocks)
            .map(|block| Digest::of(&bench.write(block, block.into())))
            .collect();
        for (direction, digest, digests) in [
            (Direction::Out, DigestWork::Compute, expected.clone()),
            (Direction::Out, DigestWork::Skip, Vec::new()),
            (
                Direction::In,
                DigestWork::Verify(expected.clone()),
                Vec::new(),
            ),
        ] {
            let command = bench.command(direction, &moves, Fence::NONE, digest);
            let id = command.id();
            let before = bench.harness.now();
            assert!(bench.backend.submit(before, command).is_ok());
            let ended = bench.wait_done(id);
            let after = bench.harness.now();
            assert_eq!(ended.bytes, u64::from(blocks) * block_bytes);
            assert_eq!(ended.fault, None);
            assert_eq!(ended.digests, digests);
            assert_eq!(ended.submitted_at, before);
            assert!(
                before <= ended.completed_at && ended.completed_at <= after,
                "{ended:?} is not between {before:?} and {after:?}"
            );
        }
    }
    bench.close();
}

/// Clause 8: closing comes back although a step never ends, accounts for every command, and can
/// be repeated.
pub fn clause_8_close_is_bounded_and_idempotent<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    bench.finish(Direction::Out, &[(0, 0)]);
    let step = bench.harness.begin_step();
    let mut left = BTreeMap::new();
    if bench.harness.submit_mode() == SubmitMode::Queued {
        for (direction, moves) in [
            (Direction::In, [(1, 0)]),
            (Direction::Out, [(2, 2)]),
            (Direction::Out, [(3, 3)]),
        ] {
            let id = bench.start(direction, &moves, step, DigestWork::Skip);
            left.insert(id, bench.harness.block_bytes());
        }
    }
    let closed = bench.backend.close(Span::from_millis(5));
    bench.backend.poll(&mut bench.ended);
    for ended in bench.ended.drain(..) {
        assert_ne!(
            ended.outcome,
            Outcome::Done,
            "{ended:?} before its step is over"
        );
        assert!(
            left.remove(&ended.id).is_some(),
            "{:?} ended twice",
            ended.id
        );
    }
    assert_eq!(
        u64::from(closed.unconfirmed),
        left.len() as u64,
        "unconfirmed commands"
    );
    assert_eq!(
        closed.leaked_bytes,
        left.values().sum::<u64>(),
        "bytes of unconfirmed commands"
    );
    assert_eq!(
        bench.backend.close(Span::ZERO),
        closed,
        "closing again says something else"
    );
    bench.harness.end_step(step);
}
