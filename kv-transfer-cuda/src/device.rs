//! The driver, one GPU's primary context, streams and kernels.
//!
//! Every call into the driver that is about a context, a stream or a kernel is here, each in a
//! function of its own that says what it relies on. The driver's library is opened at run time:
//! [`Device::open`] is the only way in, and it asks whether the library is there before it calls
//! anything, so no later call can miss it.

#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::{fmt, ptr};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use crate::error::DriverError;
use crate::event::Event;
use crate::kernels::{Kernel, PTX};
use crate::memory::DeviceBytes;
use crate::{CudaError, StreamPriority};

/// The oldest driver whose calls are used: CUDA 12.0.
const DRIVER_VERSION_MIN: i32 = 12_000;

/// The driver from which on one call can queue many copies.
const DRIVER_VERSION_BATCH: i32 = 12_080;

/// Turns a driver's answer into a result.
pub(crate) fn check(call: &'static str, answer: sys::CUresult) -> Result<(), DriverError> {
    if answer == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let code = i32::try_from(answer as u32).unwrap_or(i32::MAX);
    Err(DriverError {
        call,
        code,
        name: error_name(answer),
    })
}

fn error_name(answer: sys::CUresult) -> String {
    let mut name: *const c_char = ptr::null();
    // SAFETY: the library is open, or there would be no answer; `name` is a valid place for a
    // pointer. The call has no other requirement.
    let asked = unsafe { sys::cuGetErrorName(answer, &raw mut name) };
    if asked != sys::CUresult::CUDA_SUCCESS || name.is_null() {
        return String::from("unknown error");
    }
    // SAFETY: the driver answered with a pointer to a static, NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_string_lossy().into_owned()
}

/// One GPU, by its primary context: the one that other CUDA libraries in this process use too.
///
/// Cheap to clone. The context is released when the last clone is gone.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    handle: sys::CUdevice,
    context: sys::CUcontext,
    facts: DeviceFacts,
    kernels: OnceLock<Module>,
}

// SAFETY: a context handle may be used from any thread; the driver locks what it needs to. All
// other fields are plain values, or handles of the same kind.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing is changed through a shared reference but the `OnceLock`.
unsafe impl Sync for Inner {}

/// What is worth knowing about a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Which one, counted from 0.
    pub ordinal: u32,
    /// The vendor's name for it.
    pub name: String,
    /// Where it is plugged in, as in `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// CUDA version of the driver: major × 1000 + minor × 10.
    pub driver_version: i32,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: i32,
    /// Size of the second-level cache, bytes.
    pub l2_bytes: i32,
    /// Part of that cache that can be set aside at most, bytes.
    pub l2_persisting_bytes_max: i32,
    /// Copy engines.
    pub copy_engines: i32,
    /// Whether one call can queue many copies.
    pub batch_copies: bool,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.inner.facts).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.kernels.take());
        // SAFETY: the context was retained by `open` and is released once, here. An error can't
        // be acted upon: the context is poisoned or the process is ending.
        let _released = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

