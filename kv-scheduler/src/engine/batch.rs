//! The rows of a step: decode rows of running groups, then prefill chunks.

use kv_core::{Backend, Choice, Machine, PlantedFault};

use super::{Engine, GroupIndex};
use crate::group::{Group, Phase};
use crate::{BatchRow, BlockCopy, Executor, Sample};

/// A row that has its place in the cache and waits for the step.
#[derive(Debug)]
pub(super) struct PlannedRow {
    pub(super) group: GroupIndex,
    pub(super) choice: Choice,
    /// First token, by position.
    pub(super) position: u32,
    pub(super) tokens: u32,
    /// For whom to sample from the logits after the last token.
    pub(super) samples: Vec<Choice>,
    /// Whether this row ends the prompt that choices share.
    pub(super) ends_shared_prompt: bool,
}

/// What a step is going to do.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) copies: Vec<BlockCopy>,
    pub(super) rows: Vec<PlannedRow>,
    /// Tokens that still fit into the step.
    pub(super) budget: u32,
}

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Rows of all running groups, oldest first: decode rows before prefill chunks.
    pub(super) fn plan_running(&mut self, plan: &mut Plan) {
        let groups: Vec<GroupIndex> = self.running.values().copied().collect();
        for decode in [true, false] {
            for &index in &groups {
                let choices: Vec<Choice> = self.group(index).active().collect();
                for choice in choices {
                    if (self.pending_tokens(index, choice) == 1) == decode {
                        self.plan_row(plan, index, choice);
                    }
                }
            }
        }
    }

    /// Tokens of a choice that have to be run before its next token.
    fn pending_tokens(&self, index: GroupIndex, choice: Choice) -> u32 {
        let group = self.group(index);
        let Phase::Running(lease) = &group.phase else {
            return 0;
        };
        group.target_tokens(choice) - self.machine.tokens(lease, choice)
    }

    /// Plans as much of a choice's pending tokens as budget, chunk and free blocks allow.
    pub(super) fn plan_row(&mut self, plan: &mut Plan, index: GroupIndex, choice: Choice) {
        let pending = self.pending_tokens(index, choice);
        let wanted = pending.min(self.config.prefill_chunk).min(plan.budget);
        if wanted == 0 {
            return;
        }
        let Self {
            machine, groups, ..
        } = self;
        let group = groups[index].as_ref().expect("queues name live groups");
        let Phase::Running(lease) = &group.phase else {
            return;
        };
        let position = machine.tokens(lease, choice);
        // What fits into free blocks, if not all does. With a shared tail the copy needs one.
        let block_tokens = machine.config().block_tokens;
        let room = |tokens: u32| {
            machine.blocks_to_append(lease, |c| if c == choice { tokens } else { 0 })
                <= machine.free_blocks()
        };
        let mut tokens = wanted;
        if !room(tokens) {
            let in_last = (block_tokens - position % block_tokens) % block_tokens;
            let fits = machine
                .free_blocks()
                .saturating_mul(block_tokens)
                .saturating_add(in_last);
            tokens = tokens.min(fits);
            if tokens == 0 || !room(tokens) {
                self.stats.stalled_rows += 1;
                return;
            }
        }
        match machine.append(lease, choice, tokens) {
            Ok(Some(_)) if PlantedFault::ForgetCopyOnWrite.is_on() => {}
            Ok(copy) => plan.copies.extend(copy.map(|c| BlockCopy {
                from: c.from,
                to: c.to,
            })),
            Err(_) => {
                self.stats.stalled_rows += 1;
                return;
            }
        }
        plan.budget -= tokens;
        let ends = tokens == pending;
        let ends_shared_prompt = ends && !group.forked;
        let samples = match (ends, group.forked) {
            (false, _) => Vec::new(),
            (true, true) => vec![choice],
            // Computed again: what the choices emitted then tells them apart.
            (true, false) if !group.output(choice).is_empty() => Vec::new(),
            (true, false) => group.unfinished().collect(),
        };
        plan.rows.push(PlannedRow {
            group: index,
            choice,
            position,
            tokens,
            samples,
            ends_shared_prompt,
        });
    }
}

/// The rows as the executor sees them.
pub(super) fn materialize<'a>(
    groups: &'a [Option<Group>],
    machine: &'a Machine,
    plan: &Plan,
) -> Vec<BatchRow<'a>> {
    let row = |planned: &PlannedRow| {
        let group = groups[planned.group]
            .as_ref()
            .expect("rows belong to live groups");
        let Phase::Running(lease) = &group.phase else {
            unreachable!("rows belong to running groups")
        };
        let first = planned.position as usize;
        let history = &group.choice(planned.choice).history;
        BatchRow {
            request: group.id(),
            choice: planned.choice,
            blocks: machine.table(lease, planned.choice),
            position: planned.position,
            tokens: &history[first..first + planned.tokens as usize],
            prompt: &group.request.prompt,
            samples: planned
                .samples
                .iter()
                .map(|&choice| Sample {
                    choice,
                    params: &group.request.sampling,
                    output: group.output(choice),
                })
                .collect(),
        }
    };
    plan.rows.iter().map(row).collect()
}
