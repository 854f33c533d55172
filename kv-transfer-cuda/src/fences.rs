//! Fences of steps: events that an executor records and that copies wait for on the GPU.

#![expect(unsafe_code, reason = "records events on streams of other libraries")]

use std::collections::VecDeque;

use cudarc::driver::{CudaStream, sys};
use kv_core::Fence;
use parking_lot::Mutex;

use crate::device::{Device, Stream};
use crate::error::DriverError;
use crate::event::{Event, EventPool, Progress};

/// Steps that may be under way at the same time before another event has to be made.
const STEPS_AHEAD: usize = 64;

/// The steps of one executor, as far as they are not known to be over.
///
/// The executor calls [`record`](Self::record) after it queued the last kernel of a step; the
/// fence it gets goes with the step's output. Copies that come after the step wait for it on the
/// GPU; no thread waits. Shared between an executor and a backend.
#[derive(Debug)]
pub struct StepFences {
    pool: EventPool,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    last: u64,
    /// In the order of their numbers. What is missing at the front is over.
    running: VecDeque<(u64, Event)>,
}

/// A fence that no step stands for.
#[derive(Debug)]
pub(crate) enum FenceFault {
    /// The driver refused.
    Driver(DriverError),
    /// No such step was recorded.
    NeverRecorded,
}

impl StepFences {
    /// No step so far.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn new(device: &Device) -> Result<Self, DriverError> {
        Ok(Self {
            pool: EventPool::new(device, STEPS_AHEAD)?,
            steps: Mutex::default(),
        })
    }

    /// Ends a step: everything queued on the stream so far.
    ///
    /// # Errors
    ///
    /// If the driver refuses; the step has no fence then.
    pub fn record(&self, stream: &Stream) -> Result<Fence, DriverError> {
        // SAFETY: our own stream is alive and belongs to the device's context.
        unsafe { self.record_raw(stream.handle()) }
    }

    /// Ends a step on a stream of cudarc's safe interface.
    ///
    /// # Errors
    ///
    /// If the driver refuses, for example because the stream belongs to another context than the
    /// device's primary one; the step has no fence then.
    pub fn record_on(&self, stream: &CudaStream) -> Result<Fence, DriverError> {
        // SAFETY: the stream is alive while it is borrowed. The driver checks the context.
        unsafe { self.record_raw(stream.cu_stream()) }
    }

    /// Ends a step on a stream of another library.
    ///
    /// # Errors
    ///
    /// If the driver refuses; the step has no fence then.
    ///
    /// # Safety
    ///
    /// 1. The stream is alive.
    pub unsafe fn record_raw(&self, stream: sys::CUstream) -> Result<Fence, DriverError> {
        let mut steps = self.steps.lock();
        while let Some((_, event)) = steps.running.front() {
            // A query that errs leaves the event where it is: whoever waits for it meets the
            // error, and treats it as what it is.
            if !matches!(event.progress(), Ok(Progress::Over)) {
                break;
            }
            if let Some((_, event)) = steps.running.pop_front() {
                self.pool.put_back(event);
            }
        }
        let event = self.pool.take()?;
        // SAFETY: clause 1 is the caller's; the driver refuses a stream of another context.
        unsafe { event.record_raw(stream) }?;
        steps.last += 1;
        let number = steps.last;
        steps.running.push_back((number, event));
        Ok(Fence::of_step(number))
    }

    /// Makes later work of the stream wait for the step. The calling thread does not wait.
    pub(crate) fn order(&self, stream: &Stream, after: Fence) -> Result<(), FenceFault> {
        let steps = self.steps.lock();
        if after.step() > steps.last {
            return Err(FenceFault::NeverRecorded);
        }
        steps.find(after).map_or(Ok(()), |event| {
            stream.wait(event).map_err(FenceFault::Driver)
        })
    }
}

impl Steps {
    /// The event of a step that is not known to be over.
    fn find(&self, fence: Fence) -> Option<&Event> {
        let front = self.running.front()?.0;
        let index = usize::try_from(fence.step().checked_sub(front)?).ok()?;
        self.running.get(index).map(|(_, event)| event)
    }
}
