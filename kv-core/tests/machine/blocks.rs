//! Blocks on the GPU: sharing inside a group, and copy-on-write where choices part.

use kv_core::{Choice, CopyOnWrite, GroupId, Lease, OnGpu};

use crate::rig::{BLOCK_TOKENS, Rig};

fn choice(index: u32) -> Choice {
    Choice::new(index)
}

/// A group whose choices share a prompt of that many tokens.
fn forked(rig: &mut Rig, choices: u32, tokens: u32) -> Lease<OnGpu> {
    let lease = rig.machine.allocate(GroupId::new(1), choices).unwrap();
    rig.machine.append(&lease, choice(0), tokens).unwrap();
    for index in 1..choices {
        rig.machine.fork(&lease, choice(0), choice(index)).unwrap();
    }
    rig.check();
    lease
}

#[test]
fn i02_choices_share_blocks_and_hold_them_once() {
    let mut rig = Rig::new(8, 8);
    let lease = forked(&mut rig, 3, 8);
    assert_eq!(
        (rig.stats().gpu.allocated, rig.machine.blocks(&lease)),
        (2, 2)
    );
    for index in 0..3 {
        rig.machine.release_choice(&lease, choice(index)).unwrap();
        rig.check();
        let left = if index < 2 { 2 } else { 0 };
        assert_eq!(rig.stats().gpu.allocated, left);
    }
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn choices_part_with_one_copy_each_but_the_last_writer() {
    for choices in 2..=4 {
        let mut rig = Rig::new(16, 0);
        let lease = forked(&mut rig, choices, BLOCK_TOKENS + 1);
        let tail = rig.machine.table(&lease, choice(0))[1];
        let needed = rig.machine.blocks_to_append(&lease, |_| 1);
        assert_eq!(needed, choices - 1);
        let before = rig.stats().gpu.allocated;
        for index in 0..choices {
            let copy = rig.machine.append(&lease, choice(index), 1).unwrap();
            let table = rig.machine.table(&lease, choice(index));
            let expected = (index + 1 < choices).then_some(CopyOnWrite {
                from: tail,
                to: table[1],
            });
            assert_eq!(copy, expected, "choice {index} of {choices}");
            rig.check();
        }
        assert_eq!(rig.stats().gpu.allocated, before + needed);
        let mut tails: Vec<_> = (0..choices)
            .map(|index| rig.machine.table(&lease, choice(index))[1])
            .collect();
        tails.sort_unstable();
        tails.dedup();
        assert_eq!(
            tails.len(),
            choices as usize,
            "nobody shares what is written"
        );
        rig.release(lease);
        rig.assert_empty();
    }
}

#[test]
fn full_shared_blocks_are_never_copied() {
    let mut rig = Rig::new(8, 0);
    let lease = forked(&mut rig, 2, 2 * BLOCK_TOKENS);
    assert_eq!(rig.machine.blocks_to_append(&lease, |_| 1), 2);
    for index in 0..2 {
        assert_eq!(rig.machine.append(&lease, choice(index), 1).unwrap(), None);
    }
    assert_eq!(rig.stats().gpu.allocated, 4);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn what_an_append_takes_is_what_was_said() {
    let mut rig = Rig::new(32, 0);
    for tokens in 0..=9 {
        for more in 0..=9 {
            let lease = rig.machine.allocate(GroupId::new(2), 1).unwrap();
            rig.machine.append(&lease, choice(0), tokens).unwrap();
            let said = rig.machine.blocks_to_append(&lease, |_| more);
            let before = rig.stats().gpu.allocated;
            rig.machine.append(&lease, choice(0), more).unwrap();
            assert_eq!(
                rig.stats().gpu.allocated - before,
                said,
                "{tokens} + {more}"
            );
            assert_eq!(rig.machine.tokens(&lease, choice(0)), tokens + more);
            rig.release(lease);
        }
    }
}

#[test]
fn i09_shared_blocks_move_once_and_come_back_shared() {
    let mut rig = Rig::new(8, 8);
    let lease = forked(&mut rig, 3, 6);
    rig.machine.append(&lease, choice(0), 1).unwrap();
    let blocks = rig.machine.blocks(&lease);
    assert_eq!(blocks, 3, "two of the prompt, one copied tail");
    let lease = rig.park(lease);
    assert_eq!(rig.stats().out.bytes, 3 * rig.stats().block_bytes);
    assert_eq!(rig.stats().host.parked, 3);
    let lease = rig.restore(lease);
    assert_eq!(rig.stats().back_in.bytes, 3 * rig.stats().block_bytes);
    let tables: Vec<_> = (0..3)
        .map(|index| rig.machine.table(&lease, choice(index)).to_vec())
        .collect();
    assert_eq!(tables[1], tables[2]);
    assert_eq!(tables[0][0], tables[1][0]);
    assert_ne!(tables[0][1], tables[1][1]);
    let tokens: Vec<_> = (0..3)
        .map(|index| rig.machine.tokens(&lease, choice(index)))
        .collect();
    assert_eq!(tokens, [7, 6, 6]);
    rig.release(lease);
    rig.assert_empty();
}

#[test]
fn a_released_choice_takes_its_own_blocks_only() {
    let mut rig = Rig::new(8, 8);
    let lease = forked(&mut rig, 2, BLOCK_TOKENS);
    for index in 0..2 {
        rig.machine.append(&lease, choice(index), 1).unwrap();
    }
    rig.machine.release_choice(&lease, choice(1)).unwrap();
    rig.check();
    assert_eq!(rig.machine.blocks(&lease), 2);
    // What was freed serves the next growth, and only the live choice moves.
    rig.machine.append(&lease, choice(0), BLOCK_TOKENS).unwrap();
    let lease = rig.park(lease);
    assert_eq!(rig.stats().host.parked, 3);
    let lease = rig.restore(lease);
    assert!(rig.machine.table(&lease, choice(1)).is_empty());
    rig.release(lease);
    rig.assert_empty();
}
