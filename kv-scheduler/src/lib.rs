//! Continuous batching over the machine of `kv-core`: groups of sequences are admitted, swapped
//! out, resumed and cancelled as a whole, while others go on decoding.
//!
//! There is no clock, no thread and no randomness in this crate: [`Engine::step`] takes the time, an
//! [`Executor`] runs the model and a [`kv_core::Backend`] moves the bytes.

#![forbid(unsafe_code)]

mod config;
mod engine;
mod executor;
mod group;
mod queue;
mod report;
mod request;

pub use config::{EngineConfig, EngineConfigError, SwapPolicy, VictimPolicy};
pub use engine::Engine;
pub use executor::{
    Batch, BatchRow, BlockCopy, ExecuteError, Executor, Logprobs, RowFault, Sample, Sampled,
    StepOutput,
};
pub use report::{EngineStats, Next, Output, Rejection};
pub use request::{FinishReason, InvalidParam, Request, RequestId, SamplingParams, TokenId};
