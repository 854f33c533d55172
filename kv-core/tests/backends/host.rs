//! What is peculiar to the backend on worker threads.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;
use std::time::Duration;

use kv_core::host::{Clock, HostBackend, HostConfig, Link, PlainMemory};
use kv_core::{
    Backend, BlockId, CopyFault, DigestWork, Direction, Layout, Outcome, SlotIndex, Span, Time,
};

use crate::world::{self, Gate, LIMIT, Wakes};

/// A link so slow that only closing ends a copy on it.
const NEVER: Link = Link {
    bandwidth_bytes_per_second: None,
    delay: Span::from_secs(3_600),
};

fn memory() -> Arc<PlainMemory> {
    Arc::new(PlainMemory::new(world::layout(8)))
}

fn start(memory: &Arc<PlainMemory>, config: HostConfig, clock: Clock) -> HostBackend {
    HostBackend::new(Arc::clone(memory), config, clock).unwrap()
}

/// A clock that opens the gate when the backend and all its threads have let go of it.
fn clock_with_end(end: &Arc<Gate>) -> Clock {
    struct OpenOnDrop(Arc<Gate>);
    impl Drop for OpenOnDrop {
        fn drop(&mut self) {
            self.0.open();
        }
    }
    let end = OpenOnDrop(Arc::clone(end));
    let clock = world::clock();
    Arc::new(move || {
        let _keep = &end;
        clock()
    })
}

/// Whether the caller is one of the backend's threads.
fn on_a_copy_thread() -> bool {
    std::thread::current()
        .name()
        .is_some_and(|name| name.starts_with("kv-host-"))
}

#[test]
fn both_directions_run_at_once() {
    let memory = memory();
    let config = HostConfig {
        link_out: NEVER,
        ..HostConfig::new(8)
    };
    let mut backend = start(&memory, config, world::clock());
    let wakes = Wakes::attach(&mut backend);
    let out = world::out(&memory, &[(0, 0)]);
    let out_id = out.id();
    backend.submit(Time::ZERO, out).unwrap();
    while !backend.probe().is_held(SlotIndex::new(0)) {
        std::thread::yield_now();
    }
    for _ in 0..10 {
        let back = world::back_in(&memory, &[(1, 1)]);
        let id = back.id();
        backend.submit(Time::ZERO, back).unwrap();
        let ended = wakes.collect(&mut backend, 1);
        assert_eq!((ended[0].id, ended[0].outcome), (id, Outcome::Done));
    }
    // Closing hurries what is on the link, and flushes it.
    assert_eq!(backend.close(Span::from_secs(30)).unconfirmed, 0);
    let ended = wakes.collect(&mut backend, 1);
    assert_eq!((ended[0].id, ended[0].outcome), (out_id, Outcome::Done));
}

#[test]
fn a_narrow_link_holds_a_copy_up_until_closing_hurries_it() {
    let memory = memory();
    // A byte a second: the first block alone would take 8 minutes.
    let link = Link {
        bandwidth_bytes_per_second: Some(NonZeroU64::MIN),
        delay: Span::ZERO,
    };
    let config = HostConfig {
        link_out: link,
        ..HostConfig::new(8)
    };
    let mut backend = start(&memory, config, world::clock());
    let wakes = Wakes::attach(&mut backend);
    let bytes = world::fill(&memory, 0, 3);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0), (1, 1)]))
        .unwrap();
    // The slot is locked while the copy is on the link, so the first block's bytes are visible
    // only after closing.
    let probe = backend.probe();
    while !probe.is_held(SlotIndex::new(0)) {
        std::thread::yield_now();
    }
    assert_eq!(wakes.count(), 0);
    assert_eq!(backend.close(Span::from_secs(30)).unconfirmed, 0);
    let ended = wakes.collect(&mut backend, 1).remove(0);
    assert_eq!((ended.outcome, ended.bytes), (Outcome::Done, 960));
    assert_eq!(probe.bytes(SlotIndex::new(0)), bytes);
}

#[test]
fn a_step_that_never_ends_fails_the_copy_and_touches_nothing() {
    let memory = memory();
    let config = HostConfig {
        fence_limit: Span::from_millis(1),
        ..HostConfig::new(8)
    };
    let mut backend = start(&memory, config, world::clock());
    let wakes = Wakes::attach(&mut backend);
    let kept = world::fill(&memory, 0, 1);
    let step = memory.begin_step();
    for direction in [Direction::In, Direction::Out] {
        let command = world::command(&memory, direction, &[(0, 0)], step, DigestWork::Skip);
        backend.submit(Time::ZERO, command).unwrap();
        let ended = wakes.collect(&mut backend, 1);
        assert_eq!(ended[0].outcome, Outcome::Failed);
        assert_eq!(ended[0].fault, Some(CopyFault::FenceTimeout));
    }
    assert_eq!(world::read(&memory, 0), kept);
    assert!(
        backend
            .probe()
            .bytes(SlotIndex::new(0))
            .iter()
            .all(|&byte| byte == 0)
    );
}

