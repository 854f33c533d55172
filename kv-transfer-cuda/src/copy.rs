//! Queues the copies of one direction: the staging ring, and the direct ways.
//!
//! The ring, seen from a copy out: a kernel gathers the rows of a piece into a slab, on a stream
//! of its own; the copy engine moves the slab to the slots, on another one. Events chain the two:
//! `filled` says that a slab may be read, `emptied` that it may be written again. A copy in is the
//! mirror image, with the copy engine first. Nothing here waits.
//!
//! Who may touch what: a [`Mover`] belongs to one lane and is used by one thread at a time. What
//! it queues touches the pool, the arena and the slabs, until the mark that the lane waits for;
//! the lane keeps the mover, and with it all three, until then or for ever.

#![expect(unsafe_code, reason = "queues copies and kernels on raw addresses")]

use core::ffi::c_void;
use core::{fmt, mem};
use std::sync::Arc;

use cudarc::driver::sys;
use kv_core::{BlockMove, CopyFault, Direction};

use crate::arena::HostArena;
use crate::config::{CudaConfig, SlabCaching, StagingConfig};
use crate::cost::{Costs, Path, Ways};
use crate::device::{Device, Stream, check, launch};
use crate::error::DriverError;
use crate::event::{Event, EventPool};
use crate::fences::{FenceFault, StepFences};
use crate::flight::Flight;
use crate::kernels::{BLOCKS_MAX, FEW_BLOCKS_MAX, Kernel, Packing, THREADS, WARPS};
use crate::lane::MARKS_MAX;
use crate::memory::{DeviceBytes, GpuMemory};
use crate::plan::{Piece, Run, SEGMENT_BYTES_MAX, Shape, runs};
use crate::{CudaError, StreamPriority};

mod probe;

/// Direct copies that are queued in one go.
const DIRECT_COPIES_MAX: usize = 64;

/// The piece that nothing overlaps with is cut this short, bytes: the first one out, whose gather
/// the link waits for, and the last one in, whose scatter the flight waits for.
pub(crate) const RAMP_BYTES: u64 = 1 << 20;

/// Payload of direct copies that is queued in one go, bytes.
const DIRECT_BYTES_MAX: u64 = 16 << 20;

/// Copies from which on one call for all of them is quicker than one call each.
const BATCH_MIN: usize = 4;

/// What both directions share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) arena: Arc<HostArena>,
    pub(crate) fences: Arc<StepFences>,
    pub(crate) shape: Shape,
    /// The shape's segments in GPU memory, where kernels read them.
    pub(crate) table: DeviceBytes,
    pub(crate) ways: Ways,
    pub(crate) events: EventPool,
}

impl Common {
    pub(crate) fn new(
        memory: Arc<GpuMemory>,
        arena: Arc<HostArena>,
        fences: Arc<StepFences>,
    ) -> Result<Self, CudaError> {
        let device = memory.device();
        let shape = Shape::new(memory.layout(), memory.bases())?;
        let table = DeviceBytes::of_segments(device, &shape.segments)?;
        let ways = Ways::new(memory.layout());
        let events = EventPool::new(device, 2 * MARKS_MAX + 8)?;
        Ok(Self {
            memory,
            arena,
            fences,
            shape,
            table,
            ways,
            events,
        })
    }

    pub(crate) fn device(&self) -> &Device {
        self.memory.device()
    }
}

/// The streams, slabs and events of one direction.
pub(crate) struct Mover {
    direction: Direction,
    // Streams and events come first: they are destroyed before the memory they touch.
    kernel_stream: Stream,
    copy_streams: Vec<Stream>,
    filled: Vec<Event>,
    emptied: Vec<Event>,
    slabs: DeviceBytes,
    slab_bytes: u64,
    next_slab: usize,
    /// Slabs from the next one on that nothing uses.
    slabs_at_rest: usize,
    /// Entries that were put into the streams' queues so far.
    entries: u64,
    next_stream: usize,
    grid_max: u32,
    keep: bool,
    costs: Costs,
    scratch: Vec<Run>,
    common: Arc<Common>,
}

impl fmt::Debug for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mover")
            .field("direction", &self.direction)
            .finish_non_exhaustive()
    }
}

/// Parameters of a kernel, as `kernels/copy.cu` declares them.
#[repr(C)]
struct PieceParams<const MAX: usize> {
    segments: u64,
    slab: u64,
    block_bytes: u64,
    keep: u64,
    items: u64,
    segments_per_block: u32,
    first_segment: u32,
    blocks: [u32; MAX],
}