impl Device {
    /// Opens the driver and the GPU with that number, counted from 0.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoDriver`] without the driver's library, [`CudaError::NoDevice`] without that
    /// GPU, and the other variants if either is too old or the driver refuses.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        // SAFETY: only tries to open a library by its well-known name; loading the driver's
        // library runs its initialisers, which is what this process wants.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: the library is there. No other requirement.
        let answer = unsafe { sys::cuInit(0) };
        if answer == sys::CUresult::CUDA_ERROR_NO_DEVICE {
            return Err(CudaError::NoDevice { ordinal, count: 0 });
        }
        check("cuInit", answer)?;
        let driver_version = driver_version()?;
        if driver_version < DRIVER_VERSION_MIN {
            let needed = DRIVER_VERSION_MIN;
            return Err(CudaError::DriverTooOld {
                found: driver_version,
                needed,
            });
        }
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let handle = device_handle(ordinal)?;
        let facts = facts(handle, ordinal, driver_version)?;
        let (major, minor) = facts.compute_capability;
        if major < 8 {
            return Err(CudaError::DeviceTooOld { major, minor });
        }
        let mut context: sys::CUcontext = ptr::null_mut();
        // SAFETY: `handle` came from the driver; `context` is a valid place for a handle.
        let answer = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, handle) };
        check("cuDevicePrimaryCtxRetain", answer)?;
        let inner = Inner {
            handle,
            context,
            facts,
            kernels: OnceLock::new(),
        };
        let device = Self {
            inner: Arc::new(inner),
        };
        device.bind()?;
        let module = Module::load(PTX)?;
        drop(device.inner.kernels.set(module));
        Ok(device)
    }

    /// What is worth knowing about it.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.inner.facts
    }

    /// Makes this GPU's context the current one of the calling thread.
    ///
    /// # Errors
    ///
    /// If the driver refuses; the context is then broken.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained as long as `self` lives.
        let answer = unsafe { sys::cuCtxSetCurrent(self.inner.context) };
        check("cuCtxSetCurrent", answer)
    }

    /// Waits until everything queued so far, on all streams, is over.
    ///
    /// # Errors
    ///
    /// If the context is broken.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: a context is current. No other requirement.
        let answer = unsafe { sys::cuCtxSynchronize() };
        check("cuCtxSynchronize", answer)
    }

    /// Whether the driver knows the address as page-locked host memory.
    pub(crate) fn is_page_locked(&self, address: u64) -> bool {
        let mut kind: c_uint = 0;
        let which = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        if self.bind().is_err() {
            return false;
        }
        // SAFETY: a context is current; the place holds a value of the attribute's type; any
        // address may be asked about.
        let answer = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), which, address) };
        answer == sys::CUresult::CUDA_SUCCESS
            && kind == sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST as c_uint
    }

    /// Waits for the default stream, on which plain blocking copies run.
    pub(crate) fn synchronize_default_stream(&self) -> Result<(), DriverError> {
        // SAFETY: a context is current: the caller has just bound it. Null names its default
        // stream.
        let answer = unsafe { sys::cuStreamSynchronize(ptr::null_mut()) };
        check("cuStreamSynchronize", answer)
    }

    /// Free and total memory of the GPU, bytes.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a context is current; both places are valid.
        let answer = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check("cuMemGetInfo", answer)?;
        Ok((free as u64, total as u64))
    }

    /// Sets aside a part of the second-level cache for lines that are marked as persisting.
    ///
    /// This holds for the whole context, other users included.
    pub(crate) fn set_persisting_l2(&self, bytes: u64) -> Result<(), DriverError> {
        self.bind()?;
        let limit = sys::CUlimit_enum::CU_LIMIT_PERSISTING_L2_CACHE_SIZE;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: a context is current. The driver checks the value.
        let answer = unsafe { sys::cuCtxSetLimit(limit, bytes) };
        check("cuCtxSetLimit", answer)
    }

    pub(crate) fn kernel(&self, kernel: Kernel) -> Function {
        self.inner.kernels.get().expect("loaded by open").functions[kernel.index()]
    }

    /// Loads another module, for tests and benchmarks.
    ///
    /// # Errors
    ///
    /// If the driver does not take the text.
    pub fn load(&self, ptx: &CStr, kernels: &[&CStr]) -> Result<Vec<LoadedKernel>, CudaError> {
        self.bind()?;
        let module = Arc::new(Module::load_named(ptx, kernels)?);
        let functions = module.functions.clone();
        Ok(functions
            .into_iter()
            .map(|function| LoadedKernel {
                device: self.clone(),
                module: Arc::clone(&module),
                function,
            })
            .collect())
    }
}

fn driver_version() -> Result<i32, DriverError> {
    let mut version: c_int = 0;
    // SAFETY: the place is valid. No other requirement.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    check("cuDriverGetVersion", answer)?;
    Ok(version)
}

