//! Why a store refuses, and how an operation can fail.

/// Why a store did not take an operation. Nothing was started, and what was passed came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreRefusal {
    /// As many operations or bytes as it can have are under way; ask again after the next
    /// completion.
    #[error("as many operations or bytes are under way as the store can have")]
    Busy,
    /// It takes nothing any more.
    #[error("the store is closed")]
    Closed,
    /// The chunk is longer than any that it holds.
    #[error("the chunk has {bytes} bytes, at most {max} are allowed")]
    TooLarge {
        /// Length that the key names.
        bytes: u32,
        /// [`StoreLimits::chunk_bytes_max`](crate::StoreLimits::chunk_bytes_max).
        max: u32,
    },
    /// The buffer doesn't have the length that the key names.
    #[error("the buffer has {found} bytes, the key names {expected}")]
    WrongLength {
        /// Length that the key names.
        expected: u32,
        /// Length of the buffer.
        found: usize,
    },
}

/// How an operation that was taken failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreFault {
    /// It was cancelled before it had an effect.
    #[error("the operation was cancelled before it had an effect")]
    Cancelled,
    /// The store was closed before the operation had an effect.
    #[error("the store was closed before the operation had an effect")]
    Closed,
    /// What is stored doesn't have the digest that the key names. The buffer's content is of no
    /// use.
    #[error("the stored bytes don't have the digest that the key names")]
    Corrupt,
    /// No room; nothing was stored.
    #[error("the store is full")]
    Full,
    /// Nothing is stored under this key.
    #[error("nothing is stored under this key")]
    NotFound,
    /// The store could not be reached, surely without effect.
    #[error("the store could not be reached")]
    Unavailable,
    /// Nobody can say whether the operation had an effect, nor, if the buffer did not come back,
    /// whether it is still being touched.
    #[error("nobody can say whether the operation had an effect")]
    Unknown,
}

/// Why bytes are no [`ChunkKey`](crate::ChunkKey).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Not as long as a key.
    #[error("a key has {expected} bytes, these are {found}")]
    Length {
        /// [`ChunkKey::ENCODED_BYTES`](crate::ChunkKey::ENCODED_BYTES).
        expected: usize,
        /// Number of bytes.
        found: usize,
    },
    /// A format that this version doesn't know.
    #[error("the key has format version {found}, must be {expected}")]
    Version {
        /// In the bytes.
        found: u16,
        /// [`ChunkKey::FORMAT_VERSION`](crate::ChunkKey::FORMAT_VERSION).
        expected: u16,
    },
    /// A key that names no bytes.
    #[error("the key names a chunk of 0 bytes")]
    Empty,
}
