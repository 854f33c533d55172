//! Blocks of groups on the GPU: append, fork, release.

use alloc::vec::Vec;

use crate::pool::{BlockState, SlotState};
use crate::record::Table;
use crate::{
    BlockId, Choice, Lease, Machine, OnGpu, Place, PlantedFault, RecordState, Refusal, Refused,
    Stimulus, Ticket, Time,
};

/// A block that several choices shared is about to be written by one of them: before the next
/// step, its content must be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOnWrite {
    /// The shared block.
    pub from: BlockId,
    /// The block that this choice writes from now on.
    pub to: BlockId,
}

/// What an append would take.
#[derive(Clone, Copy, Debug)]
struct Growth {
    new_blocks: u32,
    copies_tail: bool,
}

impl Growth {
    const fn blocks(self) -> u32 {
        self.new_blocks + if self.copies_tail { 1 } else { 0 }
    }
}

impl Machine {
    fn growth(&self, table: &Table, cells: &[crate::record::Cell], tokens: u32) -> Growth {
        let block_tokens = self.config.block_tokens;
        let blocks = table.tokens.saturating_add(tokens).div_ceil(block_tokens);
        let has = u32::try_from(table.cells.len()).expect("tables are smaller than the pool");
        let shared = |cell: u32| cells[cell as usize].refs > 1;
        let partly_filled = !table.tokens.is_multiple_of(block_tokens);
        let copies_tail =
            tokens > 0 && partly_filled && table.cells.last().is_some_and(|&cell| shared(cell));
        Growth {
            new_blocks: blocks - has,
            copies_tail,
        }
    }

    /// How many free blocks it would take to append `tokens(choice)` tokens to every choice of a
    /// group that has any. On the host: beyond the blocks that it has there.
    ///
    /// Exact also where choices share a block: whoever writes it last writes it in place.
    #[must_use]
    pub fn blocks_to_append<P: Place>(
        &self,
        lease: &Lease<P>,
        mut tokens: impl FnMut(Choice) -> u32,
    ) -> u32 {
        if !self.owns(lease) {
            return 0;
        }
        let record = self.record(lease.index);
        let mut blocks = 0;
        // Shared tails that are going to be written, and by how many choices.
        let mut tails: Vec<(u32, u32)> = Vec::new();
        for (choice, table) in (0u32..).map(Choice::new).zip(&record.tables) {
            let Some(table) = table else { continue };
            let growth = self.growth(table, &record.cells, tokens(choice));
            blocks += growth.new_blocks;
            if let Some(&tail) = table.cells.last().filter(|_| growth.copies_tail) {
                match tails.iter_mut().find(|(cell, _)| *cell == tail) {
                    Some((_, writers)) => *writers += 1,
                    None => tails.push((tail, 1)),
                }
            }
        }
        for (cell, writers) in tails {
            let in_place = u32::from(record.cells[cell as usize].refs == writers);
            blocks += writers - in_place;
        }
        blocks
    }

    /// Makes room for the KV of `tokens` further tokens of one choice, which the next step is
    /// going to write. All or nothing.
    ///
    /// Clean copies of blocks that are going to be written are given up.
    ///
    /// # Errors
    ///
    /// [`Refusal::GpuBlocks`], [`Refusal::NoSuchChoice`] or [`Refusal::Foreign`].
    pub fn append(
        &mut self,
        lease: &Lease<OnGpu>,
        choice: Choice,
        tokens: u32,
    ) -> Result<Option<CopyOnWrite>, Refusal> {
        if !self.owns(lease) {
            return Err(Refusal::Foreign);
        }
        let record = self.record(lease.index);
        let table = record.table(choice).ok_or(Refusal::NoSuchChoice)?;
        let growth = self.growth(table, &record.cells, tokens);
        let (needed, free) = (growth.blocks(), self.gpu.free());
        if needed > free {
            return Err(Refusal::GpuBlocks { needed, free });
        }
        let copy = self.make_tail_writable(lease.index, choice, tokens, growth);
        for _ in 0..growth.new_blocks {
            let block = self
                .gpu
                .take(BlockState::Allocated)
                .expect("enough blocks are free");
            let record = self.record_mut(lease.index);
            let cell = record.add_cell(block);
            let table = record
                .table_mut(choice)
                .expect("the choice was found above");
            table.cells.push(cell);
            table.published.push(block);
        }
        let table = self.record_mut(lease.index).table_mut(choice);
        table.expect("the choice was found above").tokens += tokens;
        Ok(copy)
    }

