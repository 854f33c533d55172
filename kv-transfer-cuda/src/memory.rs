//! Memory of the GPU: our own allocations, and pools of blocks, our own or foreign ones.

#![expect(unsafe_code, reason = "allocates and copies memory of the GPU")]

use core::any::Any;
use core::fmt;
use std::sync::Arc;

use cudarc::driver::sys;
use kv_core::{BlockId, Layout, Row};

use crate::device::{Device, check};
use crate::error::DriverError;
use crate::plan::Segment;
use crate::{CudaError, Stream};

/// One allocation of GPU memory.
pub struct DeviceBytes {
    device: Device,
    address: sys::CUdeviceptr,
    bytes: u64,
}

impl fmt::Debug for DeviceBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBytes")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl DeviceBytes {
    /// Allocates so many bytes, at least one; their content is whatever it is.
    ///
    /// # Errors
    ///
    /// If the GPU has not so much memory left.
    pub fn new(device: &Device, bytes: u64) -> Result<Self, DriverError> {
        device.bind()?;
        let mut address: sys::CUdeviceptr = 0;
        let length = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: a context is current; the place is valid.
        let answer = unsafe { sys::cuMemAlloc_v2(&raw mut address, length) };
        check("cuMemAlloc", answer)?;
        Ok(Self {
            device: device.clone(),
            address,
            bytes,
        })
    }

    /// The address as kernels see it. Good as long as this lives.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Length, bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether it is of no length.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies bytes to the GPU and waits for the copy.
    ///
    /// # Errors
    ///
    /// If the driver refuses, or the context is broken.
    ///
    /// # Panics
    ///
    /// If the bytes don't fit.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), DriverError> {
        let end = offset.checked_add(from.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "write beyond an allocation"
        );
        self.device.bind()?;
        // SAFETY: the range lies in this allocation, checked above; `from` is readable for its
        // length; the call returns after it has read all of it.
        let answer = unsafe {
            sys::cuMemcpyHtoD_v2(self.address + offset, from.as_ptr().cast(), from.len())
        };
        check("cuMemcpyHtoD", answer)
    }

    /// Copies bytes from the GPU and waits for the copy.
    ///
    /// # Errors
    ///
    /// If the driver refuses, or the context is broken.
    ///
    /// # Panics
    ///
    /// If so many bytes are not there.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), DriverError> {
        let end = offset.checked_add(to.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "read beyond an allocation"
        );
        self.device.bind()?;
        // SAFETY: the range lies in this allocation, checked above; `to` is writable for its
        // length and borrowed for the whole blocking call.
        let answer = unsafe {
            sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), self.address + offset, to.len())
        };
        check("cuMemcpyDtoH", answer)
    }

    /// Copies a table of segments to the GPU.
    pub(crate) fn of_segments(device: &Device, segments: &[Segment]) -> Result<Self, DriverError> {
        let mut bytes = Vec::with_capacity(size_of_val(segments));
        for segment in segments {
            bytes.extend_from_slice(&segment.address.to_ne_bytes());
            bytes.extend_from_slice(&segment.block_stride.to_ne_bytes());
            bytes.extend_from_slice(&segment.slot_offset.to_ne_bytes());
            bytes.extend_from_slice(&segment.bytes.to_ne_bytes());
        }
        let table = Self::new(device, bytes.len() as u64)?;
        table.write(0, &bytes)?;
        Ok(table)
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: allocated by `new` and freed once; whoever lets work touch it keeps it alive
        // until that work is over. An error can't be acted upon here.
        let _freed = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// The pool of KV blocks on the GPU, described by its [`Layout`].
///
/// Shared between an executor, which computes addresses from [`GpuMemory::region_address`], and a
/// backend. It lives until both are done with it.
pub struct GpuMemory {
    device: Device,
    layout: Layout,
    bases: Vec<u64>,
    owner: Owner,
}

enum Owner {
    Foreign {
        #[expect(dead_code, reason = "keeps the memory alive")]
        keep: Arc<dyn Any + Send + Sync>,
    },
    Own {
        #[expect(dead_code, reason = "keeps the memory alive")]
        regions: Vec<DeviceBytes>,
    },
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Foreign { .. } => "foreign",
            Owner::Own { .. } => "own",
        };
        f.debug_struct("GpuMemory")
            .field("layout", &self.layout)
            .field("owner", &owner)
            .finish_non_exhaustive()
    }
}

impl GpuMemory {
    /// Allocates a pool; its content is whatever it is.
    ///
    /// # Errors
    ///
    /// If the GPU has not so much memory left.
    pub fn allocate(device: &Device, layout: Layout) -> Result<Self, CudaError> {
        let mut regions = Vec::with_capacity(layout.regions().len());
        for &bytes in layout.regions() {
            regions.push(DeviceBytes::new(device, bytes)?);
        }
        let bases = regions.iter().map(DeviceBytes::address).collect();
        Ok(Self {
            device: device.clone(),
            layout,
            bases,
            owner: Owner::Own { regions },
        })
    }

    /// Takes a pool that somebody else allocated: one base address per region of the layout.
    ///
    /// # Errors
    ///
    /// [`CudaError::RegionCount`] if the lists don't match.
    ///
    /// # Safety
    ///
    /// 1. Each base address is GPU memory of the device's primary context, valid for the length
    ///    that the layout gives for its region, as long as `keep` lives.
    /// 2. Nobody but steps and backends that are ordered by their fences touches the blocks while
    ///    a command names them.
    pub unsafe fn foreign(
        device: &Device,
        layout: Layout,
        bases: Vec<u64>,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        if bases.len() != layout.regions().len() {
            let (given, regions) = (bases.len(), layout.regions().len());
            return Err(CudaError::RegionCount { given, regions });
        }
        Ok(Self {
            device: device.clone(),
            layout,
            bases,
            owner: Owner::Foreign { keep },
        })
    }