#[test]
fn a_block_that_somebody_holds_is_named() {
    let memory = memory();
    let mut backend = start(&memory, HostConfig::new(8), world::clock());
    let wakes = Wakes::attach(&mut backend);
    let held = memory.write(BlockId::new(1)).unwrap();
    for command in [world::out, world::back_in] {
        backend
            .submit(Time::ZERO, command(&memory, &[(0, 0), (1, 1)]))
            .unwrap();
        let ended = wakes.collect(&mut backend, 1);
        assert_eq!(ended[0].outcome, Outcome::Failed);
        assert_eq!(ended[0].fault, Some(CopyFault::BlockBusy { index: 1 }));
        assert_eq!(ended[0].bytes, 0);
    }
    drop(held);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(1, 1)]))
        .unwrap();
    assert_eq!(wakes.collect(&mut backend, 1)[0].outcome, Outcome::Done);
}

#[test]
fn a_slot_under_two_copies_is_named() {
    let memory = memory();
    let config = HostConfig {
        threads_per_direction: NonZeroU32::new(2).unwrap(),
        link_out: NEVER,
        ..HostConfig::new(8)
    };
    let mut backend = start(&memory, config, world::clock());
    let wakes = Wakes::attach(&mut backend);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0)]))
        .unwrap();
    backend
        .submit(Time::ZERO, world::out(&memory, &[(1, 0)]))
        .unwrap();
    let ended = wakes.collect(&mut backend, 1);
    assert_eq!(ended[0].outcome, Outcome::Failed);
    assert_eq!(ended[0].fault, Some(CopyFault::SlotBusy { index: 0 }));
    assert_eq!(backend.close(Span::from_secs(30)).unconfirmed, 0);
    assert_eq!(wakes.collect(&mut backend, 1)[0].outcome, Outcome::Done);
}

#[test]
fn damage_is_named_and_reaches_no_block() {
    let memory = memory();
    let mut backend = start(&memory, HostConfig::new(8), world::clock());
    let wakes = Wakes::attach(&mut backend);
    for block in 0..4 {
        world::fill(&memory, block, block.into());
    }
    let moves = [(0, 3), (1, 2), (2, 1), (3, 0)];
    let after = kv_core::Fence::NONE;
    let out = world::command(&memory, Direction::Out, &moves, after, DigestWork::Compute);
    backend.submit(Time::ZERO, out).unwrap();
    let digests = wakes.collect(&mut backend, 1).remove(0).digests;
    for damaged in 0..4 {
        let kept: Vec<_> = (0..4)
            .map(|block| world::fill(&memory, block, 77))
            .collect();
        let slot = SlotIndex::new(moves[damaged].1);
        backend.probe().flip_bit(slot, 100 + damaged);
        let verify = DigestWork::Verify(digests.clone());
        let back = world::command(&memory, Direction::In, &moves, after, verify);
        backend.submit(Time::ZERO, back).unwrap();
        let ended = wakes.collect(&mut backend, 1).remove(0);
        let index = u32::try_from(damaged).unwrap();
        assert_eq!(ended.fault, Some(CopyFault::DigestMismatch { index }));
        assert_eq!(
            (0..4)
                .map(|block| world::read(&memory, block))
                .collect::<Vec<_>>(),
            kept
        );
        backend.probe().flip_bit(slot, 100 + damaged);
    }
}

#[test]
fn a_panic_in_a_copy_is_an_unknown_end_and_the_thread_goes_on() {
    let memory = memory();
    let calm = world::clock();
    let panicked = std::sync::atomic::AtomicBool::new(false);
    let clock: Clock = Arc::new(move || {
        let first = on_a_copy_thread() && !panicked.swap(true, std::sync::atomic::Ordering::SeqCst);
        assert!(!first, "a panic on purpose");
        calm()
    });
    let mut backend = start(&memory, HostConfig::new(8), clock);
    let wakes = Wakes::attach(&mut backend);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0)]))
        .unwrap();
    let ended = wakes.collect(&mut backend, 1).remove(0);
    assert_eq!(ended.outcome, Outcome::Unknown);
    assert_eq!(ended.fault, Some(CopyFault::Panicked));
    assert_eq!(ended.bytes, 0);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0)]))
        .unwrap();
    assert_eq!(wakes.collect(&mut backend, 1)[0].outcome, Outcome::Done);
}

#[test]
fn a_copy_that_outlasts_closing_is_counted_and_may_still_end() {
    let memory = memory();
    let (go_on, calm) = (Arc::new(Gate::default()), world::clock());
    let reached = Arc::new(Gate::default());
    let clock: Clock = {
        let (go_on, reached) = (Arc::clone(&go_on), Arc::clone(&reached));
        Arc::new(move || {
            if on_a_copy_thread() {
                reached.open();
                assert!(go_on.wait(LIMIT));
            }
            calm()
        })
    };
    let mut backend = start(&memory, HostConfig::new(8), clock);
    let wakes = Wakes::attach(&mut backend);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0), (1, 1)]))
        .unwrap();
    assert!(reached.wait(LIMIT));
    let closed = backend.close(Span::from_millis(1));
    assert_eq!((closed.unconfirmed, closed.leaked_bytes), (1, 960));
    assert_eq!(wakes.count(), 0);
    go_on.open();
    assert_eq!(backend.close(Span::from_secs(30)).unconfirmed, 0);
    assert_eq!(wakes.collect(&mut backend, 1)[0].outcome, Outcome::Done);
}

