//! Out and back: who holds what, and when.

use kv_core::{
    Checksum, CopyFault, Digest, DigestWork, Direction, Fence, Gone, GroupId, HostSide,
    MachineConfig, Outcome, Redeemed, Refused, Span, SubmitRefusal, Time,
};

use crate::rig::{C0, Rig, completion, config};

#[test]
fn i04_source_blocks_are_held_until_the_copy_is_over() {
    let mut rig = Rig::new(2, 4);
    let lease = rig.group(1, 8);
    let blocks = rig.machine.table(&lease, C0).to_vec();
    let ticket = rig.out(lease);
    let gpu = rig.stats().gpu;
    assert_eq!((gpu.free, gpu.evicting), (0, 2));
    assert_eq!(rig.machine.arriving_blocks(), 2);
    let moved: Vec<_> = rig.commands[0].moves().iter().map(|m| m.block).collect();
    assert_eq!(moved, blocks);
    let ticket = rig.machine.redeem(ticket).unwrap_err().back;
    rig.end(Outcome::Done);
    assert_eq!(rig.stats().gpu.free, 2);
    assert_eq!(rig.stats().host.parked, 2);
    let Redeemed::Moved(lease) = rig.machine.redeem(ticket).unwrap() else {
        panic!("it has moved")
    };
    assert_eq!(
        (rig.machine.blocks(&lease), rig.machine.tokens(&lease, C0)),
        (2, 8)
    );
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i06_a_table_is_published_only_when_all_blocks_are_there() {
    // The two pieces of a flight in: after the first one nothing can be read yet.
    let mut rig = Rig::capped(4, 4, 2);
    let lease = rig.group(1, 13);
    let lease = rig.park(lease);
    let ticket = rig.back(lease);
    while !rig.commands.is_empty() {
        let gpu = rig.stats().gpu;
        assert_eq!(
            (gpu.restoring, gpu.allocated),
            (4, 0),
            "no part of a group is published"
        );
        assert_eq!(
            rig.stats().host.parked,
            4,
            "the host copy counts until the end"
        );
        rig.end(Outcome::Done);
    }
    let Redeemed::Moved(lease) = rig.machine.redeem(ticket).unwrap() else {
        panic!("it has moved")
    };
    assert_eq!(rig.machine.table(&lease, C0).len(), 4);
    assert_eq!(rig.machine.tokens(&lease, C0), 13);
    assert_eq!((rig.stats().host.clean, rig.stats().host.parked), (4, 0));
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_failed_flight_out_leaves_the_group_as_it_was() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 10);
    let table = rig.machine.table(&lease, C0).to_vec();
    let ticket = rig.out(lease);
    rig.end(Outcome::Failed);
    let Redeemed::Stayed(lease) = rig.machine.redeem(ticket).unwrap() else {
        panic!("it stayed")
    };
    assert_eq!(rig.machine.table(&lease, C0), table);
    let stats = rig.stats();
    assert_eq!((stats.host.free, stats.gpu.allocated), (4, 3));
    assert_eq!(
        (stats.out.failed, stats.out.done, stats.out.bytes),
        (1, 0, 0)
    );
    let lease = rig.park(lease);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_failed_flight_in_keeps_the_host_copy_for_another_try() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 10);
    let mut lease = rig.park(lease);
    for failure in 1..=3 {
        let ticket = rig.back(lease);
        assert_eq!(rig.stats().gpu.restoring, 3);
        rig.end(Outcome::Failed);
        let Redeemed::Stayed(back) = rig.machine.redeem(ticket).unwrap() else {
            panic!("it stayed")
        };
        lease = back;
        let stats = rig.stats();
        assert_eq!((stats.gpu.free, stats.host.parked), (4, 3));
        assert_eq!(stats.back_in.failed, failure);
    }
    let lease = rig.restore(lease);
    assert_eq!(rig.machine.tokens(&lease, C0), 10);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_digest_mismatch_never_comes_back() {
    let mut rig = Rig::checked(4, 4);
    let lease = rig.group(1, 10);
    let lease = rig.park(lease);
    let ticket = rig.back(lease);
    let command = rig.commands.remove(0);
    let expected: Vec<_> = command
        .moves()
        .iter()
        .map(|step| Digest::of(&step.slot.value().to_le_bytes()))
        .collect();
    assert_eq!(
        *command.digest(),
        DigestWork::Verify(expected),
        "as computed on the way out"
    );
    let mut failed = completion(&command, rig.now, Outcome::Failed);
    failed.fault = Some(CopyFault::DigestMismatch { index: 1 });
    rig.report(&failed);
    let stats = rig.stats();
    assert_eq!((stats.checksum_failures, stats.back_in.bytes), (1, 0));
    assert_eq!(stats.groups.failed, 1);
    assert!(matches!(
        rig.machine.redeem(ticket).unwrap(),
        Redeemed::Gone(Gone::Corrupt)
    ));
    rig.assert_empty();
}

