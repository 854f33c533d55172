//! The boundary to a store of KV outside the process: a trait, its types, and a suite.
//!
//! There is no client here, no retry and no cache. Whoever brings a store implements
//! [`ExternalKvStore`] and runs `conformance` over it; whoever uses one decides what to do when it
//! fails. The protocol in prose is `docs/store-protocol.md`.
//!
//! # Features
//!
//! * `conformance`: a store in memory, and the suite that any store must pass.

#![forbid(unsafe_code)]

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod key;
#[cfg(feature = "conformance")]
mod memory;
mod store;
mod types;

pub use error::{KeyError, StoreFault, StoreRefusal};
pub use key::ChunkKey;
#[cfg(feature = "conformance")]
pub use memory::MemoryStore;
pub use store::ExternalKvStore;
pub use types::{
    Cancelling, Finished, Operation, StoreClosed, StoreCompletion, StoreLimits, StoreTicket,
};
