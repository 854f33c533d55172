//! Layouts: what is accepted is sound, what is refused is named, and nothing panics.

#![expect(
    clippy::unwrap_used,
    reason = "the switches for tests don't reach helper functions in integration tests"
)]

use kv_core::testing::{FlatPool, Rng};
use kv_core::{BlockId, Layout, LayoutError, RowGroup};
use proptest::prelude::*;

/// Every row of every block, with its row group: (region, start, end, group).
fn all_rows(groups: &[RowGroup], blocks: u32) -> Vec<(u32, u64, u64, usize)> {
    let mut rows = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        for block in 0..u64::from(blocks) {
            for row in 0..u64::from(group.rows) {
                let start = group.base + block * group.block_stride + row * group.row_stride;
                rows.push((group.region, start, start + group.row_bytes, index));
            }
        }
    }
    rows
}

/// The pairs of row groups of which two different rows share bytes.
fn overlaps(rows: &[(u32, u64, u64, usize)]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for (at, a) in rows.iter().enumerate() {
        for b in &rows[..at] {
            if a.0 == b.0 && a.1 < b.2 && b.1 < a.2 {
                pairs.push((a.3.min(b.3), a.3.max(b.3)));
            }
        }
    }
    pairs
}

/// Small descriptions without rhyme or reason: many overlap, many are out of bounds.
fn wild_groups() -> impl Strategy<Value = Vec<RowGroup>> {
    let group = (
        0..3_u32,
        0..40_u64,
        0..40_u64,
        1..4_u32,
        0..40_u64,
        1..10_u64,
    );
    let group = group.prop_map(
        |(region, base, block_stride, rows, row_stride, row_bytes)| RowGroup {
            region,
            base,
            block_stride,
            rows,
            row_stride,
            row_bytes,
        },
    );
    prop::collection::vec(group, 1..4)
}

/// Sound descriptions with gaps: each group has a stretch of a region for itself, with blocks
/// inside rows or rows inside blocks.
fn sound() -> impl Strategy<Value = (u32, Vec<u64>, Vec<RowGroup>)> {
    let group = (
        0..3_u32,
        1..5_u32,
        1..20_u64,
        0..9_u64,
        0..9_u64,
        any::<bool>(),
    );
    (1..6_u32, prop::collection::vec(group, 1..5)).prop_map(|(blocks, groups)| {
        let mut regions = vec![3_u64; 3];
        let groups = groups
            .into_iter()
            .map(|(region, rows, row_bytes, gap_in, gap_out, rows_inside)| {
                let inner = row_bytes + gap_in;
                let inner_count = if rows_inside { rows } else { blocks };
                let outer_count = if rows_inside { blocks } else { rows };
                let outer = inner * u64::from(inner_count) + gap_out;
                let end = &mut regions[region as usize];
                let base = *end;
                *end += outer * u64::from(outer_count);
                let (row_stride, block_stride) = if rows_inside {
                    (inner, outer)
                } else {
                    (outer, inner)
                };
                RowGroup {
                    region,
                    base,
                    block_stride,
                    rows,
                    row_stride,
                    row_bytes,
                }
            })
            .collect();
        (blocks, regions, groups)
    })
}

