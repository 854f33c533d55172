//! I09 on a real GPU: what comes back is what went, for every shape, way and order.

use kv_core::testing::Rng;
use kv_core::{BlockId, DigestWork, Direction, Fence, Layout, RowGroup, SlotIndex};
use kv_transfer_cuda::{CudaConfig, PathChoice, SlabCaching, StagingConfig};

use crate::rig::{Rig, pattern};

/// Bytes of a pool of the grid at most.
const POOL_BYTES_MAX: u64 = 64 << 20;

/// The whole pool as the test thinks it is.
struct Image {
    regions: Vec<Vec<u8>>,
}

impl Image {
    fn random(rig: &Rig, seed: u64) -> Self {
        let layout = rig.memory.layout();
        let mut regions = Vec::new();
        for (index, &bytes) in layout.regions().iter().enumerate() {
            let bytes = pattern(
                seed ^ (index as u64) << 32,
                usize::try_from(bytes).expect("small"),
            );
            let region = u32::try_from(index).expect("few");
            rig.memory
                .write_region(region, 0, &bytes)
                .expect("a sound context");
            regions.push(bytes);
        }
        Self { regions }
    }

    fn block(&self, layout: &Layout, block: u32) -> Vec<u8> {
        let mut packed = Vec::new();
        for row in layout.rows(BlockId::new(block)) {
            let start = usize::try_from(row.offset).expect("small");
            let length = usize::try_from(row.bytes).expect("small");
            packed.extend_from_slice(&self.regions[row.region as usize][start..start + length]);
        }
        packed
    }

    fn set_block(&mut self, layout: &Layout, block: u32, packed: &[u8]) {
        for row in layout.rows(BlockId::new(block)) {
            let start = usize::try_from(row.offset).expect("small");
            let length = usize::try_from(row.bytes).expect("small");
            let from = usize::try_from(row.slot_offset).expect("small");
            self.regions[row.region as usize][start..start + length]
                .copy_from_slice(&packed[from..from + length]);
        }
    }

    fn assert_is_what_the_gpu_holds(&self, rig: &Rig, what: &str) {
        for (index, expected) in self.regions.iter().enumerate() {
            let mut found = vec![0; expected.len()];
            let region = u32::try_from(index).expect("few");
            rig.memory
                .read_region(region, 0, &mut found)
                .expect("a sound context");
            if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
                panic!("{what}: byte {at} of region {region} is wrong");
            }
        }
    }
}

fn shuffled(count: u32, rng: &mut Rng) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..count).collect();
    rng.shuffle(&mut ids);
    ids
}

/// Out to shuffled slots, into other blocks, everything compared, also what must not change.
fn round_trip(layout: &Layout, config: &CudaConfig, what: &str) {
    let mut rig = Rig::new(layout.clone(), config);
    let mut rng = Rng::new(layout.fingerprint());
    let mut image = Image::random(&rig, layout.fingerprint());
    let half = (layout.blocks() / 2).max(1);
    let blocks = shuffled(layout.blocks(), &mut rng);
    let slots = shuffled(config.arena.slots, &mut rng);
    let moves: Vec<_> = blocks
        .iter()
        .copied()
        .zip(slots)
        .take(half as usize)
        .collect();
    let done = rig.finish(Direction::Out, &moves);
    assert_eq!(done.bytes, u64::from(half) * layout.block_bytes(), "{what}");
    let mut parked = Vec::new();
    for &(block, slot) in &moves {
        let bytes = rig
            .backend
            .slot_bytes(SlotIndex::new(slot))
            .expect("at rest");
        assert!(
            bytes == image.block(layout, block),
            "{what}: block {block} in slot {slot}"
        );
        parked.push(bytes);
    }
    image.assert_is_what_the_gpu_holds(&rig, what);
    // Into the other half, or into the only block there is, in another order.
    let mut targets: Vec<u32> = blocks.iter().rev().copied().take(half as usize).collect();
    rng.shuffle(&mut targets);
    let back: Vec<_> = targets
        .iter()
        .zip(&moves)
        .map(|(&to, &(_, slot))| (to, slot))
        .collect();
    if layout.blocks() == 1 {
        image = Image::random(&rig, 77);
    }
    rig.finish(Direction::In, &back);
    for (&(to, _), bytes) in back.iter().zip(&parked) {
        image.set_block(layout, to, bytes);
    }
    image.assert_is_what_the_gpu_holds(&rig, what);
}

