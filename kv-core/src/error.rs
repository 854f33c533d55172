//! Refusals and errors of the machine.

use crate::MetadataError;

/// Why the machine refused a request; nothing was changed (I12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Backpressure: not enough free GPU blocks.
    #[error("{needed} GPU blocks are needed, {free} are free")]
    GpuBlocks {
        /// Blocks needed.
        needed: u32,
        /// Blocks free now.
        free: u32,
    },
    /// Backpressure: not enough host slots, clean copies of others counted as free.
    #[error("{needed} host slots are needed, {free} can be had")]
    HostSlots {
        /// Slots needed.
        needed: u32,
        /// Slots that can be had now.
        free: u32,
    },
    /// Backpressure: the in-flight budget is spent.
    #[error("{needed} bytes of in-flight budget are needed, {free} are left")]
    Inflight {
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        free: u64,
    },
    /// The machine is drained and takes nothing new.
    #[error("the machine is draining")]
    Draining,
    /// A live group has this id.
    #[error("a live group has this id")]
    GroupExists,
    /// A group has at least one choice.
    #[error("a group of 0 choices")]
    NoChoices,
    /// The group has no such choice, or it was released.
    #[error("the group has no such choice")]
    NoSuchChoice,
    /// The choice has tokens already.
    #[error("the choice is not empty")]
    ChoiceNotEmpty,
    /// The handle belongs to another machine.
    #[error("the handle belongs to another machine")]
    Foreign,
    /// The flight is not over yet.
    #[error("the flight is not settled")]
    NotSettled,
    /// What was saved doesn't fit what would be restored; the host copy is not usable.
    #[error("saved metadata: {0}")]
    Metadata(#[from] MetadataError),
}

/// Why a machine can't be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A pool without blocks.
    #[error("the GPU pool has 0 blocks, must have at least 1")]
    NoBlocks,
    /// The in-flight cap doesn't hold one block.
    #[error("the in-flight cap is {cap} bytes, must be at least one block of {block_bytes} bytes")]
    InflightCap {
        /// The cap.
        cap: u64,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// The rate assumed for deadlines is 0.
    #[error("the assumed copy rate is 0 bytes per second, must be at least 1")]
    NoRate,
}