    /// The last block, if it is partly filled, is going to be written: it must be this choice's
    /// alone, and its clean copy is out of date.
    fn make_tail_writable(
        &mut self,
        index: u32,
        choice: Choice,
        tokens: u32,
        growth: Growth,
    ) -> Option<CopyOnWrite> {
        let block_tokens = self.config.block_tokens;
        let Self {
            gpu, host, records, ..
        } = self;
        let record = records[index as usize].as_mut()?;
        let table = record.table(choice)?;
        if tokens == 0 || table.tokens.is_multiple_of(block_tokens) {
            return None;
        }
        let tail = *table.cells.last()?;
        if growth.copies_tail {
            let to = gpu
                .take(BlockState::Allocated)
                .expect("enough blocks are free");
            let shared = &mut record.cells[tail as usize];
            let from = shared
                .block
                .expect("groups on the GPU have all blocks there");
            shared.refs -= 1;
            let cell = record.add_cell(to);
            let table = record.table_mut(choice)?;
            *table.cells.last_mut()? = cell;
            *table.published.last_mut()? = to;
            return Some(CopyOnWrite { from, to });
        }
        let cell = &mut record.cells[tail as usize];
        if PlantedFault::TrustStaleCopy.is_on() {
            return None;
        }
        cell.digest = None;
        if let Some(slot) = cell.slot.take() {
            host.pass(slot, SlotState::Clean, SlotState::Free);
        }
        None
    }

    /// Gives an empty choice the same blocks and tokens as another one. Takes no block.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoSuchChoice`], [`Refusal::ChoiceNotEmpty`] or [`Refusal::Foreign`].
    pub fn fork(&mut self, lease: &Lease<OnGpu>, from: Choice, to: Choice) -> Result<(), Refusal> {
        if !self.owns(lease) {
            return Err(Refusal::Foreign);
        }
        let record = self.record_mut(lease.index);
        let source = record.table(from).ok_or(Refusal::NoSuchChoice)?;
        let copy = Table {
            cells: source.cells.clone(),
            published: source.published.clone(),
            tokens: source.tokens,
        };
        let target = record.table_mut(to).ok_or(Refusal::NoSuchChoice)?;
        if target.tokens > 0 {
            return Err(Refusal::ChoiceNotEmpty);
        }
        let cells = copy.cells.clone();
        *target = copy;
        for cell in cells {
            record.cells[cell as usize].refs += 1;
        }
        Ok(())
    }

    /// The block table of a choice, in order; empty for an unknown choice.
    #[must_use]
    pub fn table(&self, lease: &Lease<OnGpu>, choice: Choice) -> &[BlockId] {
        if !self.owns(lease) {
            return &[];
        }
        self.record(lease.index)
            .table(choice)
            .map_or(&[], |table| &table.published)
    }

    /// Tokens of a choice whose KV is stored; 0 for an unknown choice.
    #[must_use]
    pub fn tokens<P: Place>(&self, lease: &Lease<P>, choice: Choice) -> u32 {
        if !self.owns(lease) {
            return 0;
        }
        self.record(lease.index)
            .table(choice)
            .map_or(0, |table| table.tokens)
    }

