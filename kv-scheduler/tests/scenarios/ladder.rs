//! What happens when a swap can't be had or doesn't work: retries, recompute, memory that is lost.

use kv_core::{Direction, Outcome, Span, SubmitRefusal, Time};
use kv_scheduler::{Next, Request, RequestId, SwapPolicy};

use crate::world::{Copies, Setup, World, forged, request};

fn stays() -> Request {
    request(1, 1, 64, 64)
}

/// Has to leave at the 17th decode step of a pool of 8 blocks.
fn leaves() -> Request {
    request(2, 1, 32, 64)
}

fn pair(setup: Setup) -> World {
    let mut world = World::new(setup);
    world.submit(stays());
    world.submit(leaves());
    world
}

fn assert_pair(world: &World) {
    world.assert_text(&stays());
    world.assert_text(&leaves());
}

fn held(gpu_blocks: u32, host_slots: u32) -> Setup {
    Setup {
        copies: Copies::Held,
        ..Setup::new(gpu_blocks, host_slots)
    }
}

#[test]
fn i10_without_a_host_pool_groups_are_computed_again() {
    let mut world = pair(Setup::new(8, 0));
    world.finish();
    assert_pair(&world);
    let stats = world.stats();
    assert_eq!((stats.preempted_swap, stats.preempted_recompute), (0, 1));
    // It left with 48 tokens stored; exactly those are run again.
    assert_eq!(stats.recomputed_tokens, 48);
    assert_eq!(stats.prefill_tokens, 96, "counted once");
    assert_eq!(stats.tokens, 128, "nothing is emitted twice");
    assert_eq!(world.machine().host_backpressure, 1);
    assert_eq!(world.seen(RequestId(2)).pauses.len(), 1);
    world.assert_empty();
}

#[test]
fn i10_with_swapping_off_nothing_is_copied() {
    let mut setup = Setup::new(8, 8);
    setup.engine.swap = SwapPolicy::Off;
    let mut world = pair(setup);
    world.finish();
    assert_pair(&world);
    let (stats, machine) = (world.stats(), world.machine());
    assert_eq!((stats.preempted_recompute, machine.out.started), (1, 0));
    assert_eq!(machine.host.peak, 0);
    assert_eq!(machine.host_backpressure, 0, "nobody asked");
}

#[test]
fn i10_all_choices_come_back_from_a_recompute() {
    for n in [2, 3, 4] {
        // A prompt that ends inside a block: its tail is shared until the choices part.
        let subject = request(2, n, 40, 60);
        let blocks = 2 + n * 5;
        let mut world = World::new(Setup::new(blocks, 0));
        world.submit(request(1, 1, 64, 80));
        world.submit(subject.clone());
        world.finish();
        assert!(world.stats().preempted_recompute >= 1, "{n} choices");
        let seen = world.seen(subject.id);
        assert!(seen.choices.iter().all(|choice| choice.len() == 60));
        world.assert_text(&subject);
        world.assert_text(&request(1, 1, 64, 80));
        world.assert_empty();
    }
}

#[test]
fn i10_a_choice_that_ended_stays_ended_after_a_recompute() {
    let subject = request(2, 2, 32, 40);
    let mut world = World::new(Setup::new(11, 0));
    world.submit(request(1, 1, 64, 80));
    world.submit(subject.clone());
    world.pass_until(|world| world.seen(subject.id).tokens() >= 10);
    world.stop(subject.id, kv_core::Choice::new(0));
    let stopped = world.seen(subject.id).choices[0].len();
    world.submit(request(3, 1, 48, 40));
    world.finish();
    assert!(world.stats().preempted_recompute >= 1);
    let seen = world.seen(subject.id);
    let whole = crate::world::reference(&world.setup, &subject);
    assert_eq!(seen.choices[0], whole.choices[0][..stopped]);
    assert_eq!(seen.choices[1], whole.choices[1]);
}

