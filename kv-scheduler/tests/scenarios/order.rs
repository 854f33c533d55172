//! Who goes first, who leaves, who comes back.

use kv_core::{Direction, Outcome, Span, Time};
use kv_scheduler::{RequestId, VictimPolicy};

use crate::world::{Copies, Setup, World, request};

#[test]
fn i05_requests_are_admitted_in_the_order_in_which_they_came() {
    let mut world = World::new(Setup::new(12, 12));
    // A large one at the head holds smaller ones up: nobody overtakes.
    let sizes = [64, 128, 16, 16, 96, 16];
    let ids: Vec<_> = (1u64..)
        .zip(sizes)
        .map(|(id, prompt)| world.submit(request(id, 1, prompt, 20)))
        .collect();
    world.finish();
    let admitted: Vec<Time> = ids
        .iter()
        .map(|&id| world.seen(id).admitted_at.unwrap())
        .collect();
    assert!(admitted.is_sorted(), "{admitted:?}");
    for (id, prompt) in (1u64..).zip(sizes) {
        world.assert_text(&request(id, 1, prompt, 20));
    }
}

#[test]
fn parked_groups_come_back_in_the_order_in_which_they_left_and_before_newcomers() {
    let mut world = World::new(Setup::new(16, 32));
    // The old one grows until both others had to leave: the newest first, with 7 blocks. What the
    // second one leaves behind is too small for the third.
    let sizes = [(1, 64, 128), (2, 48, 90), (3, 96, 64)];
    for (id, prompt, max_tokens) in sizes {
        world.submit(request(id, 1, prompt, max_tokens));
    }
    world.pass_until(|world| world.machine().groups.host_resident == 2);
    let newcomer = world.submit(request(4, 1, 16, 4));
    let mut copies = Vec::new();
    let mut both_started_at = None;
    world.pass_until(|world| {
        for copy in world.pending() {
            if copy.direction == Direction::In {
                copies.push(copy.moves[0].slot.value());
            }
        }
        if both_started_at.is_none() && world.machine().back_in.started == 2 {
            both_started_at = Some(world.passed_at);
            assert_eq!(world.seen(newcomer).tokens(), 0);
        }
        world.seen(newcomer).is_over()
    });
    assert_eq!(
        copies[..2],
        [0, 7],
        "the third left first, into the slots from 0 on"
    );
    assert!(world.seen(newcomer).admitted_at >= both_started_at);
    world.finish();
    for (id, prompt, max_tokens) in sizes.into_iter().chain([(4, 16, 4)]) {
        world.assert_text(&request(id, 1, prompt, max_tokens));
    }
    world.assert_empty();
}

#[test]
fn recomputed_groups_come_back_before_newcomers() {
    let mut world = World::new(Setup::new(8, 0));
    world.submit(request(1, 1, 64, 64));
    world.submit(request(2, 1, 32, 64));
    world.pass_until(|world| world.stats().recompute_pending == 1);
    let newcomer = world.submit(request(3, 1, 16, 4));
    let tokens = world.seen(RequestId(2)).tokens();
    world.pass_until(|world| world.seen(newcomer).admitted_at.is_some());
    assert!(world.seen(RequestId(2)).tokens() > tokens);
    world.finish();
    world.assert_text(&request(2, 1, 32, 64));
}

/// Three groups of different sizes in a full pool; which one left first.
fn first_to_leave(victim: VictimPolicy) -> u64 {
    let mut setup = Setup::new(15, 30);
    setup.engine.victim = victim;
    let mut world = World::new(setup);
    let requests = [
        request(1, 1, 80, 64),
        request(2, 1, 32, 64),
        request(3, 1, 64, 64),
    ];
    for request in &requests {
        world.submit(request.clone());
    }
    world.pass_until(|world| world.machine().out.started == 1);
    let silent: Vec<u64> = (1..=3)
        .filter(|&id| world.seen(RequestId(id)).tokens() < 17)
        .collect();
    world.pass();
    let moved = world.blocks_moved(Direction::Out);
    world.finish();
    for request in &requests {
        world.assert_text(request);
    }
    let by_size = [0, 6, 3, 5].map(|blocks| blocks == moved);
    let id = by_size
        .iter()
        .position(|&same| same)
        .expect("one of the three moved");
    assert!(silent.is_empty(), "all had 17 tokens before: {silent:?}");
    id as u64
}

#[test]
fn the_policy_names_the_victim() {
    assert_eq!(first_to_leave(VictimPolicy::Newest), 3);
    assert_eq!(first_to_leave(VictimPolicy::Oldest), 1);
    assert_eq!(first_to_leave(VictimPolicy::Cost), 2);
}

