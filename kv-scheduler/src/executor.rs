//! The contract between the engine and whatever runs the model.

use kv_core::{BlockId, Choice, Fence};

use crate::{RequestId, SamplingParams, TokenId};

/// Copies the content of one block to another one before any row of the batch runs: the
/// copy-on-write of a block that several choices shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Where the content is.
    pub from: BlockId,
    /// The block that will be written from now on.
    pub to: BlockId,
}

/// One step: copies first, then all rows.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Copies to be made before any row runs, in this order.
    pub copies: &'a [BlockCopy],
    /// The rows. No two rows write the same block; several may read the same one.
    pub rows: &'a [BatchRow<'a>],
}

/// A piece of one sequence: a chunk of its prompt, or its last token.
///
/// The executor writes the KV of `tokens[i]` to position `position + i`: row element
/// `p % block_tokens` of block `blocks[p / block_tokens]`. All earlier positions are there.
#[derive(Clone, Debug)]
pub struct BatchRow<'a> {
    /// Which request.
    pub request: RequestId,
    /// Which of its choices. A prompt that choices share is run as choice 0.
    pub choice: Choice,
    /// The block table, at least up to the last position of this row.
    pub blocks: &'a [BlockId],
    /// Position of the first token of this row, counted from 0.
    pub position: u32,
    /// The tokens to run, at least one.
    pub tokens: &'a [TokenId],
    /// The whole prompt of the request.
    pub prompt: &'a [TokenId],
    /// What to sample from the logits after the last token; empty for a chunk in the middle.
    pub samples: Vec<Sample<'a>>,
}

/// Asks for one token.
///
/// The result is a function of the logits, `params`, `prompt`, `output` and `choice`, and of
/// nothing else: pausing, resuming or recomputing a sequence can't change it.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// For which choice.
    pub choice: Choice,
    /// How.
    pub params: &'a SamplingParams,
    /// What this choice has emitted so far. The new token's position is
    /// `prompt.len() + output.len()`.
    pub output: &'a [TokenId],
}

/// Natural logarithms of probabilities, before penalties and truncation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// Of the sampled token.
    pub chosen: f32,
    /// The most probable tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Present if the request asked for it.
    pub logprobs: Option<Logprobs>,
}

/// What became of a step.
#[derive(Debug)]
pub struct StepOutput {
    /// For each row of the batch, in order: its samples in the order asked for, or why this row
    /// alone failed.
    pub rows: Vec<Result<Vec<Sampled>, RowFault>>,
    /// The end of this step: after it, what it wrote may be copied and what it read overwritten.
    pub fence: Fence,
}

/// One row failed; its KV is not usable, the other rows are fine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct RowFault {
    /// What happened, for the log; free of tokens and text.
    pub what: String,
}

/// A whole step failed; the KV of none of its rows is usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step failed: {what}")]
pub struct ExecuteError {
    /// What happened, for the log; free of tokens and text.
    pub what: String,
}

/// Runs a model over the paged cache.
///
/// An executor writes exactly the positions that the rows name and the targets of the copies, and
/// touches no block that isn't in the batch. The tokens of a row don't depend on the other rows.
pub trait Executor {
    /// Runs one step.
    ///
    /// # Errors
    ///
    /// [`ExecuteError`] if nothing of the step can be used; a fault of single rows is reported in
    /// the output.
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError>;
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        (**self).execute(batch)
    }
}
