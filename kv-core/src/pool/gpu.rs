//! GPU blocks.

use alloc::vec;
use alloc::vec::Vec;

use crate::{BlockId, GpuBlocks};

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Nobody.
    Free,
    /// A table.
    Allocated,
    /// A flight out.
    Evicting,
    /// A flight in.
    Restoring,
    /// Nobody, for ever.
    Lost,
}

/// All GPU blocks. Every change of hands goes through [`GpuPool::pass`], which refuses what the
/// life cycle doesn't have.
#[derive(Debug)]
pub(crate) struct GpuPool {
    states: Vec<BlockState>,
    free: Vec<BlockId>,
    counts: GpuBlocks,
}

impl GpuPool {
    pub(crate) fn new(blocks: u32) -> Self {
        Self {
            states: vec![BlockState::Free; blocks as usize],
            // The lowest id is taken first.
            free: (0..blocks).rev().map(BlockId::new).collect(),
            counts: GpuBlocks {
                total: blocks,
                free: blocks,
                ..GpuBlocks::default()
            },
        }
    }

    pub(crate) const fn counts(&self) -> GpuBlocks {
        self.counts
    }

    pub(crate) const fn free(&self) -> u32 {
        self.counts.free
    }

    /// Takes a free block, or `None` if there is none.
    pub(crate) fn take(&mut self, to: BlockState) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.set(block, BlockState::Free, to);
        Some(block)
    }

    /// Hands a block from one kind of holder to another.
    pub(crate) fn pass(&mut self, block: BlockId, from: BlockState, to: BlockState) {
        assert!(
            from != BlockState::Free,
            "{block:?} is taken with `take` only"
        );
        self.set(block, from, to);
        if to == BlockState::Free {
            self.free.push(block);
        }
    }

    /// Puts a block that is still held into the free list: a planted fault.
    pub(crate) fn plant_free(&mut self, block: BlockId) {
        self.free.push(block);
    }

    fn set(&mut self, block: BlockId, from: BlockState, to: BlockState) {
        use BlockState as B;
        let state = &mut self.states[block.value() as usize];
        assert!(
            *state == from,
            "{block:?} is {state:?}, not {from:?}, and can't become {to:?}"
        );
        let legal = matches!(
            (from, to),
            (B::Free, B::Allocated | B::Restoring)
                | (B::Allocated, B::Free | B::Evicting)
                | (B::Evicting, B::Free | B::Allocated | B::Lost)
                | (B::Restoring, B::Free | B::Allocated | B::Lost)
        );
        assert!(legal, "{block:?} can't go from {from:?} to {to:?}");
        *state = to;
        *self.count(from) -= 1;
        *self.count(to) += 1;
    }

    const fn count(&mut self, state: BlockState) -> &mut u32 {
        match state {
            BlockState::Free => &mut self.counts.free,
            BlockState::Allocated => &mut self.counts.allocated,
            BlockState::Evicting => &mut self.counts.evicting,
            BlockState::Restoring => &mut self.counts.restoring,
            BlockState::Lost => &mut self.counts.lost,
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn states(&self) -> &[BlockState] {
        &self.states
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn free_list(&self) -> &[BlockId] {
        &self.free
    }
}
