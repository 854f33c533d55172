//! The pinned host pool: one mapping, cut into equal slots, page-locked chunk by chunk.
//!
//! Who may touch what: the mapping belongs to the arena and is unmapped with it. A slot's bytes
//! are touched by the device while a copy names the slot, by a digest thread between the end of
//! an `Out` and its completion or before an `In` is queued, and by tests at rest; the machine
//! gives a slot to one flight at a time. No reference to bytes of a slot lives longer than that.
//! `ready` only grows, and a slot below it lies in a chunk that is touched and page-locked.

#![expect(
    unsafe_code,
    reason = "maps memory, page-locks it and hands out its bytes"
)]

use core::ffi::c_void;
use core::fmt;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::Arc;

use cudarc::driver::sys;
use kv_core::{Digest, SlotIndex};
use parking_lot::{Condvar, Mutex};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::config::ArenaConfig;
use crate::device::{Device, check};
use crate::error::DriverError;
use crate::{CudaError, limits};

mod grow;

pub(crate) use grow::grow;

/// Huge pages are of this size; chunks begin on its multiples.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Page-locks memory for a device.
pub(crate) trait PageLock: Send + Sync + 'static {
    /// Page-locks a range of an arena's mapping.
    fn lock(&self, address: NonNull<u8>, bytes: usize) -> Result<(), DriverError>;

    /// Undoes [`lock`](Self::lock) for the same range.
    fn unlock(&self, address: NonNull<u8>);
}

impl PageLock for Device {
    fn lock(&self, address: NonNull<u8>, bytes: usize) -> Result<(), DriverError> {
        self.bind()?;
        let address = address.as_ptr().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: a context is current; the range is part of a mapping that its arena unmaps only
        // after `unlock`. Registering makes it readable and writable for devices and changes no
        // byte.
        let answer = unsafe { sys::cuMemHostRegister_v2(address, bytes, flags) };
        check("cuMemHostRegister", answer)
    }

    fn unlock(&self, address: NonNull<u8>) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: registered by `lock`; no copy names a slot in it any more, because flights hold
        // the arena. An error can't be acted upon: the context is broken.
        let _unlocked = unsafe { sys::cuMemHostUnregister(address.as_ptr().cast::<c_void>()) };
    }
}

/// Where the slots of an arena lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    slots: u32,
    slot_bytes: u64,
    slots_per_chunk: u32,
    chunk_stride: u64,
}

impl Geometry {
    fn new(slot_bytes: u64, config: &ArenaConfig) -> Result<Self, CudaError> {
        if slot_bytes == 0 || slot_bytes > config.chunk_bytes {
            let most = config.chunk_bytes;
            let what = format!("a slot of {slot_bytes} bytes does not fit into a chunk of {most}");
            return Err(CudaError::Config { what });
        }
        let fitting = u32::try_from(config.chunk_bytes / slot_bytes).unwrap_or(u32::MAX);
        let slots_per_chunk = fitting.min(config.slots);
        let used = u64::from(slots_per_chunk) * slot_bytes;
        let chunk_stride = used.next_multiple_of(HUGE_PAGE_BYTES);
        Ok(Self {
            slots: config.slots,
            slot_bytes,
            slots_per_chunk,
            chunk_stride,
        })
    }

    const fn chunks(&self) -> u32 {
        self.slots.div_ceil(self.slots_per_chunk)
    }

    fn mapped_bytes(&self) -> u64 {
        self.chunk_stride.saturating_mul(self.chunks().into())
    }

    /// Slots in that chunk; the last one may have fewer.
    fn slots_in(&self, chunk: u32) -> u32 {
        self.slots_per_chunk
            .min(self.slots - chunk * self.slots_per_chunk)
    }

    /// Bytes of that chunk that are touched and locked.
    fn chunk_bytes(&self, chunk: u32) -> u64 {
        (u64::from(self.slots_in(chunk)) * self.slot_bytes).next_multiple_of(4096)
    }

    /// Offset of a slot into the mapping, and its chunk.
    fn place(&self, slot: u32) -> (u64, u32) {
        let chunk = slot / self.slots_per_chunk;
        let inside = u64::from(slot % self.slots_per_chunk) * self.slot_bytes;
        (u64::from(chunk) * self.chunk_stride + inside, chunk)
    }
}

/// The pool. Flights hold it, so that it outlives every copy that touches it.
pub(crate) struct HostArena {
    mapping: Mapping,
    geometry: Geometry,
    lock: Box<dyn PageLock>,
    ready: AtomicU32,
    growth: Mutex<Growth>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct Growth {
    /// Chunks that are locked, all before the first one that isn't.
    locked: u32,
    /// Nothing will be added any more, because all is there or something failed.
    ended: bool,
    failed: Option<CudaError>,
    times: PoolTimes,
}

/// What setting up the pinned pool has taken so far. The two overlap but for the first chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolTimes {
    /// Touching memory, with all threads together.
    pub touch: Duration,
    /// Page-locking it.
    pub lock: Duration,
}

