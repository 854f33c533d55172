//! Requests that start flights, and what they yield.

use alloc::vec::Vec;

use crate::flight::{CellMove, Flight};
use crate::pool::{BlockState, SlotState};
use crate::{
    BlockId, BlockMove, Checksum, Direction, Event, Fence, Gone, Lease, Machine, OnGpu, OnHost,
    Outcome, Place, PlantedFault, RecordState, Redeemed, Refusal, Refused, RestoreTarget,
    SlotIndex, Span, Stimulus, Ticket, TicketId, Time,
};

impl Machine {
    /// Starts moving a group to the host: every slot and byte of budget is taken, or nothing.
    ///
    /// Blocks whose bytes are on the host already (clean copies) are not moved again. All blocks
    /// become free when the flight settles as `Done`; a flight without anything to move settles
    /// at once. `after` is the last step that wrote the group's blocks.
    ///
    /// # Errors
    ///
    /// [`Refusal::HostSlots`], [`Refusal::Inflight`], [`Refusal::Draining`] or
    /// [`Refusal::Foreign`], and the lease back.
    pub fn swap_out(
        &mut self,
        now: Time,
        lease: Lease<OnGpu>,
        after: Fence,
    ) -> Result<Ticket<OnGpu>, Refused<Lease<OnGpu>, Refusal>> {
        match self.reserve_out(&lease) {
            Ok(reserved_bytes) => Ok(self.start_out(now, &lease, after, reserved_bytes)),
            Err(why) => Err(Refused { why, back: lease }),
        }
    }

