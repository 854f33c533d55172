//! Pure state machine for swapping the KV cache of LLM serving between GPU and host memory.
//!
//! Nothing in this crate reads a clock, starts a thread or draws a random number outside the
//! feature `host`: time is an argument, commands go out through [`Machine::poll_command`], and
//! what the world did comes in through `handle_*`.
//! The same machine therefore runs under a simulator with virtual time, on plain memory and on
//! CUDA.
//!
//! # Features
//!
//! * `host`: a plain-memory backend that copies on worker threads, and the blocking backend.
//! * `planted-faults`: known mistakes that can be switched on, to test the tests.
//! * `testing`: a simulated backend, checkers of the invariants and a conformance suite that any
//!   [`Backend`] must pass.

#![cfg_attr(not(any(feature = "host", feature = "testing", test)), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod backend;
mod command;
mod digest;
mod error;
mod event;
mod flight;
mod handle;
#[cfg(feature = "host")]
pub mod host;
mod id;
mod layout;
mod machine;
mod metadata;
mod planted;
mod pool;
mod record;
mod state;
mod stats;
#[cfg(feature = "testing")]
pub mod testing;
mod time;

pub use backend::{Backend, Closed, Refused, SubmitRefusal};
pub use command::{
    BlockMove, Command, CommandId, Completion, CopyFault, DigestWork, Direction, Fence, Outcome,
};
pub use digest::Digest;
pub use error::{ConfigError, Refusal};
pub use event::{Event, Settled};
pub use handle::{Gone, Lease, OnGpu, OnHost, Place, Redeemed, Ticket};
pub use id::{BlockId, Choice, Generation, GroupId, RecordKey, SlotIndex, TicketId};
pub use layout::{Layout, LayoutError, Row, RowGroup};
pub use machine::{Accepted, Checksum, CopyOnWrite, Deadlines, Machine, MachineConfig};
pub use metadata::{ChoiceExtent, Metadata, MetadataError, RestoreTarget};
pub use planted::PlantedFault;
pub use pool::HostSide;
pub use state::{RecordState, StateTable, Stimulus};
pub use stats::{DirectionCounters, GpuBlocks, GroupStates, HostSlots, Stats};
pub use time::{Span, Time};