impl fmt::Debug for HostArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArena")
            .field("geometry", &self.geometry)
            .field("ready", &self.ready)
            .finish_non_exhaustive()
    }
}

impl HostArena {
    /// Reserves addresses; no memory is taken before [`grow`] runs.
    pub(crate) fn reserve(
        slot_bytes: u64,
        config: &ArenaConfig,
        lock: Box<dyn PageLock>,
    ) -> Result<Arc<Self>, CudaError> {
        let geometry = Geometry::new(slot_bytes, config)?;
        limits::check_control_groups(geometry.mapped_bytes(), config.flag)?;
        let mapping = Mapping::new(geometry.mapped_bytes())?;
        Ok(Arc::new(Self {
            mapping,
            geometry,
            lock,
            ready: AtomicU32::new(0),
            growth: Mutex::default(),
            grown: Condvar::new(),
        }))
    }

    /// Slots that can be used by now, counted from 0.
    pub(crate) fn slots_ready(&self) -> u32 {
        self.ready.load(Ordering::Acquire)
    }

    /// Length of a slot, bytes.
    pub(crate) const fn slot_bytes(&self) -> u64 {
        self.geometry.slot_bytes
    }

    /// Waits until the pool has stopped growing, at most `limit`.
    pub(crate) fn wait_grown(&self, limit: Duration) -> Result<u32, CudaError> {
        let mut growth = self.growth.lock();
        self.grown
            .wait_while_for(&mut growth, |growth| !growth.ended, limit);
        match &growth.failed {
            Some(error) => Err(error.clone()),
            None => Ok(self.slots_ready()),
        }
    }

    /// What setting up the pool has taken so far.
    pub(crate) fn times(&self) -> PoolTimes {
        self.growth.lock().times
    }

    /// Why the pool is smaller than asked for, if it is.
    pub(crate) fn failure(&self) -> Option<CudaError> {
        self.growth.lock().failed.clone()
    }

    /// Address of a slot, and its chunk.
    ///
    /// # Panics
    ///
    /// If the slot is not ready.
    pub(crate) fn place(&self, slot: SlotIndex) -> (u64, u32) {
        let ready = self.slots_ready();
        assert!(
            slot.value() < ready,
            "{slot:?} of a pool with {ready} ready slots"
        );
        let (offset, chunk) = self.geometry.place(slot.value());
        (self.mapping.base.as_ptr().addr() as u64 + offset, chunk)
    }

    /// Calls `f` with the bytes of a slot.
    ///
    /// # Safety
    ///
    /// 1. Nobody writes to the slot during the call: no running `In` or `Out` names it, or only
    ///    copies that read it.
    ///
    /// # Panics
    ///
    /// If the slot is not ready.
    pub(crate) unsafe fn with_bytes<R>(&self, slot: SlotIndex, f: impl FnOnce(&[u8]) -> R) -> R {
        let (start, length) = self.pointer(slot);
        // SAFETY: `pointer` gives the start of a slot of that length inside the mapping, touched
        // and therefore initialised by the system; clause 1 keeps writers away; the reference
        // does not leave this call.
        let bytes = unsafe { core::slice::from_raw_parts(start.as_ptr(), length) };
        f(bytes)
    }

    /// Calls `f` with the bytes of a slot, to be changed.
    ///
    /// # Safety
    ///
    /// 1. Nobody else reads or writes the slot during the call.
    ///
    /// # Panics
    ///
    /// If the slot is not ready.
    pub(crate) unsafe fn with_bytes_mut<R>(
        &self,
        slot: SlotIndex,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        let (start, length) = self.pointer(slot);
        // SAFETY: as in `with_bytes`; clause 1 makes the reference the only one.
        let bytes = unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), length) };
        f(bytes)
    }

    /// Digest of a slot whose flight is at rest: its copy out is over, or its copy in is not queued
    /// yet. The digest threads call this at these times only.
    pub(crate) fn digest(&self, slot: SlotIndex) -> Digest {
        // SAFETY: the flight that owns the slot is at rest, so that nobody writes to it.
        unsafe { self.with_bytes(slot, Digest::of) }
    }

    /// A copy of the bytes of a slot, while the backend is at rest.
    pub(crate) fn bytes_at_rest(&self, slot: SlotIndex) -> Vec<u8> {
        // SAFETY: the backend is at rest: no command is open, so that nobody writes to the slot.
        unsafe { self.with_bytes(slot, <[u8]>::to_vec) }
    }

    /// Flips one bit of a slot, while the backend is at rest and borrowed by the caller alone.
    pub(crate) fn flip_bit_at_rest(&self, slot: SlotIndex, bit: usize) {
        // SAFETY: the backend is at rest and only the caller can submit to it, so that nobody
        // else touches the slot.
        unsafe { self.with_bytes_mut(slot, |bytes| bytes[bit / 8] ^= 1 << (bit % 8)) };
    }

    /// The one place where a slot becomes a pointer.
    fn pointer(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        let (address, _) = self.place(slot);
        let offset = address - self.mapping.base.as_ptr().addr() as u64;
        let offset = usize::try_from(offset).expect("inside the mapping");
        let length = usize::try_from(self.geometry.slot_bytes).expect("inside the mapping");
        assert!(
            offset + length <= self.mapping.bytes,
            "{slot:?} reaches beyond the mapping"
        );
        // SAFETY: the offset lies inside the mapping, checked above.
        (unsafe { self.mapping.base.add(offset) }, length)
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        for chunk in 0..self.growth.get_mut().locked {
            self.lock.unlock(
                self.mapping
                    .at(u64::from(chunk) * self.geometry.chunk_stride),
            );
        }
    }
}