impl Mover {
    pub(crate) fn new(
        common: Arc<Common>,
        direction: Direction,
        config: &CudaConfig,
    ) -> Result<Self, CudaError> {
        let staging = match direction {
            Direction::In => config.staging_in,
            Direction::Out => config.staging_out,
        };
        let StagingConfig {
            slabs,
            slab_bytes,
            copy_streams,
        } = staging;
        let device = common.device().clone();
        let events = || {
            (0..slabs)
                .map(|_| Event::between_streams(&device))
                .collect::<Result<Vec<_>, _>>()
        };
        let stream = || Stream::new(&device, StreamPriority::Low);
        let mut mover = Self {
            direction,
            kernel_stream: Stream::new(&device, config.pack_priority)?,
            copy_streams: (0..copy_streams)
                .map(|_| stream())
                .collect::<Result<_, _>>()?,
            filled: events()?,
            emptied: events()?,
            slabs: DeviceBytes::new(&device, u64::from(slabs) * slab_bytes)?,
            slab_bytes,
            next_slab: 0,
            slabs_at_rest: usize::try_from(slabs).unwrap_or(0),
            entries: 0,
            next_stream: 0,
            grid_max: config.grid_max,
            keep: config.slab_caching == SlabCaching::EvictLast,
            costs: Costs::default(),
            scratch: Vec::new(),
            common,
        };
        if config.slab_caching == SlabCaching::Persisting {
            let most = u64::try_from(device.facts().l2_persisting_bytes_max).unwrap_or(0);
            device.set_persisting_l2(config.staging_bytes().min(most))?;
            mover.kernel_stream.keep_in_l2(&mover.slabs)?;
        }
        mover.load_kernels()?;
        mover.costs = mover.probe()?;
        Ok(mover)
    }

    pub(crate) const fn costs(&self) -> &Costs {
        &self.costs
    }

    pub(crate) fn device(&self) -> &Device {
        self.common.device()
    }

    pub(crate) const fn common(&self) -> &Arc<Common> {
        &self.common
    }

    /// Queues the next part of a flight; afterwards it is finished or has more.
    ///
    /// # Errors
    ///
    /// Why no more of it can be queued. Whether something was is in the flight.
    pub(crate) fn advance(&mut self, flight: &mut Flight) -> Result<(), CopyFault> {
        let device_fault = |error: DriverError| CopyFault::Device { code: error.code };
        if !flight.ordered {
            let first = match (flight.path, self.direction) {
                (Path::Ring, _) => &self.kernel_stream,
                (Path::Rows, _) => &self.copy_streams[0],
            };
            match self.common.fences.order(first, flight.after) {
                Ok(()) => flight.ordered = true,
                Err(FenceFault::NeverRecorded) => return Err(CopyFault::FenceTimeout),
                Err(FenceFault::Driver(error)) => return Err(device_fault(error)),
            }
        }
        let advanced = match flight.path {
            Path::Ring => self.advance_ring(flight),
            Path::Rows => self.advance_rows(flight),
        };
        advanced.map_err(device_fault)
    }

    /// Entries that were put into the streams' queues so far, the fuller one counted.
    pub(crate) const fn entries(&self) -> u64 {
        self.entries
    }

    /// How many calls so many copies are.
    fn copy_calls(&self, runs: &[Run]) -> u64 {
        if runs.len() >= BATCH_MIN && self.device().facts().batch_copies {
            1
        } else {
            runs.len() as u64
        }
    }

    /// Everything queued so far is over: no slab is in use.
    pub(crate) fn rest(&mut self) {
        self.slabs_at_rest = self.filled.len();
    }

    /// Marks everything queued so far for a flight.
    pub(crate) fn mark(&self, flight: &Flight) -> Result<Event, DriverError> {
        let stream = match (flight.path, self.direction) {
            (Path::Ring, _) if flight.alone => &self.kernel_stream,
            (Path::Ring, Direction::In) => &self.kernel_stream,
            (Path::Ring, Direction::Out) => {
                let last = self
                    .next_stream
                    .checked_sub(1)
                    .unwrap_or(self.copy_streams.len() - 1);
                let stream = &self.copy_streams[last];
                if self.copy_streams.len() > 1 {
                    // The piece before the last one went another way.
                    for emptied in &self.emptied {
                        stream.wait(emptied)?;
                    }
                }
                stream
            }
            (Path::Rows, _) => &self.copy_streams[0],
        };
        let event = self.common.events.take()?;
        event.record(stream)?;
        Ok(event)
    }

