//! What is remembered about a parked group, checked field by field before its bytes go back.

use alloc::vec::Vec;

use crate::{BlockId, Digest, RecordKey};

/// What one choice has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceExtent {
    /// Tokens whose KV is stored.
    pub tokens: u32,
    /// Blocks in its table.
    pub blocks: u32,
    /// Tokens in the last block; 0 if there is none.
    pub last_block_tokens: u32,
}

impl ChoiceExtent {
    /// The only right extent for that many tokens.
    #[must_use]
    pub const fn of(tokens: u32, block_tokens: u32) -> Self {
        let blocks = tokens.div_ceil(block_tokens);
        let last_block_tokens = if tokens == 0 {
            0
        } else {
            (tokens - 1) % block_tokens + 1
        };
        Self {
            tokens,
            blocks,
            last_block_tokens,
        }
    }
}

/// Description of a parked group, format version 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Format version.
    pub version: u16,
    /// Which life of which group.
    pub key: RecordKey,
    /// [`Layout::fingerprint`](crate::Layout::fingerprint) of the pool that the bytes came from.
    pub layout_fingerprint: u64,
    /// Number of host slots; a block that choices share counts once.
    pub block_count: u32,
    /// Payload: `block_count` times bytes per block.
    pub bytes: u64,
    /// Every choice that isn't finished, in order.
    pub choices: Vec<ChoiceExtent>,
    /// One digest per slot, in order, if digests are on.
    pub digests: Option<Vec<Digest>>,
}

/// What the bytes are about to be restored into.
#[derive(Clone, Copy, Debug)]
pub struct RestoreTarget<'a> {
    /// The record.
    pub key: RecordKey,
    /// Fingerprint of the pool's layout.
    pub layout_fingerprint: u64,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub pool_blocks: u32,
    /// The reserved blocks, one per slot.
    pub blocks: &'a [BlockId],
}

/// The first field that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// `version`.
    #[error("version is {found}, must be {}", Metadata::VERSION)]
    Version {
        /// Saved.
        found: u16,
    },
    /// `key.group`.
    #[error("group is {found}, must be {expected}")]
    Group {
        /// Saved.
        found: u64,
        /// Right.
        expected: u64,
    },
    /// `key.generation`.
    #[error("generation is {found}, must be {expected}")]
    Generation {
        /// Saved.
        found: u64,
        /// Right.
        expected: u64,
    },
    /// `layout_fingerprint`.
    #[error("layout fingerprint is {found:#x}, must be {expected:#x}")]
    Layout {
        /// Saved.
        found: u64,
        /// Right.
        expected: u64,
    },
    /// `block_count`.
    #[error("block count is {found}, must be {expected}")]
    BlockCount {
        /// Saved.
        found: u32,
        /// Right.
        expected: u32,
    },
    /// `bytes`.
    #[error("byte count is {found}, must be {expected}")]
    Bytes {
        /// Saved.
        found: u64,
        /// Right.
        expected: u64,
    },
    /// A reserved block outside the pool.
    #[error("block {found} is outside a pool of {blocks}")]
    BlockRange {
        /// The block.
        found: u32,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// A block reserved twice.
    #[error("block {found} is named twice")]
    DuplicateBlock {
        /// The block.
        found: u32,
    },
    /// `tokens` or `blocks` of a choice: one is not what the other needs.
    #[error("choice {choice} has {blocks} blocks for {tokens} tokens, must have {expected}")]
    ChoiceBlocks {
        /// Index among the saved choices.
        choice: u32,
        /// Saved tokens.
        tokens: u32,
        /// Saved blocks.
        blocks: u32,
        /// Blocks that the tokens need.
        expected: u32,
    },
    /// `last_block_tokens` of a choice.
    #[error("choice {choice} has {found} tokens in its last block, must have {expected}")]
    LastBlock {
        /// Index among the saved choices.
        choice: u32,
        /// Saved.
        found: u32,
        /// Right.
        expected: u32,
    },
    /// Number of digests.
    #[error("{found} digests, must be {expected}")]
    Digests {
        /// Saved.
        found: u32,
        /// Right.
        expected: u32,
    },
}

impl Metadata {
    /// The format that this crate writes, and the only one that it reads.
    pub const VERSION: u16 = 1;

    /// Checks every field against what the bytes are about to be restored into.
    ///
    /// # Errors
    ///
    /// The first field that is wrong, in the order of [`MetadataError`]'s variants.
    pub fn validate(&self, target: &RestoreTarget<'_>) -> Result<(), MetadataError> {
        use MetadataError as E;
        if self.version != Self::VERSION {
            return Err(E::Version {
                found: self.version,
            });
        }
        let (found, expected) = (self.key.group.value(), target.key.group.value());
        if found != expected {
            return Err(E::Group { found, expected });
        }
        let (found, expected) = (self.key.generation.value(), target.key.generation.value());
        if found != expected {
            return Err(E::Generation { found, expected });
        }
        let (found, expected) = (self.layout_fingerprint, target.layout_fingerprint);
        if found != expected {
            return Err(E::Layout { found, expected });
        }
        let (found, expected) = (self.block_count, count(target.blocks.len()));
        if found != expected {
            return Err(E::BlockCount { found, expected });
        }
        let (found, expected) = (self.bytes, u64::from(self.block_count) * target.block_bytes);
        if found != expected {
            return Err(E::Bytes { found, expected });
        }
        self.validate_blocks(target)?;
        self.validate_choices(target.block_tokens)?;
        match &self.digests {
            Some(digests) if count(digests.len()) != self.block_count => Err(E::Digests {
                found: count(digests.len()),
                expected: self.block_count,
            }),
            _ => Ok(()),
        }
    }