/// K and V apart, MLA-like, and layers whose rows differ.
fn unequal(blocks: u32, row_bytes: u64) -> Layout {
    let gap = 128;
    let long = row_bytes * 3;
    let groups = [
        RowGroup {
            region: 0,
            base: 256,
            block_stride: row_bytes + gap,
            rows: 3,
            row_stride: u64::from(blocks) * (row_bytes + gap),
            row_bytes,
        },
        // Block by block, all its rows together.
        RowGroup {
            region: 1,
            base: 0,
            block_stride: 2 * long,
            rows: 2,
            row_stride: long,
            row_bytes: long,
        },
    ];
    let first = 256 + 3 * u64::from(blocks) * (row_bytes + gap);
    let second = u64::from(blocks) * 2 * long;
    Layout::new(16, blocks, &[first, second], &groups).expect("rows are apart")
}

/// Layouts of about that row size and block count, as far as they are not too large.
fn layouts(row_bytes: u64, blocks: u32) -> Vec<(&'static str, Layout)> {
    let values = u32::try_from(row_bytes).expect("small");
    let mut all = vec![
        // One byte a value, 2 bytes, 4 bytes: the row sizes are what matters, not the type.
        (
            "stacked",
            Layout::stacked(4, blocks, 1, 1, values / 2, 1).expect("valid"),
        ),
        (
            "per layer",
            Layout::per_layer(3, blocks, 1, 1, values / 2, 2).expect("valid"),
        ),
        (
            "latent",
            Layout::latent(5, blocks, 1, values / 4, 4).expect("valid"),
        ),
        ("unequal", unequal(blocks, row_bytes)),
    ];
    all.retain(|(_, layout)| layout.regions().iter().sum::<u64>() <= POOL_BYTES_MAX);
    all
}

fn grid(config: impl Fn(u32) -> CudaConfig, rows: &[u64], counts: &[u32]) {
    let mut tried = 0;
    for &row_bytes in rows {
        for &blocks in counts {
            for (name, layout) in layouts(row_bytes, blocks) {
                let what = format!("{name}, rows of {row_bytes}, {blocks} blocks");
                round_trip(&layout, &config(layout.blocks()), &what);
                tried += 1;
            }
        }
    }
    assert!(tried >= rows.len(), "the grid is empty");
}

const ROWS: [u64; 8] = [
    64,
    512,
    2 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
];
const COUNTS: [u32; 6] = [1, 2, 3, 32, 514, 8_192];

fn config(slots: u32, path: PathChoice) -> CudaConfig {
    let mut config = CudaConfig::new(slots);
    config.path = path;
    config
}

#[test]
fn i09_every_layout_through_the_ring() {
    grid(|slots| config(slots, PathChoice::Ring), &ROWS, &COUNTS);
}

#[test]
fn i09_every_layout_by_the_measured_way() {
    grid(
        |slots| config(slots, PathChoice::Measured),
        &ROWS,
        &[1, 3, 32],
    );
}

#[test]
fn i09_every_layout_by_direct_copies() {
    grid(|slots| config(slots, PathChoice::Rows), &ROWS, &[1, 3, 32]);
}

