//! Who comes back, and who leaves when blocks are short.

use kv_core::{Backend, Lease, Place, Refusal, Refused, Time};

use super::{Engine, GroupIndex};
use crate::group::{Group, Phase};
use crate::{Executor, SwapPolicy, VictimPolicy};

/// What became of a victim.
enum Evicted {
    /// It left, or is leaving.
    Yes,
    /// The in-flight budget is spent; it comes back when a flight settles.
    BudgetSpent,
}

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Free blocks that a group needs to run its next row and `further` tokens of each choice.
    pub(super) fn want<P: Place>(&self, group: &Group, lease: &Lease<P>, further: u32) -> u32 {
        let chunk = self.config.prefill_chunk;
        self.machine.blocks_to_append(lease, |choice| {
            if !group.is_active(choice) {
                return 0;
            }
            let pending = group.target_tokens(choice) - self.machine.tokens(lease, choice);
            match pending {
                // The prompt was run, its choices are about to part.
                0 => 0,
                // The last token that a choice emits is never run.
                1 => further
                    .saturating_add(1)
                    .min(group.remaining_tokens(choice).max(1)),
                _ => pending.min(chunk),
            }
        })
    }

    /// Free blocks that all running groups need together.
    pub(super) fn want_of_running(&self, further: u32) -> u32 {
        let mut blocks = 0u32;
        for &index in self.running.values() {
            let group = self.group(index);
            if let Phase::Running(lease) = &group.phase {
                blocks = blocks.saturating_add(self.want(group, lease, further));
            }
        }
        blocks
    }

    /// Tokens that every running sequence must be able to take before somebody comes back: never
    /// fewer than what makes somebody leave, or they would push each other out in turns.
    pub(super) fn slack_tokens(&self) -> u32 {
        self.config
            .resume_slack_tokens
            .max(self.config.lookahead_tokens)
    }

    /// Free blocks that groups on their way back are going to need.
    pub(super) fn want_of_coming(&self) -> u32 {
        self.by_ticket
            .values()
            .map(|&index| self.group(index))
            .filter(|group| matches!(group.phase, Phase::InInFlight(_)))
            .map(|group| group.expected_blocks)
            .sum()
    }

    /// Sequences that run, or are about to.
    pub(super) fn running_sequences(&self) -> u32 {
        let here = self.running.values();
        let coming = self.by_ticket.values();
        here.chain(coming)
            .map(|&index| self.group(index))
            .filter(|group| matches!(group.phase, Phase::Running(_) | Phase::InInFlight(_)))
            .map(Group::unfinished_count)
            .sum()
    }

    /// Starts bringing parked groups back, the one that was parked first before all others.
    /// Nobody overtakes: the first one that can't come back yet ends it.
    pub(super) fn resume(&mut self, now: Time) -> u32 {
        let mut started = 0;
        while let Some(&index) = self.parked.front() {
            let Some(expected_blocks) = self.can_resume(now, index) else {
                break;
            };
            self.parked.pop_front();
            let group = self.group_mut(index);
            group.expected_blocks = expected_blocks;
            let Phase::HostResident(lease) = std::mem::replace(&mut group.phase, Phase::Moving)
            else {
                unreachable!("parked groups are on the host")
            };
            match self.machine.swap_in(now, lease, self.fence) {
                Ok(ticket) => {
                    started += 1;
                    self.moving += 1;
                    self.by_ticket.insert(ticket.id(), index);
                    self.group_mut(index).phase = Phase::InInFlight(ticket);
                }
                Err(Refused { why, back }) => {
                    self.group_mut(index).phase = Phase::HostResident(back);
                    self.parked.push_front(index);
                    if matches!(why, Refusal::Metadata(_)) {
                        // The host copy can't be right; the tokens can.
                        self.drop_kv(now, index);
                        continue;
                    }
                    break;
                }
            }
        }
        started
    }

    /// Whether a parked group can come back; if so, the free blocks that it will need then.
    fn can_resume(&self, now: Time, index: GroupIndex) -> Option<u32> {
        let group = self.group(index);
        let Phase::HostResident(lease) = &group.phase else {
            return None;
        };
        let sequences = self.running_sequences() + group.unfinished_count();
        if now < group.not_before || sequences > self.config.max_batch_size {
            return None;
        }
        // A group that comes back alone needs its next tokens only; among others it waits until
        // everybody can go on for a while, or they would push each other out in turns.
        let alone = self.running.is_empty() && self.moving == 0;
        let further = if alone { 0 } else { self.slack_tokens() };
        let own = self.want(group, lease, further);
        let needed = self
            .machine
            .blocks(lease)
            .saturating_add(own)
            .saturating_add(self.want_of_coming())
            .saturating_add(self.want_of_running(further));
        (needed <= self.machine.free_blocks()).then_some(own)
    }

    /// Makes sure that every running sequence can take its next tokens: moves victims until what
    /// is free or on its way back to the free list is enough. Never more than the shortfall.
    pub(super) fn make_room(&mut self, now: Time) -> u32 {
        let mut left = 0;
        let further = self.config.lookahead_tokens;
        let mut tried = Vec::new();
        let mut wanted = self.want_of_running(further);
        while self.running.len() > 1 {
            let supply = self
                .machine
                .free_blocks()
                .saturating_add(self.machine.arriving_blocks());
            if wanted <= supply {
                break;
            }
            let Some(victim) = self.victim(now, &tried) else {
                break;
            };
            let group = self.group(victim);
            let freed = match &group.phase {
                Phase::Running(lease) => self.want(group, lease, further),
                _ => 0,
            };
            match self.evict(now, victim) {
                Evicted::Yes => {
                    left += 1;
                    wanted -= freed;
                }
                Evicted::BudgetSpent => tried.push(victim),
            }
        }
        left
    }

    /// The group that should leave next, by policy.
    fn victim(&self, now: Time, tried: &[GroupIndex]) -> Option<GroupIndex> {
        let eligible = |index: &GroupIndex| {
            let group = self.group(*index);
            group.touched_in_pass != self.pass && now >= group.not_before && !tried.contains(index)
        };
        let mut candidates = self.running.values().copied().filter(eligible);
        match self.config.victim {
            VictimPolicy::Oldest => candidates.next(),
            VictimPolicy::Newest => candidates.next_back(),
            VictimPolicy::Cost => candidates
                .min_by_key(|&index| (self.cost(index), u64::MAX - self.group(index).arrival)),
        }
    }

    /// What it costs to do without a group for a while, in bytes of link traffic: out what isn't
    /// on the host yet, later everything back in; more for a group that left before.
    fn cost(&self, index: GroupIndex) -> u64 {
        let group = self.group(index);
        let Phase::Running(lease) = &group.phase else {
            return u64::MAX;
        };
        let blocks = self.machine.dirty_blocks(lease) + self.machine.blocks(lease);
        u64::from(blocks) * (1 + u64::from(group.swaps))
    }

    /// Lets a group leave: to the host if that is allowed and there is room, else its KV is
    /// dropped and computed again.
    fn evict(&mut self, now: Time, index: GroupIndex) -> Evicted {
        let max_retries = self.config.max_retries;
        let pass = self.pass;
        let group = self.group(index);
        let swap = self.config.swap == SwapPolicy::On && group.evict_failures <= max_retries;
        let empty =
            matches!(&group.phase, Phase::Running(lease) if self.machine.blocks(lease) == 0);
        if swap && !empty {
            let group = self.group_mut(index);
            let arrival = group.arrival;
            let Phase::Running(lease) = std::mem::replace(&mut group.phase, Phase::Moving) else {
                unreachable!("victims are running")
            };
            match self.machine.swap_out(now, lease, self.fence) {
                Ok(ticket) => {
                    self.running.remove(&arrival);
                    self.moving += 1;
                    self.by_ticket.insert(ticket.id(), index);
                    let group = self.group_mut(index);
                    group.phase = Phase::OutInFlight(ticket);
                    group.swaps += 1;
                    group.paused_since = Some(now);
                    group.left_in_pass = pass;
                    self.stats.preempted_swap += 1;
                    return Evicted::Yes;
                }
                Err(Refused { why, back }) => {
                    self.group_mut(index).phase = Phase::Running(back);
                    if matches!(why, Refusal::Inflight { .. }) {
                        return Evicted::BudgetSpent;
                    }
                }
            }
        }
        self.preempt_for_recompute(now, index);
        Evicted::Yes
    }

    pub(super) fn preempt_for_recompute(&mut self, now: Time, index: GroupIndex) {
        self.drop_kv(now, index);
        let pass = self.pass;
        let group = self.group_mut(index);
        group.paused_since = Some(now);
        group.left_in_pass = pass;
        self.stats.preempted_recompute += 1;
    }
}
