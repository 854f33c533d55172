//! What tests can do with the simulated backend.

use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::testing::{
    CopyAt, Fates, Met, Odds, OnClose, SimBackend, SimConfig, SimControl, SimError,
};
use kv_core::{
    Backend, CommandId, Completion, CopyFault, Digest, DigestWork, Direction, Fence, Outcome,
    SlotIndex, Span, SubmitRefusal, TicketId, Time,
};

use crate::world::{self, Wakes};

fn setup(config: SimConfig) -> (Arc<PlainMemory>, SimBackend, SimControl) {
    let memory = Arc::new(PlainMemory::new(world::layout(8)));
    let backend = SimBackend::new(Arc::clone(&memory), config);
    let control = backend.control();
    (memory, backend, control)
}

fn poll(backend: &mut SimBackend) -> Vec<Completion> {
    let mut ended = Vec::new();
    backend.poll(&mut ended);
    ended
}

#[test]
fn bytes_move_when_the_test_says_so() {
    for (copy_at, old_wins) in [(CopyAt::End, false), (CopyAt::Start, true)] {
        let (memory, mut backend, control) = setup(SimConfig {
            copy_at,
            ..SimConfig::new(8)
        });
        let old = world::fill(&memory, 0, 1);
        let command = world::out(&memory, &[(0, 0)]);
        let id = command.id();
        backend.submit(Time::from_nanos(5), command).unwrap();
        let new = world::fill(&memory, 0, 2);
        assert_eq!(control.pending().len(), 1);
        assert!(poll(&mut backend).is_empty());
        let done = control.complete(id, Time::from_nanos(9), Outcome::Done);
        assert_eq!(done, Ok(Outcome::Done));
        let ended = poll(&mut backend).remove(0);
        assert_eq!(ended.submitted_at, Time::from_nanos(5));
        assert_eq!(ended.completed_at, Time::from_nanos(9));
        let expected = if old_wins { &old } else { &new };
        assert_eq!(&control.slot_bytes(SlotIndex::new(0)), expected);
    }
}

#[test]
fn a_copy_that_breaks_off_has_moved_its_first_blocks() {
    let (memory, mut backend, control) = setup(SimConfig::new(8));
    let first = world::fill(&memory, 0, 1);
    world::fill(&memory, 1, 2);
    let command = world::out(&memory, &[(0, 0), (1, 1)]);
    let id = command.id();
    backend.submit(Time::ZERO, command).unwrap();
    control
        .break_off(id, Time::ZERO, Outcome::Unknown, 1)
        .unwrap();
    let ended = poll(&mut backend).remove(0);
    assert_eq!(
        (ended.outcome, ended.fault),
        (Outcome::Unknown, Some(CopyFault::Injected))
    );
    assert_eq!(ended.bytes, 0);
    assert_eq!(control.slot_bytes(SlotIndex::new(0)), first);
    assert!(
        control
            .slot_bytes(SlotIndex::new(1))
            .iter()
            .all(|&byte| byte == 0)
    );
}

#[test]
fn i13_reports_can_be_repeated_contradicted_and_forged() {
    let (memory, mut backend, control) = setup(SimConfig::new(8));
    let wakes = Wakes::attach(&mut backend);
    let command = world::out(&memory, &[(0, 0)]);
    let id = command.id();
    backend.submit(Time::ZERO, command).unwrap();
    assert_eq!(control.repeat(id), Err(SimError::NoSuchCommand(id)));
    control.complete(id, Time::ZERO, Outcome::Done).unwrap();
    control.repeat(id).unwrap();
    control.contradict(id).unwrap();
    let dead = CommandId::for_testing(TicketId::for_testing(u64::MAX), 3);
    let forged = Completion {
        id: dead,
        ..poll(&mut backend).remove(0)
    };
    control.forge(forged);
    assert_eq!(poll(&mut backend)[0].id, dead);
    assert_eq!(wakes.count(), 4);
    let again = control.complete(id, Time::ZERO, Outcome::Done);
    assert_eq!(again, Err(SimError::NoSuchCommand(id)));
}

