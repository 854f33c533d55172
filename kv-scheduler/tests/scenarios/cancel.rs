//! Clients that leave: during a copy, while parked, in the queue, all at once.

use kv_core::testing::Rng;
use kv_core::{Direction, Outcome, Span};
use kv_scheduler::{Next, Request, RequestId};

use crate::world::{Copies, Setup, World, request};

const A: u64 = 1;
const B: u64 = 2;
const C: u64 = 3;

fn a() -> Request {
    request(A, 1, 64, 64)
}

fn b() -> Request {
    request(B, 1, 32, 32)
}

/// Runs up to the pass in which B has to leave: the 17th decode step.
fn until_b_leaves(world: &mut World) {
    world.submit(a());
    world.submit(b());
    for _ in 0..17 {
        world.pass();
        assert_eq!(
            world.machine().out.started,
            0,
            "all fits up to 16 decode steps"
        );
    }
    assert_eq!(world.machine().gpu.free, 0);
    world.pass();
    assert_eq!(world.machine().out.started, 1);
    assert_eq!(world.machine().gpu.evicting, 3);
}

#[test]
fn s01_cancel_while_the_swap_out_runs() {
    let mut world = World::new(Setup {
        copies: Copies::Held,
        ..Setup::new(8, 8)
    });
    until_b_leaves(&mut world);
    let copy = world.pending().remove(0);
    assert_eq!(copy.moves.len(), 3);
    let at = |millis| copy.submitted_at + Span::from_millis(millis);
    let a_tokens = world.seen(RequestId(A)).tokens();
    let b_seen = world.seen(RequestId(B)).clone();

    world.now = at(50);
    world.cancel(RequestId(B));
    assert_eq!(world.machine().groups.cancel_pending, 1);
    // Nobody gets the blocks while the copy runs, and nobody else has to leave.
    for millis in [50, 60, 100, 150, 199] {
        world.now = at(millis);
        assert!(matches!(world.step(), Next::Wait(_)));
        let gpu = world.machine().gpu;
        assert_eq!((gpu.free, gpu.allocated, gpu.evicting), (0, 5, 3));
        assert_eq!(world.seen(RequestId(A)).tokens(), a_tokens);
        assert_eq!(world.seen(RequestId(A)).failed, None);
    }
    world.now = at(200);
    assert!(!world.bell.take());
    world.end_copy(Outcome::Done);
    assert!(world.bell.take(), "the completion wakes the engine");
    assert_eq!(world.step(), Next::Again);
    assert_eq!(world.seen(RequestId(A)).tokens(), a_tokens + 1);
    world.now = at(400);
    world.repeat(&copy);
    world.finish();

    world.assert_text(&a());
    let b_after = world.seen(RequestId(B));
    assert_eq!(b_after.choices, b_seen.choices, "B hears nothing further");
    world.assert_beginning(&b());
    world.assert_empty();
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!(world.blocks_moved(Direction::Out), 3);
    assert_eq!(machine.back_in.started, 0);
    assert_eq!(machine.stale_completions, 1);
    assert_eq!((stats.cancelled, machine.cancelled), (1, 1));
    assert_eq!((stats.preempted_swap, stats.preempted_recompute), (1, 0));
    world.engine.shutdown(world.now, Span::ZERO);
    assert!(world.engine.machine().is_drained());
}

/// One round of S2; the world is empty before and after.
pub(crate) fn cancel_parked_and_waiting(world: &mut World, cycle: u64) {
    let id = |which: u64| RequestId(cycle * 10 + which);
    let (out_before, cancelled_before) = (world.machine().out.started, world.stats().cancelled);
    world.submit(Request { id: id(A), ..a() });
    world.submit(Request { id: id(B), ..b() });
    world.submit(request(cycle * 10 + C, 1, 64, 8));
    world.pass_until(|world| world.machine().groups.host_resident == 1);
    assert_eq!(world.machine().host.parked, 3);
    assert_eq!(world.seen(id(C)).admitted_at, None, "two run already");
    world.pass();
    let cancelled_at = world.now;
    world.cancel(id(B));
    world.cancel(id(C));
    assert_eq!(world.machine().host.free, 8);
    assert!(world.now.since(cancelled_at) <= Span::from_millis(100));
    world.finish();
    world.assert_empty();
    assert_eq!(world.seen(id(C)).tokens(), 0);
    assert_eq!(
        world.machine().out.started,
        out_before + 1,
        "B's copy, none for C"
    );
    assert_eq!(world.machine().back_in.started, 0);
    assert_eq!(world.stats().cancelled, cancelled_before + 2);
}