/// The engine's own wait: nothing else happens until then.
fn waits_until(next: Next) -> Time {
    match next {
        Next::Wait(Some(time)) => time,
        other => panic!("the engine should wait for its retry, not {other:?}"),
    }
}

#[test]
fn s09_failed_resumes_back_off_and_end_in_a_recompute() {
    let mut setup = held(8, 8);
    setup.engine.max_retries = 2;
    setup.engine.retry_backoff = Span::from_millis(1);
    let mut world = pair(setup);
    world.pass_until(|world| !world.pending().is_empty());
    world.end_copy(Outcome::Done);
    // When the other one is over, only the parked one is left.
    world.pass_until(|world| world.seen(RequestId(1)).is_over() && !world.pending().is_empty());
    for failure in 1..=3u64 {
        let [copy] = &world.pending()[..] else {
            panic!("one flight at a time")
        };
        assert_eq!(copy.direction, Direction::In);
        world.end_copy(Outcome::Failed);
        let failed_at = world.now;
        assert_eq!(world.step(), Next::Again);
        assert_eq!(world.machine().back_in.failed, failure);
        assert_eq!(world.machine().gpu.restoring, 0);
        if failure == 3 {
            break;
        }
        assert_eq!(world.machine().host.parked, 3, "the host copy is intact");
        let retry_at = waits_until(world.step());
        let backoff = Span::from_millis(1 << (failure - 1));
        assert_eq!(retry_at, failed_at + backoff, "it doubles");
        world.now = Time::from_nanos(retry_at.as_nanos() - 1);
        world.step();
        assert!(world.pending().is_empty(), "not before its time");
        world.now = retry_at;
        world.step();
    }
    assert_eq!(
        world.machine().host.parked,
        0,
        "after three tries the copy is given up"
    );
    world.finish();
    assert_pair(&world);
    let stats = world.stats();
    assert_eq!((stats.resumed, stats.recomputed_tokens), (0, 48));
    world.assert_empty();
}

#[test]
fn without_retries_the_first_failure_ends_in_a_recompute() {
    let mut setup = held(8, 8);
    setup.engine.max_retries = 0;
    let mut world = pair(setup);
    world.pass_until(|world| !world.pending().is_empty());
    world.end_copy(Outcome::Done);
    world.pass_until(|world| world.machine().back_in.started == 1);
    world.end_copy(Outcome::Failed);
    world.finish();
    assert_eq!(world.machine().back_in.started, 1);
    assert_eq!(world.stats().recomputed_tokens, 48);
    assert_pair(&world);
}

#[test]
fn failed_evictions_leave_the_group_where_it_was_and_end_in_a_recompute() {
    let mut setup = held(8, 8);
    setup.engine.max_retries = 1;
    let mut world = pair(setup);
    for failure in 1..=2 {
        world.pass_until(|world| !world.pending().is_empty());
        assert_eq!(world.machine().gpu.evicting, 3);
        world.end_copy(Outcome::Failed);
        world.step();
        let machine = world.machine();
        assert_eq!((machine.out.failed, machine.gpu.evicting), (failure, 0));
        assert_eq!(machine.host.free, 8);
        assert_eq!(
            world.stats().running,
            2,
            "it is on the GPU, nobody pays for it"
        );
    }
    assert_eq!(world.stats().preempted_recompute, 0);
    world.finish();
    assert_pair(&world);
    let machine = world.machine();
    assert_eq!((machine.out.started, machine.out.done), (2, 0));
    assert_eq!(world.stats().preempted_recompute, 1);
    world.assert_empty();
}

