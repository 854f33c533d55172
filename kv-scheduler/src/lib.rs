//! Continuous batching over the machine of `kv-core`: groups of sequences are admitted, swapped
//! out, resumed and cancelled as a whole, while others go on decoding.
//!
//! There is no clock, no thread and no randomness in this crate: the engine's `step` takes the time,
//! an [`Executor`] runs the model and a [`kv_core::Backend`] moves the bytes.

#![forbid(unsafe_code)]

mod config;
mod executor;
mod report;
mod request;

pub use config::{EngineConfig, SwapPolicy, VictimPolicy};
pub use executor::{
    Batch, BatchRow, BlockCopy, ExecuteError, Executor, Logprobs, RowFault, Sample, Sampled,
    StepOutput,
};
pub use report::{EngineStats, Next, Output, Rejection};
pub use request::{FinishReason, InvalidParam, Request, RequestId, SamplingParams, TokenId};
