//! Copies against steps, both ways, with a control that leaves the order out (S4).

use std::sync::Arc;

use kv_core::host::{HostBackend, HostConfig, PlainMemory};
use kv_core::{Backend, DigestWork, Direction, Fence, SlotIndex};

use crate::world::{self, LIMIT, Wakes};

const BLOCKS: [u32; 4] = [0, 1, 2, 3];
const MOVES: [(u32, u32); 4] = [(0, 0), (1, 1), (2, 2), (3, 3)];

fn setup() -> (Arc<PlainMemory>, HostBackend, Arc<Wakes>) {
    let memory = Arc::new(PlainMemory::new(world::layout(8)));
    let mut backend =
        HostBackend::new(Arc::clone(&memory), HostConfig::new(8), world::clock()).unwrap();
    let wakes = Wakes::attach(&mut backend);
    (memory, backend, wakes)
}

/// Whether the copy waits for the step that touches the same blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Fenced,
    None,
}

/// One round: a step writes four blocks slowly, and they are swapped out meanwhile. Says how many
/// slots have wrong bytes.
fn write_then_out(
    (memory, backend, wakes): &mut (Arc<PlainMemory>, HostBackend, Arc<Wakes>),
    round: u64,
    order: Order,
) -> usize {
    let seed = |block: u32| (1 << 32) + round * 4 + u64::from(block);
    let new: Vec<_> = BLOCKS
        .iter()
        .map(|&block| (block, world::pattern(memory, seed(block))))
        .collect();
    let step = world::slow_write(memory, LIMIT, new.clone());
    let fence = if order == Order::Fenced {
        step.fence
    } else {
        Fence::NONE
    };
    let command = world::command(memory, Direction::Out, &MOVES, fence, DigestWork::Skip);
    backend.submit(kv_core::Time::ZERO, command).unwrap();
    if order == Order::None {
        // The step stays half done until the copy is over: the damage is certain.
        wakes.collect(backend, 1);
    }
    step.go_on.open();
    if order == Order::Fenced {
        wakes.collect(backend, 1);
    }
    step.join();
    let probe = backend.probe();
    new.iter()
        .filter(|(slot, bytes)| probe.bytes(SlotIndex::new(*slot)) != *bytes)
        .count()
}

/// One round: a step reads four blocks slowly, and they are overwritten by a swap-in meanwhile.
/// Says how many blocks the step saw wrong.
fn read_then_in(
    (memory, backend, wakes): &mut (Arc<PlainMemory>, HostBackend, Arc<Wakes>),
    round: u64,
    order: Order,
) -> usize {
    let seed = |block: u32, what: u64| round * 8 + u64::from(block) * 2 + what;
    let incoming: Vec<_> = BLOCKS
        .iter()
        .map(|&block| world::fill(memory, block, seed(block, 0)))
        .collect();
    backend
        .submit(kv_core::Time::ZERO, world::out(memory, &MOVES))
        .unwrap();
    wakes.collect(backend, 1);
    let old: Vec<_> = BLOCKS
        .iter()
        .map(|&block| world::fill(memory, block, seed(block, 1)))
        .collect();
    let step = world::slow_read(memory, LIMIT, BLOCKS.to_vec());
    let fence = if order == Order::Fenced {
        step.fence
    } else {
        Fence::NONE
    };
    let command = world::command(memory, Direction::In, &MOVES, fence, DigestWork::Skip);
    backend.submit(kv_core::Time::ZERO, command).unwrap();
    if order == Order::None {
        wakes.collect(backend, 1);
    }
    step.go_on.open();
    if order == Order::Fenced {
        wakes.collect(backend, 1);
    }
    let saw = step.join();
    for (&block, bytes) in BLOCKS.iter().zip(&incoming) {
        assert!(
            world::read(memory, block) == *bytes,
            "block {block} did not arrive"
        );
    }
    saw.iter().zip(&old).filter(|(saw, old)| saw != old).count()
}

#[test]
fn s04_an_out_waits_for_the_step_that_writes_its_blocks() {
    let mut world = setup();
    let wrong: usize = (0..1_000)
        .map(|round| write_then_out(&mut world, round, Order::Fenced))
        .sum();
    assert_eq!(wrong, 0);
}

#[test]
fn s04_an_in_waits_for_the_step_that_reads_its_blocks() {
    let mut world = setup();
    let wrong: usize = (0..1_000)
        .map(|round| read_then_in(&mut world, round, Order::Fenced))
        .sum();
    assert_eq!(wrong, 0);
}

#[test]
fn s04_control_without_a_fence_shows_damage_both_ways() {
    let mut world = setup();
    for round in 0..10 {
        assert_eq!(
            write_then_out(&mut world, round, Order::None),
            4,
            "slots of round {round}"
        );
        assert_eq!(
            read_then_in(&mut world, round, Order::None),
            4,
            "blocks of round {round}"
        );
    }
}