    /// Checks everything that a flight out needs; returns its share of the budget.
    fn reserve_out(&mut self, lease: &Lease<OnGpu>) -> Result<u64, Refusal> {
        if !self.owns(lease) {
            return Err(Refusal::Foreign);
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        let (mut needed, mut own) = (0u32, 0u32);
        for (_, cell) in self.record(lease.index).live_cells() {
            *(if cell.slot.is_none() {
                &mut needed
            } else {
                &mut own
            }) += 1;
        }
        let free = self.host.available(own);
        if needed > free {
            self.stats.host_backpressure += 1;
            self.events.push_back(Event::HostBackpressure);
            return Err(Refusal::HostSlots { needed, free });
        }
        self.check_budget(needed)
    }

    /// A flight's share of the in-flight budget: its bytes, or the whole cap if it is larger and
    /// has to be issued piece by piece.
    fn check_budget(&mut self, blocks: u32) -> Result<u64, Refusal> {
        let cap = self.config.inflight_bytes_max;
        let needed = u64::from(blocks)
            .saturating_mul(self.config.block_bytes)
            .min(cap);
        let free = cap - self.reserved_bytes;
        if needed > free {
            if PlantedFault::LeakSlotOnRefusal.is_on() {
                self.host.take(1);
            }
            self.stats.inflight_backpressure += 1;
            self.events.push_back(Event::InflightBackpressure);
            return Err(Refusal::Inflight { needed, free });
        }
        Ok(needed)
    }

    fn start_out(
        &mut self,
        now: Time,
        lease: &Lease<OnGpu>,
        after: Fence,
        reserved_bytes: u64,
    ) -> Ticket<OnGpu> {
        let record = self.record(lease.index);
        let dirty: Vec<(u32, BlockId)> = record
            .live_cells()
            .filter(|(_, cell)| cell.slot.is_none())
            .map(|(index, cell)| (index, cell.block.expect("on the GPU all blocks are there")))
            .collect();
        let clean: Vec<(BlockId, SlotIndex)> = record
            .live_cells()
            .filter_map(|(_, cell)| Some((cell.block?, cell.slot?)))
            .collect();
        let mut moves = Vec::with_capacity(dirty.len());
        let slots = self.take_slots(lease.index, u32::try_from(dirty.len()).unwrap_or(u32::MAX));
        for ((cell, block), slot) in dirty.into_iter().zip(slots) {
            self.gpu
                .pass(block, BlockState::Allocated, BlockState::Evicting);
            self.record_mut(lease.index).cells[cell as usize].slot = Some(slot);
            if PlantedFault::FreeBlocksAtSubmit.is_on() {
                self.gpu.plant_free(block);
            }
            moves.push(CellMove {
                cell,
                place: BlockMove { block, slot },
            });
        }
        self.stats.clean_blocks_kept += clean.len() as u64;
        for (block, slot) in clean {
            // The flight holds these too: if it fails, the group is on the GPU as before.
            self.gpu
                .pass(block, BlockState::Allocated, BlockState::Evicting);
            self.host.pass(slot, SlotState::Clean, SlotState::Parked);
        }
        self.record_mut(lease.index).hide();
        self.advance(lease.index, Stimulus::SubmitOut);
        self.stats.out.started += 1;
        let id = self.start(
            now,
            lease.index,
            Direction::Out,
            moves,
            after,
            reserved_bytes,
        );
        Ticket::new(self.id, lease.index, lease.key, id)
    }

    /// That many free slots; as many clean copies of other groups are given up as it takes.
    fn take_slots(&mut self, except: u32, n: u32) -> Vec<SlotIndex> {
        let missing = if self.host.is_pageable() {
            0
        } else {
            n.saturating_sub(self.host.free())
        };
        for _ in 0..missing {
            let (slot, owner) = self
                .host
                .oldest_clean(except)
                .expect("enough slots can be had");
            let cell = &mut self.record_mut(owner.record).cells[owner.cell as usize];
            assert!(
                cell.slot == Some(slot),
                "{slot:?} is the clean copy of another cell"
            );
            cell.slot = None;
            cell.digest = None;
            self.host.pass(slot, SlotState::Clean, SlotState::Free);
        }
        if missing > 0 {
            self.stats.clean_copies_reclaimed += u64::from(missing);
            self.events
                .push_back(Event::CleanCopiesReclaimed { slots: missing });
        }
        let slots = self.host.take(n);
        assert!(
            slots.len() == n as usize,
            "{n} slots could be had, {} were",
            slots.len()
        );
        slots
    }

    /// Starts bringing a parked group back: every block and byte of budget is taken, or nothing.
    ///
    /// The blocks can be read when the flight has settled as `Done`, not before; the host slots
    /// stay as clean copies then. `after` is the last step that read the blocks which are
    /// overwritten.
    ///
    /// # Errors
    ///
    /// [`Refusal::GpuBlocks`], [`Refusal::Inflight`], [`Refusal::Draining`],
    /// [`Refusal::Foreign`], or [`Refusal::Metadata`] if what was saved can't be right; and the
    /// lease back.
    pub fn swap_in(
        &mut self,
        now: Time,
        lease: Lease<OnHost>,
        after: Fence,
    ) -> Result<Ticket<OnHost>, Refused<Lease<OnHost>, Refusal>> {
        match self.reserve_in(&lease) {
            Ok((moves, bytes)) => Ok(self.start_in(now, &lease, after, moves, bytes)),
            Err(why) => Err(Refused { why, back: lease }),
        }
    }

    fn reserve_in(&mut self, lease: &Lease<OnHost>) -> Result<(Vec<CellMove>, u64), Refusal> {
        if !self.owns(lease) {
            return Err(Refusal::Foreign);
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        let (needed, free) = (self.blocks(lease), self.gpu.free());
        if needed > free {
            return Err(Refusal::GpuBlocks { needed, free });
        }
        let reserved_bytes = self.check_budget(needed)?;
        let places: Vec<(u32, SlotIndex)> = self
            .record(lease.index)
            .live_cells()
            .map(|(index, cell)| (index, cell.slot.expect("on the host all slots are there")))
            .collect();
        let mut moves = Vec::with_capacity(places.len());
        for (cell, slot) in places {
            let block = self
                .gpu
                .take(BlockState::Restoring)
                .expect("enough blocks are free");
            moves.push(CellMove {
                cell,
                place: BlockMove { block, slot },
            });
        }
        if let Err(error) = self.validate(lease, &moves) {
            for CellMove { place, .. } in moves {
                self.gpu
                    .pass(place.block, BlockState::Restoring, BlockState::Free);
            }
            return Err(Refusal::Metadata(error));
        }
        Ok((moves, reserved_bytes))
    }

    fn validate(
        &self,
        lease: &Lease<OnHost>,
        moves: &[CellMove],
    ) -> Result<(), crate::MetadataError> {
        let blocks: Vec<BlockId> = moves.iter().map(|m| m.place.block).collect();
        let record = self.record(lease.index);
        let metadata = record
            .metadata
            .as_ref()
            .expect("parked groups have metadata");
        metadata.validate(&RestoreTarget {
            key: record.key,
            layout_fingerprint: self.config.layout_fingerprint,
            block_bytes: self.config.block_bytes,
            block_tokens: self.config.block_tokens,
            pool_blocks: self.config.gpu_blocks,
            blocks: &blocks,
        })
    }

    fn start_in(
        &mut self,
        now: Time,
        lease: &Lease<OnHost>,
        after: Fence,
        moves: Vec<CellMove>,
        reserved_bytes: u64,
    ) -> Ticket<OnHost> {
        for CellMove { cell, place } in &moves {
            self.record_mut(lease.index).cells[*cell as usize].block = Some(place.block);
        }
        self.advance(lease.index, Stimulus::SubmitIn);
        if PlantedFault::PublishBeforeDone.is_on() {
            self.record_mut(lease.index).publish();
        }
        self.stats.back_in.started += 1;
        let id = self.start(
            now,
            lease.index,
            Direction::In,
            moves,
            after,
            reserved_bytes,
        );
        Ticket::new(self.id, lease.index, lease.key, id)
    }

    /// Puts a flight on its way. Everything it touches has changed hands already.
    fn start(
        &mut self,
        now: Time,
        index: u32,
        direction: Direction,
        moves: Vec<CellMove>,
        after: Fence,
        reserved_bytes: u64,
    ) -> TicketId {
        let ticket = self.next_ticket();
        let block_bytes = self.config.block_bytes;
        let bytes = moves.len() as u64 * block_bytes;
        // A flight that fits into the budget is one piece. A larger one goes in pieces of half
        // the budget, so that one is being copied while the next one is being prepared.
        let in_pieces = (reserved_bytes / 2).max(block_bytes) / block_bytes.max(1);
        let piece_blocks = if bytes <= reserved_bytes {
            moves.len()
        } else {
            usize::try_from(in_pieces).unwrap_or(usize::MAX)
        };
        let deadline = now + self.time_limit(direction, bytes);
        let record = self.record_mut(index);
        record.ticket = Some(ticket);
        let digests = match direction {
            Direction::In => moves
                .iter()
                .map(|m| record.cells[m.cell as usize].digest)
                .collect(),
            Direction::Out => moves.iter().map(|_| None).collect(),
        };
        let flight = Flight {
            ticket,
            record: index,
            direction,
            moves,
            digests,
            next: 0,
            piece_blocks: piece_blocks.max(1),
            pieces: Vec::new(),
            reserved_bytes,
            unsettled_bytes: 0,
            after,
            started_at: now,
            deadline,
            worst: Outcome::Done,
            fault: None,
            last_completed_at: now,
            bytes_done: 0,
            checksum: self.config.checksum == Checksum::On
                && !(direction == Direction::In && PlantedFault::SkipVerify.is_on()),
            cancelled: false,
        };
        self.reserved_bytes += reserved_bytes;
        if flight.is_over() {
            self.settle(now, &flight);
        } else {
            self.deadlines.insert((deadline, ticket));
            self.issuing.push_back(ticket);
            self.flights.insert(ticket, flight);
        }
        ticket
    }

    fn time_limit(&self, direction: Direction, bytes: u64) -> Span {
        let rate = self.rate(direction);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let expected = Span::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.config.deadlines.base + expected.saturating_mul(self.config.deadlines.factor.into())
    }

    /// Turns a settled flight into what it yields.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotSettled`] or [`Refusal::Foreign`], and the ticket back.
    pub fn redeem<P: Place>(
        &mut self,
        ticket: Ticket<P>,
    ) -> Result<Redeemed<P>, Refused<Ticket<P>, Refusal>> {
        if !self.is_live(ticket.machine, ticket.index, ticket.key) {
            return Err(Refused {
                why: Refusal::Foreign,
                back: ticket,
            });
        }
        let (index, key) = (ticket.index, ticket.key);
        let record = self.record(index);
        assert!(
            record.ticket == Some(ticket.id),
            "a record has one flight at a time"
        );
        let here = match record.state {
            RecordState::GpuResident => OnGpu::NAME,
            RecordState::HostResident => OnHost::NAME,
            RecordState::Failed => {
                let gone = if record.corrupt {
                    Gone::Corrupt
                } else {
                    Gone::Unknown
                };
                self.advance(index, Stimulus::Cancel);
                self.live.remove(&key.group);
                self.remove_record(index);
                return Ok(Redeemed::Gone(gone));
            }
            RecordState::SwapOutInFlight
            | RecordState::SwapInInFlight
            | RecordState::CancelPending
            | RecordState::Cancelled => {
                return Err(Refused {
                    why: Refusal::NotSettled,
                    back: ticket,
                });
            }
        };
        if here == P::NAME {
            Ok(Redeemed::Stayed(Lease::new(self.id, index, key)))
        } else {
            Ok(Redeemed::Moved(Lease::new(self.id, index, key)))
        }
    }
}