#[test]
fn a_step_under_way_and_damage_are_respected() {
    let (memory, mut backend, control) = setup(SimConfig::new(8));
    let step = memory.begin_step();
    let moves = [(0, 0)];
    let command = world::command(&memory, Direction::Out, &moves, step, DigestWork::Compute);
    let id = command.id();
    backend.submit(Time::ZERO, command).unwrap();
    let early = control.complete(id, Time::ZERO, Outcome::Done);
    assert_eq!(early, Err(SimError::FenceOpen(step)));
    assert_eq!(control.complete_all(Time::ZERO), 0);
    memory.end_step(step);
    assert_eq!(control.complete_all(Time::ZERO), 1);
    let digests = poll(&mut backend).remove(0).digests;
    assert_eq!(digests, [Digest::of(&world::read(&memory, 0))]);
    control.flip_host_bit(SlotIndex::new(0), 12);
    let verify = DigestWork::Verify(digests);
    let command = world::command(&memory, Direction::In, &moves, Fence::NONE, verify);
    let id = command.id();
    backend.submit(Time::ZERO, command).unwrap();
    assert_eq!(
        control.complete(id, Time::ZERO, Outcome::Done),
        Ok(Outcome::Failed)
    );
    let ended = poll(&mut backend).remove(0);
    assert_eq!(ended.fault, Some(CopyFault::DigestMismatch { index: 0 }));
}

#[test]
fn refusals_come_in_the_order_in_which_they_were_planted() {
    let (memory, mut backend, control) = setup(SimConfig::new(8));
    control.refuse_next(SubmitRefusal::Busy);
    control.refuse_next(SubmitRefusal::Closed);
    let mut command = world::out(&memory, &[(0, 0)]);
    for why in [SubmitRefusal::Busy, SubmitRefusal::Closed] {
        let refused = backend.submit(Time::ZERO, command).unwrap_err();
        assert_eq!(refused.why, why);
        command = refused.back;
    }
    backend.submit(Time::ZERO, command).unwrap();
}

#[test]
fn slots_become_ready_and_never_go_away() {
    let config = SimConfig {
        slots_ready: 2,
        ..SimConfig::new(8)
    };
    let (_memory, backend, control) = setup(config);
    assert_eq!(backend.slots_ready(), 2);
    control.set_slots_ready(5);
    control.set_slots_ready(3);
    assert_eq!(backend.slots_ready(), 5);
    control.set_slots_ready(100);
    assert_eq!(backend.slots_ready(), 8);
}

#[test]
fn closing_can_leave_commands_unconfirmed() {
    let config = SimConfig {
        on_close: OnClose::Abandon,
        ..SimConfig::new(8)
    };
    let (memory, mut backend, control) = setup(config);
    backend
        .submit(Time::ZERO, world::out(&memory, &[(0, 0), (1, 1)]))
        .unwrap();
    let closed = backend.close(Span::ZERO);
    assert_eq!((closed.unconfirmed, closed.leaked_bytes), (1, 960));
    assert_eq!(backend.close(Span::ZERO), closed);
    assert!(poll(&mut backend).is_empty());
    assert_eq!(
        control.complete_all(Time::ZERO),
        1,
        "what was left may still end"
    );
}

/// A world of 400 commands under that seed: everything that was reported.
fn storm(seed: u64) -> (Vec<Completion>, Met) {
    let (memory, mut backend, control) = setup(SimConfig::new(8));
    let mut fates = Fates::new(seed, Odds::stormy());
    let mut reports = Vec::new();
    for round in 0..400 {
        let now = Time::from_nanos(round * 10_000_000);
        let place = u32::try_from(round % 8).unwrap();
        let ticket = TicketId::for_testing(round);
        let moves = vec![kv_core::BlockMove {
            block: kv_core::BlockId::new(place),
            slot: SlotIndex::new(place),
        }];
        let direction = if round % 3 == 0 {
            Direction::In
        } else {
            Direction::Out
        };
        let block_bytes = memory.layout().block_bytes();
        let command = kv_core::Command::for_testing(
            ticket,
            direction,
            moves,
            Fence::NONE,
            block_bytes,
            DigestWork::Skip,
        );
        backend.submit(now, command).unwrap();
        let made = fates.run(now, &control);
        let before = reports.len();
        backend.poll(&mut reports);
        assert_eq!(reports.len() - before, made);
        assert!(fates.next_due().is_none_or(|due| due > now));
    }
    (reports, fates.met())
}

#[test]
fn a_seed_makes_a_world_and_every_kind_of_fault_is_met() {
    assert_eq!(storm(1), storm(1));
    assert_ne!(storm(1).0, storm(2).0);
    let (_, met) = storm(3);
    for count in [
        met.done,
        met.failed,
        met.unknown,
        met.never,
        met.repeated,
        met.contradicted,
    ] {
        assert!(count > 0, "{met:?}");
    }
}
