//! Whose turn it is, priorities, and time slices.
//!
//! The more urgent goes first; who waits long becomes more urgent. Among equals, without slices,
//! groups on the host come back first, then groups to be computed again, then new requests. With
//! slices all of them stand in one line, ordered by since when they wait, and groups that ran
//! their slice leave when somebody in the line needs their place. Moving costs link time but no
//! compute, so this bounds how long anybody waits for a first or a next token.
//!
//! Running groups never leave for a newcomer of equal priority, slices apart.

use kv_core::{Backend, Span, Time};

use super::room::Evicted;
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

/// Who goes first: the smaller turn. Urgency, kind of wait, since when, order of arrival.
type Turn = (i64, u8, Time, u64);

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Who comes to the GPU next, if nobody has to be waited for.
    pub(super) fn next_in_line(&self, now: Time) -> Option<GroupIndex> {
        let floor = self.most_urgent();
        let next = self
            .heads()
            .min_by_key(|&index| self.turn(now, floor, index))?;
        let group = self.group(next);
        if self.config.slice.is_none() && !matches!(group.phase, Phase::HostResident(_)) {
            // A victim that is leaving gives its blocks up for those who run, not for newcomers
            // that are no more urgent than it.
            let (urgency, ..) = self.turn(now, floor, next);
            let blocks = |&index: &GroupIndex| {
                let leaving = self.group(index);
                matches!(leaving.phase, Phase::OutInFlight(_))
                    && i64::from(leaving.request.priority) <= urgency
            };
            if self.by_ticket.values().any(blocks) {
                return None;
            }
        }
        Some(next)
    }

    /// The first of each queue and class.
    fn heads(&self) -> impl Iterator<Item = GroupIndex> {
        let parked = self.parked.heads();
        parked
            .chain(self.recompute.heads())
            .chain(self.waiting.heads())
    }

    /// The most urgent priority that waits; nobody becomes more urgent than that by waiting.
    fn most_urgent(&self) -> i32 {
        let priorities = self.heads().map(|index| self.group(index).request.priority);
        priorities.min().unwrap_or(0)
    }

    fn turn(&self, now: Time, floor: i32, index: GroupIndex) -> Turn {
        let group = self.group(index);
        let waited = now.since(group.waits_since()).as_nanos();
        let steps = waited / self.config.priority_aging.as_nanos().max(1);
        let steps = i64::try_from(steps).unwrap_or(i64::MAX);
        let urgency = i64::from(group.request.priority)
            .saturating_sub(steps)
            .max(floor.into());
        let (rank, order) = match group.phase {
            Phase::HostResident(_) => (0, group.parked_order),
            Phase::RecomputePending => (1, group.arrival),
            _ => (2, group.arrival),
        };
        if self.config.slice.is_some() {
            (urgency, 0, group.waits_since(), group.arrival)
        } else {
            (urgency, rank, Time::ZERO, order)
        }
    }

    /// The next few in the line.
    fn line(&self, now: Time) -> Vec<GroupIndex> {
        let floor = self.most_urgent();
        let parked = self.parked.first(LINE_LOOK);
        let again = self.recompute.first(LINE_LOOK);
        let waiting = self.waiting.first(LINE_LOOK);
        let mut line: Vec<_> = parked.chain(again).chain(waiting).collect();
        line.sort_by_key(|&index| self.turn(now, floor, index));
        line.truncate(LINE_LOOK);
        line
    }

    /// Makes room for those in the line: groups that ran their slice leave for anybody, to the
    /// host only; less urgent ones leave for more urgent ones, in whatever way they can. As many
    /// as the next ones in the line need, and no more.
    pub(super) fn rotate(&mut self, now: Time) -> u32 {
        let swaps = self.config.swap == SwapPolicy::On && !self.stats.swap_given_up;
        let slice = self.config.slice.filter(|_| swaps);
        if slice.is_none() && self.priorities.len() < 2 {
            return 0;
        }
        let line = self.line(now);
        if line.is_empty() {
            return 0;
        }
        let slack = self.slack_tokens();
        let mut wanted = self
            .want_of_running(slack)
            .saturating_add(self.want_of_coming());
        let mut sequences = self.running_sequences();
        let over = slice.map_or_else(Vec::new, |slice| self.over_their_slice(now, slice));
        let mut over = over.into_iter();
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
                let Some(victim) = over.next().or_else(|| self.less_urgent(now, next)) else {
                    return left;
                };
                let group = self.group(victim);
                let Phase::Running(lease) = &group.phase else {
                    continue;
                };
                let (freed, choices) = (self.want(group, lease, slack), group.unfinished_count());
                if !self.leaves_for(now, victim, next) {
                    return left;
                }
                left += 1;
                wanted = wanted.saturating_sub(freed);
                sequences = sequences.saturating_sub(choices);
            }
        }
        left
    }

    /// The group that leaves first for a more urgent one: the least urgent, the newest of these.
    fn less_urgent(&self, now: Time, than: GroupIndex) -> Option<GroupIndex> {
        let priority = |index: GroupIndex| self.group(index).request.priority;
        let candidates = self.running.values().copied().filter(|&index| {
            let group = self.group(index);
            priority(index) > priority(than)
                && group.touched_in_pass != self.pass
                && now >= group.not_before
                && self.holds_blocks(group)
        });
        candidates.max_by_key(|&index| (priority(index), self.group(index).arrival))
    }

    /// Lets a victim leave for somebody in the line; says whether it does.
    fn leaves_for(&mut self, now: Time, victim: GroupIndex, next: GroupIndex) -> bool {
        let less_urgent = self.group(victim).request.priority > self.group(next).request.priority;
        if less_urgent {
            matches!(self.evict(now, victim), Evicted::Yes)
        } else {
            self.evict_to_host(now, victim).is_ok()
        }
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
