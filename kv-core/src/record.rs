//! One group: its choices' tables over shared blocks, and where the bytes of each block are.

use alloc::vec::Vec;

use crate::{BlockId, Choice, Digest, Metadata, RecordKey, RecordState, SlotIndex, TicketId};

/// One logical block of a group. Choices that share a prompt share its cells.
#[derive(Debug)]
pub(crate) struct Cell {
    /// Place on the GPU.
    pub(crate) block: Option<BlockId>,
    /// Place on the host: the only copy when `block` is none, else a clean copy or the target of
    /// a running flight.
    pub(crate) slot: Option<SlotIndex>,
    /// Digest of the bytes in `slot`.
    pub(crate) digest: Option<Digest>,
    /// How many tables name this cell. 0: the place in the list is unused.
    pub(crate) refs: u32,
}

/// The blocks of one choice, in order.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Indices into the record's cells.
    pub(crate) cells: Vec<u32>,
    /// The same blocks by GPU id; empty unless the group is on the GPU, so that nobody can read a
    /// half-restored table.
    pub(crate) published: Vec<BlockId>,
    /// Tokens whose KV is stored.
    pub(crate) tokens: u32,
}

/// One life of a group.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) key: RecordKey,
    pub(crate) state: RecordState,
    pub(crate) cells: Vec<Cell>,
    pub(crate) unused_cells: Vec<u32>,
    /// One per choice; none when the choice was released.
    pub(crate) tables: Vec<Option<Table>>,
    /// Of the bytes on the host.
    pub(crate) metadata: Option<Metadata>,
    /// The last flight.
    pub(crate) ticket: Option<TicketId>,
    /// Whether that flight ended because the host bytes were damaged.
    pub(crate) corrupt: bool,
}

impl Record {
    pub(crate) fn new(key: RecordKey, choices: u32) -> Self {
        Self {
            key,
            state: RecordState::GpuResident,
            cells: Vec::new(),
            unused_cells: Vec::new(),
            tables: (0..choices).map(|_| Some(Table::default())).collect(),
            metadata: None,
            ticket: None,
            corrupt: false,
        }
    }

    pub(crate) fn table(&self, choice: Choice) -> Option<&Table> {
        self.tables.get(choice.value() as usize)?.as_ref()
    }

    pub(crate) fn table_mut(&mut self, choice: Choice) -> Option<&mut Table> {
        self.tables.get_mut(choice.value() as usize)?.as_mut()
    }

    /// Adds a cell that one table names.
    pub(crate) fn add_cell(&mut self, block: BlockId) -> u32 {
        let cell = Cell {
            block: Some(block),
            slot: None,
            digest: None,
            refs: 1,
        };
        if let Some(index) = self.unused_cells.pop() {
            self.cells[index as usize] = cell;
            return index;
        }
        self.cells.push(cell);
        u32::try_from(self.cells.len() - 1).expect("a group has at most as many cells as blocks")
    }

    /// All cells in use with their indices.
    pub(crate) fn live_cells(&self) -> impl Iterator<Item = (u32, &Cell)> {
        (0u32..).zip(&self.cells).filter(|(_, cell)| cell.refs > 0)
    }

    /// Makes the tables readable again after all blocks are back.
    pub(crate) fn publish(&mut self) {
        let cells = &self.cells;
        for table in self.tables.iter_mut().flatten() {
            table.published.clear();
            table.published.extend(table.cells.iter().map(|&cell| {
                cells[cell as usize]
                    .block
                    .expect("a table is published when all blocks are there")
            }));
        }
    }

    /// Makes the tables unreadable.
    pub(crate) fn hide(&mut self) {
        for table in self.tables.iter_mut().flatten() {
            table.published.clear();
        }
    }
}
