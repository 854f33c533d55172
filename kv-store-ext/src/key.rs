//! The name of a chunk: whose it is, what it means, how long it is, and its digest.

use kv_core::Digest;

use crate::KeyError;

/// Names one chunk: the bytes of one block.
///
/// Two keys that differ in any field name different chunks. The digest guards against damage; it
/// is not what tells chunks apart, because 64 bits are too few for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkKey {
    /// Whose: a number that the caller never gives to anybody else, such as a random one per
    /// process.
    pub namespace: u128,
    /// Which object of the caller, such as the generation of a group's record.
    pub object: u64,
    /// Which chunk of the object, counted from 0.
    pub index: u32,
    /// [`Layout::fingerprint`](kv_core::Layout::fingerprint) of the pool that the bytes came
    /// from.
    pub layout_fingerprint: u64,
    /// Length of the chunk. At least 1.
    pub bytes: u32,
    /// Digest of the chunk.
    pub digest: Digest,
}

impl ChunkKey {
    /// Version of the encoding and of what the bytes of a chunk mean.
    pub const FORMAT_VERSION: u16 = 1;

    /// Length of an encoded key.
    pub const ENCODED_BYTES: usize = 2 + 16 + 8 + 4 + 8 + 4 + 8;

    /// The key as bytes, for stores that name things by bytes: the format version, then the
    /// fields in order, all little endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_BYTES] {
        let mut out = [0; Self::ENCODED_BYTES];
        let mut rest = &mut out[..];
        put(&mut rest, &Self::FORMAT_VERSION.to_le_bytes());
        put(&mut rest, &self.namespace.to_le_bytes());
        put(&mut rest, &self.object.to_le_bytes());
        put(&mut rest, &self.index.to_le_bytes());
        put(&mut rest, &self.layout_fingerprint.to_le_bytes());
        put(&mut rest, &self.bytes.to_le_bytes());
        put(&mut rest, &self.digest.value().to_le_bytes());
        out
    }

    /// The key that these bytes are.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if they are not what [`to_bytes`](Self::to_bytes) makes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KeyError> {
        let expected = Self::ENCODED_BYTES;
        let bytes: &[u8; Self::ENCODED_BYTES] = bytes.try_into().map_err(|_| KeyError::Length {
            expected,
            found: bytes.len(),
        })?;
        let mut rest = &bytes[..];
        let found = u16::from_le_bytes(take(&mut rest));
        let key = Self {
            namespace: u128::from_le_bytes(take(&mut rest)),
            object: u64::from_le_bytes(take(&mut rest)),
            index: u32::from_le_bytes(take(&mut rest)),
            layout_fingerprint: u64::from_le_bytes(take(&mut rest)),
            bytes: u32::from_le_bytes(take(&mut rest)),
            digest: Digest::from_value(u64::from_le_bytes(take(&mut rest))),
        };
        if found != Self::FORMAT_VERSION {
            return Err(KeyError::Version {
                found,
                expected: Self::FORMAT_VERSION,
            });
        }
        if key.bytes == 0 {
            return Err(KeyError::Empty);
        }
        Ok(key)
    }
}

fn put(rest: &mut &mut [u8], field: &[u8]) {
    let (head, tail) = core::mem::take(rest).split_at_mut(field.len());
    head.copy_from_slice(field);
    *rest = tail;
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (head, tail) = rest
        .split_first_chunk()
        .expect("the fields are as long as the key");
    *rest = tail;
    *head
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ChunkKey = ChunkKey {
        namespace: 1 << 100,
        object: 2,
        index: 3,
        layout_fingerprint: 4,
        bytes: 5,
        digest: Digest::from_value(6),
    };

    #[test]
    fn a_key_comes_back_from_its_bytes() {
        assert_eq!(ChunkKey::from_bytes(&KEY.to_bytes()), Ok(KEY));
    }

    #[test]
    fn every_byte_counts() {
        let bytes = KEY.to_bytes();
        for place in 0..bytes.len() {
            let mut other = bytes;
            other[place] ^= 0x80;
            assert_ne!(ChunkKey::from_bytes(&other), Ok(KEY), "byte {place}");
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let bytes = KEY.to_bytes();
        let length = |found| {
            Err(KeyError::Length {
                expected: 50,
                found,
            })
        };
        assert_eq!(ChunkKey::from_bytes(&bytes[1..]), length(49));
        assert_eq!(ChunkKey::from_bytes(&[]), length(0));
        assert_eq!(ChunkKey::from_bytes(&[0; 51]), length(51));
        let version = Err(KeyError::Version {
            found: 0,
            expected: 1,
        });
        assert_eq!(ChunkKey::from_bytes(&[0; 50]), version);
        let empty = ChunkKey { bytes: 0, ..KEY };
        assert_eq!(
            ChunkKey::from_bytes(&empty.to_bytes()),
            Err(KeyError::Empty)
        );
    }
}
