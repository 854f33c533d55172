//! Giving up in every state: nothing waits, nothing that a copy may touch is given away.

use kv_core::{Accepted, GroupId, Outcome, Redeemed, Refusal};

use crate::rig::{C0, Rig, completion};

#[test]
fn i04_a_cancelled_flight_out_holds_blocks_and_slots_until_it_is_over() {
    for outcome in [Outcome::Done, Outcome::Failed] {
        let mut rig = Rig::new(2, 2);
        let lease = rig.group(1, 8);
        let ticket = rig.out(lease);
        rig.cancel(ticket);
        let stats = rig.stats();
        assert_eq!((stats.gpu.evicting, stats.host.filling), (2, 2));
        assert_eq!(stats.groups.cancel_pending, 1);
        assert_eq!((stats.gpu.free, stats.cancelled), (0, 0));
        rig.end(outcome);
        assert_eq!(rig.stats().cancelled, 1);
        assert!(rig.settled().cancelled);
        rig.assert_empty();
    }
}

#[test]
fn i04_a_cancelled_flight_in_holds_blocks_and_slots_until_it_is_over() {
    for outcome in [Outcome::Done, Outcome::Failed] {
        let mut rig = Rig::new(2, 2);
        let lease = rig.group(1, 8);
        let lease = rig.park(lease);
        let ticket = rig.back(lease);
        rig.cancel(ticket);
        let stats = rig.stats();
        assert_eq!((stats.gpu.restoring, stats.host.parked), (2, 2));
        assert_eq!(rig.machine.arriving_blocks(), 2);
        rig.end(outcome);
        rig.assert_empty();
        assert_eq!(rig.machine.arriving_blocks(), 0);
    }
}

#[test]
fn giving_up_on_the_gpu_and_on_the_host_frees_at_once() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    rig.release(lease);
    rig.assert_empty();
    let lease = rig.group(1, 8);
    let lease = rig.park(lease);
    rig.release(lease);
    rig.assert_empty();
    assert_eq!(rig.stats().cancelled, 0, "no tombstone was needed");
}

#[test]
fn a_settled_ticket_can_be_given_up_too() {
    for outcome in [Outcome::Done, Outcome::Failed] {
        let mut rig = Rig::new(4, 4);
        let lease = rig.group(1, 8);
        let ticket = rig.out(lease);
        rig.end(outcome);
        rig.cancel(ticket);
        rig.assert_empty();
        let lease = rig.group(1, 8);
        let lease = rig.park(lease);
        let ticket = rig.back(lease);
        rig.end(outcome);
        rig.cancel(ticket);
        rig.assert_empty();
    }
}

#[test]
fn i14_a_ticket_whose_flight_is_unknown_can_be_given_up() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    rig.end(Outcome::Unknown);
    assert_eq!(rig.stats().groups.failed, 1);
    rig.cancel(ticket);
    assert_eq!(rig.stats().groups, kv_core::GroupStates::default());
    assert_eq!(rig.stats().gpu.lost, 2);
}

#[test]
fn a_flight_that_was_never_handed_out_is_over_at_once() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    let ticket = rig
        .machine
        .swap_out(rig.now, lease, kv_core::Fence::NONE)
        .unwrap();
    rig.machine.cancel(rig.now, ticket).unwrap();
    assert!(rig.machine.poll_command().is_none());
    rig.pump();
    rig.assert_empty();
}

#[test]
fn i13_an_id_can_be_used_again_while_its_old_flight_goes_on() {
    let mut rig = Rig::new(4, 4);
    let old = rig.group(7, 8);
    let old_key = old.key();
    let ticket = rig.out(old);
    rig.cancel(ticket);
    let new = rig.group(7, 6);
    assert_ne!(new.key(), old_key);
    assert_eq!(new.key().group, old_key.group);
    let table = rig.machine.table(&new, C0).to_vec();
    let command = rig.commands.remove(0);
    let done = completion(&command, rig.now, Outcome::Done);
    assert_eq!(rig.report(&done), Accepted::Flight);
    // The old flight's end, and its echo, leave the new life alone.
    assert_eq!(rig.report(&done), Accepted::Stale);
    assert_eq!(rig.machine.table(&new, C0), table);
    assert_eq!(rig.machine.tokens(&new, C0), 6);
    let stats = rig.stats();
    assert_eq!((stats.gpu.allocated, stats.gpu.free), (2, 2));
    assert_eq!((stats.stale_completions, stats.cancelled), (1, 1));
    // Also when the new life flies itself.
    let ticket = rig.out(new);
    assert_eq!(rig.report(&done), Accepted::Stale);
    assert!(rig.machine.redeem(ticket).is_err());
}

#[test]
fn i11_a_thousand_swap_and_cancel_cycles_leave_nothing() {
    let mut rig = Rig::new(6, 8);
    for cycle in 0..1_000 {
        let lease = rig.group(cycle % 3, 1 + u32::try_from(cycle % 12).unwrap());
        let outcome = if cycle % 5 == 0 {
            Outcome::Failed
        } else {
            Outcome::Done
        };
        match cycle % 4 {
            0 => {
                let ticket = rig.out(lease);
                rig.cancel(ticket);
                rig.end(outcome);
            }
            1 => {
                let lease = rig.park(lease);
                let ticket = rig.back(lease);
                rig.cancel(ticket);
                rig.end(outcome);
            }
            2 => {
                let lease = rig.park(lease);
                let lease = rig.restore(lease);
                let ticket = rig.out(lease);
                assert!(rig.commands.is_empty(), "all blocks were clean");
                rig.cancel(ticket);
            }
            _ => {
                let lease = rig.park(lease);
                rig.release(lease);
            }
        }
        rig.assert_empty();
    }
    let stats = rig.stats();
    assert_eq!((stats.out.started, stats.back_in.started), (1_250, 500));
    assert_eq!(stats.cancelled, 500, "one tombstone in every second cycle");
    assert_eq!((stats.stale_completions, stats.gpu.lost), (0, 0));
}

#[test]
fn i13_handles_of_another_machine_are_refused() {
    let mut mine = Rig::new(4, 4);
    let mut other = Rig::new(4, 4);
    let (lease, foreign) = (mine.group(1, 8), other.group(1, 8));
    assert!(mine.machine.table(&foreign, C0).is_empty());
    assert_eq!(mine.machine.tokens(&foreign, C0), 0);
    assert_eq!(mine.machine.blocks(&foreign), 0);
    let why = mine.refused(|machine| machine.append(&foreign, C0, 1));
    assert_eq!(why, Refusal::Foreign);
    let refused = mine.machine.release(foreign).unwrap_err();
    assert_eq!(refused.why, Refusal::Foreign);
    let ticket = other.out(refused.back);
    let refused = mine.machine.redeem(ticket).unwrap_err();
    assert_eq!(refused.why, Refusal::Foreign);
    let refused = mine.machine.cancel(mine.now, refused.back).unwrap_err();
    assert_eq!(refused.why, Refusal::Foreign);
    // A completion that reaches the wrong machine is dead there.
    let command = other.commands.remove(0);
    let done = completion(&command, other.now, Outcome::Done);
    assert_eq!(mine.report(&done), Accepted::Stale);
    assert_eq!(other.report(&done), Accepted::Flight);
    assert!(matches!(
        other.machine.redeem(refused.back),
        Ok(Redeemed::Moved(_))
    ));
    mine.release(lease);
    mine.assert_empty();
    assert!(mine.machine.allocate(GroupId::new(1), 1).is_ok());
}
