//! Where a block's rows lie in GPU memory, and how they are packed into a host slot.

use alloc::vec::Vec;

/// Equal rows at equal distances: part of every block.
///
/// Row `r` of block `b` starts `base + b * block_stride + r * row_stride` bytes into the region.
/// All quantities are bytes but `region` and `rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowGroup {
    /// Which allocation, counted from 0.
    pub region: u32,
    /// Where row 0 of block 0 starts.
    pub base: u64,
    /// Distance between the same row of neighbouring blocks.
    pub block_stride: u64,
    /// Number of rows of each block in this group.
    pub rows: u32,
    /// Distance between neighbouring rows of the same block.
    pub row_stride: u64,
    /// Length of a row.
    pub row_bytes: u64,
}

/// One contiguous piece of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which allocation.
    pub region: u32,
    /// Where the row starts in the region, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// Where the row starts in the block's host slot, bytes.
    pub slot_offset: u64,
}

/// Why a layout was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A count or a length that must be at least 1 is 0.
    #[error("{what} is 0, must be at least 1")]
    Zero {
        /// Which.
        what: &'static str,
    },
    /// More rows per block than any cache has.
    #[error("{rows} rows per block, must be at most {max}")]
    TooManyRows {
        /// Asked for.
        rows: u64,
        /// Allowed.
        max: u32,
    },
    /// Arithmetic left the range of 64 bits.
    #[error("row group {index} reaches beyond 64-bit addresses")]
    Overflow {
        /// Which row group.
        index: usize,
    },
    /// A row group names a region that was not given.
    #[error("row group {index} names region {region}, but there are {regions} regions")]
    NoSuchRegion {
        /// Which row group.
        index: usize,
        /// The region it names.
        region: u32,
        /// How many there are.
        regions: usize,
    },
    /// A row group reaches beyond its region.
    #[error("row group {index} ends at byte {end} of a region of {region_bytes} bytes")]
    OutOfBounds {
        /// Which row group.
        index: usize,
        /// One past its last byte.
        end: u64,
        /// Length of the region.
        region_bytes: u64,
    },
    /// Two rows share bytes.
    #[error("rows of row groups {first} and {second} overlap in region {region}")]
    Overlap {
        /// One row group.
        first: usize,
        /// The other; may be the same.
        second: usize,
        /// Where.
        region: u32,
    },
}

/// Describes a paged KV cache: never guessed, always checked.
///
/// ```
/// use kv_core::Layout;
///
/// // The single tensor [layers, blocks, 2, block_tokens, kv_heads, head_dim], 2 bytes a value.
/// let layout = Layout::stacked(4, 100, 16, 8, 64, 2)?;
/// assert_eq!(layout.block_bytes(), 4 * 2 * 16 * 8 * 64 * 2);
/// assert_eq!(layout.rows_per_block(), 4);
/// # Ok::<(), kv_core::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    block_tokens: u32,
    blocks: u32,
    regions: Vec<u64>,
    groups: Vec<RowGroup>,
    rows_per_block: u32,
    block_bytes: u64,
}

impl Layout {
    /// Checks a description of `blocks` blocks of `block_tokens` tokens in regions of the given
    /// lengths in bytes.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] names the first thing that is wrong: a zero, an overflow, a region that
    /// doesn't exist or is too short, or rows that share bytes.
    pub fn new(
        block_tokens: u32,
        blocks: u32,
        regions: &[u64],
        groups: &[RowGroup],
    ) -> Result<Self, LayoutError> {
        let zero = |what| Err(LayoutError::Zero { what });
        if block_tokens == 0 {
            return zero("block_tokens");
        }
        if blocks == 0 {
            return zero("blocks");
        }
        if groups.is_empty() {
            return zero("number of row groups");
        }
        let mut rows_per_block = 0u32;
        let mut block_bytes = 0u64;
        for (index, group) in groups.iter().enumerate() {
            if group.rows == 0 {
                return zero("rows");
            }
            if group.row_bytes == 0 {
                return zero("row_bytes");
            }
            let region_bytes =
                *regions
                    .get(group.region as usize)
                    .ok_or(LayoutError::NoSuchRegion {
                        index,
                        region: group.region,
                        regions: regions.len(),
                    })?;
            let end = end_of(group, blocks).ok_or(LayoutError::Overflow { index })?;
            if end > region_bytes {
                return Err(LayoutError::OutOfBounds {
                    index,
                    end,
                    region_bytes,
                });
            }
            let rows = u64::from(rows_per_block) + u64::from(group.rows);
            rows_per_block = rows_within_bounds(rows)?;
            block_bytes = u64::from(group.rows)
                .checked_mul(group.row_bytes)
                .and_then(|bytes| bytes.checked_add(block_bytes))
                .ok_or(LayoutError::Overflow { index })?;
        }
        overlap(groups, blocks)?;
        Ok(Self {
            block_tokens,
            blocks,
            regions: regions.to_vec(),
            groups: groups.to_vec(),
            rows_per_block,
            block_bytes,
        })
    }

