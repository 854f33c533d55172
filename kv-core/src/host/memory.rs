//! The "GPU" pool in plain memory.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{BlockId, Fence, Layout, Span};

/// A pool of blocks in plain memory, with the steps that touch it.
///
/// A block's rows lie back to back in the order of [`Layout::rows`], as in a host slot; the
/// layout's strides matter only where memory is one flat region.
/// Shared between one executor and one backend.
pub struct PlainMemory {
    layout: Layout,
    rows: Vec<Range<usize>>,
    blocks: Vec<RwLock<Box<[u64]>>>,
    steps: Mutex<Steps>,
    step_over: Condvar,
}

#[derive(Debug, Default)]
struct Steps {
    started: u64,
    over: u64,
}

impl fmt::Debug for PlainMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainMemory")
            .field("layout", &self.layout)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl PlainMemory {
    /// Maps a pool, all bytes zero. Pages are taken from the system when first touched.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        let words = usize::try_from(layout.block_bytes().div_ceil(8))
            .expect("a block fits into the address space");
        let rows = layout
            .rows(BlockId::new(0))
            .map(|row| index(row.slot_offset)..index(row.slot_offset + row.bytes))
            .collect();
        let blocks = (0..layout.blocks())
            .map(|_| RwLock::new(vec![0u64; words].into_boxed_slice()))
            .collect();
        Self {
            layout,
            rows,
            blocks,
            steps: Mutex::default(),
            step_over: Condvar::new(),
        }
    }

    /// What the pool looks like.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Opens a block for reading, or `None` if somebody is writing it.
    ///
    /// # Panics
    ///
    /// If the block is not in the pool.
    #[must_use]
    pub fn read(&self, block: BlockId) -> Option<BlockRead<'_>> {
        let words = self.blocks[block.value() as usize].try_read()?;
        Some(BlockRead {
            memory: self,
            words,
        })
    }

    /// Opens a block for writing, or `None` if somebody is reading or writing it.
    ///
    /// # Panics
    ///
    /// If the block is not in the pool.
    #[must_use]
    pub fn write(&self, block: BlockId) -> Option<BlockWrite<'_>> {
        let words = self.blocks[block.value() as usize].try_write()?;
        Some(BlockWrite {
            memory: self,
            words,
        })
    }

    /// Starts a step; copies that must come after it wait until [`end_step`](Self::end_step).
    #[must_use]
    pub fn begin_step(&self) -> Fence {
        let mut steps = self.steps.lock();
        steps.started += 1;
        Fence::of_step(steps.started)
    }

    /// Ends a step and all earlier ones.
    pub fn end_step(&self, fence: Fence) {
        let mut steps = self.steps.lock();
        steps.over = steps.over.max(fence.step());
        drop(steps);
        self.step_over.notify_all();
    }

    /// Waits until the step is over, at most `limit`; says whether it is.
    #[must_use]
    pub fn wait_step(&self, fence: Fence, limit: Span) -> bool {
        let mut steps = self.steps.lock();
        let limit = limit.as_duration().min(Duration::from_secs(86_400));
        let wait = self
            .step_over
            .wait_while_for(&mut steps, |s| s.over < fence.step(), limit);
        !wait.timed_out()
    }
}

/// A block open for reading.
#[derive(Debug)]
pub struct BlockRead<'a> {
    memory: &'a PlainMemory,
    words: RwLockReadGuard<'a, Box<[u64]>>,
}

impl BlockRead<'_> {
    /// All rows back to back.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..index(self.memory.layout.block_bytes())]
    }

    /// One row, by its place in [`Layout::rows`].
    ///
    /// # Panics
    ///
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.memory.rows[row].clone()]
    }
}

/// A block open for writing.
#[derive(Debug)]
pub struct BlockWrite<'a> {
    memory: &'a PlainMemory,
    words: RwLockWriteGuard<'a, Box<[u64]>>,
}

impl BlockWrite<'_> {
    /// All rows back to back.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..index(self.memory.layout.block_bytes())]
    }

    /// All rows back to back, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = index(self.memory.layout.block_bytes());
        &mut bytemuck::cast_slice_mut(&mut self.words)[..bytes]
    }

    /// One row, by its place in [`Layout::rows`].
    ///
    /// # Panics
    ///
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.memory.rows[row].clone()]
    }

    /// One row, to be written.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    #[must_use]
    pub fn row_mut(&mut self, row: usize) -> &mut [u8] {
        let range = self.memory.rows[row].clone();
        &mut bytemuck::cast_slice_mut(&mut self.words)[range]
    }
}

/// An offset inside a block whose length was checked to fit into memory.
fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("a block fits into the address space")
}
