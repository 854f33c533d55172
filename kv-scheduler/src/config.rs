//! Settings of the engine.

use kv_core::Span;

/// Who leaves first when blocks are short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VictimPolicy {
    /// The group that was admitted last.
    #[default]
    Newest,
    /// The group that was admitted first.
    Oldest,
    /// The group whose absence costs least: link time to move it out and back, or time to compute
    /// it again if that is less, both as measured. A victim goes the cheaper way.
    Cost,
}

/// What happens to a victim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapPolicy {
    /// Its blocks are dropped and computed again later.
    Off,
    /// It is moved to the host if there is room, else computed again later.
    #[default]
    On,
}

/// Settings of the engine. Plain values; [`Engine::new`](crate::Engine::new) checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Most sequences (choices) that run at the same time.
    pub max_batch_size: u32,
    /// Most tokens in one step: 1 per decode row, and prefill chunks.
    pub max_tokens_per_step: u32,
    /// Most tokens of one prompt in one step.
    pub prefill_chunk: u32,
    /// Most tokens of one sequence, prompt and answer.
    pub max_seq_len: u32,
    /// Most requests that wait; 0 is no limit.
    pub max_waiting: u32,
    /// Most choices of one request.
    pub max_n: u32,
    /// What happens to a victim.
    pub swap: SwapPolicy,
    /// Who leaves first.
    pub victim: VictimPolicy,
    /// How often a failed resume is tried again before the group is computed again.
    pub max_retries: u32,
    /// Wait before the first retry; doubles with each further one.
    pub retry_backoff: Span,
    /// Blocks for this many further tokens of every running sequence are kept free by moving
    /// victims early, so that nobody waits for a copy of somebody else. 0 moves a victim when a
    /// block is missing.
    pub lookahead_tokens: u32,
    /// Share of the blocks, in thousandths, that admission leaves free for the growth of those
    /// who run. In 0..=500.
    pub watermark_permille: u32,
    /// A group that ran this long makes room when others wait for a place on the GPU; `None` lets
    /// everybody run to the end. A slice is never shorter than four times what the link needs to
    /// move the group out and back. For backends that copy beside decoding only: where copies
    /// block, slices make everybody slower.
    pub slice: Option<Span>,
    /// How often a group is moved for the sake of slices; after that it runs to the end. Lack of
    /// blocks moves it all the same.
    pub max_swaps: u32,
    /// When more than this share of the blocks or of the host slots is lost, in thousandths, the
    /// backend is not trusted any more: from then on victims are computed again.
    pub lost_permille_max: u32,
    /// Waiting this long makes a request one priority more urgent, at most as urgent as the most
    /// urgent one that waits.
    pub priority_aging: Span,
    /// A parked group is resumed once every running sequence, and it, could take this many tokens.
    pub resume_slack_tokens: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_batch_size: 32,
            max_tokens_per_step: 2048,
            prefill_chunk: 512,
            max_seq_len: 4096,
            max_waiting: 0,
            max_n: 16,
            swap: SwapPolicy::On,
            victim: VictimPolicy::Newest,
            max_retries: 2,
            retry_backoff: Span::from_millis(1),
            lookahead_tokens: 4,
            watermark_permille: 20,
            lost_permille_max: 100,
            priority_aging: Span::from_secs(10),
            slice: None,
            max_swaps: 1_000,
            resume_slack_tokens: 16,
        }
    }
}

/// A setting that can't work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}, must be between {least} and {most}")]
pub struct EngineConfigError {
    /// Which field of [`EngineConfig`].
    pub name: &'static str,
    /// Its value.
    pub value: u32,
    /// Smallest value allowed.
    pub least: u32,
    /// Largest value allowed.
    pub most: u32,
}

impl EngineConfig {
    /// Checks that the settings can work together.
    ///
    /// # Errors
    ///
    /// The first setting that is out of its range. A step must have room for one token of every running
    /// sequence, or some would never get on.
    pub fn validate(&self) -> Result<(), EngineConfigError> {
        let any = u32::MAX;
        let checks = [
            ("max_batch_size", self.max_batch_size, 1, any),
            (
                "max_tokens_per_step",
                self.max_tokens_per_step,
                self.max_batch_size,
                any,
            ),
            ("prefill_chunk", self.prefill_chunk, 1, any),
            ("max_seq_len", self.max_seq_len, 2, any),
            ("max_n", self.max_n, 1, any),
            ("watermark_permille", self.watermark_permille, 0, 500),
        ];
        let slice = self.slice.map_or(1, |slice| u32::from(slice > Span::ZERO));
        let slice = ("slice", slice, 1, any);
        for (name, value, least, most) in checks.into_iter().chain([slice]) {
            if value < least || value > most {
                return Err(EngineConfigError {
                    name,
                    value,
                    least,
                    most,
                });
            }
        }
        Ok(())
    }
}