#[test]
fn i09_small_slabs_two_streams_and_every_caching() {
    for slab_caching in [
        SlabCaching::EvictLast,
        SlabCaching::Persisting,
        SlabCaching::Plain,
    ] {
        let config = |slots| {
            let mut config = config(slots, PathChoice::Ring);
            let staging = StagingConfig {
                slabs: 2,
                slab_bytes: 64 << 10,
                copy_streams: 2,
            };
            config.staging_out = staging;
            config.staging_in = staging;
            config.slab_caching = slab_caching;
            config
        };
        grid(config, &[64, 4 << 10, 256 << 10], &[1, 3, 32, 514]);
    }
}

#[test]
fn i09_rows_that_are_aligned_to_nothing() {
    for row_bytes in [1, 3, 33, 36, 100, 4_097, 10_002] {
        for blocks in [1, 7, 64] {
            let layout = unequal(blocks, row_bytes);
            let what = format!("rows of {row_bytes}, {blocks} blocks");
            round_trip(&layout, &config(blocks, PathChoice::Ring), &what);
            round_trip(&layout, &config(blocks, PathChoice::Measured), &what);
        }
    }
}

#[test]
fn i09_both_directions_at_once() {
    let layout = Layout::stacked(8, 512, 16, 2, 64, 2).expect("64 MiB");
    let mut rig = Rig::new(layout.clone(), &CudaConfig::new(512));
    let mut image = Image::random(&rig, 1);
    let mut rng = Rng::new(2);
    let ids = shuffled(512, &mut rng);
    let (left, right) = ids.split_at(256);
    let pairs = |blocks: &[u32], slots: &[u32]| -> Vec<(u32, u32)> {
        blocks.iter().copied().zip(slots.iter().copied()).collect()
    };
    rig.finish(Direction::Out, &pairs(left, left));
    for round in 0..8 {
        // What lies in the slots of `left` comes into the blocks of `left`, while the blocks of
        // `right` go out.
        let parked: Vec<_> = left
            .iter()
            .map(|&slot| {
                rig.backend
                    .slot_bytes(SlotIndex::new(slot))
                    .expect("at rest")
            })
            .collect();
        let mut targets = left.to_vec();
        rng.shuffle(&mut targets);
        let digest = DigestWork::Compute;
        let out = rig.submit(Direction::Out, &pairs(right, right), Fence::NONE, digest);
        let back = pairs(&targets, left);
        let back = rig.submit(Direction::In, &back, Fence::NONE, DigestWork::Skip);
        let out = rig.wait(out);
        assert_eq!(rig.wait(back).outcome, kv_core::Outcome::Done);
        for (&block, digest) in right.iter().zip(&out.digests) {
            let bytes = image.block(&layout, block);
            assert_eq!(
                *digest,
                kv_core::Digest::of(&bytes),
                "round {round}, block {block}"
            );
        }
        for (&to, bytes) in targets.iter().zip(&parked) {
            image.set_block(&layout, to, bytes);
        }
        image.assert_is_what_the_gpu_holds(&rig, "both directions");
    }
}

/// The seed's exact round trip, with its geometry, in half precision and in brain floats: to the
/// copies both are two bytes a value.
#[test]
fn i09_the_seeds_tensor_comes_back_exactly_and_the_host_side_is_page_locked() {
    let layout = Layout::stacked(2, 16, 16, 2, 32, 2).expect("valid");
    let mut rig = Rig::new(layout.clone(), &CudaConfig::new(16));
    let image = Image::random(&rig, 5);
    let moves: Vec<_> = (0..8).map(|i| (i, 15 - i)).collect();
    rig.finish(Direction::Out, &moves);
    assert!(rig.backend.slot_is_page_locked(SlotIndex::new(15)));
    let back: Vec<_> = (0..8).map(|i| (i + 8, 15 - i)).collect();
    rig.finish(Direction::In, &back);
    for block in 0..8 {
        let found = rig
            .memory
            .read_block(BlockId::new(block + 8))
            .expect("a sound context");
        assert!(found == image.block(&layout, block));
    }
}