#[test]
fn s02_cancel_on_the_host_and_in_the_queue_1000_times() {
    let mut setup = Setup::new(8, 8);
    setup.engine.max_batch_size = 2;
    let mut world = World::new(setup);
    let reference = crate::world::reference(&world.setup, &a());
    for cycle in 0..1_000 {
        cancel_parked_and_waiting(&mut world, cycle);
        let seen = world.seen.remove(&RequestId(cycle * 10 + A)).unwrap();
        assert_eq!(seen.text(), reference.text(), "I10: cycle {cycle}");
        world.seen.clear();
        world.events.clear();
    }
    assert_eq!(world.blocks_moved(Direction::Out), 3_000);
}

/// 121 clients, 106 of whom run at a time.
fn crowd(gpu_blocks: u32) -> World {
    let mut setup = Setup::new(gpu_blocks, 640);
    setup.engine.max_batch_size = 106;
    setup.copies = Copies::After(Span::from_millis(5));
    World::new(setup)
}

fn first_token_passes(world: &mut World, id: u64) -> u64 {
    let before = world.passes;
    let id = world.submit(request(id, 1, 64, 4));
    world.pass_until(|world| world.seen(id).tokens() > 0);
    let passes = world.passes - before;
    world.finish();
    passes
}

fn everybody_leaves(gpu_blocks: u32) -> World {
    let idle = first_token_passes(&mut crowd(gpu_blocks), 1_000);
    let mut world = crowd(gpu_blocks);
    let ids: Vec<_> = (1..=121)
        .map(|id| world.submit(request(id, 1, 64, 256)))
        .collect();
    let all_have_sent = |world: &World| {
        let sent = ids.iter().filter(|&&id| world.seen(id).tokens() > 0);
        sent.count() >= 106.min(gpu_blocks as usize / 5)
    };
    world.pass_until(all_have_sent);
    for _ in 0..20 {
        world.pass();
    }
    let mut rng = Rng::new(12);
    let mut leaving = ids;
    rng.shuffle(&mut leaving);
    let (before, cancelled) = (world.now, world.stats().cancelled);
    for (index, id) in leaving.into_iter().enumerate() {
        if index % 40 == 39 {
            world.pass();
        }
        world.cancel(id);
    }
    assert!(world.now.since(before) <= Span::from_millis(50));
    let over = world.now;
    world.finish();
    assert!(world.now.since(over) <= Span::from_secs(1));
    world.assert_empty();
    assert_eq!(world.stats().cancelled, cancelled + 121);
    assert_eq!(first_token_passes(&mut world, 1_000), idle);
    world
}

#[test]
fn s12_everybody_leaves_at_once() {
    let world = everybody_leaves(640);
    assert_eq!(
        world.machine().out.started,
        0,
        "530 blocks and their growth fit"
    );
}

#[test]
fn s12_everybody_leaves_at_once_some_from_the_host() {
    let world = everybody_leaves(320);
    assert!(world.machine().out.started > 0);
}

#[test]
fn s12_i17_two_thousand_requests_leave_nothing() {
    let mut world = crowd(640);
    let mut next = 1;
    while next <= 2_000 || !world.engine.is_idle() {
        while next <= 2_000 && world.engine.live_requests() < 8 {
            world.submit(request(next, 1, 64, 32));
            next += 1;
        }
        world.pass();
        world.seen.retain(|_, seen| !seen.is_over());
        world.events.clear();
    }
    world.finish();
    world.assert_empty();
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!((stats.finished, stats.tokens), (2_000, 64_000));
    assert_eq!((stats.failed, stats.cancelled), (0, 0));
    assert_eq!(machine.host.free, 640);
}