    /// One tensor `[layers, blocks, 2, block_tokens, kv_heads, head_dim]` of `value_bytes` bytes
    /// a value: per layer one row, K before V.
    ///
    /// # Errors
    ///
    /// As [`Layout::new`].
    pub fn stacked(
        layers: u32,
        blocks: u32,
        block_tokens: u32,
        kv_heads: u32,
        head_dim: u32,
        value_bytes: u32,
    ) -> Result<Self, LayoutError> {
        let row = product(&[2, block_tokens, kv_heads, head_dim, value_bytes])?;
        let layer = row
            .checked_mul(blocks.into())
            .ok_or(LayoutError::Overflow { index: 0 })?;
        let whole = layer
            .checked_mul(layers.into())
            .ok_or(LayoutError::Overflow { index: 0 })?;
        let group = RowGroup {
            region: 0,
            base: 0,
            block_stride: row,
            rows: layers,
            row_stride: layer,
            row_bytes: row,
        };
        Self::new(block_tokens, blocks, &[whole], &[group])
    }

    /// Per layer one allocation for K and one for V, each `[blocks, block_tokens, kv_heads,
    /// head_dim]`: two rows per layer, K of a layer before its V.
    ///
    /// # Errors
    ///
    /// As [`Layout::new`].
    pub fn per_layer(
        layers: u32,
        blocks: u32,
        block_tokens: u32,
        kv_heads: u32,
        head_dim: u32,
        value_bytes: u32,
    ) -> Result<Self, LayoutError> {
        let row = product(&[block_tokens, kv_heads, head_dim, value_bytes])?;
        Self::planes(layers.saturating_mul(2), blocks, block_tokens, row)
    }

    /// Multi-head latent attention: per layer one allocation `[blocks, block_tokens, width]`.
    ///
    /// # Errors
    ///
    /// As [`Layout::new`].
    pub fn latent(
        layers: u32,
        blocks: u32,
        block_tokens: u32,
        width: u32,
        value_bytes: u32,
    ) -> Result<Self, LayoutError> {
        let row = product(&[block_tokens, width, value_bytes])?;
        Self::planes(layers, blocks, block_tokens, row)
    }

    fn planes(
        planes: u32,
        blocks: u32,
        block_tokens: u32,
        row_bytes: u64,
    ) -> Result<Self, LayoutError> {
        rows_within_bounds(planes.into())?;
        let region = row_bytes
            .checked_mul(blocks.into())
            .ok_or(LayoutError::Overflow { index: 0 })?;
        let groups: Vec<_> = (0..planes)
            .map(|region| RowGroup {
                region,
                base: 0,
                block_stride: row_bytes,
                rows: 1,
                row_stride: row_bytes,
                row_bytes,
            })
            .collect();
        let regions: Vec<_> = (0..planes).map(|_| region).collect();
        Self::new(block_tokens, blocks, &regions, &groups)
    }

    /// Tokens of one sequence in one block.
    #[must_use]
    pub const fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks in the GPU pool.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Length of each allocation, bytes.
    #[must_use]
    pub fn regions(&self) -> &[u64] {
        &self.regions
    }

    /// The row groups, in the order in which their rows are packed into a slot.
    #[must_use]
    pub fn row_groups(&self) -> &[RowGroup] {
        &self.groups
    }

    /// Rows of one block over all groups.
    #[must_use]
    pub const fn rows_per_block(&self) -> u32 {
        self.rows_per_block
    }

