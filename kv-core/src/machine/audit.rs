//! Checkers of the invariants: everything is counted again from scratch.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use crate::pool::{BlockState, SlotState};
use crate::record::Record;
use crate::{Direction, GpuBlocks, GroupStates, HostSlots, Machine, RecordState};

type Audit = Result<(), String>;

fn expect(right: bool, what: impl FnOnce() -> String) -> Audit {
    if right { Ok(()) } else { Err(what()) }
}

impl Machine {
    /// Checks I01 to I04 over the whole machine.
    ///
    /// # Errors
    ///
    /// Says which invariant does not hold, and where.
    pub fn audit(&self) -> Audit {
        self.audit_pools()?;
        let mut blocks = BTreeMap::new();
        let mut slots = BTreeMap::new();
        for (index, record) in (0u32..).zip(&self.records) {
            let Some(record) = record else { continue };
            Self::audit_tables(record)?;
            self.audit_places(index, record, &mut blocks, &mut slots)?;
        }
        for (place, &state) in (0u32..).zip(self.gpu.states()) {
            let held = blocks.contains_key(&place);
            let should = !matches!(state, BlockState::Free | BlockState::Lost);
            expect(held == should, || {
                format!("I02: block {place} is {state:?}, held: {held}")
            })?;
        }
        for (place, &state) in (0u32..).zip(self.host.states()) {
            let held = slots.contains_key(&place);
            let should = !matches!(
                state,
                SlotState::Free | SlotState::Lost | SlotState::Unready
            );
            expect(held == should, || {
                format!("I02: slot {place} is {state:?}, held: {held}")
            })?;
        }
        self.audit_budget()
    }

    /// I01: the parts sum up to the whole, and the free lists are what the states say.
    fn audit_pools(&self) -> Audit {
        let mut counts = GpuBlocks {
            total: self.gpu.counts().total,
            ..GpuBlocks::default()
        };
        for state in self.gpu.states() {
            *match state {
                BlockState::Free => &mut counts.free,
                BlockState::Allocated => &mut counts.allocated,
                BlockState::Evicting => &mut counts.evicting,
                BlockState::Restoring => &mut counts.restoring,
                BlockState::Lost => &mut counts.lost,
            } += 1;
        }
        let said = self.gpu.counts();
        expect(counts == said, || {
            format!("I01: blocks are {counts:?}, said {said:?}")
        })?;
        let free: BTreeSet<_> = self.gpu.free_list().iter().collect();
        let is_free =
            |b: &&crate::BlockId| self.gpu.states()[b.value() as usize] == BlockState::Free;
        let right = free.len() == self.gpu.free_list().len()
            && free.len() == counts.free as usize
            && free.iter().all(is_free);
        expect(right, || "I02: the list of free blocks is wrong".into())?;
        let raw = self.host.raw_counts();
        let mut counts = HostSlots {
            total: raw.total,
            peak: raw.peak,
            ..HostSlots::default()
        };
        for state in self.host.states() {
            *match state {
                SlotState::Unready => &mut counts.unready,
                SlotState::Free => &mut counts.free,
                SlotState::Filling => &mut counts.filling,
                SlotState::Parked => &mut counts.parked,
                SlotState::Clean => &mut counts.clean,
                SlotState::Lost => &mut counts.lost,
            } += 1;
        }
        expect(counts == raw, || {
            format!("I01: slots are {counts:?}, said {raw:?}")
        })?;
        let listed = self.host.free_slots();
        let free: BTreeSet<_> = listed.iter().collect();
        let right = free.len() == listed.len()
            && free.len() == counts.free as usize
            && free
                .iter()
                .all(|s| self.host.states()[s.value() as usize] == SlotState::Free);
        expect(right, || "I02: the list of free slots is wrong".into())
    }

    /// I02: reference counts equal the number of tables; tables are published as a whole or not
    /// at all.
    fn audit_tables(record: &Record) -> Audit {
        let key = record.key;
        let mut refs = vec![0u32; record.cells.len()];
        for table in record.tables.iter().flatten() {
            for &cell in &table.cells {
                refs[cell as usize] += 1;
            }
            let blocks: Option<Vec<_>> = table
                .cells
                .iter()
                .map(|&cell| record.cells[cell as usize].block)
                .collect();
            let published = if record.state == RecordState::GpuResident {
                blocks.unwrap_or_default()
            } else {
                Vec::new()
            };
            expect(table.published == published, || {
                format!(
                    "I06: {key:?} publishes {:?}, not {published:?}",
                    table.published
                )
            })?;
        }
        let said: Vec<_> = record.cells.iter().map(|cell| cell.refs).collect();
        expect(refs == said, || {
            format!("I02: {key:?} has references {refs:?}, said {said:?}")
        })
    }