/// What must hold for every accepted layout.
fn assert_sound(layout: &Layout) {
    let mut seen = Vec::new();
    for block in 0..layout.blocks() {
        let mut slot_end = 0;
        let mut rows = 0;
        for row in layout.rows(BlockId::new(block)) {
            assert_eq!(
                row.slot_offset, slot_end,
                "rows lie back to back in the slot"
            );
            slot_end += row.bytes;
            rows += 1;
            assert!(row.offset + row.bytes <= layout.regions()[row.region as usize]);
            seen.push((row.region, row.offset, row.offset + row.bytes, 0));
        }
        assert_eq!(
            slot_end,
            layout.block_bytes(),
            "the rows cover the slot exactly"
        );
        assert_eq!(rows, layout.rows_per_block());
    }
    assert_eq!(overlaps(&seen), [], "rows share bytes");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_024, ..ProptestConfig::default() })]

    #[test]
    fn sound_descriptions_are_accepted((blocks, regions, groups) in sound()) {
        let layout = Layout::new(16, blocks, &regions, &groups);
        prop_assert!(layout.is_ok(), "{:?}", layout);
        assert_sound(&layout.unwrap());
    }

    #[test]
    fn the_answer_is_that_of_looking_at_every_pair_of_rows(
        groups in wild_groups(),
        blocks in 1..6_u32,
        region_bytes in 1..300_u64,
    ) {
        let regions = [region_bytes, region_bytes];
        let rows = all_rows(&groups, blocks);
        let overlapping = overlaps(&rows);
        match Layout::new(16, blocks, &regions, &groups) {
            Ok(layout) => assert_sound(&layout),
            Err(LayoutError::NoSuchRegion { index, region, regions }) => {
                prop_assert_eq!(groups[index].region, region);
                prop_assert!(region as usize >= regions);
            }
            Err(LayoutError::OutOfBounds { index, end, region_bytes }) => {
                prop_assert!(end > region_bytes);
                let last = rows.iter().filter(|row| row.3 == index).map(|row| row.2).max();
                prop_assert_eq!(last, Some(end));
            }
            Err(LayoutError::Overlap { first, second, region }) => {
                let pair = (first.min(second), first.max(second));
                prop_assert!(overlapping.contains(&pair), "{:?} of {:?}", pair, overlapping);
                prop_assert_eq!(groups[first].region, region);
                prop_assert_eq!(groups[second].region, region);
            }
            Err(other) => prop_assert!(false, "{other} for {groups:?}"),
        }
    }

    #[test]
    fn no_numbers_make_it_panic(
        block_tokens in any::<u32>(),
        blocks in 0..9_u32,
        regions in prop::collection::vec(extreme(), 0..3),
        groups in prop::collection::vec(
            (0..3_u32, extreme(), extreme(), 0..9_u32, extreme(), extreme()),
            0..4,
        ),
    ) {
        let groups: Vec<_> = groups
            .into_iter()
            .map(|(region, base, block_stride, rows, row_stride, row_bytes)| RowGroup {
                region,
                base,
                block_stride,
                rows,
                row_stride,
                row_bytes,
            })
            .collect();
        if let Ok(layout) = Layout::new(block_tokens, blocks, &regions, &groups) {
            assert_sound(&layout);
        }
    }

    #[test]
    fn i09_scattered_blocks_gather_to_the_same_bytes((blocks, regions, groups) in sound(),
                                                    seed in any::<u64>()) {
        let layout = Layout::new(16, blocks, &regions, &groups).unwrap();
        let mut pool = FlatPool::new(layout);
        let mut rng = Rng::new(seed);
        // Gaps are nobody's: whatever is there stays there.
        for region in pool.regions_mut() {
            rng.fill(region);
        }
        let before = pool.clone();
        let len = usize::try_from(pool.layout().block_bytes()).unwrap();
        let slots: Vec<_> = (0..blocks)
            .map(|_| {
                let mut slot = vec![0; len];
                rng.fill(&mut slot);
                slot
            })
            .collect();
        for (block, slot) in (0..).zip(&slots) {
            pool.scatter(BlockId::new(block), slot);
        }
        for (block, slot) in (0..).zip(&slots) {
            prop_assert_eq!(&pool.gather(BlockId::new(block)), slot);
        }
        let mut owned: Vec<Vec<bool>> =
            pool.regions().iter().map(|region| vec![false; region.len()]).collect();
        for (region, start, end, _) in all_rows(&groups, blocks) {
            let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
            owned[region as usize][range].fill(true);
        }
        for (region, owned) in owned.iter().enumerate() {
            for (at, _) in owned.iter().enumerate().filter(|(_, owned)| !**owned) {
                prop_assert_eq!(pool.regions()[region][at], before.regions()[region][at]);
            }
        }
    }
}

/// Numbers near both ends and in the middle.
fn extreme() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..20_u64,
        (0..20_u64).prop_map(|less| u64::MAX - less),
        any::<u64>()
    ]
}

const GROUP: RowGroup = RowGroup {
    region: 0,
    base: 0,
    block_stride: 8,
    rows: 2,
    row_stride: 32,
    row_bytes: 8,
};

/// Changes one thing about a good description of 4 blocks in 64 bytes.
fn refused(change: impl FnOnce(&mut RowGroup)) -> LayoutError {
    let mut group = GROUP;
    change(&mut group);
    Layout::new(16, 4, &[64], &[group]).unwrap_err()
}