#[test]
fn closing_ends_what_was_not_begun_and_it_never_begins() {
    let memory = memory();
    let end = Arc::new(Gate::default());
    let mut backend = start(&memory, HostConfig::new(8), clock_with_end(&end));
    let wakes = Wakes::attach(&mut backend);
    world::fill(&memory, 0, 1);
    let moves: Vec<_> = (0..4).map(|place| (0, place)).collect();
    backend
        .submit(Time::ZERO, world::out(&memory, &moves))
        .unwrap();
    wakes.collect(&mut backend, 1);
    let kept: Vec<_> = (0..4).map(|block| world::fill(&memory, block, 2)).collect();
    let step = memory.begin_step();
    for block in 0..4 {
        let moves = [(block, block)];
        let command = world::command(&memory, Direction::In, &moves, step, DigestWork::Skip);
        backend.submit(Time::ZERO, command).unwrap();
    }
    assert_eq!(
        backend.close(Span::ZERO).unconfirmed,
        0,
        "closing waits for no step"
    );
    let ended = wakes.collect(&mut backend, 4);
    assert!(
        ended
            .iter()
            .all(|ended| ended.fault == Some(CopyFault::Closed))
    );
    memory.end_step(step);
    drop(backend);
    assert!(end.wait(LIMIT));
    assert_eq!(
        (0..4)
            .map(|block| world::read(&memory, block))
            .collect::<Vec<_>>(),
        kept
    );
}

#[test]
fn dropping_waits_for_nothing_and_the_threads_let_go() {
    let memory = memory();
    let end = Arc::new(Gate::default());
    let config = HostConfig {
        link_in: NEVER,
        ..HostConfig::new(8)
    };
    let mut backend = start(&memory, config, clock_with_end(&end));
    let kept = world::fill(&memory, 2, 5);
    let step = memory.begin_step();
    let waits = world::command(&memory, Direction::Out, &[(0, 0)], step, DigestWork::Skip);
    backend.submit(Time::ZERO, waits).unwrap();
    backend
        .submit(Time::ZERO, world::back_in(&memory, &[(1, 1)]))
        .unwrap();
    let queued = world::back_in(&memory, &[(2, 2)]);
    backend.submit(Time::ZERO, queued).unwrap();
    drop(backend);
    assert!(
        !end.wait(Duration::ZERO),
        "a thread waits for the step and keeps its memory alive"
    );
    memory.end_step(step);
    assert!(
        end.wait(LIMIT),
        "threads keep memory although nothing is left to do"
    );
    assert_eq!(Arc::strong_count(&memory), 1);
    assert_eq!(
        world::read(&memory, 2),
        kept,
        "a queued copy ran after the backend was gone"
    );
}

#[test]
fn a_thousand_commands_leave_nothing_behind() {
    let memory = memory();
    let end = Arc::new(Gate::default());
    let mut backend = start(&memory, HostConfig::new(8), clock_with_end(&end));
    let wakes = Wakes::attach(&mut backend);
    let bytes = world::fill(&memory, 0, 42);
    for round in 0..500 {
        let (here, there) = (round % 8, (round + 1) % 8);
        backend
            .submit(Time::ZERO, world::out(&memory, &[(here, here)]))
            .unwrap();
        wakes.collect(&mut backend, 1);
        backend
            .submit(Time::ZERO, world::back_in(&memory, &[(there, here)]))
            .unwrap();
        let ended = wakes.collect(&mut backend, 1);
        assert_eq!(ended.len(), 1);
    }
    assert_eq!(wakes.count(), 1_000, "each completion wakes once");
    assert_eq!(world::read(&memory, 500 % 8), bytes);
    assert_eq!(
        backend.close(Span::from_secs(30)),
        kv_core::Closed::default()
    );
    drop(backend);
    assert!(end.wait(LIMIT));
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn untouched_slots_cost_no_resident_memory() {
    let resident_pages = || -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    // 256 slots of 8 MiB.
    let layout = Layout::latent(1, 1, 16, 1 << 18, 2).unwrap();
    assert_eq!(layout.block_bytes(), 8 << 20);
    let memory = Arc::new(PlainMemory::new(layout));
    let before = resident_pages();
    let backend = start(&memory, HostConfig::new(256), world::clock());
    let grown = resident_pages().saturating_sub(before) * 4_096;
    assert!(
        grown < 512 << 20,
        "{grown} bytes for a slab of 2 GiB that nobody touched"
    );
    drop(backend);
}
