//! Digest of one block's bytes: XXH3, 64 bits.

/// XXH3-64 over the bytes of one host slot, all rows back to back, padding included.
///
/// A checksum against damage, not against an adversary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// Digest of `bytes`, one whole slot.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64(bytes))
    }

    /// A digest that was computed before and written down.
    #[must_use]
    pub const fn from_value(value: u64) -> Self {
        Self(value)
    }

    /// The number, to be written down.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}
