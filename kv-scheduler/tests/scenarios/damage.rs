//! Damaged host memory.

use kv_core::{Checksum, Direction, SlotIndex};
use kv_scheduler::{Request, RequestId};

use crate::world::{Setup, World, reference, request};

fn stays() -> Request {
    request(1, 1, 64, 64)
}

fn leaves() -> Request {
    request(2, 1, 32, 64)
}

/// S18: one bit of a parked group's host memory is flipped.
fn damaged(checksum: Checksum, bit: usize) -> World {
    let mut world = World::new(Setup {
        checksum,
        ..Setup::new(8, 8)
    });
    world.submit(stays());
    world.submit(leaves());
    let mut slot = None;
    world.pass_until(|world| {
        slot = world
            .pending()
            .first()
            .map(|copy| copy.moves[1].slot)
            .or(slot);
        world.machine().groups.host_resident == 1
    });
    let slot: SlotIndex = slot.unwrap();
    world.control.flip_host_bit(slot, bit);
    world.finish();
    world.assert_text(&stays());
    world.assert_empty();
    world
}

#[test]
fn s18_i09_a_flipped_bit_never_reaches_the_gpu() {
    for bit in [0, 7, 100, 8 * 255 + 7] {
        let world = damaged(Checksum::On, bit);
        let (stats, machine) = (world.stats(), world.machine());
        assert_eq!(world.blocks_moved(Direction::In), 0);
        assert_eq!((machine.checksum_failures, machine.back_in.failed), (1, 1));
        assert!(stats.recomputed_tokens > 0);
        assert_eq!(stats.resumed, 0);
        world.assert_text(&leaves());
    }
}

#[test]
fn s18_without_digests_the_same_flip_changes_the_text() {
    let world = damaged(Checksum::Off, 100);
    assert_eq!(world.machine().checksum_failures, 0);
    let right = reference(&world.setup, &leaves());
    let seen = world.seen(RequestId(2));
    assert_eq!(seen.finish, right.finish, "it looks like success");
    assert_ne!(seen.choices, right.choices);
}

#[test]
fn s18_with_digests_healthy_memory_comes_back() {
    let mut world = World::new(Setup {
        checksum: Checksum::On,
        ..Setup::new(8, 8)
    });
    world.submit(stays());
    world.submit(leaves());
    world.finish();
    assert!(world.machine().back_in.done > 0);
    assert_eq!(world.machine().checksum_failures, 0);
    assert_eq!(world.stats().recomputed_tokens, 0);
    world.assert_text(&stays());
    world.assert_text(&leaves());
}
