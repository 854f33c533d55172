//! Groups move as a whole or not at all.

use kv_core::{Direction, Outcome, Span};
use kv_scheduler::RequestId;

use crate::world::{Copies, STEP, Setup, World, request};

const R1: u64 = 1;
const R2: u64 = 2;

/// S7 with that many host slots; what the host held outside running copies.
fn two_groups_of_two(host_slots: u32) -> (World, Vec<u32>) {
    let mut world = World::new(Setup::new(10, host_slots));
    world.submit(request(R1, 2, 32, 48));
    world.submit(request(R2, 2, 32, 48));
    for _ in 0..17 {
        world.pass();
    }
    assert_eq!(world.machine().gpu.allocated, 8, "4 blocks a group");
    assert_eq!(
        world.stats().preempted_swap + world.stats().preempted_recompute,
        0
    );
    world.pass();
    let gone = world.stats().preempted_swap + world.stats().preempted_recompute;
    assert_eq!(gone, 1, "R2 leaves at the 17th decode step");
    let mut held = vec![0];
    world.pass_until(|world| {
        let stats = world.machine();
        if stats.flights == 0 && held.last() != Some(&stats.host.parked) {
            held.push(stats.host.parked);
        }
        world.engine.is_idle()
    });
    for id in [R1, R2] {
        let seen = world.seen(RequestId(id));
        assert!(seen.choices.iter().all(|choice| choice.len() == 48));
        world.assert_text(&request(id, 2, 32, 48));
    }
    world.assert_empty();
    (world, held)
}

#[test]
fn s07_a_host_pool_that_just_fits() {
    let (world, held) = two_groups_of_two(4);
    assert_eq!(held, [0, 4, 0]);
    assert_eq!(
        world.blocks_moved(Direction::Out),
        4,
        "shared blocks move once"
    );
    assert_eq!(world.blocks_moved(Direction::In), 4);
    assert_eq!(world.machine().host.peak, 4);
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!((stats.preempted_swap, stats.preempted_recompute), (1, 0));
    assert_eq!((machine.out.done, machine.back_in.done), (1, 1));
    let last_of_r1 = world.seen(RequestId(R1)).token_at.last().copied();
    let back = world.seen(RequestId(R2)).token_at[2 * 17];
    assert!(Some(back) > last_of_r1, "R2 returns after R1 has ended");
}

#[test]
fn s07_a_host_pool_that_is_one_short() {
    let (world, held) = two_groups_of_two(3);
    assert_eq!(held, [0], "no partial swap");
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!((machine.out.started, machine.host.peak), (0, 0));
    assert_eq!((stats.preempted_swap, stats.preempted_recompute), (0, 1));
    assert_eq!(machine.host_backpressure, 1);
    assert!(stats.recomputed_tokens > 0);
}

#[test]
fn s07_no_host_pool() {
    let (world, held) = two_groups_of_two(0);
    assert_eq!(held, [0]);
    assert_eq!(world.machine().out.started, 0);
    assert_eq!(world.stats().preempted_recompute, 1);
}

/// Brings Y (6 blocks) to the host and Z's end near; returns when Y's way back has begun.
fn y_on_its_way_back() -> World {
    let mut world = World::new(Setup {
        copies: Copies::Held,
        // A flight of six blocks goes in six pieces, two of them at a time.
        inflight_blocks: Some(2),
        ..Setup::new(16, 16)
    });
    // Z and a third one push Y out; when the third one is gone, Y comes back beside Z.
    world.submit(z());
    world.submit(pusher());
    world.submit(y());
    world.pass_until(|world| world.machine().out.started == 1);
    for _ in 0..6 {
        world.end_copy(Outcome::Done);
        world.pass();
    }
    assert_eq!(world.machine().host.parked, 6);
    world.pass_until(|world| world.seen(RequestId(3)).is_over());
    world.pass_until(|world| !world.pending().is_empty());
    assert_eq!(world.machine().gpu.restoring, 6);
    world
}

fn z() -> kv_scheduler::Request {
    request(1, 1, 16, 90)
}

fn pusher() -> kv_scheduler::Request {
    request(3, 1, 96, 20)
}

fn y() -> kv_scheduler::Request {
    request(2, 1, 80, 60)
}

/// Three pieces arrive, the fourth fails.
fn fail_the_fourth_piece(world: &mut World) {
    let failed = world.machine().back_in.failed;
    for _ in 0..3 {
        world.end_copy(Outcome::Done);
        world.pass();
        assert_eq!(
            world.machine().gpu.restoring,
            6,
            "no block is visible early"
        );
    }
    let piece = world.end_copy(Outcome::Failed);
    assert_eq!(piece.id.piece(), 3);
    // The fifth was under way already; the sixth is never issued.
    world.pass();
    assert_eq!(
        world.machine().gpu.restoring,
        6,
        "the fifth may still write"
    );
    let piece = world.end_copy(Outcome::Done);
    assert_eq!(piece.id.piece(), 4);
    world.pass();
    assert_eq!(world.machine().back_in.failed, failed + 1);
}

#[test]
fn s09_the_fourth_of_six_pieces_fails_once() {
    let mut world = y_on_its_way_back();
    let y_tokens = world.seen(RequestId(2)).tokens();
    let free = world.machine().gpu.free;
    fail_the_fourth_piece(&mut world);
    let machine = world.machine();
    // The pass that settles the failure may have started the second try already.
    assert_eq!(machine.gpu.free + machine.gpu.restoring, free + 6);
    assert_eq!(machine.host.parked, 6, "the host copy is intact");
    assert_eq!(world.seen(RequestId(2)).tokens(), y_tokens);
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
    let machine = world.machine();
    assert_eq!((machine.back_in.failed, machine.back_in.done), (1, 1));
    assert_eq!(world.stats().recomputed_tokens, 0);
    world.assert_text(&y());
    world.assert_text(&z());
    assert!(longest_gap(&world, 1) <= Span::from_secs(1));
    world.assert_empty();
}

#[test]
fn s09_the_fourth_of_six_pieces_fails_always() {
    let mut world = y_on_its_way_back();
    for _ in 0..3 {
        world.pass_until(|world| !world.pending().is_empty());
        fail_the_fourth_piece(&mut world);
    }
    let machine = world.machine();
    assert_eq!(machine.host.parked, 0, "its 6 slots are free");
    assert_eq!(machine.back_in.failed, 3);
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
    assert_eq!(world.machine().back_in.done, 0);
    assert!(world.stats().recomputed_tokens > 0);
    world.assert_text(&y());
    world.assert_text(&z());
    assert!(longest_gap(&world, 1) <= Span::from_secs(1));
    world.assert_empty();
}

fn longest_gap(world: &World, id: u64) -> Span {
    let tokens = &world.seen(RequestId(id)).token_at;
    let gaps = tokens.windows(2).map(|pair| pair[1].since(pair[0]));
    gaps.max().unwrap_or(STEP)
}
