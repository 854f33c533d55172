//! The end of a flight: everything it held changes hands at once.

use crate::flight::{CellMove, Flight};
use crate::pool::{BlockState, CleanOwner, SlotState};
use crate::record::Cell;
use crate::{
    ChoiceExtent, CopyFault, Direction, Event, Machine, Metadata, Outcome, PlantedFault, Settled,
    Stimulus, Time,
};

impl Machine {
    /// Settles a flight that is over and was taken out of the table.
    pub(super) fn settle(&mut self, now: Time, flight: &Flight) {
        self.reserved_bytes -= flight.reserved_bytes;
        self.count(now, flight);
        match (flight.cancelled, flight.direction, flight.worst) {
            (true, ..) => self.retire(flight),
            (false, Direction::Out, Outcome::Done) => self.settle_out_done(flight),
            (false, Direction::Out, Outcome::Failed) => self.settle_out_failed(flight),
            (false, Direction::In, Outcome::Done) => self.settle_in_done(flight),
            (false, Direction::In, Outcome::Failed) if PlantedFault::FailedAsDone.is_on() => {
                self.settle_in_done(flight);
            }
            (false, Direction::In, Outcome::Failed) => self.settle_in_failed(flight),
            (false, _, Outcome::Unknown) => {
                self.advance(flight.record, Stimulus::Unknown);
                self.forsake(flight);
            }
        }
        self.events.push_back(Event::Settled(Settled {
            ticket: flight.ticket,
            direction: flight.direction,
            outcome: flight.worst,
            fault: flight.fault,
            cancelled: flight.cancelled,
            bytes: flight.bytes_done,
            blocks: u32::try_from(flight.moves.len()).unwrap_or(u32::MAX),
            copy_span: flight.last_completed_at.since(flight.started_at),
            notice_span: now.since(flight.last_completed_at),
        }));
    }

    fn count(&mut self, now: Time, flight: &Flight) {
        let counters = match flight.direction {
            Direction::In => &mut self.stats.back_in,
            Direction::Out => &mut self.stats.out,
        };
        counters.bytes += flight.bytes_done;
        match flight.worst {
            Outcome::Done => {
                counters.done += 1;
                let copy_span = flight.last_completed_at.since(flight.started_at);
                counters.copy_span = counters.copy_span + copy_span;
                let notice_span = now.since(flight.last_completed_at);
                counters.notice_span = counters.notice_span + notice_span;
            }
            Outcome::Failed => counters.failed += 1,
            Outcome::Unknown => counters.unknown += 1,
        }
        if matches!(flight.fault, Some(CopyFault::DigestMismatch { .. })) {
            self.stats.checksum_failures += 1;
        }
    }

    fn settle_out_done(&mut self, flight: &Flight) {
        self.advance(flight.record, Stimulus::OutDone);
        let block_tokens = self.config.block_tokens;
        let Self {
            gpu,
            host,
            records,
            config,
            ..
        } = self;
        let Some(record) = records[flight.record as usize].as_mut() else {
            return;
        };
        for (CellMove { cell, place }, digest) in flight.moves.iter().zip(&flight.digests) {
            host.pass(place.slot, SlotState::Filling, SlotState::Parked);
            record.cells[*cell as usize].digest = *digest;
        }
        for cell in record.cells.iter_mut().filter(|cell| cell.refs > 0) {
            if let Some(block) = cell.block.take() {
                gpu.pass(block, BlockState::Evicting, BlockState::Free);
            }
        }
        let block_count = record.cells.len() - record.unused_cells.len();
        let digests = record.live_cells().map(|(_, cell)| cell.digest).collect();
        record.metadata = Some(Metadata {
            version: Metadata::VERSION,
            key: record.key,
            layout_fingerprint: config.layout_fingerprint,
            block_count: u32::try_from(block_count).unwrap_or(u32::MAX),
            bytes: block_count as u64 * config.block_bytes,
            choices: record
                .tables
                .iter()
                .flatten()
                .map(|table| ChoiceExtent {
                    blocks: u32::try_from(table.cells.len()).unwrap_or(u32::MAX),
                    ..ChoiceExtent::of(table.tokens, block_tokens)
                })
                .collect(),
            digests,
        });
    }

