//! Who comes back, and who leaves when blocks are short.

use kv_core::{
    Backend, Direction, Lease, OnGpu, Place, PlantedFault, Refusal, Refused, Span, Time,
};

use super::{Engine, GroupIndex};
use crate::group::{Group, Phase};
use crate::{Executor, RequestId, SwapPolicy, VictimPolicy};

/// What became of a victim.
pub(super) enum Evicted {
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

    /// Free blocks that running groups need for `further` tokens of each choice after the rows
    /// that are planned already. Prompts that aren't run to the end are not counted here.
    pub(super) fn growth_of_running(&self, further: u32) -> u32 {
        let mut blocks = 0u32;
        for &index in self.running.values() {
            let group = self.group(index);
            let Phase::Running(lease) = &group.phase else {
                continue;
            };
            let growth = self.machine.blocks_to_append(lease, |choice| {
                if !group.is_active(choice) {
                    return 0;
                }
                // The last token that a choice emits is never run.
                let left = group.remaining_tokens(choice);
                match group.target_tokens(choice) - self.machine.tokens(lease, choice) {
                    0 => further.min(left.saturating_sub(1)),
                    1 => further.saturating_add(1).min(left),
                    _ => 0,
                }
            });
            blocks = blocks.saturating_add(growth);
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

    /// Starts bringing parked groups back, in the order of the line. Nobody overtakes: the first
    /// one that can't come back yet ends it.
    pub(super) fn resume(&mut self, now: Time) -> u32 {
        let mut started = 0;
        while let Some(index) = self.next_in_line(now) {
            let Some(expected_blocks) = self.can_resume(now, index) else {
                break;
            };
            let group = self.group_mut(index);
            let (priority, order) = (group.request.priority, group.parked_order);
            group.expected_blocks = expected_blocks;
            let Phase::HostResident(lease) = std::mem::replace(&mut group.phase, Phase::Moving)
            else {
                unreachable!("parked groups are on the host")
            };
            match self.machine.swap_in(now, lease, self.fence) {
                Ok(ticket) => {
                    started += 1;
                    self.parked.remove(priority, order);
                    self.moving += 1;
                    self.by_ticket.insert(ticket.id(), index);
                    self.group_mut(index).phase = Phase::InInFlight(ticket);
                }
                Err(Refused { why, back }) => {
                    self.group_mut(index).phase = Phase::HostResident(back);
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
        #[cfg(any(test, feature = "testing"))]
        self.log_room(wanted);
        while self.running.len() > 1 {
            let coming_back = if PlantedFault::NoArrivingCredit.is_on() {
                0
            } else {
                self.machine.arriving_blocks()
            };
            let supply = self.machine.free_blocks().saturating_add(coming_back);
            if wanted <= supply {
                break;
            }
            let Some(victim) = self.victim(&tried) else {
                break;
            };
            let group = self.group(victim);
            if now < group.not_before {
                // Its last eviction failed; nobody else has to pay for that.
                break;
            }
            let freed = match &group.phase {
                Phase::Running(lease) => self.want(group, lease, further),
                _ => 0,
            };
            #[cfg(any(test, feature = "testing"))]
            let held = self.blocks_of(victim);
            match self.evict(now, victim) {
                Evicted::Yes => {
                    #[cfg(any(test, feature = "testing"))]
                    self.log_victim(freed, held);
                    left += 1;
                    wanted -= freed;
                }
                Evicted::BudgetSpent => tried.push(victim),
            }
        }
        left
    }

    /// Whether a group on the GPU has anything to give up.
    pub(super) fn holds_blocks(&self, group: &Group) -> bool {
        matches!(&group.phase, Phase::Running(lease) if self.machine.blocks(lease) > 0)
    }

    /// The group that should leave next, by policy.
    fn victim(&self, tried: &[GroupIndex]) -> Option<GroupIndex> {
        let eligible = |index: &GroupIndex| {
            let group = self.group(*index);
            (group.touched_in_pass != self.pass || PlantedFault::SamePassVictim.is_on())
                && !tried.contains(index)
                && self.holds_blocks(group)
        };
        let priority = |index: &GroupIndex| self.group(*index).request.priority;
        let all = || self.running.values().copied().filter(eligible);
        // The least urgent ones, and among them by policy.
        let least = all().map(|index| priority(&index)).max()?;
        let mut candidates = all().filter(|index| priority(index) == least);
        match self.config.victim {
            VictimPolicy::Oldest => candidates.next(),
            VictimPolicy::Newest => candidates.next_back(),
            VictimPolicy::Cost => candidates
                .min_by_key(|&index| (self.cost(index), u64::MAX - self.group(index).arrival)),
        }
    }

    /// What it costs to do without a group for a while, in nanoseconds of link or of compute,
    /// whichever is less; more for a group that left before, so that nobody leaves all the time.
    fn cost(&self, index: GroupIndex) -> u64 {
        let group = self.group(index);
        let Phase::Running(lease) = &group.phase else {
            return u64::MAX;
        };
        let mut away = self.move_span(lease);
        if self.link_is_measured() {
            away = away.min(self.compute_span(group, lease));
        }
        away.as_nanos().saturating_mul(1 + u64::from(group.swaps))
    }

    /// Link time of a group: out what isn't on the host yet, later everything back in. At the
    /// rates that were measured, or at the assumed one at first.
    pub(super) fn move_span(&self, lease: &Lease<OnGpu>) -> Span {
        let block_bytes = self.machine.config().block_bytes;
        let span = |blocks: u32, direction| {
            let bytes = u128::from(blocks) * u128::from(block_bytes);
            let nanos = bytes * 1_000_000_000 / u128::from(self.machine.rate(direction));
            Span::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        span(self.machine.dirty_blocks(lease), Direction::Out)
            + span(self.machine.blocks(lease), Direction::In)
    }

    /// Whether the link was measured both ways. Before that, moving is not compared with
    /// computing: a guess that is too low would never be put right.
    fn link_is_measured(&self) -> bool {
        let measured = |direction| self.machine.measured_rate(direction).is_some();
        measured(Direction::In) && measured(Direction::Out)
    }

    /// Time to compute a group's KV again, at the measured rate; the longest span while nothing
    /// was measured.
    fn compute_span(&self, group: &Group, lease: &Lease<OnGpu>) -> Span {
        let tokens: u64 = group
            .active()
            .map(|choice| u64::from(self.machine.tokens(lease, choice)))
            .sum();
        self.prefill.span_of(tokens)
    }

    /// Whether a group's KV is computed again sooner than it is moved out and back. Asked only by
    /// the policy that compares costs, and with a margin, so that a wavering measurement doesn't
    /// change the way every time.
    fn computing_is_cheaper(&self, group: &Group) -> bool {
        let Phase::Running(lease) = &group.phase else {
            return false;
        };
        let by_cost = self.config.victim == VictimPolicy::Cost && self.link_is_measured();
        by_cost && self.compute_span(group, lease).saturating_mul(2) < self.move_span(lease)
    }

    /// Lets a group leave: to the host if that is allowed and there is room, else its KV is
    /// dropped and computed again.
    pub(super) fn evict(&mut self, now: Time, index: GroupIndex) -> Evicted {
        let group = self.group(index);
        let swap = self.config.swap == SwapPolicy::On
            && !self.stats.swap_given_up
            && group.evict_failures <= self.config.max_retries
            && !self.computing_is_cheaper(group);
        let refusal = if swap {
            self.evict_to_host(now, index).err()
        } else {
            None
        };
        match refusal {
            None if swap => Evicted::Yes,
            Some(Refusal::Inflight { .. }) => Evicted::BudgetSpent,
            _ => {
                self.preempt_for_recompute(now, index);
                Evicted::Yes
            }
        }
    }

    /// Starts moving a running group to the host.
    pub(super) fn evict_to_host(&mut self, now: Time, index: GroupIndex) -> Result<(), Refusal> {
        let (pass, fence) = (self.pass, self.fence);
        let group = self.group_mut(index);
        let arrival = group.arrival;
        let Phase::Running(lease) = std::mem::replace(&mut group.phase, Phase::Moving) else {
            unreachable!("victims are running")
        };
        let ticket = match self.machine.swap_out(now, lease, fence) {
            Ok(ticket) => ticket,
            Err(Refused { why, back }) => {
                self.group_mut(index).phase = Phase::Running(back);
                return Err(why);
            }
        };
        self.running.remove(&arrival);
        self.moving += 1;
        self.by_ticket.insert(ticket.id(), index);
        let group = self.group_mut(index);
        group.phase = Phase::OutInFlight(ticket);
        group.swaps += 1;
        group.paused_since.get_or_insert(now);
        group.left_in_pass = pass;
        self.stats.preempted_swap += 1;
        Ok(())
    }

    /// Moves a running group to the host although nobody needs its blocks: a hook for whoever
    /// shows that clients don't notice a swap. Answers whether it is leaving now; if so, call
    /// [`step`](Self::step) again.
    ///
    /// `false` if the request is not running, holds nothing, backs off after a failed eviction,
    /// or may not or can't go to the host now. Its KV is never dropped for this.
    pub fn force_swap(&mut self, now: Time, id: RequestId) -> bool {
        let Some(&index) = self.by_id.get(&id) else {
            return false;
        };
        let group = self.group(index);
        let may = self.config.swap == SwapPolicy::On
            && !self.stats.swap_given_up
            && group.evict_failures <= self.config.max_retries
            && now >= group.not_before
            && self.holds_blocks(group);
        may && self.evict_to_host(now, index).is_ok()
    }

    pub(super) fn preempt_for_recompute(&mut self, now: Time, index: GroupIndex) {
        self.drop_kv(now, index);
        let pass = self.pass;
        let group = self.group_mut(index);
        group.paused_since.get_or_insert(now);
        group.left_in_pass = pass;
        self.stats.preempted_recompute += 1;
    }
}