#[test]
fn a_done_without_the_right_payload_proves_nothing() {
    for wrong in ["bytes", "digests"] {
        let mut rig = Rig::checked(4, 4);
        let lease = rig.group(1, 8);
        let ticket = rig.out(lease);
        let command = rig.commands.remove(0);
        let mut done = completion(&command, rig.now, Outcome::Done);
        match wrong {
            "bytes" => done.bytes -= 1,
            _ => drop(done.digests.pop()),
        }
        rig.report(&done);
        assert_eq!(
            (rig.stats().gpu.lost, rig.stats().host.lost),
            (2, 2),
            "{wrong}"
        );
        let gone = rig.machine.redeem(ticket).unwrap();
        assert!(matches!(gone, Redeemed::Gone(Gone::Unknown)));
        rig.check();
    }
}

#[test]
fn i15_the_pageable_side_builds_no_pool_and_counts_nothing() {
    let mut rig = Rig::with(config(4, HostSide::Pageable));
    for round in 0..5 {
        let lease = rig.group(round, 16);
        let lease = rig.park(lease);
        assert_eq!(rig.stats().host, kv_core::HostSlots::default());
        let lease = rig.restore(lease);
        assert_eq!(rig.stats().host, kv_core::HostSlots::default());
        assert_eq!(
            rig.machine.dirty_blocks(&lease),
            4,
            "the blocking path keeps no copies"
        );
        rig.release(lease);
        let forgotten = rig.machine.poll_forgotten();
        assert_eq!(forgotten.len(), 4, "its buffers may be dropped");
    }
    let stats = rig.stats();
    assert_eq!((stats.out.done, stats.back_in.done), (5, 5));
    assert_eq!(stats.out.bytes, 5 * 4 * stats.block_bytes);
    assert_eq!(stats.out.bytes, stats.back_in.bytes);
    rig.assert_empty();
}

#[test]
fn i15_a_pageable_slot_is_free_when_its_group_is_released_on_the_host() {
    let mut rig = Rig::with(config(4, HostSide::Pageable));
    let lease = rig.group(1, 9);
    let lease = rig.park(lease);
    assert!(rig.machine.poll_forgotten().is_empty());
    rig.release(lease);
    assert_eq!(rig.machine.poll_forgotten().len(), 3);
    rig.assert_empty();
}

#[test]
fn commands_carry_the_fence_and_the_exact_bytes() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 6);
    let fence = Fence::of_step(7);
    let ticket = rig.machine.swap_out(rig.now, lease, fence).unwrap();
    rig.pump();
    let command = &rig.commands[0];
    assert_eq!(
        (command.after(), command.direction()),
        (fence, Direction::Out)
    );
    assert_eq!(command.bytes(), 2 * rig.stats().block_bytes);
    assert_eq!(*command.digest(), DigestWork::Skip);
    assert_eq!(command.id().ticket(), ticket.id());
    rig.later(Span::from_millis(3));
    rig.end(Outcome::Done);
    let settled = rig.settled();
    assert_eq!((settled.ticket, settled.blocks), (ticket.id(), 2));
    assert_eq!(settled.copy_span, Span::from_millis(3));
    assert!(!settled.cancelled);
    assert_eq!(rig.stats().out.copy_span, Span::from_millis(3));
}