    /// I02, I04: each block and slot has one holder, of the kind that its state says.
    fn audit_places(
        &self,
        index: u32,
        record: &Record,
        blocks: &mut BTreeMap<u32, u32>,
        slots: &mut BTreeMap<u32, u32>,
    ) -> Audit {
        let key = record.key;
        let flight = record.ticket.and_then(|ticket| self.flights.get(&ticket));
        let state = match (record.state, flight.map(|flight| flight.direction)) {
            (RecordState::CancelPending, Some(Direction::In)) => RecordState::SwapInInFlight,
            (RecordState::CancelPending, Some(Direction::Out)) => RecordState::SwapOutInFlight,
            (state, _) => state,
        };
        let moving: BTreeSet<u32> = flight
            .iter()
            .flat_map(|flight| &flight.moves)
            .map(|m| m.cell)
            .collect();
        for (cell_index, cell) in record.live_cells() {
            let moves = moving.contains(&cell_index);
            let (block_state, slot_state) = match state {
                RecordState::GpuResident => (
                    Some(BlockState::Allocated),
                    cell.slot.map(|_| SlotState::Clean),
                ),
                RecordState::SwapOutInFlight if moves => {
                    (Some(BlockState::Evicting), Some(SlotState::Filling))
                }
                RecordState::SwapOutInFlight => {
                    (Some(BlockState::Evicting), Some(SlotState::Parked))
                }
                RecordState::HostResident => (None, Some(SlotState::Parked)),
                RecordState::SwapInInFlight => {
                    (Some(BlockState::Restoring), Some(SlotState::Parked))
                }
                RecordState::CancelPending | RecordState::Cancelled | RecordState::Failed => {
                    (None, None)
                }
            };
            let found = cell
                .block
                .map(|block| self.gpu.states()[block.value() as usize]);
            expect(found == block_state, || {
                format!("I04: {key:?} is {state:?}, a block of it {found:?}")
            })?;
            let found = cell
                .slot
                .map(|slot| self.host.states()[slot.value() as usize]);
            expect(found == slot_state, || {
                format!("I04: {key:?} is {state:?}, a slot of it {found:?}")
            })?;
            let twice = cell
                .block
                .is_some_and(|b| blocks.insert(b.value(), index).is_some())
                || cell
                    .slot
                    .is_some_and(|s| slots.insert(s.value(), index).is_some());
            expect(!twice, || {
                format!("I02: {key:?} holds what another cell holds too")
            })?;
            if let Some(slot) = cell.slot.filter(|_| state == RecordState::GpuResident) {
                let owner = self.host.owner(slot);
                let right = owner.record == index && owner.cell == cell_index;
                expect(right, || {
                    format!("I02: clean {slot:?} is said to be {owner:?}'s")
                })?;
            }
        }
        Ok(())
    }

    /// I03 and the gauges.
    fn audit_budget(&self) -> Audit {
        let cap = self.config.inflight_bytes_max;
        let reserved: u64 = self
            .flights
            .values()
            .map(|flight| flight.reserved_bytes)
            .sum();
        let unsettled: u64 = self
            .flights
            .values()
            .map(|flight| flight.unsettled_bytes)
            .sum();
        let stats = self.stats();
        expect(reserved == self.reserved_bytes && reserved <= cap, || {
            format!(
                "I03: {reserved} bytes reserved of {cap}, said {}",
                self.reserved_bytes
            )
        })?;
        expect(
            unsettled == stats.inflight_bytes && unsettled <= cap,
            || {
                format!(
                    "I03: {unsettled} bytes in flight of {cap}, said {}",
                    stats.inflight_bytes
                )
            },
        )?;
        let mut groups = GroupStates::default();
        for record in self.records.iter().flatten() {
            match record.state {
                RecordState::GpuResident => groups.gpu_resident += 1,
                RecordState::SwapOutInFlight => groups.swap_out_in_flight += 1,
                RecordState::HostResident => groups.host_resident += 1,
                RecordState::SwapInInFlight => groups.swap_in_in_flight += 1,
                RecordState::CancelPending => groups.cancel_pending += 1,
                RecordState::Failed => groups.failed += 1,
                RecordState::Cancelled => {}
            }
        }
        expect(groups == stats.groups, || {
            format!("I17: groups are {groups:?}, said {:?}", stats.groups)
        })
    }
}
