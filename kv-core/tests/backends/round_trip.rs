//! Bytes after a resume equal bytes before the swap, for every layout and choice of places (I09).

use std::sync::Arc;

use kv_core::host::{HostBackend, HostConfig, PlainMemory, SyncBackend};
use kv_core::testing::{Rng, SimBackend, SimConfig};
use kv_core::{
    Backend, Completion, DigestWork, Direction, Fence, Layout, Outcome, RowGroup, Span, Time,
};
use proptest::prelude::*;

use crate::world::{self, Wakes};

/// Layouts of every kind, with rows of odd lengths.
fn layouts() -> impl Strategy<Value = Layout> {
    let dims = (1..4_u32, 4..16_u32, 1..5_u32, 1..4_u32, 1..9_u32, 1..5_u32);
    (dims, 0..4_u32).prop_map(|((layers, blocks, tokens, heads, dim, bytes), kind)| {
        let layout = match kind {
            0 => Layout::stacked(layers, blocks, tokens, heads, dim, bytes),
            1 => Layout::per_layer(layers, blocks, tokens, heads, dim, bytes),
            2 => Layout::latent(layers, blocks, tokens, heads * dim, bytes),
            // Two kinds of layers with rows of different length, interleaved in one region.
            _ => {
                let (wide, narrow) = (u64::from(tokens * dim * bytes), u64::from(heads));
                let stride = (wide + narrow) * u64::from(layers);
                let group = |base, row_bytes| RowGroup {
                    region: 0,
                    base,
                    block_stride: stride,
                    rows: layers,
                    row_stride: wide + narrow,
                    row_bytes,
                };
                let groups = [group(0, wide), group(wide, narrow)];
                Layout::new(tokens, blocks, &[stride * u64::from(blocks)], &groups)
            }
        };
        layout.unwrap()
    })
}

/// Swaps `count` blocks at places drawn from the seed out and, to other places, back in.
fn round_trip<B: Backend>(
    memory: &PlainMemory,
    backend: &mut B,
    slots: u32,
    count: usize,
    seed: u64,
    mut finish: impl FnMut(&mut B) -> Completion,
) {
    let mut rng = Rng::new(seed);
    let mut draw = |end: u32| {
        let mut places: Vec<u32> = (0..end).collect();
        rng.shuffle(&mut places);
        places.truncate(count);
        places
    };
    let blocks = memory.layout().blocks();
    let (from, through, to) = (draw(blocks), draw(slots), draw(blocks));
    let written: Vec<_> = from
        .iter()
        .map(|&block| world::fill(memory, block, u64::from(block) + seed))
        .collect();
    let pairs = |blocks: &[u32]| -> Vec<_> {
        blocks
            .iter()
            .copied()
            .zip(through.iter().copied())
            .collect()
    };
    let none = Fence::NONE;
    let out = world::command(
        memory,
        Direction::Out,
        &pairs(&from),
        none,
        DigestWork::Compute,
    );
    backend.submit(Time::ZERO, out).unwrap();
    let out = finish(backend);
    assert_eq!(out.outcome, Outcome::Done);
    for block in 0..blocks {
        world::fill(memory, block, !seed);
    }
    let verify = DigestWork::Verify(out.digests);
    let back = world::command(memory, Direction::In, &pairs(&to), none, verify);
    backend.submit(Time::ZERO, back).unwrap();
    assert_eq!(finish(backend).outcome, Outcome::Done);
    for (&block, bytes) in to.iter().zip(&written) {
        assert!(
            world::read(memory, block) == *bytes,
            "block {block} has other bytes"
        );
    }
    let untouched = world::pattern(memory, !seed);
    for block in (0..blocks).filter(|block| !to.contains(block)) {
        assert!(
            world::read(memory, block) == untouched,
            "block {block} was touched"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn i09_bytes_survive_on_every_backend(
        layout in layouts(),
        share in 1..=100_usize,
        seed in any::<u64>(),
    ) {
        let slots = 17;
        let count = (layout.blocks() as usize * share).div_ceil(100);
        let memory = Arc::new(PlainMemory::new(layout));

        let config = HostConfig::new(slots);
        let mut host = HostBackend::new(Arc::clone(&memory), config, world::clock()).unwrap();
        let wakes = Wakes::attach(&mut host);
        let finish = |backend: &mut HostBackend| wakes.collect(backend, 1).remove(0);
        round_trip(&memory, &mut host, slots, count, seed, finish);

        let limit = Span::from_secs(60);
        let mut sync = SyncBackend::new(Arc::clone(&memory), limit, world::clock());
        let wakes = Wakes::attach(&mut sync);
        let finish = |backend: &mut SyncBackend| wakes.collect(backend, 1).remove(0);
        round_trip(&memory, &mut sync, slots, count, seed, finish);

        let mut sim = SimBackend::new(Arc::clone(&memory), SimConfig::new(slots));
        let wakes = Wakes::attach(&mut sim);
        let control = sim.control();
        let finish = |backend: &mut SimBackend| {
            control.complete_all(Time::ZERO);
            wakes.collect(backend, 1).remove(0)
        };
        round_trip(&memory, &mut sim, slots, count, seed, finish);
    }
}
