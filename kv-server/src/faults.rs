//! Faults on purpose, for tests from outside: the flags behind `--fault-injection`.
//!
//! Three wrappers, each around the real thing: `FaultyBackend` around whatever copies,
//! `FaultyExecutor` around whatever runs the model, `ForcedSwaps` around the engine. They are
//! put in place only if the configuration has a [`FaultPlan`]; without one no server has any of
//! this in its way.

mod backend;
mod config;
mod executor;
mod forced;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

pub(crate) use self::backend::{Delay, FaultyBackend};
pub(crate) use self::config::plan;
pub(crate) use self::executor::FaultyExecutor;
pub(crate) use self::forced::ForcedSwaps;

/// What shall go wrong. Copies and steps are counted from 1, over the server's life; a copy is
/// one command to the backend, in either direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Each copy's end is seen this much later; blocking copies block this much longer.
    pub copy_delay: Duration,
    /// These copies fail and move nothing.
    pub fail_copies: BTreeSet<u64>,
    /// This copy runs, but nobody hears of its end.
    pub lose_copy: Option<NonZeroU64>,
    /// The end of this copy is reported twice.
    pub repeat_completion: Option<NonZeroU64>,
    /// After so many copies out, one bit of the last one's first host slot is flipped.
    pub flip_host_bit: Option<NonZeroU64>,
    /// This step fails.
    pub step_error: Option<NonZeroU64>,
    /// A group is swapped out after every so many of its tokens.
    pub force_swap_every: Option<NonZeroU32>,
}
