//! One pass, and what its step yields.

use kv_core::{Backend, Choice, Time};

use super::batch::{Plan, PlannedRow, materialize};
use super::{Engine, GroupIndex};
use crate::group::{Phase, count};
use crate::{Batch, Executor, FinishReason, Next, Output, Sampled, StepOutput};

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Runs one pass: settles what is over, resumes, makes room, runs one step of the model and
    /// appends what happened to `outputs`. Blocks in the executor only.
    pub fn step(&mut self, now: Time, outputs: &mut Vec<Output>) -> Next {
        self.pass += 1;
        self.prefill.pass_starts(now);
        let mut progress = self.settle(now);
        progress += self.resume(now);
        progress += self.make_room(now);
        progress += self.rotate(now);
        // Copies start before the step, so that they run beside it. A blocking backend is through
        // with them here, and what it freed can be used at once.
        self.pump(now);
        progress += self.settle(now);
        let mut plan = Plan {
            budget: self.config.max_tokens_per_step,
            ..Plan::default()
        };
        self.plan_running(&mut plan);
        self.admit(now, &mut plan, outputs);
        if plan.rows.is_empty() {
            progress += self.break_deadlock(now, progress, outputs);
        } else {
            progress += 1;
            self.run(now, &plan, outputs);
        }
        // What was freed or failed meanwhile may have left commands behind.
        self.pump(now);
        let lost = kv_core::PlantedFault::LoseWakeUp.is_on() && plan.rows.is_empty();
        if progress > 0 && !lost {
            return Next::Again;
        }
        let until = self.wait_until(now);
        if until.is_none() && !self.is_idle() {
            self.stats.stuck_passes += 1;
        }
        Next::Wait(until)
    }

    fn run(&mut self, now: Time, plan: &Plan, outputs: &mut Vec<Output>) {
        self.stats.steps += 1;
        self.count_tokens(plan);
        let (decode, prefill): (Vec<_>, Vec<_>) = plan.rows.iter().partition(|row| row.tokens == 1);
        let prefill_tokens = prefill.iter().map(|row| u64::from(row.tokens)).sum();
        self.prefill
            .step_starts(now, prefill_tokens, decode.len() as u64);
        let Self {
            executor,
            groups,
            machine,
            ..
        } = self;
        let rows = materialize(groups, machine, plan);
        let batch = Batch {
            copies: &plan.copies,
            rows: &rows,
        };
        match executor.execute(&batch) {
            Ok(StepOutput { rows, fence }) => {
                self.fence = self.fence.max(fence);
                let missing = plan.rows.len() - rows.len().min(plan.rows.len());
                let rows = rows.into_iter().map(Some).chain((0..missing).map(|_| None));
                for (planned, row) in plan.rows.iter().zip(rows) {
                    match row {
                        Some(Ok(samples)) => self.apply(now, planned, samples, outputs),
                        Some(Err(fault)) => self.fail(now, planned.group, &fault.what, outputs),
                        None => {
                            self.fail(now, planned.group, "the step reported no result", outputs)
                        }
                    }
                }
            }
            Err(error) => {
                for planned in &plan.rows {
                    self.fail(now, planned.group, &error.what, outputs);
                }
            }
        }
    }

    fn count_tokens(&mut self, plan: &Plan) {
        for planned in &plan.rows {
            let end = planned.position + planned.tokens;
            let group = self.groups[planned.group]
                .as_mut()
                .expect("queues name live groups");
            let prompt = group.prompt_tokens();
            let state = group.choice_mut(planned.choice);
            let again = state.high_water.min(end).saturating_sub(planned.position);
            let first_time = end.min(prompt).saturating_sub(planned.position + again);
            state.high_water = state.high_water.max(end);
            self.stats.recomputed_tokens += u64::from(again);
            self.stats.prefill_tokens += u64::from(first_time);
        }
    }

    /// Hands out the tokens of a row. The group may be gone already: an earlier row of the same
    /// step failed.
    fn apply(
        &mut self,
        now: Time,
        planned: &PlannedRow,
        samples: Vec<Sampled>,
        outputs: &mut Vec<Output>,
    ) {
        let index = planned.group;
        if self.groups[index].is_none() {
            return;
        }
        if samples.len() != planned.samples.len() {
            self.fail(
                now,
                index,
                "the step reported a wrong number of samples",
                outputs,
            );
            return;
        }
        if planned.ends_shared_prompt {
            self.fork(index, planned.choice);
        }
        let pass = self.pass;
        for (&choice, sampled) in planned.samples.iter().zip(samples) {
            let group = self.group_mut(index);
            group.touched_in_pass = pass;
            group.choice_mut(choice).history.push(sampled.token);
            let request = group.id();
            let finish = if group.request.stop_tokens.contains(&sampled.token) {
                Some(FinishReason::Stop)
            } else if group.remaining_tokens(choice) == 0 {
                Some(FinishReason::Length)
            } else {
                None
            };
            if let Some(since) = group.paused_since.take() {
                outputs.push(Output::Resumed {
                    request,
                    pause: now.since(since),
                });
            }
            outputs.push(Output::Token {
                request,
                choice,
                sampled,
                finish,
            });
            self.stats.tokens += 1;
            if let Some(reason) = finish {
                self.finish_choice(now, index, choice, reason);
            }
        }
    }

    /// The prompt was run once for all choices; from now on each has a table of its own.
    fn fork(&mut self, index: GroupIndex, root: Choice) {
        let Self {
            machine, groups, ..
        } = self;
        let group = groups[index].as_mut().expect("queues name live groups");
        let Phase::Running(lease) = &group.phase else {
            return;
        };
        let others: Vec<Choice> = group
            .unfinished()
            .filter(|&choice| choice != root)
            .collect();
        for &choice in &others {
            machine
                .fork(lease, root, choice)
                .expect("the other choices are empty until now");
        }
        let stored = machine.tokens(lease, root);
        for choice in others {
            let state = group.choice_mut(choice);
            state.high_water = state.high_water.max(stored);
        }
        group.forked = true;
    }

    /// Ends a choice; with the last one the request is over.
    pub(super) fn finish_choice(
        &mut self,
        now: Time,
        index: GroupIndex,
        choice: Choice,
        why: FinishReason,
    ) {
        let Self {
            machine, groups, ..
        } = self;
        let group = groups[index].as_mut().expect("queues name live groups");
        let state = group.choice_mut(choice);
        if state.finish.is_some() {
            return;
        }
        state.finish = Some(why);
        if group.unfinished_count() == 0 {
            self.remove(now, index);
            self.stats.finished += 1;
        } else if let Phase::Running(lease) = &group.phase {
            machine
                .release_choice(lease, choice)
                .expect("unfinished choices have a table");
        } else {
            self.drop_orphaned_prompt(now, index);
        }
    }

    /// Ends a request that can't go on.
    fn fail(&mut self, now: Time, index: GroupIndex, what: &str, outputs: &mut Vec<Output>) {
        let Some(group) = &self.groups[index] else {
            return;
        };
        outputs.push(Output::Failed {
            request: group.id(),
            what: what.to_owned(),
        });
        self.remove(now, index);
        self.stats.failed += 1;
    }

    /// No row could be planned. If nothing is under way that could change that, somebody has to
    /// leave, or to end: work never stands still.
    fn break_deadlock(&mut self, now: Time, progress: u32, outputs: &mut Vec<Output>) -> u32 {
        let coming = self.machine.stats().flights > 0;
        if progress > 0 || coming {
            return 0;
        }
        let backing_off = |&index| now < self.group(index).not_before;
        if self.running.values().any(backing_off) {
            return 0;
        }
        if self.running.len() > 1 {
            let newest = self.running.values().next_back().copied();
            if let Some(index) = newest {
                self.preempt_for_recompute(now, index);
                return 1;
            }
        }
        let alone = self.running.values().next().copied();
        let stuck = alone.or_else(|| self.hopeless(now));
        match stuck {
            Some(index) => {
                self.fail(
                    now,
                    index,
                    "the pool has lost the blocks that this request needs",
                    outputs,
                );
                1
            }
            None => 0,
        }
    }

    /// With nothing running and nothing under way, the head of the queues could have started if
    /// it ever could.
    fn hopeless(&self, now: Time) -> Option<GroupIndex> {
        self.next_in_line(now)
            .filter(|&index| now >= self.group(index).not_before)
    }

    /// When something happens by itself.
    fn wait_until(&self, now: Time) -> Option<Time> {
        let parked = self
            .parked
            .heads()
            .map(|index| self.group(index).not_before);
        let running = self
            .running
            .values()
            .map(|&index| self.group(index).not_before);
        let waits = parked.chain(running).filter(|&time| time > now);
        waits.chain(self.machine.poll_timeout()).min()
    }

    /// Requests that are there.
    #[must_use]
    pub fn live_requests(&self) -> u32 {
        count(self.by_id.len())
    }
}