#[test]
fn a_group_without_blocks_moves_at_once() {
    let mut rig = Rig::new(4, 0);
    let lease = rig.machine.allocate(GroupId::new(1), 2).unwrap();
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    assert_eq!(rig.stats().out.bytes, 0);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_busy_backend_gets_the_same_command_again() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    let command = rig.commands.remove(0);
    let (id, moves) = (command.id(), command.moves().to_vec());
    let why = SubmitRefusal::Busy;
    rig.machine
        .handle_refused(rig.now, Refused { why, back: command });
    rig.check();
    rig.pump();
    assert_eq!(
        (rig.commands[0].id(), rig.commands[0].moves()),
        (id, &moves[..])
    );
    rig.end(Outcome::Done);
    assert!(matches!(rig.machine.redeem(ticket), Ok(Redeemed::Moved(_))));
}

#[test]
fn a_closed_backend_fails_the_flight_and_loses_nothing() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    let back = rig.commands.remove(0);
    let why = SubmitRefusal::Closed;
    rig.machine.handle_refused(rig.now, Refused { why, back });
    rig.pump();
    assert_eq!(rig.settled().fault, Some(CopyFault::Closed));
    let Ok(Redeemed::Stayed(lease)) = rig.machine.redeem(ticket) else {
        panic!("nothing was started")
    };
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn slots_become_usable_as_they_are_set_up() {
    let mut machine = kv_core::Machine::new(config(4, HostSide::Slots(4))).unwrap();
    assert_eq!(machine.stats().host.unready, 4);
    machine.handle_slots_ready(1);
    let mut rig = Rig {
        machine,
        now: Time::ZERO,
        commands: Vec::new(),
        events: Vec::new(),
    };
    let lease = rig.group(1, 8);
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .swap_out(Time::ZERO, lease, Fence::NONE)
            .map_err(|refused| crate::rig::keep(refused, &mut back))
    });
    assert_eq!(why, kv_core::Refusal::HostSlots { needed: 2, free: 1 });
    rig.machine.handle_slots_ready(3);
    // Fewer than before changes nothing, more than there are means all.
    rig.machine.handle_slots_ready(1);
    assert_eq!(rig.stats().host.free, 3);
    let lease = rig.park(back.unwrap());
    rig.machine.handle_slots_ready(u32::MAX);
    assert_eq!((rig.stats().host.free, rig.stats().host.unready), (2, 0));
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i11_a_drain_lets_running_flights_end_and_starts_none() {
    let mut rig = Rig::new(8, 8);
    let flying = rig.group(1, 8);
    let staying = rig.group(2, 8);
    let ticket = rig.out(flying);
    rig.machine.drain();
    rig.machine.drain();
    assert!(!rig.machine.is_drained());
    let why = rig.refused(|machine| machine.allocate(GroupId::new(3), 1));
    assert_eq!(why, kv_core::Refusal::Draining);
    rig.end(Outcome::Done);
    let Ok(Redeemed::Moved(lease)) = rig.machine.redeem(ticket) else {
        panic!("it arrived")
    };
    rig.release(lease);
    assert!(!rig.machine.is_drained());
    rig.release(staying);
    assert!(rig.machine.is_drained());
    rig.assert_empty();
}

#[test]
fn i11_past_the_limit_of_a_drain_what_flies_is_lost_and_counted() {
    let mut rig = Rig::new(8, 8);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    rig.cancel(ticket);
    rig.machine.drain();
    rig.machine.abandon_flights(rig.now);
    rig.machine.abandon_flights(rig.now);
    rig.pump();
    assert!(rig.machine.is_drained());
    assert_eq!((rig.stats().gpu.lost, rig.stats().host.lost), (2, 2));
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    let good = config(4, HostSide::Slots(4));
    let wrong = |config: MachineConfig| kv_core::Machine::new(config).unwrap_err().to_string();
    let no_blocks = MachineConfig {
        gpu_blocks: 0,
        ..good
    };
    assert!(wrong(no_blocks).contains("0 blocks"));
    let cap = MachineConfig {
        inflight_bytes_max: good.block_bytes - 1,
        ..good
    };
    assert!(wrong(cap).contains("in-flight cap"));
    let mut rate = good;
    rate.deadlines.assumed_rate = 0;
    assert!(wrong(rate).contains("copy rate"));
    assert_eq!(good.checksum, Checksum::Off);
}