    /// The group is on the GPU as if nothing had happened.
    fn settle_out_failed(&mut self, flight: &Flight) {
        self.advance(flight.record, Stimulus::OutFailed);
        let Self {
            gpu, host, records, ..
        } = self;
        let Some(record) = records[flight.record as usize].as_mut() else {
            return;
        };
        for CellMove { cell, place } in &flight.moves {
            host.pass(place.slot, SlotState::Filling, SlotState::Free);
            record.cells[*cell as usize].slot = None;
        }
        for (index, cell) in (0u32..)
            .zip(&record.cells)
            .filter(|(_, cell)| cell.refs > 0)
        {
            let block = cell
                .block
                .expect("a flight out keeps the blocks until it is done");
            gpu.pass(block, BlockState::Evicting, BlockState::Allocated);
            if let Some(slot) = cell.slot {
                host.set_clean(
                    slot,
                    CleanOwner {
                        record: flight.record,
                        cell: index,
                    },
                );
            }
        }
        record.publish();
    }

    fn settle_in_done(&mut self, flight: &Flight) {
        self.advance(flight.record, Stimulus::InDone);
        let Self {
            gpu, host, records, ..
        } = self;
        let Some(record) = records[flight.record as usize].as_mut() else {
            return;
        };
        for CellMove { cell, place } in &flight.moves {
            gpu.pass(place.block, BlockState::Restoring, BlockState::Allocated);
            if host.is_pageable() {
                // The blocking path keeps no copies.
                host.pass(place.slot, SlotState::Parked, SlotState::Free);
                record.cells[*cell as usize].slot = None;
            } else {
                host.set_clean(
                    place.slot,
                    CleanOwner {
                        record: flight.record,
                        cell: *cell,
                    },
                );
            }
        }
        record.metadata = None;
        record.publish();
    }

    /// The host copy is as good as before, unless it was found damaged.
    fn settle_in_failed(&mut self, flight: &Flight) {
        let corrupt = matches!(flight.fault, Some(CopyFault::DigestMismatch { .. }));
        self.advance(
            flight.record,
            if corrupt {
                Stimulus::Corrupt
            } else {
                Stimulus::InFailed
            },
        );
        let Self {
            gpu, host, records, ..
        } = self;
        let Some(record) = records[flight.record as usize].as_mut() else {
            return;
        };
        for CellMove { cell, place } in &flight.moves {
            gpu.pass(place.block, BlockState::Restoring, BlockState::Free);
            let cell = &mut record.cells[*cell as usize];
            cell.block = None;
            if corrupt {
                host.pass(place.slot, SlotState::Parked, SlotState::Free);
                cell.slot = None;
            }
        }
        record.corrupt = corrupt;
    }

    /// Frees what a flight held and that surely nothing touches any more; what nobody can vouch
    /// for is lost. The record holds nothing afterwards.
    fn forsake(&mut self, flight: &Flight) {
        let (block_from, slot_from) = match flight.direction {
            Direction::In => (BlockState::Restoring, SlotState::Parked),
            Direction::Out => (BlockState::Evicting, SlotState::Filling),
        };
        let mut lost = 0u32;
        let Self {
            gpu, host, records, ..
        } = self;
        let Some(record) = records[flight.record as usize].as_mut() else {
            return;
        };
        for (CellMove { cell, place }, outcome) in flight.moves_with_outcome() {
            let (block_to, slot_to) =
                if outcome == Outcome::Unknown && !PlantedFault::ReuseAfterUnknown.is_on() {
                    lost += 1;
                    (BlockState::Lost, SlotState::Lost)
                } else {
                    (BlockState::Free, SlotState::Free)
                };
            gpu.pass(place.block, block_from, block_to);
            host.pass(place.slot, slot_from, slot_to);
            let cell = &mut record.cells[cell as usize];
            (cell.block, cell.slot) = (None, None);
        }
        // What is left are clean copies of a flight out, which no command named.
        for Cell { block, slot, .. } in record.cells.iter_mut().filter(|cell| cell.refs > 0) {
            if let Some(block) = block.take() {
                gpu.pass(block, BlockState::Evicting, BlockState::Free);
            }
            if let Some(slot) = slot.take() {
                host.pass(slot, SlotState::Parked, SlotState::Free);
            }
        }
        record.hide();
        if lost > 0 {
            let slots = if self.host.is_pageable() { 0 } else { lost };
            self.events.push_back(Event::Lost {
                blocks: lost,
                slots,
            });
        }
    }

    /// A tombstone's flight is over.
    fn retire(&mut self, flight: &Flight) {
        if flight.direction == Direction::In {
            let blocks = u32::try_from(flight.moves.len()).unwrap_or(u32::MAX);
            self.retiring_blocks -= blocks;
        }
        self.advance(flight.record, Stimulus::Retire);
        self.forsake(flight);
        self.stats.cancelled += 1;
        self.remove_record(flight.record);
    }
}
