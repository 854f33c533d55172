//! Every way to be refused: nothing changes, and what was passed comes back.

use kv_core::{Choice, Fence, GroupId, Outcome, Refusal};

use crate::rig::{C0, Rig, keep};

#[test]
fn i12_gpu_blocks_for_an_append() {
    let mut rig = Rig::new(3, 4);
    let lease = rig.group(1, 8);
    let why = rig.refused(|machine| machine.append(&lease, C0, 5));
    assert_eq!(why, Refusal::GpuBlocks { needed: 2, free: 1 });
    assert_eq!(rig.machine.tokens(&lease, C0), 8);
    // A copy of the shared tail counts as well.
    let mut rig = Rig::new(2, 0);
    let lease = rig.machine.allocate(GroupId::new(1), 2).unwrap();
    rig.machine.append(&lease, C0, 6).unwrap();
    rig.machine.fork(&lease, C0, Choice::new(1)).unwrap();
    let why = rig.refused(|machine| machine.append(&lease, C0, 1));
    assert_eq!(why, Refusal::GpuBlocks { needed: 1, free: 0 });
}

#[test]
fn i12_gpu_blocks_for_a_way_back() {
    let mut rig = Rig::new(4, 4);
    let parked = rig.group(1, 12);
    let parked = rig.park(parked);
    let other = rig.group(2, 8);
    let mut back = None;
    let now = rig.now;
    let why = rig.refused(|machine| {
        machine
            .swap_in(now, parked, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::GpuBlocks { needed: 3, free: 2 });
    rig.release(other);
    let lease = rig.restore(back.unwrap());
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i12_host_slots() {
    let mut rig = Rig::new(4, 2);
    let lease = rig.group(1, 12);
    let table = rig.machine.table(&lease, C0).to_vec();
    let mut back = None;
    let now = rig.now;
    let why = rig.refused(|machine| {
        machine
            .swap_out(now, lease, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::HostSlots { needed: 3, free: 2 });
    assert_eq!(rig.stats().host_backpressure, 1);
    let lease = back.unwrap();
    assert_eq!(rig.machine.table(&lease, C0), table);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i12_in_flight_budget_for_a_way_back() {
    let mut rig = Rig::capped(8, 8, 2);
    let parked = rig.group(1, 8);
    let parked = rig.park(parked);
    let other = rig.group(2, 4);
    let ticket = rig.out(other);
    let mut back = None;
    let now = rig.now;
    let why = rig.refused(|machine| {
        machine
            .swap_in(now, parked, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert!(matches!(why, Refusal::Inflight { .. }));
    rig.end(Outcome::Done);
    let lease = rig.restore(back.unwrap());
    rig.release(lease);
    rig.cancel(ticket);
    rig.assert_empty();
}

#[test]
fn i12_draining() {
    let mut rig = Rig::new(8, 8);
    let parked = rig.group(1, 8);
    let parked = rig.park(parked);
    let here = rig.group(2, 8);
    rig.machine.drain();
    let now = rig.now;
    let why = rig.refused(|machine| machine.allocate(GroupId::new(3), 1));
    assert_eq!(why, Refusal::Draining);
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .swap_out(now, here, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::Draining);
    rig.release(back.unwrap());
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .swap_in(now, parked, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::Draining);
    rig.release(back.unwrap());
    assert!(rig.machine.is_drained());
    rig.assert_empty();
}

#[test]
fn i12_groups_and_choices() {
    let mut rig = Rig::new(8, 8);
    let why = rig.refused(|machine| machine.allocate(GroupId::new(1), 0));
    assert_eq!(why, Refusal::NoChoices);
    let lease = rig.machine.allocate(GroupId::new(1), 2).unwrap();
    let why = rig.refused(|machine| machine.allocate(GroupId::new(1), 1));
    assert_eq!(why, Refusal::GroupExists);
    rig.machine.append(&lease, C0, 6).unwrap();
    let (one, two) = (Choice::new(1), Choice::new(2));
    let why = rig.refused(|machine| machine.append(&lease, two, 1));
    assert_eq!(why, Refusal::NoSuchChoice);
    let why = rig.refused(|machine| machine.fork(&lease, C0, two));
    assert_eq!(why, Refusal::NoSuchChoice);
    let why = rig.refused(|machine| machine.fork(&lease, two, one));
    assert_eq!(why, Refusal::NoSuchChoice);
    let why = rig.refused(|machine| machine.release_choice(&lease, two));
    assert_eq!(why, Refusal::NoSuchChoice);
    rig.machine.fork(&lease, C0, one).unwrap();
    let why = rig.refused(|machine| machine.fork(&lease, C0, one));
    assert_eq!(why, Refusal::ChoiceNotEmpty);
    rig.machine.release_choice(&lease, one).unwrap();
    let why = rig.refused(|machine| machine.release_choice(&lease, one));
    assert_eq!(why, Refusal::NoSuchChoice);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn i12_a_ticket_comes_back_until_its_flight_has_settled() {
    let mut rig = Rig::new(4, 4);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .redeem(ticket)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::NotSettled);
    rig.end(Outcome::Done);
    assert!(rig.machine.redeem(back.unwrap()).is_ok());
}

#[test]
fn i12_a_foreign_lease_comes_back() {
    let mut rig = Rig::new(4, 4);
    let mut other = Rig::new(4, 4);
    let foreign = other.group(1, 8);
    let mut back = None;
    let now = rig.now;
    let why = rig.refused(|machine| {
        machine
            .swap_out(now, foreign, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::Foreign);
    let foreign = other.park(back.unwrap());
    let mut back = None;
    let why = rig.refused(|machine| {
        machine
            .swap_in(now, foreign, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    assert_eq!(why, Refusal::Foreign);
    other.release(back.unwrap());
    other.assert_empty();
}