    /// Payload of one block, and length of a host slot, bytes.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The rows of a block, in the order in which they lie back to back in a slot.
    ///
    /// # Panics
    ///
    /// If the block is not in the pool.
    pub fn rows(&self, block: crate::BlockId) -> impl Iterator<Item = Row> + '_ {
        assert!(
            block.value() < self.blocks,
            "{block:?} of a pool of {} blocks",
            self.blocks
        );
        let mut slot_offset = 0;
        self.groups
            .iter()
            .flat_map(move |group| (0..group.rows).map(move |row| (group, row)))
            .map(move |(group, row)| {
                let place = Row {
                    region: group.region,
                    offset: group.base
                        + u64::from(block.value()) * group.block_stride
                        + u64::from(row) * group.row_stride,
                    bytes: group.row_bytes,
                    slot_offset,
                };
                slot_offset += group.row_bytes;
                place
            })
    }

    /// A number that differs between layouts whose blocks don't mean the same bytes.
    ///
    /// It covers tokens per block and the sequence of row lengths, not addresses: bytes saved
    /// from one pool are good in another one of the same shape.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut bytes = Vec::with_capacity(4 + self.groups.len() * 12);
        bytes.extend_from_slice(&self.block_tokens.to_le_bytes());
        for group in &self.groups {
            bytes.extend_from_slice(&group.rows.to_le_bytes());
            bytes.extend_from_slice(&group.row_bytes.to_le_bytes());
        }
        xxhash_rust::xxh3::xxh3_64(&bytes)
    }
}

/// Most rows of one block: 64 K layers with two planes each.
const ROWS_MAX: u32 = 1 << 17;

fn rows_within_bounds(rows: u64) -> Result<u32, LayoutError> {
    match u32::try_from(rows) {
        Ok(rows) if rows <= ROWS_MAX => Ok(rows),
        _ => Err(LayoutError::TooManyRows {
            rows,
            max: ROWS_MAX,
        }),
    }
}

fn product(factors: &[u32]) -> Result<u64, LayoutError> {
    factors
        .iter()
        .try_fold(1u64, |all, &factor| all.checked_mul(factor.into()))
        .ok_or(LayoutError::Overflow { index: 0 })
}

/// One past the last byte of the group in its region.
fn end_of(group: &RowGroup, blocks: u32) -> Option<u64> {
    let last_block = u64::from(blocks - 1).checked_mul(group.block_stride)?;
    let last_row = u64::from(group.rows - 1).checked_mul(group.row_stride)?;
    group
        .base
        .checked_add(last_block)?
        .checked_add(last_row)?
        .checked_add(group.row_bytes)
}

/// Refuses rows that share bytes.
///
/// Two quick answers cover the usual layouts; whatever they can't settle is enumerated.
fn overlap(groups: &[RowGroup], blocks: u32) -> Result<(), LayoutError> {
    let mut doubtful = alloc::collections::BTreeSet::new();
    for (index, group) in groups.iter().enumerate() {
        if !nested(group, blocks) {
            doubtful.insert(group.region);
        }
        let end = end_of(group, blocks).ok_or(LayoutError::Overflow { index })?;
        for other in &groups[..index] {
            let apart = other.region != group.region
                || end_of(other, blocks).is_some_and(|other_end| other_end <= group.base)
                || end <= other.base;
            if !apart {
                doubtful.insert(group.region);
            }
        }
    }
    for region in doubtful {
        let mut rows = Vec::new();
        for (index, group) in groups
            .iter()
            .enumerate()
            .filter(|(_, g)| g.region == region)
        {
            for block in 0..u64::from(blocks) {
                for row in 0..u64::from(group.rows) {
                    let start = group.base + block * group.block_stride + row * group.row_stride;
                    rows.push((start, start + group.row_bytes, index));
                }
            }
        }
        rows.sort_unstable();
        for pair in rows.windows(2) {
            if pair[1].0 < pair[0].1 {
                return Err(LayoutError::Overlap {
                    first: pair[0].2,
                    second: pair[1].2,
                    region,
                });
            }
        }
    }
    Ok(())
}

/// Whether one stride lies wholly inside the other, so that no two rows of the group can meet.
fn nested(group: &RowGroup, blocks: u32) -> bool {
    let mut strides = [(group.block_stride, blocks), (group.row_stride, group.rows)];
    strides.sort_unstable();
    let mut extent = group.row_bytes;
    for (stride, count) in strides {
        if count > 1 && stride < extent {
            return false;
        }
        extent += u64::from(count - 1) * stride;
    }
    true
}
