//! Whose turn it is, priorities, and time slices.
//!
//! The more urgent goes first; who waits long becomes more urgent. Among equals, without slices,
//! groups on the host come back first, then groups to be computed again, then new requests. With
//! slices all of them stand in one line, ordered by since when they wait, and groups that ran
//! their slice leave when somebody in the line needs their place. Moving costs link time but no
//! compute, so this bounds how long anybody waits for a first or a next token.
//!
//! With slices a newcomer makes others leave only while all who were let in need less than
//! [`ADMITTED_POOLS`] times the pool; beyond that it waits behind those who had to leave. So the
//! longest pause depends on the slice and not on how many requests arrive.
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

/// With slices: how many times the pool the groups that were let in may fill, on the GPU and on the
/// host. Measured with arrivals from traces, see `docs/policies.md`.
const ADMITTED_POOLS: u64 = 2;

/// How far down the line room is made in one pass.
const LINE_LOOK: usize = 8;

/// Who goes first: the smaller turn. Urgency, kind of wait, since when, order of arrival.
type Turn = (i64, u8, Time, u64);

/// What turns depend on besides the group, the same for one look at the line.
#[derive(Clone, Copy, Debug)]
struct Look {
    now: Time,
    /// The most urgent priority that waits; nobody becomes more urgent than that by waiting.
    floor: i32,
    /// Blocks that newcomers may still ask for; without slices it doesn't matter.
    room_for_newcomers: u64,
}

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Who comes to the GPU next, if nobody has to be waited for.
    pub(super) fn next_in_line(&self, now: Time) -> Option<GroupIndex> {
        let look = self.look(now);
        let next = self.heads().min_by_key(|&index| self.turn(look, index))?;
        let group = self.group(next);
        if self.config.slice.is_none() && !matches!(group.phase, Phase::HostResident(_)) {
            // A victim that is leaving gives its blocks up for those who run, not for newcomers
            // that are no more urgent than it.
            let (urgency, ..) = self.turn(look, next);
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

    fn look(&self, now: Time) -> Look {
        let priorities = self.heads().map(|index| self.group(index).request.priority);
        let floor = priorities.min().unwrap_or(0);
        let room_for_newcomers = if self.config.slice.is_some() {
            let pools = u64::from(self.usable_blocks()) * ADMITTED_POOLS;
            pools.saturating_sub(self.admitted_blocks())
        } else {
            u64::MAX
        };
        Look {
            now,
            floor,
            room_for_newcomers,
        }
    }

    /// Blocks of everybody who was let in and isn't through: on the GPU, parked, or to be computed
    /// again.
    fn admitted_blocks(&self) -> u64 {
        let gpu = self.machine.stats().gpu;
        let here = u64::from(gpu.total - gpu.free - gpu.lost);
        let away = self
            .parked
            .iter()
            .chain(self.recompute.iter())
            .map(|index| {
                let group = self.group(index);
                u64::from(match &group.phase {
                    Phase::HostResident(lease) => self.machine.blocks(lease),
                    _ => self.blocks_to_start(group),
                })
            });
        here + away.sum::<u64>()
    }

    /// Whether a group waits for its first place on the GPU and others needn't leave for it.
    fn stands_back(&self, look: Look, index: GroupIndex) -> bool {
        let group = self.group(index);
        matches!(group.phase, Phase::Waiting)
            && u64::from(self.blocks_to_start(group)) > look.room_for_newcomers
    }

    /// A waiting group's priority, more urgent by one for each time that it waited so long.
    fn aged_priority(&self, now: Time, index: GroupIndex) -> i64 {
        let group = self.group(index);
        let waited = now.since(group.waits_since()).as_nanos();
        let steps = waited / self.config.priority_aging.as_nanos().max(1);
        let steps = i64::try_from(steps).unwrap_or(i64::MAX);
        i64::from(group.request.priority).saturating_sub(steps)
    }

    fn turn(&self, look: Look, index: GroupIndex) -> Turn {
        let group = self.group(index);
        let urgency = self.aged_priority(look.now, index).max(look.floor.into());
        if self.config.slice.is_some() {
            let rank = u8::from(self.stands_back(look, index));
            return (urgency, rank, group.waits_since(), group.arrival);
        }
        let (rank, order) = match group.phase {
            Phase::HostResident(_) => (0, group.parked_order),
            Phase::RecomputePending => (1, group.arrival),
            _ => (2, group.arrival),
        };
        (urgency, rank, Time::ZERO, order)
    }

    /// The next few in the line for whom others have to leave.
    fn line(&self, now: Time) -> Vec<GroupIndex> {
        let mut look = self.look(now);
        let parked = self.parked.first(LINE_LOOK);
        let again = self.recompute.first(LINE_LOOK);
        let waiting = self.waiting.first(LINE_LOOK);
        let mut line: Vec<_> = parked.chain(again).chain(waiting).collect();
        line.sort_by_key(|&index| self.turn(look, index));
        line.retain(|&index| {
            let stays = !self.stands_back(look, index);
            if stays && matches!(self.group(index).phase, Phase::Waiting) {
                let blocks = u64::from(self.blocks_to_start(self.group(index)));
                look.room_for_newcomers = look.room_for_newcomers.saturating_sub(blocks);
            }
            stays
        });
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
                // A slice ends for equals, and for who waited long enough to count as one; it
                // doesn't end for somebody less urgent.
                let urgency = self.aged_priority(now, next);
                let equal =
                    |&index: &GroupIndex| i64::from(self.group(index).request.priority) >= urgency;
                let Some(victim) = over.find(equal).or_else(|| self.less_urgent(now, next)) else {
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
