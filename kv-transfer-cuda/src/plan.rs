//! How a command is cut into pieces, and each piece into work for a kernel and a copy engine.
//!
//! Pure arithmetic. The payload of a command is thought of as one string of bytes, block after
//! block in the order of the moves, each block packed as in its host slot. A piece is a range of
//! that string which fits into a staging slab.

use kv_core::Layout;

use crate::CudaError;
use crate::kernels::BLOCKS_MAX;

/// Rows are cut into segments of at most so many bytes: what one warp copies at a time.
pub(crate) const SEGMENT_BYTES_MAX: u64 = 4096;

/// Part of a row, as the kernels read it from the GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Segment {
    /// Where it starts in block 0.
    pub(crate) address: u64,
    /// Distance from block to block, bytes.
    pub(crate) block_stride: u64,
    /// Where it starts in the packed block, bytes.
    pub(crate) slot_offset: u64,
    /// Length, bytes.
    pub(crate) bytes: u64,
}

/// Length of one access of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Sixteen bytes, the widest.
    Sixteen,
    /// Four bytes.
    Four,
    /// One byte: for layouts that are aligned to nothing.
    One,
}

/// A layout with its addresses, cut into segments.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) segments: Vec<Segment>,
    pub(crate) width: Width,
    pub(crate) block_bytes: u64,
}

/// A range of the payload of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the first move.
    pub(crate) first_move: usize,
    /// First segment of the first block.
    pub(crate) first_segment: u32,
    /// Number of segments, over all blocks.
    pub(crate) items: u32,
    /// Number of moves, the partial ones included.
    pub(crate) moves: usize,
    /// Where the piece starts in its first packed block, bytes.
    pub(crate) offset: u64,
    /// Length, bytes.
    pub(crate) bytes: u64,
}

/// How far a command has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Index of the next move.
    pub(crate) next_move: usize,
    /// Next segment of that block.
    pub(crate) segment: u32,
}

impl Shape {
    /// `bases` are the addresses of the layout's regions.
    pub(crate) fn new(layout: &Layout, bases: &[u64]) -> Result<Self, CudaError> {
        if bases.len() != layout.regions().len() {
            let (given, regions) = (bases.len(), layout.regions().len());
            return Err(CudaError::RegionCount { given, regions });
        }
        let mut segments = Vec::new();
        let mut slot_offset = 0;
        let mut alignment = layout.block_bytes();
        for group in layout.row_groups() {
            let base = bases[group.region as usize];
            for row in 0..u64::from(group.rows) {
                let address = base + group.base + row * group.row_stride;
                alignment |= address | group.block_stride | slot_offset | group.row_bytes;
                let mut at = 0;
                while at < group.row_bytes {
                    let bytes = SEGMENT_BYTES_MAX.min(group.row_bytes - at);
                    segments.push(Segment {
                        address: address + at,
                        block_stride: group.block_stride,
                        slot_offset: slot_offset + at,
                        bytes,
                    });
                    at += bytes;
                }
                slot_offset += group.row_bytes;
            }
        }
        if u32::try_from(segments.len()).is_err() {
            let what = format!("a block of {} bytes is too large", layout.block_bytes());
            return Err(CudaError::Config { what });
        }
        let width = match alignment.trailing_zeros() {
            0 | 1 => Width::One,
            2 | 3 => Width::Four,
            _ => Width::Sixteen,
        };
        Ok(Self {
            segments,
            width,
            block_bytes: layout.block_bytes(),
        })
    }

    /// Segments of a block.
    pub(crate) fn segments_per_block(&self) -> u32 {
        u32::try_from(self.segments.len()).expect("checked when the shape was made")
    }

    /// The next piece of a command of so many moves, at most `slab_bytes` long, or `None` at the
    /// end. Moves the cursor behind it.
    pub(crate) fn next_piece(
        &self,
        cursor: &mut Cursor,
        moves: usize,
        slab_bytes: u64,
    ) -> Option<Piece> {
        if cursor.next_move >= moves {
            return None;
        }
        let per_block = self.segments.len();
        let offset = self.segments[cursor.segment as usize].slot_offset;
        let mut piece = Piece {
            first_move: cursor.next_move,
            first_segment: cursor.segment,
            items: 0,
            moves: 0,
            offset,
            bytes: 0,
        };
        while cursor.next_move < moves && piece.moves < BLOCKS_MAX {
            let rest = slab_bytes - piece.bytes;
            let at = self.segments[cursor.segment as usize].slot_offset;
            let here = self.block_bytes - at;
            if here <= rest {
                piece.items += self.segments_per_block() - cursor.segment;
                piece.bytes += here;
                piece.moves += 1;
                *cursor = Cursor {
                    next_move: cursor.next_move + 1,
                    segment: 0,
                };
                continue;
            }
            // Only a block that doesn't fit into a slab as a whole is cut.
            if self.block_bytes <= slab_bytes && piece.moves > 0 {
                break;
            }
            let first = cursor.segment as usize;
            let fitting = self.segments[first..per_block]
                .partition_point(|s| s.slot_offset + s.bytes - at <= rest);
            if fitting > 0 {
                let last = self.segments[first + fitting - 1];
                let fitting = u32::try_from(fitting).expect("fewer than all segments");
                piece.items += fitting;
                piece.bytes += last.slot_offset + last.bytes - at;
                piece.moves += 1;
                cursor.segment += fitting;
            }
            break;
        }
        assert!(
            piece.items > 0,
            "a slab of {slab_bytes} bytes holds no segment"
        );
        Some(piece)
    }
}

/// A stretch of host memory that one copy can move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where it starts on the GPU, bytes from a base: that of a slab for a piece, 0 for a row.
    pub(crate) gpu: u64,
    /// Where it starts in host memory.
    pub(crate) host: u64,
    /// Length, bytes.
    pub(crate) bytes: u64,
}

/// Cuts a piece into stretches that are contiguous in host memory.
///
/// `places` are the addresses of the slots of the piece's moves, each with the number of the
/// page-locked chunk it lies in: no copy may reach over the border of a chunk.
pub(crate) fn runs(
    piece: &Piece,
    block_bytes: u64,
    places: impl Iterator<Item = (u64, u32)>,
    out: &mut Vec<Run>,
) {
    out.clear();
    let mut left = piece.bytes;
    let mut skip = piece.offset;
    let mut chunk_of_last = None;
    for (address, chunk) in places.take(piece.moves) {
        let host = address + skip;
        let bytes = (block_bytes - skip).min(left);
        let gpu = piece.bytes - left;
        match out.last_mut() {
            Some(last) if last.host + last.bytes == host && chunk_of_last == Some(chunk) => {
                last.bytes += bytes;
            }
            _ => out.push(Run { gpu, host, bytes }),
        }
        chunk_of_last = Some(chunk);
        left -= bytes;
        skip = 0;
    }
    assert_eq!(left, 0, "the moves of a piece hold its bytes");
}

#[cfg(test)]
mod tests;
