//! Checkers of the invariants that span engine and machine.

use std::collections::BTreeSet;

use kv_core::Backend;

use super::{Engine, GroupIndex};
use crate::Executor;
use crate::group::Phase;

/// What the last pass knew when it made room, counted apart from what it decided with.
#[derive(Debug, Default)]
pub(super) struct RoomLog {
    wanted: u32,
    free: u32,
    leaving: u32,
    /// Per victim: what it needn't have any more, and what it gives back.
    victims: Vec<(u32, u32)>,
}

impl RoomLog {
    /// Never more than the shortfall: without the last victim it would not have been enough.
    fn check(&self) -> Result<(), String> {
        let Some((_, before_last)) = self.victims.split_last() else {
            return Ok(());
        };
        let given: u32 = before_last.iter().map(|&(_, held)| held).sum();
        let spared: u32 = before_last.iter().map(|&(freed, _)| freed).sum();
        let supply = self.free + self.leaving + given;
        let wanted = self.wanted.saturating_sub(spared);
        if wanted <= supply {
            return Err(format!("more victims than the shortfall needed: {self:?}"));
        }
        Ok(())
    }
}

impl<E: Executor, B: Backend> Engine<E, B> {
    pub(super) fn log_room(&mut self, wanted: u32) {
        let gpu = self.machine.stats().gpu;
        self.room = RoomLog {
            wanted,
            free: gpu.free,
            leaving: gpu.evicting,
            victims: Vec::new(),
        };
    }

    pub(super) fn log_victim(&mut self, freed: u32, held: u32) {
        self.room.victims.push((freed, held));
    }

    pub(super) fn blocks_of(&self, index: GroupIndex) -> u32 {
        match &self.group(index).phase {
            Phase::Running(lease) => self.machine.blocks(lease),
            _ => 0,
        }
    }

    /// Checks I01 to I07 over machine and queues.
    ///
    /// # Errors
    ///
    /// Says which invariant does not hold, and where.
    pub fn audit(&self) -> Result<(), String> {
        self.machine.audit()?;
        self.room.check()?;
        let waiting: BTreeSet<_> = self.waiting.iter().collect();
        let parked: BTreeSet<_> = self.parked.iter().collect();
        let again: BTreeSet<_> = self.recompute.iter().collect();
        let mut under_way = 0;
        for (index, group) in self.groups.iter().enumerate() {
            let Some(group) = group else { continue };
            let id = group.id();
            let places = [
                waiting.contains(&index),
                again.contains(&index),
                self.running.get(&group.arrival) == Some(&index),
                parked.contains(&index),
                self.by_ticket.values().any(|&other| other == index),
            ];
            let right = match &group.phase {
                Phase::Waiting => [true, false, false, false, false],
                Phase::RecomputePending => [false, true, false, false, false],
                Phase::Running(_) => [false, false, true, false, false],
                Phase::HostResident(_) => [false, false, false, true, false],
                Phase::OutInFlight(_) | Phase::InInFlight(_) => {
                    under_way += 1;
                    [false, false, false, false, true]
                }
                Phase::Moving => [false; 5],
            };
            if places != right || self.by_id.get(&id) != Some(&index) {
                return Err(format!(
                    "I05: {id:?} is {:?}, found in {places:?}",
                    group.phase
                ));
            }
            let pass = self.pass;
            if pass > 0 && group.left_in_pass == pass && group.touched_in_pass == pass {
                return Err(format!(
                    "I07: {id:?} had to leave in the pass that served it"
                ));
            }
            if let Phase::Running(lease) = &group.phase {
                for choice in group.active() {
                    let tokens = self.machine.tokens(lease, choice);
                    let blocks = self.machine.table(lease, choice).len();
                    let block_tokens = self.machine.config().block_tokens;
                    if blocks != tokens.div_ceil(block_tokens) as usize {
                        return Err(format!("I06: {id:?} has {blocks} blocks, {tokens} tokens"));
                    }
                }
            }
        }
        let queued = waiting.len() + self.recompute.len() + self.running.len() + parked.len();
        if queued + self.by_ticket.len() != self.by_id.len() || under_way != self.moving as usize {
            return Err(format!(
                "I05: {queued} queued, {under_way} under way, of {}",
                self.by_id.len()
            ));
        }
        Ok(())
    }
}