#[test]
fn a_victim_that_the_budget_has_no_room_for_leaves_others_to_be_tried() {
    // While one flight has the whole budget, the next one waits; nobody is computed again.
    let mut world = World::new(Setup {
        copies: Copies::Held,
        inflight_blocks: Some(1),
        ..Setup::new(22, 44)
    });
    // At the 17th decode step all five want a block, and the newest has two.
    let sizes = [80, 80, 80, 16, 16];
    for (id, prompt) in (1..).zip(sizes) {
        world.submit(request(id, 1, prompt, 96));
    }
    world.pass_until(|world| world.machine().inflight_backpressure > 0);
    assert_eq!(world.stats().preempted_recompute, 0);
    assert_eq!(world.machine().flights, 1);
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
    for (id, prompt) in (1..).zip(sizes) {
        world.assert_text(&request(id, 1, prompt, 96));
    }
}

#[test]
fn only_the_shortfall_leaves() {
    // Two small groups and one large: the newest is enough, while its blocks are on their way
    // nobody else has to go.
    let mut world = World::new(Setup {
        copies: Copies::Held,
        ..Setup::new(15, 30)
    });
    for (id, prompt) in [(1, 80), (2, 32), (3, 64)] {
        world.submit(request(id, 1, prompt, 64));
    }
    world.pass_until(|world| world.machine().out.started == 1);
    for _ in 0..50 {
        world.step();
        assert_eq!(world.stats().preempted_swap, 1);
        assert_eq!(world.stats().preempted_recompute, 0);
    }
    world.end_copy(Outcome::Done);
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
}

#[test]
fn with_a_lookahead_nobody_waits_for_somebody_elses_copy() {
    for (lookahead, stalls) in [(0, true), (4, false)] {
        let mut setup = Setup::new(15, 30);
        setup.copies = Copies::After(Span::from_millis(25));
        setup.engine.lookahead_tokens = lookahead;
        let mut world = World::new(setup);
        for (id, prompt) in [(1, 80), (2, 32), (3, 64)] {
            world.submit(request(id, 1, prompt, 64));
        }
        world.finish();
        assert!(world.stats().preempted_swap > 0);
        assert_eq!(world.stats().stalled_rows > 0, stalls, "{lookahead} tokens");
        for (id, prompt) in [(1, 80), (2, 32), (3, 64)] {
            world.assert_text(&request(id, 1, prompt, 64));
        }
    }
}

#[test]
fn decoding_goes_on_while_others_copies_run() {
    let mut setup = Setup::new(15, 30);
    setup.copies = Copies::Held;
    setup.engine.lookahead_tokens = 4;
    let mut world = World::new(setup);
    for (id, prompt) in [(1, 80), (2, 32), (3, 64)] {
        world.submit(request(id, 1, prompt, 64));
    }
    world.pass_until(|world| world.machine().out.started == 1);
    let before = [1, 2].map(|id| world.seen(RequestId(id)).tokens());
    world.pass();
    world.pass();
    let after = [1, 2].map(|id| world.seen(RequestId(id)).tokens());
    assert_eq!(after, before.map(|tokens| tokens + 2));
    assert_eq!(world.machine().flights, 1, "the copy still runs");
}

#[test]
fn i06_prompts_in_chunks_give_the_same_text() {
    for (chunk, budget) in [(1, 4), (7, 9), (16, 32), (500, 2_048)] {
        let mut setup = Setup::new(14, 28);
        setup.engine.max_batch_size = 4;
        setup.engine.prefill_chunk = chunk;
        setup.engine.max_tokens_per_step = budget;
        let mut world = World::new(setup);
        for (id, n, prompt) in [(1, 1, 75), (2, 2, 33), (3, 1, 50)] {
            world.submit(request(id, n, prompt, 40));
        }
        world.finish();
        for (id, n, prompt) in [(1, 1, 75), (2, 2, 33), (3, 1, 50)] {
            world.assert_text(&request(id, n, prompt, 40));
        }
        world.assert_empty();
    }
}

#[test]
fn i08_oversubscription_five_times_over_ends() {
    let mut world = World::new(Setup {
        copies: Copies::After(Span::from_millis(30)),
        ..Setup::new(24, 200)
    });
    for id in 1..=20 {
        let n = 1 + u32::try_from(id % 3).unwrap();
        world.submit(request(id, n, 20 + 3 * u32::try_from(id).unwrap(), 60));
    }
    world.finish();
    for id in 1..=20 {
        let n = 1 + u32::try_from(id % 3).unwrap();
        world.assert_text(&request(id, n, 20 + 3 * u32::try_from(id).unwrap(), 60));
    }
    assert!(world.machine().back_in.done > 3);
    world.assert_empty();
}
