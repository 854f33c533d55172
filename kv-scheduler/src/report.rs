//! What the engine tells the world after a step.

use kv_core::{Choice, Span, Time};

use crate::{FinishReason, RequestId, Sampled};

/// Why a request was refused at the door; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The engine finishes what it has and takes nothing new.
    #[error("the engine is shutting down")]
    Draining,
    /// A live request has this id.
    #[error("a live request has this id")]
    DuplicateId,
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// `max_tokens` is 0.
    #[error("max_tokens is 0, must be at least 1")]
    NoTokens,
    /// Too many or too few choices.
    #[error("n is {n}, must be between 1 and {max}")]
    Choices {
        /// Asked for.
        n: u32,
        /// Allowed.
        max: u32,
    },
    /// Prompt and answer are longer than a sequence may be.
    #[error("{prompt} prompt tokens and {max_tokens} new ones are more than {max} per sequence")]
    TooLong {
        /// Prompt tokens.
        prompt: u64,
        /// Asked for.
        max_tokens: u64,
        /// Allowed.
        max: u64,
    },
    /// The request could not run even alone.
    #[error("the request needs {needed} KV blocks, the pool has {blocks}")]
    NeverFits {
        /// Blocks needed at the end.
        needed: u64,
        /// Blocks in the pool.
        blocks: u64,
    },
    /// Too many requests wait already.
    #[error("{waiting} requests are waiting, at most {max} may")]
    QueueFull {
        /// Waiting now.
        waiting: u32,
        /// Allowed.
        max: u32,
    },
}

/// One thing that happened to a request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Output {
    /// A request has its place on the GPU for the first time.
    Admitted {
        /// Which request.
        request: RequestId,
        /// From its acceptance to now.
        waited: Span,
    },
    /// A token of one choice.
    Token {
        /// Which request.
        request: RequestId,
        /// Which choice.
        choice: Choice,
        /// The token.
        sampled: Sampled,
        /// Present if this is the choice's last token.
        finish: Option<FinishReason>,
    },
    /// The request failed as a whole and is gone.
    Failed {
        /// Which request.
        request: RequestId,
        /// What happened, for the log; free of tokens and text.
        what: String,
    },
    /// A group that had to leave has emitted a token again: how long it had been away.
    Resumed {
        /// Which request.
        request: RequestId,
        /// From being picked as a victim to its next token.
        pause: Span,
    },
}

/// What to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// There is work that can go on now.
    Again,
    /// Nothing can go on until a request, a cancellation or a completion arrives, or until the
    /// given time.
    Wait(Option<Time>),
}

/// Gauges and counters of the engine; those of the machine are beside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that wait for admission.
    pub waiting: u32,
    /// Requests that have blocks and can run.
    pub running: u32,
    /// Requests that are swapped out, on their way out or on their way in.
    pub swapped: u32,
    /// Requests that wait to be computed again.
    pub recompute_pending: u32,
    /// Steps executed.
    pub steps: u64,
    /// Tokens emitted.
    pub tokens: u64,
    /// Prompt tokens prefilled for the first time.
    pub prefill_tokens: u64,
    /// Tokens prefilled again after a recompute.
    pub recomputed_tokens: u64,
    /// Requests accepted.
    pub accepted: u64,
    /// Requests refused.
    pub rejected: u64,
    /// Requests that ended by themselves.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Groups swapped out.
    pub preempted_swap: u64,
    /// Groups whose blocks were dropped to be computed again.
    pub preempted_recompute: u64,
    /// Groups resumed from the host.
    pub resumed: u64,
    /// Rows of running sequences that had to wait in a step because no block was free.
    pub stalled_rows: u64,
    /// Whether the backend lost too much memory, and victims are computed again for good.
    pub swap_given_up: bool,
    /// Passes after which nothing could ever have happened although requests were there. Always 0
    /// unless the engine has a bug (I08).
    pub stuck_passes: u64,
    /// Events that nobody collected in time and that were dropped.
    pub dropped_events: u64,
}