    /// Blocks of the group, those that choices share counted once.
    #[must_use]
    pub fn blocks<P: Place>(&self, lease: &Lease<P>) -> u32 {
        if !self.owns(lease) {
            return 0;
        }
        let record = self.record(lease.index);
        u32::try_from(record.cells.len() - record.unused_cells.len()).unwrap_or(u32::MAX)
    }

    /// Blocks of the group that a swap-out would have to move.
    #[must_use]
    pub fn dirty_blocks(&self, lease: &Lease<OnGpu>) -> u32 {
        if !self.owns(lease) {
            return 0;
        }
        let dirty = self
            .record(lease.index)
            .live_cells()
            .filter(|(_, c)| c.slot.is_none());
        u32::try_from(dirty.count()).unwrap_or(u32::MAX)
    }

    /// Gives one choice's hold on its blocks up; the others go on.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoSuchChoice`] or [`Refusal::Foreign`].
    pub fn release_choice(&mut self, lease: &Lease<OnGpu>, choice: Choice) -> Result<(), Refusal> {
        if !self.owns(lease) {
            return Err(Refusal::Foreign);
        }
        let Self {
            gpu, host, records, ..
        } = self;
        let record = records[lease.index as usize]
            .as_mut()
            .ok_or(Refusal::Foreign)?;
        let table = record
            .tables
            .get_mut(choice.value() as usize)
            .and_then(Option::take)
            .ok_or(Refusal::NoSuchChoice)?;
        for index in table.cells {
            let cell = &mut record.cells[index as usize];
            cell.refs -= 1;
            if cell.refs > 0 {
                continue;
            }
            record.unused_cells.push(index);
            if let Some(block) = cell.block.take() {
                gpu.pass(block, BlockState::Allocated, BlockState::Free);
            }
            if let Some(slot) = cell.slot.take() {
                host.pass(slot, SlotState::Clean, SlotState::Free);
            }
        }
        Ok(())
    }

    /// Gives a whole group up; everything it holds is free at once.
    ///
    /// # Errors
    ///
    /// [`Refusal::Foreign`], and the lease back.
    pub fn release<P: Place>(&mut self, lease: Lease<P>) -> Result<(), Refused<Lease<P>, Refusal>> {
        if !self.owns(&lease) {
            return Err(Refused {
                why: Refusal::Foreign,
                back: lease,
            });
        }
        self.advance(lease.index, Stimulus::Cancel);
        self.live.remove(&lease.key.group);
        self.remove_record(lease.index);
        Ok(())
    }

    /// Gives a flying group up. Never waits: what the flight touches stays where it is until the
    /// flight settles; the group's id can be used again at once.
    ///
    /// # Errors
    ///
    /// [`Refusal::Foreign`], and the ticket back.
    pub fn cancel<P: Place>(
        &mut self,
        now: Time,
        ticket: Ticket<P>,
    ) -> Result<(), Refused<Ticket<P>, Refusal>> {
        if !self.is_live(ticket.machine, ticket.index, ticket.key) {
            return Err(Refused {
                why: Refusal::Foreign,
                back: ticket,
            });
        }
        self.live.remove(&ticket.key.group);
        self.advance(ticket.index, Stimulus::Cancel);
        if self.record(ticket.index).state == RecordState::Cancelled {
            self.remove_record(ticket.index);
        } else {
            self.cancel_flight(now, ticket.id);
        }
        Ok(())
    }

    /// Frees all that a record holds and that no flight touches, and forgets the record.
    pub(super) fn remove_record(&mut self, index: u32) {
        let Some(record) = self.records[index as usize].take() else {
            return;
        };
        self.unused_records.push(index);
        for cell in record.cells.iter().filter(|cell| cell.refs > 0) {
            if let Some(block) = cell.block {
                self.gpu
                    .pass(block, BlockState::Allocated, BlockState::Free);
            }
            if let Some(slot) = cell.slot {
                let state = if cell.block.is_some() {
                    SlotState::Clean
                } else {
                    SlotState::Parked
                };
                self.host.pass(slot, state, SlotState::Free);
            }
        }
    }
}
