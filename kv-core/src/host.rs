//! Plain memory instead of a GPU: the pool, and two backends over it.
//!
//! Who may touch what: a block is written by the executor between the start and the end of a step
//! that names it, or by one running `In`; it is read by steps and by running `Out`s. The machine
//! keeps these apart. Each block has a lock of its own, so a mistake there is an error and never
//! a data race.

mod backend;
pub(crate) mod copy;
mod damage;
mod link;
mod memory;
#[cfg(feature = "testing")]
mod probe;
mod sync;
mod worker;

pub use backend::{HostBackend, HostStartError};
pub use damage::DamageSlot;
pub use link::{Clock, HostConfig, Link};
pub use memory::{BlockRead, BlockWrite, PlainMemory};
#[cfg(feature = "testing")]
pub use probe::SlotProbe;
pub use sync::SyncBackend;
