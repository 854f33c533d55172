//! Clean copies: what stays on the host after a resume, and who gives it up.

use kv_core::{Choice, Event, GroupId, Outcome, Redeemed};

use crate::rig::{BLOCK_TOKENS, C0, Rig};

#[test]
fn the_second_swap_out_moves_only_what_was_written_since() {
    let mut rig = Rig::new(8, 8);
    let lease = rig.group(1, 4 * BLOCK_TOKENS - 1);
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    assert_eq!(
        (rig.stats().host.clean, rig.machine.dirty_blocks(&lease)),
        (4, 0)
    );
    // The tail is written, and a further block begun.
    rig.machine.append(&lease, C0, 2).unwrap();
    rig.check();
    assert_eq!(rig.machine.dirty_blocks(&lease), 2);
    assert_eq!(rig.stats().host.clean, 3);
    let before = rig.stats().out.bytes;
    let ticket = rig.out(lease);
    assert_eq!(rig.commands[0].moves().len(), 2);
    rig.end_all();
    assert_eq!(rig.stats().out.bytes - before, 2 * rig.stats().block_bytes);
    assert_eq!(rig.stats().clean_blocks_kept, 3);
    assert_eq!((rig.stats().gpu.free, rig.stats().host.parked), (8, 5));
    let Ok(Redeemed::Moved(lease)) = rig.machine.redeem(ticket) else {
        panic!("it has moved")
    };
    let lease = rig.restore(lease);
    assert_eq!(rig.machine.tokens(&lease, C0), 4 * BLOCK_TOKENS + 1);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_swap_out_of_a_clean_group_needs_no_copy() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 16);
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    let ticket = rig.out(lease);
    assert!(rig.commands.is_empty());
    assert_eq!((rig.stats().gpu.free, rig.stats().host.parked), (4, 4));
    let Ok(Redeemed::Moved(lease)) = rig.machine.redeem(ticket) else {
        panic!("it has moved")
    };
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn others_clean_copies_are_reclaimed_first_and_oldest_first() {
    let mut rig = Rig::new(12, 6);
    let first = rig.group(1, 8);
    let second = rig.group(2, 8);
    let third = rig.group(3, 16);
    let first = rig.park(first);
    let first = rig.restore(first);
    let second = rig.park(second);
    let second = rig.restore(second);
    assert_eq!((rig.stats().host.clean, rig.stats().host.free), (4, 2));
    let third = rig.park(third);
    assert_eq!(rig.stats().clean_copies_reclaimed, 2);
    let reclaimed = |event: &&Event| matches!(event, Event::CleanCopiesReclaimed { slots: 2 });
    assert_eq!(rig.events.iter().filter(reclaimed).count(), 1);
    assert_eq!(rig.machine.dirty_blocks(&first), 2, "it became clean first");
    assert_eq!(rig.machine.dirty_blocks(&second), 0);
    // The reclaimed one moves its blocks again, and takes the other one's copies for it.
    let first = rig.park(first);
    assert_eq!(rig.machine.dirty_blocks(&second), 2);
    for lease in [first, third] {
        rig.release(lease);
    }
    rig.release(second);
    rig.assert_empty();
}

#[test]
fn a_group_never_gives_up_its_own_clean_copies() {
    let mut rig = Rig::new(8, 4);
    let lease = rig.group(1, 12);
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    rig.machine.append(&lease, C0, 8).unwrap();
    // Two dirty blocks, one free slot, and three clean copies that are its own.
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .swap_out(kv_core::Time::ZERO, lease, kv_core::Fence::NONE)
            .map_err(|refused| crate::rig::keep(refused, &mut back))
    });
    assert_eq!(why, kv_core::Refusal::HostSlots { needed: 2, free: 1 });
    let lease = back.unwrap();
    assert_eq!(rig.machine.dirty_blocks(&lease), 2);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_failed_flight_out_keeps_clean_copies_clean() {
    let mut rig = Rig::new(8, 8);
    let lease = rig.group(1, 8);
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    rig.machine.append(&lease, C0, 1).unwrap();
    let ticket = rig.out(lease);
    rig.end(Outcome::Failed);
    let Ok(Redeemed::Stayed(lease)) = rig.machine.redeem(ticket) else {
        panic!("it stayed")
    };
    assert_eq!(
        (rig.stats().host.clean, rig.machine.dirty_blocks(&lease)),
        (2, 1)
    );
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i14_clean_copies_of_an_unknown_flight_are_not_lost() {
    // No command named them: nothing can be touching them.
    let mut rig = Rig::new(8, 8);
    let lease = rig.group(1, 8);
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    rig.machine.append(&lease, C0, 1).unwrap();
    let ticket = rig.out(lease);
    rig.end(Outcome::Unknown);
    assert!(matches!(rig.machine.redeem(ticket), Ok(Redeemed::Gone(_))));
    let stats = rig.stats();
    assert_eq!((stats.gpu.lost, stats.host.lost), (1, 1));
    assert_eq!((stats.gpu.free, stats.host.free), (7, 7));
    rig.check();
}

#[test]
fn parting_choices_keep_the_shared_clean_copy() {
    let mut rig = Rig::new(8, 8);
    let lease = rig.machine.allocate(GroupId::new(1), 2).unwrap();
    rig.machine.append(&lease, C0, 6).unwrap();
    rig.machine.fork(&lease, C0, Choice::new(1)).unwrap();
    let lease = rig.park(lease);
    let lease = rig.restore(lease);
    assert!(rig.machine.append(&lease, C0, 1).unwrap().is_some());
    rig.check();
    assert_eq!(rig.machine.dirty_blocks(&lease), 1, "the new tail");
    assert!(
        rig.machine
            .append(&lease, Choice::new(1), 1)
            .unwrap()
            .is_none()
    );
    rig.check();
    assert_eq!(
        rig.machine.dirty_blocks(&lease),
        2,
        "the old one is written in place"
    );
    rig.release(lease);
    rig.assert_empty();
}
