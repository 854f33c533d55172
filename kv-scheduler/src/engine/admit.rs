//! Admission: groups to be computed again first, then new requests, in order.

use kv_core::{Backend, Choice, Time};

use super::batch::Plan;
use super::{Engine, GroupIndex};
use crate::group::{Group, Phase, count};
use crate::{Executor, Output};

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Admits groups while blocks, sequences and step budget last. Nobody overtakes: the first
    /// group that doesn't fit, or whose turn it isn't, ends it.
    pub(super) fn admit(&mut self, now: Time, plan: &mut Plan, outputs: &mut Vec<Output>) {
        while plan.budget > 0 {
            let next = self.next_in_line(now).filter(|&index| self.fits(index));
            let Some(index) = next else { break };
            let group = self.group(index);
            let (priority, arrival) = (group.request.priority, group.arrival);
            if matches!(group.phase, Phase::Waiting) {
                let waited = now.since(group.arrived_at);
                outputs.push(Output::Admitted {
                    request: group.id(),
                    waited,
                });
                self.waiting.remove(priority, arrival);
            } else {
                self.recompute.remove(priority, arrival);
            }
            self.start(now, index);
            let choices: Vec<Choice> = self.group(index).active().collect();
            for choice in choices {
                self.plan_row(plan, index, choice);
            }
        }
    }

    fn fits(&self, index: GroupIndex) -> bool {
        let group = self.group(index);
        let again = match group.phase {
            Phase::Waiting => false,
            Phase::RecomputePending => true,
            // Parked groups come back, they don't start.
            _ => return false,
        };
        let sequences = self.running_sequences() + group.unfinished_count();
        let left_just_now = again && group.left_in_pass == self.pass;
        if left_just_now || sequences > self.config.max_batch_size {
            return false;
        }
        let needed = self.blocks_to_start(group);
        // Nobody comes in whose blocks those who run are going to need in a moment: they would
        // push each other out in turns.
        let alone = self.running.is_empty() && self.moving == 0;
        let (growth, watermark) = if alone {
            (0, 0)
        } else {
            (
                self.growth_of_running(self.slack_tokens()),
                self.watermark_blocks(),
            )
        };
        let taken = needed
            .saturating_add(self.promised_blocks())
            .saturating_add(self.want_of_coming())
            .saturating_add(growth)
            .saturating_add(watermark);
        taken <= self.machine.free_blocks()
    }

    /// Blocks that admission leaves alone, for the growth of those who run.
    fn watermark_blocks(&self) -> u32 {
        let share = u64::from(self.usable_blocks()) * u64::from(self.config.watermark_permille);
        u32::try_from(share / 1_000).unwrap_or(u32::MAX)
    }

    /// Blocks that hold a group's tokens so far, the full blocks of its prompt counted once.
    pub(super) fn blocks_to_start(&self, group: &Group) -> u32 {
        let block_tokens = self.machine.config().block_tokens;
        let shared = group.prompt_tokens() / block_tokens;
        let blocks = |choice| count(group.choice(choice).history.len()).div_ceil(block_tokens);
        if group
            .unfinished()
            .all(|choice| group.output(choice).is_empty())
        {
            return group.prompt_tokens().div_ceil(block_tokens);
        }
        shared
            + group
                .unfinished()
                .map(|choice| blocks(choice) - shared)
                .sum::<u32>()
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
    fn start(&mut self, now: Time, index: GroupIndex) {
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
        group.running_since = now;
        let arrival = group.arrival;
        self.running.insert(arrival, index);
    }
}
