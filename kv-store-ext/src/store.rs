//! The trait.

use core::task::Waker;

use kv_core::{Refused, Span};

use crate::{
    Cancelling, ChunkKey, StoreClosed, StoreCompletion, StoreLimits, StoreRefusal, StoreTicket,
};

/// Keeps chunks somewhere else.
///
/// The contract, clause by clause; `conformance` checks it on any implementation:
///
/// 1. [`put`](Self::put), [`get`](Self::get) and [`delete`](Self::delete) never block on the
///    store; they take the operation or refuse, and a refusal changes nothing and hands back what
///    was passed.
/// 2. One completion per ticket, in any order, announced through the waker. No ticket is used
///    twice.
/// 3. A put that ended as `Stored` is seen by every get that is begun afterwards, and what a get
///    brings has the digest of its key. Damage is [`Corrupt`](crate::StoreFault::Corrupt), never
///    `Got`.
/// 4. Puts and deletes can be repeated: storing a chunk that is there, or deleting one that is
///    not, succeeds.
/// 5. A buffer belongs to the store from the call to the completion, which gives it back. It is
///    missing only when the store can't vouch for it.
/// 6. [`cancel`](Self::cancel) never waits, and the operation still has exactly one completion.
/// 7. Chunks and what is under way are bounded by [`limits`](Self::limits).
/// 8. [`close`](Self::close) waits only up to its limit; what is unconfirmed then is counted.
///
/// There is no retry behind this trait: whoever calls decides.
pub trait ExternalKvStore {
    /// What the store can hold at a time. Never changes.
    fn limits(&self) -> StoreLimits;

    /// Stores a chunk.
    ///
    /// The caller vouches that the bytes have the digest of the key; the store need not check it.
    ///
    /// # Errors
    ///
    /// Hands the bytes back if it can't take them now or ever.
    fn put(
        &mut self,
        key: ChunkKey,
        bytes: Vec<u8>,
    ) -> Result<StoreTicket, Refused<Vec<u8>, StoreRefusal>>;

    /// Brings a chunk into the buffer, whose length must be the key's.
    ///
    /// # Errors
    ///
    /// Hands the buffer back if it can't take it now or ever.
    fn get(
        &mut self,
        key: ChunkKey,
        buffer: Vec<u8>,
    ) -> Result<StoreTicket, Refused<Vec<u8>, StoreRefusal>>;

    /// Deletes a chunk.
    ///
    /// # Errors
    ///
    /// [`StoreRefusal::Busy`] or [`StoreRefusal::Closed`].
    fn delete(&mut self, key: ChunkKey) -> Result<StoreTicket, StoreRefusal>;

    /// Moves all completions that have arrived to the end of `out`. Never blocks.
    fn poll(&mut self, out: &mut Vec<StoreCompletion>);

    /// Sets whom to wake, from any thread, after a completion has become visible to `poll`.
    fn set_waker(&mut self, waker: Waker);

    /// Asks to break an operation off. Never waits.
    fn cancel(&mut self, ticket: StoreTicket) -> Cancelling;

    /// Takes nothing more, ends what has had no effect as
    /// [`Closed`](crate::StoreFault::Closed), and waits for the rest, at most `limit`.
    /// Idempotent.
    fn close(&mut self, limit: Span) -> StoreClosed;
}