    /// Most bytes of the next piece.
    fn piece_bytes_max(&self, flight: &Flight) -> u64 {
        let moved = flight.queued_bytes;
        let left = flight.bytes() - moved;
        let worth_it = flight.bytes() > 4 * RAMP_BYTES && self.slab_bytes > 2 * RAMP_BYTES;
        match self.direction {
            Direction::Out if worth_it && moved == 0 => RAMP_BYTES,
            Direction::In if worth_it && left <= self.slab_bytes && left > 2 * RAMP_BYTES => {
                // Whole pages of a segment, so that something fits.
                (left - RAMP_BYTES)
                    .next_multiple_of(SEGMENT_BYTES_MAX)
                    .min(self.slab_bytes)
            }
            Direction::In | Direction::Out => self.slab_bytes,
        }
    }

    fn advance_ring(&mut self, flight: &mut Flight) -> Result<(), DriverError> {
        let shape = &self.common.shape;
        let most = self.piece_bytes_max(flight);
        let Some(piece) = shape.next_piece(&mut flight.cursor, flight.moves.len(), most) else {
            return Ok(());
        };
        // One piece on an idle lane has nothing to overlap with: kernel and copy go into one
        // stream, which orders them without any event.
        flight.alone = piece.bytes == flight.bytes() && self.slabs_at_rest == self.filled.len();
        flight.queued = true;
        flight.queued_bytes += piece.bytes;
        let moves = &flight.moves[piece.first_move..piece.first_move + piece.moves];
        let arena = Arc::clone(&self.common.arena);
        let places = moves.iter().map(|step| arena.place(step.slot));
        let mut stretches = mem::take(&mut self.scratch);
        runs(&piece, shape.block_bytes, places, &mut stretches);
        let slab = self.next_slab;
        self.next_slab = (slab + 1) % self.filled.len();
        self.entries += 4 + self.copy_calls(&stretches);
        let queued = if flight.alone {
            self.queue_alone(&piece, moves, slab, &stretches)
        } else {
            self.queue_in_turn(&piece, moves, slab, &stretches)
        };
        self.scratch = stretches;
        queued
    }

    /// Queues a piece on one stream.
    fn queue_alone(
        &mut self,
        piece: &Piece,
        moves: &[BlockMove],
        slab: usize,
        stretches: &[Run],
    ) -> Result<(), DriverError> {
        self.slabs_at_rest -= 1;
        let base = self.slabs.address() + slab as u64 * self.slab_bytes;
        let stream = &self.kernel_stream;
        match self.direction {
            Direction::Out => {
                self.pack(Packing::Gather, piece, moves, base)?;
                self.copy_runs(stream, base, stretches)?;
            }
            Direction::In => {
                self.copy_runs(stream, base, stretches)?;
                self.pack(Packing::Scatter, piece, moves, base)?;
            }
        }
        self.emptied[slab].record(stream)
    }

    /// Queues a piece on the two streams that overlap it with the pieces beside it.
    fn queue_in_turn(
        &mut self,
        piece: &Piece,
        moves: &[BlockMove],
        slab: usize,
        stretches: &[Run],
    ) -> Result<(), DriverError> {
        let at_rest = self.slabs_at_rest > 0;
        self.slabs_at_rest = self.slabs_at_rest.saturating_sub(1);
        let turn = self.next_stream;
        self.next_stream = (turn + 1) % self.copy_streams.len();
        let base = self.slabs.address() + slab as u64 * self.slab_bytes;
        let (kernels, copies) = (&self.kernel_stream, &self.copy_streams[turn]);
        let (filled, emptied) = (&self.filled[slab], &self.emptied[slab]);
        match self.direction {
            Direction::Out => {
                if !at_rest {
                    kernels.wait(emptied)?;
                }
                self.pack(Packing::Gather, piece, moves, base)?;
                filled.record(kernels)?;
                copies.wait(filled)?;
                self.copy_runs(copies, base, stretches)?;
                emptied.record(copies)
            }
            Direction::In => {
                if !at_rest {
                    copies.wait(emptied)?;
                }
                self.copy_runs(copies, base, stretches)?;
                filled.record(copies)?;
                kernels.wait(filled)?;
                self.pack(Packing::Scatter, piece, moves, base)?;
                emptied.record(kernels)
            }
        }
    }