    /// The GPU.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// What the pool looks like.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Address of a region as kernels see it. Good as long as this lives.
    ///
    /// # Panics
    ///
    /// If there is no such region.
    #[must_use]
    pub fn region_address(&self, region: u32) -> u64 {
        self.bases[region as usize]
    }

    pub(crate) fn bases(&self) -> &[u64] {
        &self.bases
    }

    /// Writes bytes of a region and waits for the copy.
    ///
    /// Not ordered after steps or commands: for filling a pool at rest, and for tests.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    ///
    /// # Panics
    ///
    /// If there is no such region, or the bytes don't fit.
    pub fn write_region(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), DriverError> {
        let address = self.checked(region, offset, from.len());
        self.device.bind()?;
        // SAFETY: the range lies in its region, checked above, and `self` keeps it alive; `from`
        // is readable for its length; the call returns after it has read all of it.
        let answer = unsafe { sys::cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len()) };
        check("cuMemcpyHtoD", answer)?;
        // A copy from pageable memory may return before its last bytes have arrived.
        self.device.synchronize_default_stream()
    }

    /// Reads bytes of a region and waits for the copy.
    ///
    /// Not ordered after steps or commands: for looking at a pool at rest, and for tests.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    ///
    /// # Panics
    ///
    /// If there is no such region, or it is shorter.
    pub fn read_region(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), DriverError> {
        let address = self.checked(region, offset, to.len());
        self.device.bind()?;
        // SAFETY: the range lies in its region, checked above, and `self` keeps it alive; `to` is
        // writable for its length and borrowed for the whole blocking call.
        let answer = unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, to.len()) };
        check("cuMemcpyDtoH", answer)
    }

    /// Address of a range that lies in its region.
    fn checked(&self, region: u32, offset: u64, length: usize) -> u64 {
        let bytes = self.layout.regions()[region as usize];
        let end = offset.checked_add(length as u64);
        assert!(
            end.is_some_and(|end| end <= bytes),
            "beyond region {region} of {bytes} bytes"
        );
        self.bases[region as usize] + offset
    }

    /// Writes a whole block, its rows back to back; otherwise as
    /// [`write_region`](Self::write_region).
    ///
    /// # Errors
    ///
    /// If the length is wrong or the driver refuses.
    pub fn write_block(&self, block: BlockId, from: &[u8]) -> Result<(), CudaError> {
        self.check_length(from.len())?;
        for row in self.layout.rows(block) {
            self.write_region(row.region, row.offset, &from[range(&row)])?;
        }
        Ok(())
    }

    /// Reads a whole block, its rows back to back; otherwise as
    /// [`read_region`](Self::read_region).
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn read_block(&self, block: BlockId) -> Result<Vec<u8>, CudaError> {
        let bytes = usize::try_from(self.layout.block_bytes()).unwrap_or(usize::MAX);
        let mut to = vec![0u8; bytes];
        for row in self.layout.rows(block) {
            self.read_region(row.region, row.offset, &mut to[range(&row)])?;
        }
        Ok(to)
    }

    fn check_length(&self, given: usize) -> Result<(), CudaError> {
        let block_bytes = self.layout.block_bytes();
        if given as u64 == block_bytes {
            Ok(())
        } else {
            Err(CudaError::BlockLength { given, block_bytes })
        }
    }

    /// Copies one block into pageable memory and waits: queued on the stream, after whatever the
    /// stream waits for.
    pub(crate) fn copy_out(
        &self,
        stream: &Stream,
        block: BlockId,
        to: &mut [u8],
    ) -> Result<(), CudaError> {
        self.check_length(to.len())?;
        for row in self.layout.rows(block) {
            let part = &mut to[range(&row)];
            let address = self.bases[row.region as usize] + row.offset;
            // SAFETY: the row lies in its region, which `Layout` checked; `part` stays borrowed until the stream was waited for
            // below, also if a later call errs.
            let answer = unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    part.as_mut_ptr().cast(),
                    address,
                    part.len(),
                    stream.handle(),
                )
            };
            if let Err(error) = check("cuMemcpyDtoHAsync", answer) {
                drop(stream.synchronize());
                return Err(error.into());
            }
        }
        Ok(stream.synchronize()?)
    }

    /// Copies pageable memory into one block and waits: queued on the stream, after whatever the
    /// stream waits for.
    pub(crate) fn copy_in(
        &self,
        stream: &Stream,
        block: BlockId,
        from: &[u8],
    ) -> Result<(), CudaError> {
        self.check_length(from.len())?;
        for row in self.layout.rows(block) {
            let part = &from[range(&row)];
            let address = self.bases[row.region as usize] + row.offset;
            // SAFETY: the row lies in its region, which `Layout` checked; `part` stays borrowed until the stream was waited for
            // below, also if a later call errs.
            let answer = unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    address,
                    part.as_ptr().cast(),
                    part.len(),
                    stream.handle(),
                )
            };
            if let Err(error) = check("cuMemcpyHtoDAsync", answer) {
                drop(stream.synchronize());
                return Err(error.into());
            }
        }
        Ok(stream.synchronize()?)
    }
}

/// Where a row lies in the packed block.
fn range(row: &Row) -> core::ops::Range<usize> {
    let start = usize::try_from(row.slot_offset).expect("a block fits into memory");
    let length = usize::try_from(row.bytes).expect("a block fits into memory");
    start..start + length
}