    fn validate_blocks(&self, target: &RestoreTarget<'_>) -> Result<(), MetadataError> {
        let mut sorted = target.blocks.to_vec();
        sorted.sort_unstable();
        if let Some(last) = sorted
            .last()
            .filter(|last| last.value() >= target.pool_blocks)
        {
            let (found, blocks) = (last.value(), target.pool_blocks);
            return Err(MetadataError::BlockRange { found, blocks });
        }
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(MetadataError::DuplicateBlock {
                found: pair[0].value(),
            }),
            None => Ok(()),
        }
    }

    fn validate_choices(&self, block_tokens: u32) -> Result<(), MetadataError> {
        for (choice, saved) in self.choices.iter().enumerate() {
            let choice = count(choice);
            let right = ChoiceExtent::of(saved.tokens, block_tokens);
            if saved.blocks != right.blocks {
                let ChoiceExtent { tokens, blocks, .. } = *saved;
                let expected = right.blocks;
                return Err(MetadataError::ChoiceBlocks {
                    choice,
                    tokens,
                    blocks,
                    expected,
                });
            }
            if saved.last_block_tokens != right.last_block_tokens {
                let (found, expected) = (saved.last_block_tokens, right.last_block_tokens);
                return Err(MetadataError::LastBlock {
                    choice,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// Lengths of lists that are bounded by the pool size.
fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{Generation, GroupId};

    const KEY: RecordKey = RecordKey {
        group: GroupId::new(7),
        generation: Generation(3),
    };

    fn good() -> Metadata {
        Metadata {
            version: 1,
            key: KEY,
            layout_fingerprint: 99,
            block_count: 3,
            bytes: 300,
            choices: vec![ChoiceExtent::of(32, 16), ChoiceExtent::of(17, 16)],
            digests: None,
        }
    }

    fn check(metadata: &Metadata, blocks: &[u32]) -> Result<(), MetadataError> {
        let blocks: Vec<_> = blocks.iter().copied().map(BlockId::new).collect();
        metadata.validate(&RestoreTarget {
            key: KEY,
            layout_fingerprint: 99,
            block_bytes: 100,
            block_tokens: 16,
            pool_blocks: 10,
            blocks: &blocks,
        })
    }

    #[test]
    fn a_right_description_passes() {
        assert_eq!(check(&good(), &[0, 9, 4]), Ok(()));
    }

    #[test]
    fn each_field_is_named_when_it_is_wrong() {
        use MetadataError as E;
        let ids = [0, 9, 4];
        let with = |change: fn(&mut Metadata)| {
            let mut metadata = good();
            change(&mut metadata);
            check(&metadata, &ids).expect_err("one field is wrong")
        };
        assert_eq!(with(|m| m.version = 2), E::Version { found: 2 });
        assert_eq!(
            with(|m| m.key.group = GroupId::new(8)),
            E::Group {
                found: 8,
                expected: 7
            }
        );
        assert_eq!(
            with(|m| m.key.generation = Generation(2)),
            E::Generation {
                found: 2,
                expected: 3
            }
        );
        assert_eq!(
            with(|m| m.layout_fingerprint = 1),
            E::Layout {
                found: 1,
                expected: 99
            }
        );
        assert_eq!(
            with(|m| m.block_count = 2),
            E::BlockCount {
                found: 2,
                expected: 3
            }
        );
        assert_eq!(
            with(|m| m.bytes = 299),
            E::Bytes {
                found: 299,
                expected: 300
            }
        );
        assert_eq!(
            with(|m| m.choices[1].tokens = 33),
            E::ChoiceBlocks {
                choice: 1,
                tokens: 33,
                blocks: 2,
                expected: 3
            }
        );
        assert_eq!(
            with(|m| m.choices[0].last_block_tokens = 0),
            E::LastBlock {
                choice: 0,
                found: 0,
                expected: 16
            }
        );
        assert_eq!(
            with(|m| m.digests = Some(vec![Digest::of(&[1])])),
            E::Digests {
                found: 1,
                expected: 3
            }
        );
    }

    #[test]
    fn blocks_outside_the_pool_and_blocks_named_twice_are_refused() {
        assert_eq!(
            check(&good(), &[0, 10, 4]),
            Err(MetadataError::BlockRange {
                found: 10,
                blocks: 10
            })
        );
        assert_eq!(
            check(&good(), &[4, 9, 4]),
            Err(MetadataError::DuplicateBlock { found: 4 })
        );
    }

    #[test]
    fn extents_at_the_edges() {
        let extent = |tokens| {
            let ChoiceExtent {
                blocks,
                last_block_tokens,
                ..
            } = ChoiceExtent::of(tokens, 16);
            (blocks, last_block_tokens)
        };
        assert_eq!(
            [0, 1, 15, 16, 17, 32].map(extent),
            [(0, 0), (1, 1), (1, 15), (1, 16), (2, 1), (2, 16)]
        );
    }
}