#[test]
fn i14_what_nobody_can_vouch_for_is_lost_and_its_group_computed_again() {
    let mut world = pair(held(11, 8));
    world.submit(request(3, 1, 16, 40));
    world.pass_until(|world| !world.pending().is_empty());
    let blocks = world.machine().gpu.evicting;
    let copy = world.end_copy(Outcome::Unknown);
    world.step();
    let machine = world.machine();
    assert_eq!((machine.gpu.lost, machine.host.lost), (blocks, blocks));
    let bytes = copy.bytes;
    world.control.forge(forged(&copy, Outcome::Done, bytes));
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
    assert_eq!(world.machine().stale_completions, 1, "I13");
    let machine = world.machine();
    assert_eq!((machine.gpu.lost, machine.host.lost), (blocks, blocks));
    assert_eq!(machine.gpu.free, 11 - blocks);
    assert_pair(&world);
    world.assert_text(&request(3, 1, 16, 40));
}

#[test]
fn i14_a_flight_that_never_ends_is_given_up_at_its_deadline() {
    let mut world = pair(held(11, 8));
    world.submit(request(3, 1, 16, 40));
    world.pass_until(|world| !world.pending().is_empty());
    let copy = world.pending().remove(0);
    world.pass_until(|world| world.machine().gpu.lost > 0);
    assert!(world.now.since(copy.submitted_at) >= Span::from_secs(30));
    assert_eq!(world.machine().out.unknown, 1);
    // The late end changes nothing any more.
    world.end_copy(Outcome::Done);
    world.setup.copies = Copies::After(Span::ZERO);
    world.finish();
    assert_eq!(world.machine().stale_completions, 1);
    assert_eq!(world.machine().gpu.lost as usize, copy.moves.len());
    assert_pair(&world);
}

#[test]
fn i08_a_request_whose_blocks_were_lost_fails_by_name_and_others_are_served() {
    // With 3 of 8 blocks lost, A's 8 blocks can't be had any more.
    let mut world = pair(held(8, 8));
    world.pass_until(|world| !world.pending().is_empty());
    world.end_copy(Outcome::Unknown);
    world.finish();
    let failed = world.seen(RequestId(1)).failed.clone().unwrap();
    assert!(failed.contains("lost"), "{failed}");
    world.assert_beginning(&stays());
    world.assert_beginning(&leaves());
    assert_eq!(world.machine().gpu.free, 5);
    // The door knows what is left.
    let why = world.refuse(request(9, 1, 64, 32));
    assert_eq!(
        why,
        kv_scheduler::Rejection::NeverFits {
            needed: 6,
            blocks: 5
        }
    );
    world.submit(request(9, 1, 64, 16));
    world.finish();
    world.assert_text(&request(9, 1, 64, 16));
}

#[test]
fn a_busy_backend_is_offered_the_copy_again() {
    let mut world = pair(Setup::new(8, 8));
    world.control.refuse_next(SubmitRefusal::Busy);
    world.finish();
    assert_pair(&world);
    let machine = world.machine();
    assert_eq!((machine.out.done, machine.out.failed), (1, 0));
    assert_eq!(world.stats().preempted_recompute, 0);
}

#[test]
fn a_backend_that_takes_nothing_any_more_leaves_recompute() {
    let mut setup = Setup::new(8, 8);
    setup.engine.max_retries = 0;
    let mut world = pair(setup);
    world.control.refuse_next(SubmitRefusal::Closed);
    world.finish();
    assert_pair(&world);
    assert_eq!(
        (world.machine().out.failed, world.machine().out.done),
        (1, 0)
    );
    assert!(world.stats().preempted_recompute >= 1);
}

#[test]
fn i03_a_group_larger_than_the_inflight_cap_moves_in_pieces() {
    for blocks in [1, 2, 3] {
        let mut world = pair(Setup {
            inflight_blocks: Some(blocks),
            ..Setup::new(8, 8)
        });
        world.finish();
        assert_pair(&world);
        let machine = world.machine();
        assert_eq!((machine.out.done, machine.back_in.done), (1, 1));
        assert_eq!(world.blocks_moved(Direction::Out), 3);
        assert_eq!(world.blocks_moved(Direction::In), 3);
    }
}