#[test]
fn each_zero_is_named() {
    assert!(Layout::new(16, 4, &[64], &[GROUP]).is_ok());
    let what = |result: Result<Layout, LayoutError>| match result {
        Err(LayoutError::Zero { what }) => what,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(what(Layout::new(0, 4, &[64], &[GROUP])), "block_tokens");
    assert_eq!(what(Layout::new(16, 0, &[64], &[GROUP])), "blocks");
    assert_eq!(what(Layout::new(16, 4, &[64], &[])), "number of row groups");
    assert_eq!(
        refused(|group| group.rows = 0),
        LayoutError::Zero { what: "rows" }
    );
    assert_eq!(
        refused(|group| group.row_bytes = 0),
        LayoutError::Zero { what: "row_bytes" }
    );
}

#[test]
fn each_reach_is_named() {
    let missing = refused(|group| group.region = 1);
    assert_eq!(
        missing,
        LayoutError::NoSuchRegion {
            index: 0,
            region: 1,
            regions: 1
        }
    );
    let beyond = refused(|group| group.base = 1);
    assert_eq!(
        beyond,
        LayoutError::OutOfBounds {
            index: 0,
            end: 65,
            region_bytes: 64
        }
    );
    for change in [
        (|group| group.base = u64::MAX) as fn(&mut RowGroup),
        |group| group.block_stride = u64::MAX,
        |group| group.row_stride = u64::MAX,
        |group| group.row_bytes = u64::MAX,
    ] {
        assert_eq!(refused(change), LayoutError::Overflow { index: 0 });
    }
}

#[test]
fn each_overlap_is_named() {
    let own = LayoutError::Overlap {
        first: 0,
        second: 0,
        region: 0,
    };
    assert_eq!(refused(|group| group.block_stride = 7), own);
    assert_eq!(refused(|group| group.block_stride = 0), own);
    assert_eq!(refused(|group| group.row_stride = 31), own);
    assert_eq!(refused(|group| group.row_stride = 0), own);
    let other = RowGroup {
        base: 60,
        rows: 1,
        block_stride: 1,
        row_bytes: 1,
        ..GROUP
    };
    let two = Layout::new(16, 4, &[64], &[GROUP, other]).unwrap_err();
    assert_eq!(
        two,
        LayoutError::Overlap {
            first: 0,
            second: 1,
            region: 0
        }
    );
}

#[test]
fn interleaved_groups_that_do_not_meet_are_accepted() {
    // K and V of a layer side by side in one region, as two row groups.
    let keys = RowGroup {
        block_stride: 16,
        row_stride: 64,
        ..GROUP
    };
    let values = RowGroup { base: 8, ..keys };
    let layout = Layout::new(16, 4, &[128], &[keys, values]).unwrap();
    assert_sound(&layout);
    assert_eq!(layout.rows_per_block(), 4);
}

#[test]
fn the_usual_shapes_have_the_expected_rows() {
    let stacked = Layout::stacked(3, 5, 4, 2, 8, 2).unwrap();
    assert_sound(&stacked);
    assert_eq!(
        (stacked.rows_per_block(), stacked.block_bytes()),
        (3, 3 * 2 * 4 * 2 * 8 * 2)
    );
    let planes = Layout::per_layer(3, 5, 4, 2, 8, 2).unwrap();
    assert_sound(&planes);
    assert_eq!((planes.rows_per_block(), planes.regions().len()), (6, 6));
    let latent = Layout::latent(3, 5, 16, 576, 2).unwrap();
    assert_sound(&latent);
    assert_eq!(
        (latent.rows_per_block(), latent.block_bytes()),
        (3, 3 * 16 * 576 * 2)
    );
}

#[test]
fn shapes_beyond_64_bits_are_refused() {
    let max = u32::MAX;
    let overflow = Err(LayoutError::Overflow { index: 0 });
    assert_eq!(Layout::stacked(1, 1, max, max, max, max), overflow);
    assert_eq!(Layout::stacked(max, max, max, 1, 1, 1), overflow);
    assert_eq!(Layout::per_layer(1, 1, max, max, max, max), overflow);
    assert_eq!(Layout::latent(1, max, max, max, 1), overflow);
    assert!(matches!(
        Layout::stacked(0, 1, 1, 1, 1, 1),
        Err(LayoutError::Zero { .. })
    ));
    assert!(matches!(
        Layout::per_layer(0, 1, 1, 1, 1, 1),
        Err(LayoutError::Zero { .. })
    ));
    assert!(matches!(
        Layout::latent(1, 1, 1, 0, 1),
        Err(LayoutError::Zero { .. })
    ));
}

#[test]
fn fingerprints_tell_shapes_apart_and_ignore_places() {
    let layout = Layout::new(16, 4, &[64], &[GROUP]).unwrap();
    let moved = RowGroup {
        base: 100,
        row_stride: 200,
        ..GROUP
    };
    let elsewhere = Layout::new(16, 3, &[1_000], &[moved]).unwrap();
    assert_eq!(layout.fingerprint(), elsewhere.fingerprint());
    let tokens = Layout::new(8, 4, &[64], &[GROUP]).unwrap();
    let rows = Layout::new(16, 4, &[64], &[RowGroup { rows: 1, ..GROUP }]).unwrap();
    let length = Layout::new(
        16,
        4,
        &[64],
        &[RowGroup {
            row_bytes: 4,
            ..GROUP
        }],
    )
    .unwrap();
    for other in [tokens, rows, length] {
        assert_ne!(layout.fingerprint(), other.fingerprint());
    }
}
