//! Pieces, segments and runs put together again give the payload, for any layout.

use kv_core::{BlockId, Layout, RowGroup};
use proptest::prelude::*;

use super::{Cursor, Run, SEGMENT_BYTES_MAX, Shape, Width, runs};

/// Regions one after the other, at addresses that leave room between them.
fn bases(layout: &Layout) -> Vec<u64> {
    let mut at = 1 << 20;
    layout
        .regions()
        .iter()
        .map(|bytes| {
            let base = at;
            at += bytes.next_multiple_of(256) + 256;
            base
        })
        .collect()
}

fn layouts() -> impl Strategy<Value = Layout> {
    let rows = prop_oneof![
        Just(1u64),
        Just(64),
        Just(100),
        Just(2048),
        Just(4096),
        Just(9_216)
    ];
    (
        1u32..6,
        1u32..20,
        proptest::collection::vec((1u32..5, rows, 0u64..3), 1..4),
    )
        .prop_map(|(tokens, blocks, groups)| {
            let mut regions = Vec::new();
            let mut described = Vec::new();
            for (region, (rows, row_bytes, gap)) in groups.into_iter().enumerate() {
                let block_stride = row_bytes + gap * 16;
                let row_stride = block_stride * u64::from(blocks);
                regions.push(row_stride * u64::from(rows));
                described.push(RowGroup {
                    region: u32::try_from(region).expect("few"),
                    base: 0,
                    block_stride,
                    rows,
                    row_stride,
                    row_bytes,
                });
            }
            Layout::new(tokens, blocks, &regions, &described).expect("rows are apart")
        })
}

/// What the kernels and the copy engine do with a command: (pool address, host address) per byte.
fn bytes_moved(
    layout: &Layout,
    shape: &Shape,
    moves: &[(u32, u64)],
    slab_bytes: u64,
) -> Vec<(u64, u64)> {
    let mut moved = Vec::new();
    let mut cursor = Cursor::default();
    while let Some(piece) = shape.next_piece(&mut cursor, moves.len(), slab_bytes) {
        assert!(piece.bytes <= slab_bytes, "{piece:?}");
        let mut slab = vec![None; usize::try_from(piece.bytes).expect("small")];
        let start = shape.segments[piece.first_segment as usize].slot_offset;
        for item in 0..piece.items {
            let place = piece.first_segment + item;
            let block = place / shape.segments_per_block();
            let segment = shape.segments[(place % shape.segments_per_block()) as usize];
            let id = moves[piece.first_move + block as usize].0;
            let pool = segment.address + u64::from(id) * segment.block_stride;
            let at = u64::from(block) * shape.block_bytes + segment.slot_offset - start;
            for byte in 0..segment.bytes {
                let cell = &mut slab[usize::try_from(at + byte).expect("small")];
                assert_eq!(*cell, None, "two segments meet in the slab");
                *cell = Some(pool + byte);
            }
        }
        let mut stretches = Vec::new();
        let places = moves[piece.first_move..].iter().map(|&(_, host)| (host, 0));
        runs(&piece, layout.block_bytes(), places, &mut stretches);
        for Run { gpu, host, bytes } in stretches {
            for byte in 0..bytes {
                let cell = slab[usize::try_from(gpu + byte).expect("small")];
                moved.push((cell.expect("every byte of the slab is filled"), host + byte));
            }
        }
    }
    moved
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn i09_every_byte_goes_to_its_place_once(
        layout in layouts(),
        slab_bytes in prop_oneof![Just(SEGMENT_BYTES_MAX), Just(10_000), Just(1 << 16)],
        order in Just((0u32..40).collect::<Vec<_>>()).prop_shuffle(),
        close in any::<bool>(),
    ) {
        let bases = bases(&layout);
        let shape = Shape::new(&layout, &bases).expect("matching lists");
        let gap = if close { 0 } else { 64 };
        let moves: Vec<(u32, u64)> = order
            .iter()
            .filter(|&&id| id < layout.blocks())
            .enumerate()
            .map(|(slot, &id)| (id, (1 << 40) + slot as u64 * (layout.block_bytes() + gap)))
            .collect();
        let mut expected = Vec::new();
        for &(id, host) in &moves {
            for row in layout.rows(BlockId::new(id)) {
                for byte in 0..row.bytes {
                    let pool = bases[row.region as usize] + row.offset + byte;
                    expected.push((pool, host + row.slot_offset + byte));
                }
            }
        }
        let mut moved = bytes_moved(&layout, &shape, &moves, slab_bytes);
        moved.sort_unstable();
        expected.sort_unstable();
        prop_assert!(moved == expected);
    }
}

#[test]
fn neighbouring_slots_are_one_run_but_not_over_the_border_of_a_chunk() {
    let layout = Layout::stacked(2, 8, 16, 2, 32, 2).expect("valid");
    let shape = Shape::new(&layout, &[4096]).expect("one region");
    let bytes = layout.block_bytes();
    let mut cursor = Cursor::default();
    let piece = shape
        .next_piece(&mut cursor, 4, 1 << 20)
        .expect("four moves");
    let mut found = Vec::new();
    let places = [(0, 0), (bytes, 0), (2 * bytes, 1), (3 * bytes, 1)];
    runs(&piece, bytes, places.into_iter(), &mut found);
    let lengths: Vec<_> = found.iter().map(|run| run.bytes).collect();
    assert_eq!(lengths, [2 * bytes, 2 * bytes]);
}

#[test]
fn blocks_that_fit_into_a_slab_are_not_cut() {
    let layout = Layout::stacked(4, 8, 16, 8, 64, 2).expect("valid");
    let shape = Shape::new(&layout, &[4096]).expect("one region");
    let slab = layout.block_bytes() * 2 + 4096;
    let mut cursor = Cursor::default();
    let mut sizes = Vec::new();
    while let Some(piece) = shape.next_piece(&mut cursor, 5, slab) {
        sizes.push(piece.moves);
        assert_eq!(piece.offset, 0);
    }
    assert_eq!(sizes, [2, 2, 1]);
}

#[test]
fn accesses_are_as_wide_as_everything_is_aligned() {
    for (row_bytes, base, width) in [
        (64, 256, Width::Sixteen),
        (64, 260, Width::Four),
        (36, 256, Width::Four),
        (33, 256, Width::One),
        (64, 258, Width::One),
    ] {
        let group = RowGroup {
            region: 0,
            base: 0,
            block_stride: row_bytes,
            rows: 1,
            row_stride: row_bytes,
            row_bytes,
        };
        let layout = Layout::new(1, 4, &[row_bytes * 4], &[group]).expect("valid");
        let shape = Shape::new(&layout, &[base]).expect("one region");
        assert_eq!(shape.width, width, "rows of {row_bytes} at {base}");
    }
}
