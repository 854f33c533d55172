//! Measures at construction what the ways of copying cost on this machine.
//!
//! It moves bytes between the slabs and the first slots of the arena, both unused at that time,
//! and only reads the pool. A few milliseconds in all.

use kv_core::{BlockId, BlockMove, SlotIndex};

use super::{Mover, Plane};
use crate::cost::Costs;
use crate::device::Stream;
use crate::error::DriverError;
use crate::event::Event;
use crate::kernels::Packing;
use crate::plan::Cursor;

/// Less than this says nothing about a link.
const BYTES_MIN: u64 = 1 << 20;

/// Each measurement is repeated so often; the quickest counts.
const REPEATS: usize = 3;

/// Many copies are measured with pieces of this size.
const COPY_BYTES: u64 = 16 << 10;

/// Two-dimensional copies are measured with so many rows of this length.
const PLANE_ROWS: u64 = 32;
const PLANE_ROW_BYTES: u64 = 4 << 10;
const PLANES: u64 = 8;

impl Mover {
    /// What the ways cost in this direction.
    pub(super) fn probe(&self) -> Result<Costs, DriverError> {
        let (host, _) = self.common.arena.place(SlotIndex::new(0));
        // All ready slots of the first chunk are neighbours.
        let room = u64::from(self.neighbours_of_slot_0()) * self.common.arena.slot_bytes();
        let bytes = room.min(self.slabs.len());
        if bytes < BYTES_MIN.max(PLANE_ROWS * PLANE_ROW_BYTES * 2) {
            return Ok(Costs::default());
        }
        let slab = self.slabs.address();
        let stream = &self.copy_streams[0];
        let line_ns = self.quickest(stream, || self.copy(stream, slab, host, bytes))?;
        let byte_ns = line_ns / number(bytes);
        let copies = (bytes / COPY_BYTES).min(64);
        // Every other piece, so that no two are neighbours on the host.
        let spread = if bytes >= 2 * copies * COPY_BYTES {
            2
        } else {
            1
        };
        let copies_ns = self.quickest(stream, || {
            (0..copies).try_for_each(|i| {
                let at = i * spread * COPY_BYTES;
                self.copy(stream, slab + i * COPY_BYTES, host + at, COPY_BYTES)
            })
        })?;
        let copy_ns = (copies_ns / number(copies) - number(COPY_BYTES) * byte_ns).max(0.0);
        let planes_ns = self.quickest(stream, || {
            (0..PLANES).try_for_each(|_| {
                let plane = Plane {
                    device: slab,
                    pitch: 2 * PLANE_ROW_BYTES,
                    host,
                    row_bytes: PLANE_ROW_BYTES,
                    rows: PLANE_ROWS,
                };
                self.copy_plane(stream, plane)
            })
        })?;
        let rows = number(PLANES * PLANE_ROWS);
        let rest = planes_ns - rows * number(PLANE_ROW_BYTES) * byte_ns;
        let row_ns = ((rest - number(PLANES) * copy_ns) / rows).max(0.0);
        Ok(Costs {
            byte_ns,
            copy_ns,
            row_ns,
            pack_ns: self.pack_ns()?,
        })
    }

    /// How long a slab, or as much as the pool holds, takes to be gathered.
    fn pack_ns(&self) -> Result<f64, DriverError> {
        let blocks = self.common.memory.layout().blocks();
        let moves: Vec<_> = (0..blocks)
            .map(|block| BlockMove {
                block: BlockId::new(block),
                slot: SlotIndex::new(block),
            })
            .take(crate::kernels::FEW_BLOCKS_MAX)
            .collect();
        let mut cursor = Cursor::default();
        let shape = &self.common.shape;
        let Some(piece) = shape.next_piece(&mut cursor, moves.len(), self.slab_bytes) else {
            return Ok(Costs::default().pack_ns);
        };
        let slab = self.slabs.address();
        let stream = &self.kernel_stream;
        self.quickest(stream, || {
            self.pack(Packing::Gather, &piece, &moves[..piece.moves], slab)
        })
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