/// An anonymous mapping, aligned to huge pages.
struct Mapping {
    whole: NonNull<c_void>,
    whole_bytes: usize,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory without affinity to a thread; who touches which part of it
// is said in the head of this file.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: u64) -> Result<Self, CudaError> {
        let failed = |reason: String| CudaError::System {
            call: "mmap",
            bytes,
            reason,
        };
        let huge = usize::try_from(HUGE_PAGE_BYTES).expect("2 MiB fit");
        let length = usize::try_from(bytes).map_err(|_| failed(String::from("too large")))?;
        let whole_bytes = length
            .checked_add(huge)
            .ok_or_else(|| failed(String::from("too large")))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so that nothing that is mapped is replaced.
        let whole = unsafe { mmap_anonymous(ptr::null_mut(), whole_bytes, access, flags) }
            .map_err(|error| failed(error.to_string()))?;
        let Some(whole) = NonNull::new(whole) else {
            return Err(failed(String::from("the system mapped address 0")));
        };
        let skip = whole.as_ptr().addr().next_multiple_of(huge) - whole.as_ptr().addr();
        // SAFETY: `skip` is less than a huge page, by which the mapping is longer than asked for.
        let base = unsafe { whole.cast::<u8>().add(skip) };
        let mapping = Self {
            whole,
            whole_bytes,
            base,
            bytes: length,
        };
        // SAFETY: the range is our own mapping; the advice changes no content. Where huge pages
        // are switched off the advice fails, and small pages serve as well.
        let _advised = unsafe { madvise(base.as_ptr().cast(), length, Advice::LinuxHugepage) };
        Ok(mapping)
    }

    /// The address at that offset.
    fn at(&self, offset: u64) -> NonNull<u8> {
        let offset = usize::try_from(offset).expect("inside the mapping");
        assert!(offset < self.bytes, "beyond the mapping");
        // SAFETY: inside the mapping, checked above.
        unsafe { self.base.add(offset) }
    }

    /// Makes the system back a range with memory, by touching each page.
    fn touch(&self, offset: u64, bytes: u64) -> Result<(), CudaError> {
        let start = self.at(offset);
        let length = usize::try_from(bytes).expect("inside the mapping");
        let inside = usize::try_from(offset).is_ok_and(|offset| offset + length <= self.bytes);
        assert!(inside, "beyond the mapping");
        // SAFETY: the range lies inside our own mapping, checked above; populating changes no
        // content.
        let populated =
            unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            // Systems before Linux 5.14 don't know the advice.
            Err(rustix::io::Errno::INVAL) => {
                for page in (0..length).step_by(4096) {
                    // SAFETY: inside the range checked above.
                    let page = unsafe { start.add(page) };
                    // SAFETY: the page is mapped writable and belongs to a chunk that is not
                    // ready, so that nobody else touches it; it is zero before and after.
                    unsafe { page.write_volatile(0) };
                }
                Ok(())
            }
            Err(error) => {
                let reason = error.to_string();
                Err(CudaError::System {
                    call: "madvise",
                    bytes,
                    reason,
                })
            }
        }
    }

    /// Gives a range's memory back to the system.
    fn give_back(&self, offset: u64, bytes: u64) {
        let start = self.at(offset);
        let length = usize::try_from(bytes).expect("inside the mapping");
        // SAFETY: the range belongs to a chunk that is not ready and not locked, so that nobody
        // relies on its content. A failure leaves the memory taken until the arena is dropped.
        let _advised = unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once; every flight that touched it held the arena. An
        // error can't be acted upon: the range is valid, so there is none.
        let _unmapped = unsafe { munmap(self.whole.as_ptr(), self.whole_bytes) };
    }
}

#[cfg(test)]
mod tests;