    /// Runs each kernel once, on nothing: the driver loads a kernel with its first launch, and may
    /// wait until the GPU is idle for that.
    fn load_kernels(&self) -> Result<(), DriverError> {
        let packing = match self.direction {
            Direction::In => Packing::Scatter,
            Direction::Out => Packing::Gather,
        };
        let nothing = Piece {
            first_move: 0,
            first_segment: 0,
            items: 0,
            moves: 0,
            offset: 0,
            bytes: 0,
        };
        let kernel = |blocks| Kernel::choose(packing, self.common.shape.width, blocks);
        if let (few, FEW_BLOCKS_MAX) = kernel(1) {
            self.launch_pack::<FEW_BLOCKS_MAX>(few, &nothing, &[], self.slabs.address())?;
        }
        let (many, _) = kernel(BLOCKS_MAX);
        self.launch_pack::<BLOCKS_MAX>(many, &nothing, &[], self.slabs.address())?;
        self.kernel_stream.synchronize()
    }

    /// Queues the kernel that packs or unpacks a piece.
    fn pack(
        &self,
        packing: Packing,
        piece: &Piece,
        moves: &[BlockMove],
        slab: u64,
    ) -> Result<(), DriverError> {
        let (kernel, room) = Kernel::choose(packing, self.common.shape.width, moves.len());
        if room == FEW_BLOCKS_MAX {
            self.launch_pack::<FEW_BLOCKS_MAX>(kernel, piece, moves, slab)
        } else {
            self.launch_pack::<BLOCKS_MAX>(kernel, piece, moves, slab)
        }
    }

    fn launch_pack<const MAX: usize>(
        &self,
        kernel: Kernel,
        piece: &Piece,
        moves: &[BlockMove],
        slab: u64,
    ) -> Result<(), DriverError> {
        let layout_blocks = self.common.memory.layout().blocks();
        let mut params = PieceParams::<MAX> {
            segments: self.common.table.address(),
            slab,
            block_bytes: self.common.shape.block_bytes,
            segments_per_block: self.common.shape.segments_per_block(),
            first_segment: piece.first_segment,
            items: piece.items.into(),
            keep: u64::from(self.keep),
            blocks: [0; MAX],
        };
        for (place, step) in params.blocks.iter_mut().zip(moves) {
            let block = step.block.value();
            assert!(
                block < layout_blocks,
                "{:?} of a pool of {layout_blocks}",
                step.block
            );
            *place = block;
        }
        assert!(moves.len() <= MAX, "a piece names at most {MAX} blocks");
        assert!(piece.bytes <= self.slab_bytes, "a piece fits into a slab");
        let grid = piece.items.div_ceil(WARPS).clamp(1, self.grid_max);
        let function = self.device().kernel(kernel);
        let mut pointers = [(&raw mut params).cast::<c_void>()];
        // SAFETY: the kernel takes one `Piece` of `MAX` ids, of the same layout as the parameters.
        // It touches rows of the named blocks, which are in the pool (checked above and by
        // `Layout`), and at most `piece.bytes` of the slab; the mover's owner keeps both alive
        // until the mark that follows is over. The machine gives the blocks to this flight alone.
        // Function and stream are of the one device; its context is current, which the lane sees
        // to.
        unsafe { launch(function, &self.kernel_stream, grid, THREADS, &mut pointers) }
    }

    /// Queues the copies between GPU memory, counted from a base, and the slots.
    fn copy_runs(&self, stream: &Stream, base: u64, runs: &[Run]) -> Result<(), DriverError> {
        if runs.len() >= BATCH_MIN && self.device().facts().batch_copies {
            return self.copy_batch(stream, base, runs);
        }
        runs.iter()
            .try_for_each(|run| self.copy(stream, base + run.gpu, run.host, run.bytes))
    }

