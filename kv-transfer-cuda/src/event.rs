//! Marks in streams that others can wait for.

#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use core::ffi::c_uint;
use core::{fmt, ptr};

use cudarc::driver::sys;
use parking_lot::Mutex;

use crate::device::{Device, Stream, check};
use crate::error::DriverError;

/// How far the work before an event has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All of it is over, or the event was never recorded.
    Over,
    /// Some of it is not over.
    Running,
}

/// A mark in a stream. Recording it anew moves it.
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks what it needs to.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Event {
    /// Makes an event whose waiters sleep instead of spinning.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn new(device: &Device) -> Result<Self, DriverError> {
        use sys::CUevent_flags_enum as F;
        Self::with_flags(
            device,
            F::CU_EVENT_BLOCKING_SYNC as c_uint | F::CU_EVENT_DISABLE_TIMING as c_uint,
        )
    }

    /// Makes an event for other streams only: reaching it interrupts nobody.
    pub(crate) fn between_streams(device: &Device) -> Result<Self, DriverError> {
        Self::with_flags(
            device,
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint,
        )
    }

    /// Makes an event that remembers when it was reached; for measurements.
    pub(crate) fn timed(device: &Device) -> Result<Self, DriverError> {
        Self::with_flags(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as c_uint)
    }

    fn with_flags(device: &Device, flags: c_uint) -> Result<Self, DriverError> {
        device.bind()?;
        let mut raw: sys::CUevent = ptr::null_mut();
        // SAFETY: a context is current; the place is valid.
        let answer = unsafe { sys::cuEventCreate(&raw mut raw, flags) };
        check("cuEventCreate", answer)?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// Marks everything queued on the stream so far.
    ///
    /// # Errors
    ///
    /// What the driver answered.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: our own stream is alive and of the same context.
        unsafe { self.record_raw(stream.handle()) }
    }

    /// Marks everything queued on a foreign stream so far.
    ///
    /// # Errors
    ///
    /// What the driver answered.
    ///
    /// # Safety
    ///
    /// 1. The stream is alive.
    /// 2. It belongs to the same context as the event.
    pub(crate) unsafe fn record_raw(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: the event is alive; clauses 1 and 2 are the caller's.
        let answer = unsafe { sys::cuEventRecord(self.raw, stream) };
        check("cuEventRecord", answer)
    }

    /// How far the work before the latest record has come. Does not wait.
    ///
    /// # Errors
    ///
    /// If the driver can't say; the work may still be under way then.
    pub fn progress(&self) -> Result<Progress, DriverError> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(Progress::Running),
            answer => check("cuEventQuery", answer).map(|()| Progress::Over),
        }
    }

    /// Sleeps until the work before the latest record is over.
    ///
    /// # Errors
    ///
    /// If the driver can't say; the work may still be under way then.
    pub fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        let answer = unsafe { sys::cuEventSynchronize(self.raw) };
        check("cuEventSynchronize", answer)
    }

    /// Time from one timed event to a later one, nanoseconds.
    pub(crate) fn nanos_since(&self, earlier: &Self) -> Result<f64, DriverError> {
        let mut millis = 0f32;
        // SAFETY: both events are alive; the driver checks that they are timed and over.
        let answer = unsafe { sys::cuEventElapsedTime(&raw mut millis, earlier.raw, self.raw) };
        check("cuEventElapsedTime", answer)?;
        Ok(f64::from(millis) * 1e6)
    }

    pub(crate) const fn handle(&self) -> sys::CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `with_flags` and destroyed once; the driver keeps what waits for it
        // going. An error can't be acted upon here.
        let _destroyed = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Events that are used again, because making one takes microseconds.
#[derive(Debug)]
pub(crate) struct EventPool {
    device: Device,
    idle: Mutex<Vec<Event>>,
}

impl EventPool {
    /// A pool that has so many events from the start.
    ///
    /// Making one later may wait until the GPU is idle, if the driver has to find memory for it.
    pub(crate) fn new(device: &Device, events: usize) -> Result<Self, DriverError> {
        let idle = (0..events)
            .map(|_| Event::new(device))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            device: device.clone(),
            idle: Mutex::new(idle),
        })
    }

    pub(crate) fn take(&self) -> Result<Event, DriverError> {
        let idle = self.idle.lock().pop();
        idle.map_or_else(|| Event::new(&self.device), Ok)
    }

    /// Takes back an event whose latest record is over, or whose waiters are all queued.
    pub(crate) fn put_back(&self, event: Event) {
        self.idle.lock().push(event);
    }
}

#[cfg(test)]
mod tests {
    use super::Event;

    const fn is_shared<T: Send + Sync>() {}

    #[test]
    fn events_may_be_shared_between_threads() {
        is_shared::<Event>();
    }
}