fn device_count() -> Result<u32, DriverError> {
    let mut count: c_int = 0;
    // SAFETY: the driver is initialised; the place is valid.
    let answer = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    check("cuDeviceGetCount", answer)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn device_handle(ordinal: u32) -> Result<sys::CUdevice, DriverError> {
    let mut handle: sys::CUdevice = 0;
    let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: the driver is initialised and checks the number; the place is valid.
    let answer = unsafe { sys::cuDeviceGet(&raw mut handle, ordinal) };
    check("cuDeviceGet", answer)?;
    Ok(handle)
}

fn attribute(
    handle: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Result<i32, DriverError> {
    let mut value: c_int = 0;
    // SAFETY: `handle` came from the driver; the place is valid.
    let answer = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, handle) };
    check("cuDeviceGetAttribute", answer)?;
    Ok(value)
}

fn facts(
    handle: sys::CUdevice,
    ordinal: u32,
    driver_version: i32,
) -> Result<DeviceFacts, DriverError> {
    use sys::CUdevice_attribute_enum as A;
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: `handle` came from the driver; it writes at most 128 bytes, NUL included.
    let answer = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, handle) };
    check("cuDeviceGetName", answer)?;
    let mut bus: [c_char; 32] = [0; 32];
    // SAFETY: `handle` came from the driver; it writes at most 32 bytes, NUL included.
    let answer = unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, handle) };
    check("cuDeviceGetPCIBusId", answer)?;
    Ok(DeviceFacts {
        ordinal,
        name: text(&name),
        pci_bus_id: text(&bus).to_lowercase(),
        driver_version,
        compute_capability: (
            attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(handle, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(handle, A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        l2_persisting_bytes_max: attribute(
            handle,
            A::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE,
        )?,
        copy_engines: attribute(handle, A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        batch_copies: driver_version >= DRIVER_VERSION_BATCH,
    })
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .take_while(|&&c| c != 0)
        .map(|c| c.to_ne_bytes()[0])
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A kernel, good as long as its module is loaded.
#[derive(Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Module {
    handle: sys::CUmodule,
    functions: Vec<Function>,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn load(ptx: &CStr) -> Result<Self, DriverError> {
        let names: Vec<_> = Kernel::ALL.iter().map(|kernel| kernel.name()).collect();
        Self::load_named(ptx, &names)
    }

    /// Needs a current context.
    fn load_named(ptx: &CStr, names: &[&CStr]) -> Result<Self, DriverError> {
        let mut handle: sys::CUmodule = ptr::null_mut();
        // SAFETY: a context is current; the text is NUL-terminated and outlives the call; the
        // place is valid.
        let answer = unsafe { sys::cuModuleLoadData(&raw mut handle, ptx.as_ptr().cast()) };
        check("cuModuleLoadData", answer)?;
        let mut module = Self {
            handle,
            functions: Vec::with_capacity(names.len()),
        };
        for name in names {
            let mut function: sys::CUfunction = ptr::null_mut();
            // SAFETY: the module is loaded; the name is NUL-terminated; the place is valid.
            let answer =
                unsafe { sys::cuModuleGetFunction(&raw mut function, handle, name.as_ptr()) };
            check("cuModuleGetFunction", answer)?;
            module.functions.push(Function(function));
        }
        Ok(module)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load_named` and unloaded once; the streams that ran its kernels hold
        // the device, and the device holds this. An error can't be acted upon here.
        let _unloaded = unsafe { sys::cuModuleUnload(self.handle) };
    }
}

/// A kernel of a module that [`Device::load`] loaded.
#[derive(Clone)]
pub struct LoadedKernel {
    function: Function,
    // Before the device, so that it is unloaded while there is a context.
    #[expect(dead_code, reason = "keeps the code of the function loaded")]
    module: Arc<Module>,
    device: Device,
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedKernel")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl LoadedKernel {
    /// Queues the kernel.
    ///
    /// # Errors
    ///
    /// What the driver answered.
    ///
    /// # Safety
    ///
    /// 1. `params` point to values of the types and in the order that the kernel declares.
    /// 2. Whatever memory the kernel touches stays valid until it is over, and nothing else
    ///    touches it in a way that the kernel does not expect.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: u32,
        threads: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        self.device.bind()?;
        // SAFETY: clauses 1 and 2 are the caller's, word for word.
        unsafe { launch(self.function, stream, grid, threads, params) }
    }
}

/// Queues a kernel.
///
/// # Safety
///
/// 1. `params` point to values of the types and in the order that the kernel declares; the driver
///    copies them before it returns.
/// 2. Whatever memory the kernel touches stays valid until it is over, and nothing else touches
///    it in a way that the kernel does not expect.
/// 3. The function belongs to the context of the stream, which is current.
pub(crate) unsafe fn launch(
    function: Function,
    stream: &Stream,
    grid: u32,
    threads: u32,
    params: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let extra = ptr::null_mut();
    let (f, s, p) = (function.0, stream.raw, params.as_mut_ptr());
    // SAFETY: the caller's clauses 1 to 3; grid and block are one-dimensional, and the driver
    // checks their sizes.
    let answer = unsafe { sys::cuLaunchKernel(f, grid, 1, 1, threads, 1, 1, 0, s, p, extra) };
    check("cuLaunchKernel", answer)
}

/// A queue of work on a GPU. Does not wait for the default stream, nor the other way round.
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders what several threads queue at the same time.
unsafe impl Sync for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Makes a stream.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn new(device: &Device, priority: StreamPriority) -> Result<Self, DriverError> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: a context is current; both places are valid.
        let answer = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", answer)?;
        let number = match priority {
            StreamPriority::High => greatest,
            StreamPriority::Low => least,
        };
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
        let mut raw: sys::CUstream = ptr::null_mut();
        // SAFETY: a context is current; the place is valid; the priority came from the driver.
        let answer = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags, number) };
        check("cuStreamCreateWithPriority", answer)?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// The GPU.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, for libraries that take one. Good as long as the stream lives.
    #[must_use]
    pub const fn handle(&self) -> sys::CUstream {
        self.raw
    }

    /// Later work of this stream starts after the event's latest record.
    ///
    /// # Errors
    ///
    /// What the driver answered.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: stream and event are alive here; the driver remembers the record itself, so
        // that the event may be recorded anew or destroyed afterwards.
        let answer = unsafe { sys::cuStreamWaitEvent(self.raw, event.handle(), 0) };
        check("cuStreamWaitEvent", answer)
    }

    /// Waits until everything queued on this stream so far is over.
    ///
    /// # Errors
    ///
    /// If the context is broken.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.device.bind()?;
        // SAFETY: the stream is alive.
        let answer = unsafe { sys::cuStreamSynchronize(self.raw) };
        check("cuStreamSynchronize", answer)
    }

    /// Asks that accesses to these bytes by kernels of this stream keep them in the part of the
    /// second-level cache that was set aside.
    pub(crate) fn keep_in_l2(&self, bytes: &DeviceBytes) -> Result<(), DriverError> {
        let window = sys::CUaccessPolicyWindow {
            base_ptr: bytes.address() as *mut c_void,
            num_bytes: usize::try_from(bytes.len()).unwrap_or(usize::MAX),
            hitRatio: 1.0,
            hitProp: sys::CUaccessProperty::CU_ACCESS_PROPERTY_PERSISTING,
            missProp: sys::CUaccessProperty::CU_ACCESS_PROPERTY_STREAMING,
        };
        let value = sys::CUstreamAttrValue {
            accessPolicyWindow: window,
        };
        let which = sys::CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW;
        // SAFETY: the stream is alive; the value is of the variant that the attribute names. The
        // window is a hint about addresses and does not make anything readable or writable.
        let answer = unsafe { sys::cuStreamSetAttribute(self.raw, which, &raw const value) };
        check("cuStreamSetAttribute", answer)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once. The call does not wait: the driver lets queued
        // work finish first. An error can't be acted upon here.
        let _destroyed = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::{Device, Function, Stream};
    use crate::CudaError;

    const fn is_shared<T: Send + Sync>() {}

    #[test]
    fn handles_may_be_shared_between_threads() {
        is_shared::<Device>();
        is_shared::<Function>();
        is_shared::<Stream>();
    }

    #[test]
    fn a_gpu_that_is_not_there_is_named() {
        match Device::open(4_000_000) {
            Err(CudaError::NoDriver) => {}
            Err(CudaError::NoDevice { ordinal, count }) => {
                assert_eq!(ordinal, 4_000_000);
                assert!(count < 4_000_000);
            }
            other => panic!("{other:?}"),
        }
    }
}