    /// Queues one copy between GPU memory and a slot.
    fn copy(&self, stream: &Stream, device: u64, host: u64, bytes: u64) -> Result<(), DriverError> {
        let host = host as *mut c_void;
        let length = usize::try_from(bytes).expect("a piece fits into memory");
        match self.direction {
            Direction::In => {
                // SAFETY: `host` and `bytes` lie in one page-locked chunk of the arena, `device`
                // and `bytes` in a slab or a row; the mover's owner keeps them alive until the
                // mark that follows is over, and the machine gives the slot to this flight alone.
                let answer =
                    unsafe { sys::cuMemcpyHtoDAsync_v2(device, host, length, stream.handle()) };
                check("cuMemcpyHtoDAsync", answer)
            }
            Direction::Out => {
                // SAFETY: as above.
                let answer =
                    unsafe { sys::cuMemcpyDtoHAsync_v2(host, device, length, stream.handle()) };
                check("cuMemcpyDtoHAsync", answer)
            }
        }
    }

    /// Queues many copies with one call.
    fn copy_batch(&self, stream: &Stream, base: u64, runs: &[Run]) -> Result<(), DriverError> {
        let mut device: Vec<u64> = runs.iter().map(|run| base + run.gpu).collect();
        let mut host: Vec<u64> = runs.iter().map(|run| run.host).collect();
        let mut sizes: Vec<usize> = runs
            .iter()
            .map(|run| usize::try_from(run.bytes).expect("a piece fits into memory"))
            .collect();
        let (from, to) = match self.direction {
            Direction::In => (&mut host, &mut device),
            Direction::Out => (&mut device, &mut host),
        };
        let nowhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first_index = 0usize;
        let mut failed_index = 0usize;
        // SAFETY: the driver is new enough to have the call. The lists are of one length and
        // outlive the call; one set of attributes is used from index 0 on. The ranges are as in
        // `copy`: inside the slab or a row, and inside one page-locked chunk each.
        let answer = unsafe {
            sys::cuMemcpyBatchAsync(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                runs.len(),
                &raw mut attributes,
                &raw mut first_index,
                1,
                &raw mut failed_index,
                stream.handle(),
            )
        };
        check("cuMemcpyBatchAsync", answer)
    }

    /// Queues one copy per row, neighbours merged where they touch on both sides.
    fn advance_rows(&mut self, flight: &mut Flight) -> Result<(), DriverError> {
        let common = Arc::clone(&self.common);
        let mut copies = mem::take(&mut self.scratch);
        copies.clear();
        let mut bytes = 0;
        // Region and chunk of the last row: no copy may reach over the border of an allocation,
        // even where the next one happens to lie right behind it.
        let mut last = None;
        while let Some(step) = flight.moves.get(flight.cursor.next_move) {
            if copies.len() >= DIRECT_COPIES_MAX || bytes >= DIRECT_BYTES_MAX {
                break;
            }
            let (slot, chunk) = common.arena.place(step.slot);
            for row in common.memory.layout().rows(step.block) {
                let gpu = common.memory.region_address(row.region) + row.offset;
                let host = slot + row.slot_offset;
                bytes += row.bytes;
                match copies.last_mut() {
                    Some(before)
                        if last == Some((row.region, chunk))
                            && before.gpu + before.bytes == gpu
                            && before.host + before.bytes == host =>
                    {
                        before.bytes += row.bytes;
                    }
                    _ => copies.push(Run {
                        gpu,
                        host,
                        bytes: row.bytes,
                    }),
                }
                last = Some((row.region, chunk));
            }
            flight.cursor.next_move += 1;
        }
        flight.queued = true;
        flight.queued_bytes += bytes;
        self.entries += 1 + self.copy_calls(&copies);
        let queued = self.copy_runs(&self.copy_streams[0], 0, &copies);
        self.scratch = copies;
        queued
    }
}

#[cfg(test)]
mod tests {
    use super::PieceParams;
    use crate::kernels::{BLOCKS_MAX, FEW_BLOCKS_MAX, PTX};

    #[test]
    fn parameters_are_as_long_as_the_kernels_declare() {
        let text = PTX.to_str().expect("PTX is ASCII");
        for (kernel, bytes) in [
            ("gather_16_few", size_of::<PieceParams<FEW_BLOCKS_MAX>>()),
            ("scatter_16_few", size_of::<PieceParams<FEW_BLOCKS_MAX>>()),
            ("gather_16", size_of::<PieceParams<BLOCKS_MAX>>()),
            ("scatter_1", size_of::<PieceParams<BLOCKS_MAX>>()),
        ] {
            let declared = format!(".b8 {kernel}_param_0[{bytes}]");
            assert!(text.contains(&declared), "{declared}");
        }
    }
}
