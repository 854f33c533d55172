//! What is peculiar to the blocking backend.

use std::sync::Arc;

use kv_core::host::{PlainMemory, SyncBackend};
use kv_core::{
    Backend, CopyFault, Digest, DigestWork, Direction, Fence, Outcome, SlotIndex, Span, Time,
};

use crate::world::{self, LIMIT, SLOW, Wakes};

fn setup(fence_limit: Span) -> (Arc<PlainMemory>, SyncBackend, Arc<Wakes>) {
    let memory = Arc::new(PlainMemory::new(world::layout(8)));
    let mut backend = SyncBackend::new(Arc::clone(&memory), fence_limit, world::clock());
    let wakes = Wakes::attach(&mut backend);
    (memory, backend, wakes)
}

#[test]
fn i15_buffers_exist_only_while_they_hold_something() {
    let (memory, mut backend, wakes) = setup(Span::from_secs(60));
    assert_eq!(backend.buffers(), 0);
    let bytes = world::fill(&memory, 3, 1);
    // Slot indices are names; nothing says that they are small.
    backend
        .submit(
            Time::ZERO,
            world::out(&memory, &[(3, u32::MAX), (4, 1_000_000)]),
        )
        .unwrap();
    assert_eq!(wakes.count(), 1, "over when submit returns, and announced");
    assert_eq!(backend.buffers(), 2);
    backend
        .submit(Time::ZERO, world::back_in(&memory, &[(0, u32::MAX)]))
        .unwrap();
    assert_eq!(world::read(&memory, 0), bytes);
    backend.forget(&[
        SlotIndex::new(u32::MAX),
        SlotIndex::new(1_000_000),
        SlotIndex::new(7),
    ]);
    assert_eq!(backend.buffers(), 0);
    let ended = wakes.collect(&mut backend, 2);
    assert!(ended.iter().all(|ended| ended.outcome == Outcome::Done));
}

#[test]
fn a_slot_without_a_buffer_is_named_and_nothing_is_copied() {
    let (memory, mut backend, wakes) = setup(Span::from_secs(60));
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0)]))
        .unwrap();
    let kept = world::fill(&memory, 1, 9);
    backend
        .submit(Time::ZERO, world::back_in(&memory, &[(1, 0), (2, 1)]))
        .unwrap();
    let ended = wakes.collect(&mut backend, 2);
    assert_eq!(ended[1].outcome, Outcome::Failed);
    assert_eq!(ended[1].fault, Some(CopyFault::SlotEmpty { index: 1 }));
    assert_eq!(world::read(&memory, 1), kept);
}

#[test]
fn s04_submit_waits_for_the_step_that_writes() {
    let (memory, mut backend, wakes) = setup(Span::from_secs(60));
    let new = world::pattern(&memory, 1);
    let step = world::slow_write(&memory, SLOW, vec![(0, new.clone())]);
    let moves = [(0, 0)];
    let out = world::command(
        &memory,
        Direction::Out,
        &moves,
        step.fence,
        DigestWork::Compute,
    );
    backend.submit(Time::ZERO, out).unwrap();
    assert_eq!(
        wakes.collect(&mut backend, 1)[0].digests,
        [Digest::of(&new)]
    );
    step.join();
}

#[test]
fn s04_control_without_a_fence_takes_half_a_step() {
    let (memory, mut backend, wakes) = setup(Span::from_secs(60));
    let new = world::pattern(&memory, 1);
    let step = world::slow_write(&memory, LIMIT, vec![(0, new.clone())]);
    let moves = [(0, 0)];
    let out = world::command(
        &memory,
        Direction::Out,
        &moves,
        Fence::NONE,
        DigestWork::Compute,
    );
    backend.submit(Time::ZERO, out).unwrap();
    assert_ne!(
        wakes.collect(&mut backend, 1)[0].digests,
        [Digest::of(&new)]
    );
    step.go_on.open();
    step.join();
}

#[test]
fn a_step_that_never_ends_fails_the_copy_and_touches_nothing() {
    let (memory, mut backend, wakes) = setup(Span::from_millis(1));
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0)]))
        .unwrap();
    let kept = world::fill(&memory, 1, 3);
    let step = memory.begin_step();
    let back = world::command(&memory, Direction::In, &[(1, 0)], step, DigestWork::Skip);
    backend.submit(Time::ZERO, back).unwrap();
    let ended = wakes.collect(&mut backend, 2);
    assert_eq!(ended[1].fault, Some(CopyFault::FenceTimeout));
    assert_eq!(world::read(&memory, 1), kept);
}
