//! One request inside the engine: its choices and where its KV is.

use kv_core::{Choice, Lease, OnGpu, OnHost, Ticket, Time};

use crate::{FinishReason, Request, RequestId, TokenId};

/// Where a group is. It is in exactly one place, and all of its choices with it (I05).
#[derive(Debug)]
pub(crate) enum Phase {
    /// In the waiting queue; holds nothing.
    Waiting,
    /// Was running, lost its KV, waits to be computed again; holds nothing.
    RecomputePending,
    /// On the GPU.
    Running(Lease<OnGpu>),
    /// On its way to the host.
    OutInFlight(Ticket<OnGpu>),
    /// Parked.
    HostResident(Lease<OnHost>),
    /// On its way back.
    InInFlight(Ticket<OnHost>),
    /// Being moved from one place to another within one call.
    Moving,
}

/// One sequence of a group.
#[derive(Debug)]
pub(crate) struct ChoiceState {
    /// Prompt, then everything emitted.
    pub(crate) history: Vec<TokenId>,
    /// Set when the choice is over.
    pub(crate) finish: Option<FinishReason>,
    /// Most tokens whose KV was ever stored; what is below it is computed again.
    pub(crate) high_water: u32,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) request: Request,
    /// Order of arrival; never changes.
    pub(crate) arrival: u64,
    pub(crate) phase: Phase,
    pub(crate) choices: Vec<ChoiceState>,
    /// Its number among the parked ones; kept when a resume fails.
    pub(crate) parked_order: u64,
    /// Whether every choice has a table of its own. Until then the first unfinished choice runs
    /// the prompt for all.
    pub(crate) forked: bool,
    /// Failed resumes in a row.
    pub(crate) resume_failures: u32,
    /// Failed evictions in a row.
    pub(crate) evict_failures: u32,
    /// Not resumed, and not evicted, before that time.
    pub(crate) not_before: Time,
    /// How often it was swapped out.
    pub(crate) swaps: u32,
    /// While it is on its way back: free blocks that it is going to need for its next tokens.
    pub(crate) expected_blocks: u32,
    /// When it was accepted.
    pub(crate) arrived_at: Time,
    /// When it came to the GPU, the last time.
    pub(crate) running_since: Time,
    /// When it was picked as a victim; until its next token.
    pub(crate) paused_since: Option<Time>,
    /// The last pass in which it was admitted, resumed or emitted (I07).
    pub(crate) touched_in_pass: u64,
    /// The last pass in which it had to leave.
    pub(crate) left_in_pass: u64,
}

impl Group {
    pub(crate) fn new(request: Request, arrival: u64, arrived_at: Time) -> Self {
        let choices = (0..request.n)
            .map(|_| ChoiceState {
                history: request.prompt.clone(),
                finish: None,
                high_water: 0,
            })
            .collect();
        Self {
            forked: request.n == 1,
            request,
            arrival,
            parked_order: 0,
            phase: Phase::Waiting,
            choices,
            resume_failures: 0,
            evict_failures: 0,
            not_before: Time::ZERO,
            swaps: 0,
            expected_blocks: 0,
            arrived_at,
            running_since: Time::ZERO,
            paused_since: None,
            touched_in_pass: 0,
            left_in_pass: 0,
        }
    }

    pub(crate) const fn id(&self) -> RequestId {
        self.request.id
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        count(self.request.prompt.len())
    }

    pub(crate) fn choice(&self, choice: Choice) -> &ChoiceState {
        &self.choices[choice.value() as usize]
    }

    pub(crate) fn choice_mut(&mut self, choice: Choice) -> &mut ChoiceState {
        &mut self.choices[choice.value() as usize]
    }

    /// The choices that are not over.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = Choice> {
        (0u32..)
            .zip(&self.choices)
            .filter(|(_, state)| state.finish.is_none())
            .map(|(index, _)| Choice::new(index))
    }

    pub(crate) fn unfinished_count(&self) -> u32 {
        count(self.unfinished().count())
    }

    /// The choices that have rows: all unfinished ones, or the first one until the group forks.
    pub(crate) fn active(&self) -> impl Iterator<Item = Choice> {
        self.unfinished()
            .take(if self.forked { usize::MAX } else { 1 })
    }

    /// Whether the choice has rows.
    pub(crate) fn is_active(&self, choice: Choice) -> bool {
        if self.forked {
            self.choices
                .get(choice.value() as usize)
                .is_some_and(|c| c.finish.is_none())
        } else {
            self.unfinished().next() == Some(choice)
        }
    }

    /// Tokens of an active choice that should be in its KV before its next token: its history,
    /// or the prompt until the group forks.
    pub(crate) fn target_tokens(&self, choice: Choice) -> u32 {
        if self.forked {
            count(self.choice(choice).history.len())
        } else {
            self.prompt_tokens()
        }
    }

    /// Tokens that the choice may still emit.
    pub(crate) fn remaining_tokens(&self, choice: Choice) -> u32 {
        let longest = self.prompt_tokens().saturating_add(self.request.max_tokens);
        longest.saturating_sub(count(self.choice(choice).history.len()))
    }

    /// Since when it waits for a place on the GPU, if it does.
    pub(crate) fn waits_since(&self) -> Time {
        self.paused_since.unwrap_or(self.arrived_at)
    }

    /// What the choice emitted so far.
    pub(crate) fn output(&self, choice: Choice) -> &[TokenId] {
        &self.choice(choice).history[self.request.prompt.len()..]
    }
}

/// Blocks that a request holds at most, the ones that choices share counted once.
///
/// The last token of a choice is never run, so it needs no place.
pub(crate) fn blocks_needed(prompt: u64, n: u64, max_tokens: u64, block_tokens: u64) -> u64 {
    let stored = prompt.saturating_add(max_tokens).saturating_sub(1);
    let blocks = stored.div_ceil(block_tokens);
    if max_tokens <= 1 {
        return blocks;
    }
    let shared = prompt / block_tokens;
    shared.saturating_add(n.saturating_mul(blocks - shared))
}

/// Lengths of lists that were checked against limits of 32 bits at the door.
pub(crate) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::blocks_needed;

    #[test]
    fn s08_the_sizes_of_the_scenario() {
        assert_eq!(blocks_needed(734, 1, 50, 16), 49);
        assert_eq!(blocks_needed(751, 1, 50, 16), 50);
        assert_eq!(blocks_needed(1_002, 1, 50, 16), 66);
    }

    #[test]
    fn choices_share_full_prompt_blocks_only() {
        assert_eq!(blocks_needed(32, 2, 48, 16), 2 + 2 * 3);
        assert_eq!(blocks_needed(33, 2, 16, 16), 2 + 2);
        assert_eq!(blocks_needed(33, 2, 17, 16), 2 + 2 * 2);
        assert_eq!(blocks_needed(33, 4, 1, 16), 3);
    }
}
