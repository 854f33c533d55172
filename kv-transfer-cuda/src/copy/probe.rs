//! Measures at construction what the ways of copying cost on this machine.
//!
//! It moves bytes between the slabs and the first slots of the arena, both unused at that time,
//! and only reads the pool. A few milliseconds in all.

use kv_core::{BlockId, BlockMove, SlotIndex};

use super::Mover;
use crate::cost::Costs;
use crate::device::Stream;
use crate::error::DriverError;
use crate::event::Event;
use crate::kernels::{FEW_BLOCKS_MAX, Packing};
use crate::plan::{Cursor, Run, SEGMENT_BYTES_MAX};

/// Less than this says nothing about a link.
const BYTES_MIN: u64 = 1 << 20;

/// Each measurement is repeated so often; the quickest counts.
const REPEATS: usize = 3;

/// Many copies are measured with pieces of this size.
const COPY_BYTES: u64 = 16 << 10;

impl Mover {
    /// What the ways cost in this direction.
    pub(super) fn probe(&self) -> Result<Costs, DriverError> {
        let (host, _) = self.common.arena.place(SlotIndex::new(0));
        // All ready slots of the first chunk are neighbours.
        let room = u64::from(self.neighbours_of_slot_0()) * self.common.arena.slot_bytes();
        let bytes = room.min(self.slabs.len());
        if bytes < BYTES_MIN {
            return Ok(Costs::default());
        }
        let slab = self.slabs.address();
        let stream = &self.copy_streams[0];
        let line_ns = self.quickest(stream, || self.copy(stream, slab, host, bytes))?;
        let byte_ns = line_ns / number(bytes);
        // Every other piece, so that no two are neighbours on the host.
        let pieces: Vec<_> = (0..(bytes / COPY_BYTES / 2).min(64))
            .map(|i| Run {
                gpu: i * COPY_BYTES,
                host: host + 2 * i * COPY_BYTES,
                bytes: COPY_BYTES,
            })
            .collect();
        let copies_ns = self.quickest(stream, || self.copy_runs(stream, slab, &pieces))?;
        let copies = pieces.len() as u64;
        let copy_ns = (copies_ns / number(copies) - number(COPY_BYTES) * byte_ns).max(0.0);
        let (pack_ns, _) = self.pack_ns(SEGMENT_BYTES_MAX)?;
        let (large_ns, large_bytes) = self.pack_ns(self.slab_bytes)?;
        let pack_byte_ns = ((large_ns - pack_ns) / number(large_bytes)).max(0.0);
        Ok(Costs {
            byte_ns,
            copy_ns,
            pack_byte_ns,
            pack_ns,
        })
    }

    /// How long a piece of at most so many bytes takes to be gathered, and how long it is.
    fn pack_ns(&self, bytes_max: u64) -> Result<(f64, u64), DriverError> {
        let moves: Vec<_> = (0..self.common.memory.layout().blocks())
            .map(|block| BlockMove {
                block: BlockId::new(block),
                slot: SlotIndex::new(block),
            })
            .take(FEW_BLOCKS_MAX)
            .collect();
        let mut cursor = Cursor::default();
        let piece = self
            .common
            .shape
            .next_piece(&mut cursor, moves.len(), bytes_max);
        let piece = piece.expect("a pool has a block, and a segment fits everywhere");
        let moves = &moves[..piece.moves];
        let slab = self.slabs.address();
        let nanos = self.quickest(&self.kernel_stream, || {
            self.pack(Packing::Gather, &piece, moves, slab)
        })?;
        Ok((nanos, piece.bytes))
    }

    /// Ready slots that lie behind each other from slot 0 on.
    fn neighbours_of_slot_0(&self) -> u32 {
        let arena = &self.common.arena;
        let (start, chunk) = arena.place(SlotIndex::new(0));
        (0..arena.slots_ready())
            .take_while(|&slot| {
                let expected = (start + u64::from(slot) * arena.slot_bytes(), chunk);
                arena.place(SlotIndex::new(slot)) == expected
            })
            .last()
            .map_or(0, |slot| slot + 1)
    }

    /// The shortest time that the queued work took on the GPU, nanoseconds.
    fn quickest(
        &self,
        stream: &Stream,
        work: impl Fn() -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        let device = self.device();
        device.bind()?;
        let (start, end) = (Event::timed(device)?, Event::timed(device)?);
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            start.record(stream)?;
            work()?;
            end.record(stream)?;
            end.wait()?;
            best = best.min(end.nanos_since(&start)?);
        }
        Ok(best)
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2 to the 52nd")]
const fn number(count: u64) -> f64 {
    count as f64
}
