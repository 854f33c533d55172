//! Pools that are filled to the last block.

use kv_core::Outcome;
use kv_scheduler::{Rejection, RequestId};

use crate::world::{Copies, Setup, World, request};

fn small_blocks(gpu_blocks: u32, host_slots: u32) -> Setup {
    Setup {
        block_tokens: 4,
        ..Setup::new(gpu_blocks, host_slots)
    }
}

#[test]
fn s16_a_request_that_needs_more_than_the_pool_is_refused() {
    let mut world = World::new(small_blocks(2, 2));
    assert_eq!(
        world.refuse(request(1, 1, 8, 8)),
        Rejection::NeverFits {
            needed: 4,
            blocks: 2
        }
    );
}

#[test]
fn s16_one_running_request_fills_the_pool_exactly() {
    let mut world = World::new(small_blocks(4, 4));
    let id = world.submit(request(1, 1, 8, 8));
    world.finish();
    assert_eq!(world.seen(id).tokens(), 8);
    assert_eq!(world.passes, 8, "no pass without a token");
    assert_eq!(world.stats().stalled_rows, 0);
    world.assert_text(&request(1, 1, 8, 8));
}

#[test]
fn s16_two_of_them_end_one_after_the_other() {
    for host_slots in [0, 2, 4, 8] {
        let mut world = World::new(small_blocks(4, host_slots));
        for id in [1, 2] {
            world.submit(request(id, 1, 8, 8));
        }
        world.finish();
        for id in [1, 2] {
            world.assert_text(&request(id, 1, 8, 8));
        }
        assert!(
            world.passes <= 30,
            "I08: {} passes with {host_slots} host slots",
            world.passes
        );
        world.assert_empty();
    }
}

#[test]
fn s16_i08_a_lone_group_of_several_choices_fills_the_pool() {
    // 2 shared blocks and 2 of each of 3 choices' own.
    let mut world = World::new(small_blocks(8, 8));
    let id = world.submit(request(1, 3, 8, 9));
    world.finish();
    assert_eq!(world.seen(id).tokens(), 27);
    assert_eq!(world.stats().preempted_recompute, 0);
    assert_eq!(
        world.machine().out.started,
        0,
        "nobody makes room for itself"
    );
    world.assert_text(&request(1, 3, 8, 9));
}

#[test]
fn s17_two_admitted_in_one_pass_do_not_fit_together() {
    let mut world = World::new(Setup::new(10, 10));
    assert_eq!(world.setup.engine.max_tokens_per_step, 2_048);
    world.submit(request(1, 1, 96, 32));
    world.submit(request(2, 1, 96, 32));
    world.pass();
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!((stats.running, stats.waiting), (1, 1), "the second waits");
    assert_eq!((machine.gpu.allocated, machine.out.started), (6, 0));
    assert_eq!(stats.preempted_recompute, 0);
    world.finish();
    for id in [1, 2] {
        world.assert_text(&request(id, 1, 96, 32));
    }
    let (first, second) = (world.seen(RequestId(1)), world.seen(RequestId(2)));
    assert!(second.admitted_at > first.token_at.last().copied());
    assert_eq!(world.stats().preempted_swap, 0, "never for a newcomer");
    world.assert_empty();
}

#[test]
fn s17_i07_nobody_leaves_in_the_pass_that_served_it() {
    // Both fit at first, and can't go on together: the audit after every pass says I07.
    for victim in [
        kv_scheduler::VictimPolicy::Newest,
        kv_scheduler::VictimPolicy::Oldest,
        kv_scheduler::VictimPolicy::Cost,
    ] {
        let mut setup = Setup::new(12, 12);
        setup.engine.victim = victim;
        let mut world = World::new(setup);
        world.submit(request(1, 1, 96, 48));
        world.submit(request(2, 1, 96, 48));
        world.pass();
        let stats = world.stats();
        assert_eq!((stats.running, stats.preempted_swap), (2, 0));
        assert_eq!(world.seen(RequestId(1)).tokens(), 1);
        world.finish();
        assert!(world.stats().preempted_swap >= 1);
        for id in [1, 2] {
            world.assert_text(&request(id, 1, 96, 48));
        }
    }
}

#[test]
fn i07_a_group_that_came_back_in_this_pass_stays() {
    let mut world = World::new(Setup {
        copies: Copies::Held,
        ..Setup::new(8, 8)
    });
    world.submit(request(1, 1, 64, 64));
    world.submit(request(2, 1, 32, 64));
    world.pass_until(|world| world.machine().out.started == 1);
    world.end_copy(Outcome::Done);
    world.pass_until(|world| world.machine().back_in.started == 1);
    // A newcomer is admitted beside it and takes what is left.
    let free = world.machine().gpu.free;
    world.submit(request(3, 1, 16 * (free - 1), 17));
    world.end_copy(Outcome::Done);
    let tokens = world.seen(RequestId(2)).tokens();
    let swaps = world.stats().preempted_swap;
    world.step();
    assert_eq!(world.stats().preempted_swap, swaps);
    assert_eq!(world.seen(RequestId(2)).tokens(), tokens + 1);
    world.setup.copies = Copies::After(kv_core::Span::ZERO);
    world.finish();
    for (id, prompt, max_tokens) in [(1, 64, 64), (2, 32, 64), (3, 16 * (free - 1), 17)] {
        world.assert_text(&request(id, 1, prompt, max_tokens));
    }
}
