//! What goes to a store and what comes back.

use crate::{ChunkKey, StoreFault};

/// Names one operation of one store. Never used again by that store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreTicket(u64);

impl StoreTicket {
    /// Wraps the number; for implementors.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The number.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}

/// What a store can hold at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Longest chunk, bytes.
    pub chunk_bytes_max: u32,
    /// Operations that may be unfinished.
    pub operations_max: u32,
    /// Bytes of buffers that may be under way.
    pub inflight_bytes_max: u64,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Delete a chunk.
    Delete,
    /// Bring a chunk.
    Get,
    /// Store a chunk.
    Put,
}

/// How an operation succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// The chunk is gone, or was not there.
    Deleted,
    /// The buffer holds the chunk, and its digest was verified.
    Got,
    /// The chunk is stored: every get that is begun from now on finds it.
    Stored,
}

/// The end of one operation. Each has exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreCompletion {
    /// Which operation.
    pub ticket: StoreTicket,
    /// What was asked for.
    pub operation: Operation,
    /// Of which chunk.
    pub key: ChunkKey,
    /// How it ended.
    pub result: Result<Finished, StoreFault>,
    /// The buffer of a put or get, given back. Missing only with [`StoreFault::Unknown`], when
    /// the store can't vouch that nobody touches it any more.
    pub buffer: Option<Vec<u8>>,
}

/// What a store says to a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelling {
    /// It will try. The operation ends as cancelled or as it would have; its completion says
    /// which.
    Requested,
    /// No such operation is unfinished. Nothing happens.
    TooLate,
}

/// What [`close`](crate::ExternalKvStore::close) left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreClosed {
    /// Operations whose end was never confirmed.
    pub unconfirmed: u32,
    /// Bytes of their buffers, which nobody gets back.
    pub leaked_bytes: u64,
}
