//! Scenario 4 on a real GPU: copies against kernels that still write or read, with a control that
//! must show damage when the fence is left out.

use core::time::Duration;

use kv_core::{DigestWork, Direction, Fence, Layout, Outcome, SlotIndex};
use kv_transfer_cuda::{CudaConfig, DeviceBytes, PathChoice};

use crate::rig::{Rig, check_late, delay, device, fill_late, rounds};

/// Blocks in one piece of 256 KiB, so that kernels can name them by address.
fn rig(path: PathChoice) -> Rig {
    let layout = Layout::stacked(1, 16, 128, 8, 64, 2).expect("valid");
    assert_eq!(layout.block_bytes(), 256 << 10);
    let mut config = CudaConfig::new(16);
    config.path = path;
    Rig::new(layout, &config)
}

const KERNEL: Duration = Duration::from_millis(20);
const BLOCKS: [u32; 4] = [2, 5, 7, 11];

/// Whether a copy is told which step it comes after.
#[derive(Clone, Copy, PartialEq)]
enum Ordering {
    ByFence,
    LeftOut,
}

fn words_that_differ(bytes: &[u8], value: u32) -> usize {
    bytes
        .chunks_exact(4)
        .filter(|word| *word != value.to_ne_bytes())
        .count()
}

/// A step writes four blocks, which are swapped out at once. Counts wrong words on the host.
fn write_then_out(rig: &mut Rig, rounds: u32, ordering: Ordering) -> usize {
    let moves: Vec<_> = BLOCKS
        .iter()
        .zip(0..)
        .map(|(&block, slot)| (block, slot))
        .collect();
    let mut wrong = 0;
    for round in 1..=rounds {
        fill_late(&rig.stream, &rig.memory, BLOCKS, round, KERNEL);
        let fence = rig.fence();
        let after = if ordering == Ordering::ByFence {
            fence
        } else {
            Fence::NONE
        };
        let ticket = rig.submit(Direction::Out, &moves, after, DigestWork::Skip);
        assert_eq!(rig.wait(ticket).outcome, Outcome::Done);
        for &(_, slot) in &moves {
            let bytes = rig
                .backend
                .slot_bytes(SlotIndex::new(slot))
                .expect("at rest");
            wrong += words_that_differ(&bytes, round);
        }
        rig.stream.synchronize().expect("a sound context");
    }
    wrong
}

/// A step reads four blocks, which are then the target of a swap-in. Counts wrong words seen by
/// the step.
fn read_then_in(rig: &mut Rig, rounds: u32, ordering: Ordering) -> u32 {
    let moves: Vec<_> = BLOCKS
        .iter()
        .zip(0..)
        .map(|(&block, slot)| (block, slot))
        .collect();
    let wrong = DeviceBytes::new(&device(), 4).expect("room on the GPU");
    wrong.write(0, &[0; 4]).expect("fits");
    fill_late(&rig.stream, &rig.memory, BLOCKS, u32::MAX, Duration::ZERO);
    let fence = rig.fence();
    let ticket = rig.submit(Direction::Out, &moves, fence, DigestWork::Skip);
    assert_eq!(rig.wait(ticket).outcome, Outcome::Done);
    for round in 1..=rounds {
        fill_late(&rig.stream, &rig.memory, BLOCKS, round, Duration::ZERO);
        rig.stream.synchronize().expect("a sound context");
        check_late(&rig.stream, &rig.memory, BLOCKS, round, KERNEL, &wrong);
        let fence = rig.fence();
        let after = if ordering == Ordering::ByFence {
            fence
        } else {
            Fence::NONE
        };
        let ticket = rig.submit(Direction::In, &moves, after, DigestWork::Skip);
        assert_eq!(rig.wait(ticket).outcome, Outcome::Done);
        rig.stream.synchronize().expect("a sound context");
    }
    let mut count = [0; 4];
    wrong.read(0, &mut count).expect("fits");
    u32::from_ne_bytes(count)
}

fn s04(path: PathChoice, most: u32) {
    let mut rig = rig(path);
    let rounds = rounds(most);
    assert_eq!(
        write_then_out(&mut rig, rounds, Ordering::ByFence),
        0,
        "bytes left too early"
    );
    assert_eq!(
        read_then_in(&mut rig, rounds, Ordering::ByFence),
        0,
        "bytes came too early"
    );
    // Without the fences the same rounds must go wrong, or they prove nothing.
    let few = rounds.min(50);
    assert!(
        write_then_out(&mut rig, few, Ordering::LeftOut) > 0,
        "the control out shows nothing"
    );
    assert!(
        read_then_in(&mut rig, few, Ordering::LeftOut) > 0,
        "the control in shows nothing"
    );
}

#[test]
fn s04_copies_through_the_ring_keep_to_their_fences() {
    s04(PathChoice::Ring, 1_000);
}

#[test]
fn s04_direct_copies_keep_to_their_fences() {
    s04(PathChoice::Rows, 100);
}

#[test]
fn a_fence_that_was_never_recorded_fails_and_copies_nothing() {
    let mut rig = rig(PathChoice::Measured);
    let ticket = rig.submit(
        Direction::Out,
        &[(0, 0)],
        Fence::of_step(99),
        DigestWork::Skip,
    );
    let ended = rig.wait(ticket);
    assert_eq!(ended.outcome, Outcome::Failed);
    assert_eq!(ended.fault, Some(kv_core::CopyFault::FenceTimeout));
    rig.finish(Direction::Out, &[(0, 0)]);
}

#[test]
fn fences_of_many_steps_are_waited_for_one_by_one() {
    let mut rig = rig(PathChoice::Measured);
    let mut fences = Vec::new();
    for round in 0..200u32 {
        fill_late(&rig.stream, &rig.memory, BLOCKS, round, Duration::ZERO);
        fences.push(rig.fence());
    }
    rig.stream.synchronize().expect("a sound context");
    delay(&rig.stream, KERNEL);
    fill_late(&rig.stream, &rig.memory, BLOCKS, 7_777, Duration::ZERO);
    let last = rig.fence();
    // An old step is over whatever runs now; the last one is not.
    let old = rig.submit(Direction::Out, &[(2, 0)], fences[17], DigestWork::Skip);
    assert_eq!(rig.wait(old).outcome, Outcome::Done);
    let new = rig.submit(Direction::Out, &[(5, 1)], last, DigestWork::Skip);
    assert_eq!(rig.wait(new).outcome, Outcome::Done);
    let bytes = rig.backend.slot_bytes(SlotIndex::new(1)).expect("at rest");
    assert_eq!(words_that_differ(&bytes, 7_777), 0);
}
