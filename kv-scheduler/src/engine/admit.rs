//! Admission: groups to be computed again first, then new requests, in order.

use kv_core::{Backend, Choice, Time};

use super::batch::Plan;
use super::{Engine, GroupIndex};
use crate::group::Phase;
use crate::{Executor, Output};

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Admits groups while blocks, sequences and step budget last. Nobody overtakes: the first
    /// group that doesn't fit ends it, and nobody is admitted while a group is parked or on its
    /// way to the host.
    pub(super) fn admit(&mut self, now: Time, plan: &mut Plan, outputs: &mut Vec<Output>) {
        while plan.budget > 0 && self.parked.is_empty() && !self.somebody_is_leaving() {
            let again = self.recompute.first_key_value().map(|(_, &index)| index);
            let Some(index) = again.or_else(|| self.waiting.front().copied()) else {
                break;
            };
            if !self.fits(index, again.is_some()) {
                break;
            }
            if again.is_some() {
                self.recompute.pop_first();
            } else {
                self.waiting.pop_front();
                let group = self.group(index);
                let waited = now.since(group.arrived_at);
                outputs.push(Output::Admitted {
                    request: group.id(),
                    waited,
                });
            }
            self.start(index);
            let choices: Vec<Choice> = self.group(index).active().collect();
            for choice in choices {
                self.plan_row(plan, index, choice);
            }
        }
    }

    fn fits(&self, index: GroupIndex, again: bool) -> bool {
        let group = self.group(index);
        let sequences = self.running_sequences() + group.unfinished_count();
        let left_just_now = again && group.left_in_pass == self.pass;
        if left_just_now || sequences > self.config.max_batch_size {
            return false;
        }
        let longest = group
            .unfinished()
            .map(|choice| group.choice(choice).history.len())
            .max();
        let block_tokens = self.machine.config().block_tokens as usize;
        let needed = crate::group::count(longest.unwrap_or(0).div_ceil(block_tokens));
        // Who had to leave once comes back when the others can go on for a while.
        let alone = self.running.is_empty() && self.moving == 0;
        let further = if again && !alone {
            self.slack_tokens()
        } else {
            0
        };
        let kept = if again {
            self.want_of_running(further)
        } else {
            0
        };
        let taken = needed
            .saturating_add(self.promised_blocks())
            .saturating_add(self.want_of_coming())
            .saturating_add(kept);
        taken <= self.machine.free_blocks()
    }

    fn somebody_is_leaving(&self) -> bool {
        let leaving = |&index| matches!(self.group(index).phase, Phase::OutInFlight(_));
        self.by_ticket.values().any(leaving)
    }

    /// Blocks that running groups still need for prompts that are not run to the end.
    fn promised_blocks(&self) -> u32 {
        let block_tokens = self.machine.config().block_tokens;
        let mut blocks = 0u32;
        for &index in self.running.values() {
            let group = self.group(index);
            let Phase::Running(lease) = &group.phase else {
                continue;
            };
            for choice in group.active() {
                let (has, target) = (
                    self.machine.tokens(lease, choice),
                    group.target_tokens(choice),
                );
                let missing = target.div_ceil(block_tokens) - has.div_ceil(block_tokens);
                blocks = blocks.saturating_add(missing);
            }
        }
        blocks
    }

    /// Gives a group its place on the GPU, without blocks yet.
    fn start(&mut self, index: GroupIndex) {
        let pass = self.pass;
        let (id, n) = (self.group(index).id(), self.group(index).request.n);
        let lease = self
            .machine
            .allocate(Self::group_id(id), n)
            .expect("ids of live requests are unique, and n is at least 1");
        let over: Vec<Choice> = (0..n)
            .map(Choice::new)
            .filter(|&choice| self.group(index).choice(choice).finish.is_some())
            .collect();
        for choice in over {
            self.machine
                .release_choice(&lease, choice)
                .expect("it was allocated just now");
        }
        let group = self.group_mut(index);
        group.phase = Phase::Running(lease);
        group.touched_in_pass = pass;
        let arrival = group.arrival;
        self.running.insert(arrival, index);
    }
}
