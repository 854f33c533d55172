//! What a copy means, spelled out row by row over flat memory: the reference for kernels and for
//! layouts.

use alloc::vec;
use alloc::vec::Vec;

use crate::{BlockId, Layout, Row};

/// A pool in flat regions, with the strides that its layout says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatPool {
    layout: Layout,
    regions: Vec<Vec<u8>>,
}

impl FlatPool {
    /// A pool of zeros.
    ///
    /// # Panics
    ///
    /// If a region doesn't fit into memory.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        let regions = layout
            .regions()
            .iter()
            .map(|&bytes| vec![0; place(bytes)])
            .collect();
        Self { layout, regions }
    }

    /// What it looks like.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The memory itself, region by region.
    #[must_use]
    pub fn regions(&self) -> &[Vec<u8>] {
        &self.regions
    }

    /// The memory itself, to be written.
    #[must_use]
    pub fn regions_mut(&mut self) -> &mut [Vec<u8>] {
        &mut self.regions
    }

    /// A block's rows, back to back: what an `Out` puts into a slot.
    #[must_use]
    pub fn gather(&self, block: BlockId) -> Vec<u8> {
        let mut slot = vec![0; place(self.layout.block_bytes())];
        for row in self.layout.rows(block) {
            let (region, from, to) = places(&row);
            slot[to].copy_from_slice(&self.regions[region][from]);
        }
        slot
    }

    /// Writes a slot into a block's rows: what an `In` does.
    ///
    /// # Panics
    ///
    /// If the slot doesn't have the length of a block.
    pub fn scatter(&mut self, block: BlockId, slot: &[u8]) {
        assert_eq!(
            slot.len() as u64,
            self.layout.block_bytes(),
            "length of a slot"
        );
        for row in self.layout.rows(block) {
            let (region, to, from) = places(&row);
            self.regions[region][to].copy_from_slice(&slot[from]);
        }
    }
}

/// The region, the row's bytes in it, and its bytes in the slot.
fn places(row: &Row) -> (usize, core::ops::Range<usize>, core::ops::Range<usize>) {
    let span = |start: u64| place(start)..place(start + row.bytes);
    (row.region as usize, span(row.offset), span(row.slot_offset))
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).expect("the pool fits into memory")
}
