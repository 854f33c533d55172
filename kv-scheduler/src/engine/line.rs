//! Whose turn it is, and time slices.
//!
//! Without slices, groups on the host come back first, then groups to be computed again, then new
//! requests. With slices all of them stand in one line, ordered by since when they wait, and
//! groups that ran their slice leave when somebody in the line needs their place. Moving costs
//! link time but no compute, so this bounds how long anybody waits for a first or a next token.

use kv_core::{Backend, Span, Time};

use super::{Engine, GroupIndex};
use crate::group::Phase;
use crate::{Executor, SwapPolicy};

/// At most one block in this many is under way on account of slices, unless a single group needs
/// more: what is under way decodes nothing.
const TRANSIT_SHARE: u32 = 16;

/// A slice is at least this many times what it takes to move the group out and back.
const SLICE_PER_MOVE: u64 = 4;

/// How far down the line room is made in one pass.
const LINE_LOOK: usize = 8;

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Whether nobody else has to come to the GPU before this group.
    pub(super) fn is_next_in_line(&self, index: GroupIndex) -> bool {
        let group = self.group(index);
        if self.config.slice.is_some() {
            let turn = (group.waits_since(), group.arrival);
            return self.heads().all(|other| {
                let other = self.group(other);
                turn <= (other.waits_since(), other.arrival)
            });
        }
        let leaving = |&index| matches!(self.group(index).phase, Phase::OutInFlight(_));
        match group.phase {
            Phase::HostResident(_) => true,
            _ => self.parked.is_empty() && !self.by_ticket.values().any(leaving),
        }
    }

    /// The first of each queue.
    fn heads(&self) -> impl Iterator<Item = GroupIndex> {
        let parked = self.parked.front().copied();
        let again = self.recompute.values().next().copied();
        let waiting = self.waiting.front().copied();
        [parked, again, waiting].into_iter().flatten()
    }

    /// The next few in the line, those who wait longest first.
    fn line(&self) -> Vec<GroupIndex> {
        let parked = self.parked.iter().take(LINE_LOOK);
        let again = self.recompute.values().take(LINE_LOOK);
        let waiting = self.waiting.iter().take(LINE_LOOK);
        let mut line: Vec<_> = parked.chain(again).chain(waiting).copied().collect();
        line.sort_by_key(|&index| {
            let group = self.group(index);
            (group.waits_since(), group.arrival)
        });
        line.truncate(LINE_LOOK);
        line
    }

    /// Lets groups that ran their slice leave, as many as the next ones in the line need and no
    /// more; only to the host, nobody is computed again for it.
    pub(super) fn rotate(&mut self, now: Time) -> u32 {
        let Some(slice) = self.config.slice else {
            return 0;
        };
        if self.config.swap == SwapPolicy::Off || self.stats.swap_given_up {
            return 0;
        }
        let line = self.line();
        if line.is_empty() {
            return 0;
        }
        let slack = self.slack_tokens();
        let mut wanted = self
            .want_of_running(slack)
            .saturating_add(self.want_of_coming());
        let mut sequences = self.running_sequences();
        let mut victims = self.over_their_slice(now, slice).into_iter();
        let mut left = 0;
        for next in line {
            let (blocks, choices) = self.place_of(next, slack);
            wanted = wanted.saturating_add(blocks);
            sequences += choices;
            let transit_max = (self.usable_blocks() / TRANSIT_SHARE).max(blocks);
            loop {
                let free = self.machine.free_blocks();
                let supply = free.saturating_add(self.machine.arriving_blocks());
                if wanted <= supply && sequences <= self.config.max_batch_size {
                    break;
                }
                let gpu = self.machine.stats().gpu;
                if gpu.evicting + gpu.restoring >= transit_max || self.running.len() <= 1 {
                    return left;
                }
                let Some(victim) = victims.next() else {
                    return left;
                };
                let group = self.group(victim);
                let Phase::Running(lease) = &group.phase else {
                    continue;
                };
                let freed = self.want(group, lease, slack);
                let choices = group.unfinished_count();
                if self.evict_to_host(now, victim).is_err() {
                    return left;
                }
                left += 1;
                wanted = wanted.saturating_sub(freed);
                sequences = sequences.saturating_sub(choices);
            }
        }
        left
    }

    /// Blocks and sequences that a group in the line needs to come back and go on.
    fn place_of(&self, index: GroupIndex, slack: u32) -> (u32, u32) {
        let group = self.group(index);
        let blocks = match &group.phase {
            Phase::HostResident(lease) => self
                .machine
                .blocks(lease)
                .saturating_add(self.want(group, lease, slack)),
            _ => self.blocks_to_start(group),
        };
        (blocks, group.unfinished_count())
    }

    /// Running groups whose slice is over, the ones that ran longest first.
    fn over_their_slice(&self, now: Time, slice: Span) -> Vec<GroupIndex> {
        let mut over: Vec<_> = self
            .running
            .values()
            .copied()
            .filter(|&index| {
                let group = self.group(index);
                let Phase::Running(lease) = &group.phase else {
                    return false;
                };
                let ran = now.since(group.running_since);
                let long_enough = || {
                    let least = self.move_span(lease).saturating_mul(SLICE_PER_MOVE);
                    ran >= slice.max(least)
                };
                group.touched_in_pass != self.pass
                    && now >= group.not_before
                    && group.swaps < self.config.max_swaps
                    && self.holds_blocks(group)
                    && ran >= slice
                    && long_enough()
            })
            .collect();
        over.sort_by_key(|&index| (self.group(index).running_since, self.group(index).arrival));
        over
    }
}
