//! Plain contiguous copies: what everything else is compared with.

#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use core::ffi::c_void;
use core::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crossbeam_channel::{Sender, bounded};
use cudarc::driver::sys;
use kv_core::Direction;
use kv_transfer_cuda::{Device, DeviceBytes, Event, Stream, StreamPriority};

use super::Failure;
use super::report::{gb_per_s, median};
use super::stand::clock;

/// Rates of long contiguous copies, GB/s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) out: f64,
    pub(crate) back_in: f64,
    pub(crate) both: f64,
}

/// Page-locked memory of the driver's own making.
pub(crate) struct Pinned {
    at: NonNull<c_void>,
    bytes: u64,
}

// SAFETY: plain memory that only the driver touches.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self, Failure> {
        device.bind()?;
        let mut at: *mut c_void = ptr::null_mut();
        let length = usize::try_from(bytes)?;
        // SAFETY: a context is current; the place is valid.
        let answer = unsafe { sys::cuMemHostAlloc(&raw mut at, length, 0) };
        let at = NonNull::new(at).ok_or_else(|| format!("cuMemHostAlloc: {answer:?}"))?;
        Ok(Self { at, bytes })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once; the measurements wait for their copies.
        let _freed = unsafe { sys::cuMemFreeHost(self.at.as_ptr()) };
    }
}

/// Queues one copy of the first `bytes` of both sides.
pub(crate) fn copy(
    stream: &Stream,
    direction: Direction,
    gpu: &DeviceBytes,
    host: &Pinned,
    bytes: u64,
) -> Result<(), Failure> {
    assert!(bytes <= gpu.len() && bytes <= host.bytes);
    let (device, at, length) = (gpu.address(), host.at.as_ptr(), usize::try_from(bytes)?);
    let answer = match direction {
        // SAFETY: both ranges are long enough, checked above, and outlive the copy: their owners
        // wait for the stream.
        Direction::In => unsafe { sys::cuMemcpyHtoDAsync_v2(device, at, length, stream.handle()) },
        // SAFETY: as above.
        Direction::Out => unsafe { sys::cuMemcpyDtoHAsync_v2(at, device, length, stream.handle()) },
    };
    if answer == sys::CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(format!("{answer:?}").into())
    }
}

const LINE_BYTES: u64 = 1 << 30;

/// Rates of copies of 1 GiB.
pub(crate) fn line(device: &Device) -> Result<Line, Failure> {
    let gpu = [
        DeviceBytes::new(device, LINE_BYTES)?,
        DeviceBytes::new(device, LINE_BYTES)?,
    ];
    let host = [
        Pinned::new(device, LINE_BYTES)?,
        Pinned::new(device, LINE_BYTES)?,
    ];
    let streams = [
        Stream::new(device, StreamPriority::Low)?,
        Stream::new(device, StreamPriority::Low)?,
    ];
    let timed = |directions: &[Direction]| -> Result<f64, Failure> {
        let mut samples = Vec::new();
        for _ in 0..6 {
            let start = clock();
            for (i, direction) in directions.iter().enumerate() {
                copy(&streams[i], *direction, &gpu[i], &host[i], LINE_BYTES)?;
            }
            streams.iter().try_for_each(Stream::synchronize)?;
            samples.push(start.elapsed().as_nanos() as f64);
        }
        let bytes = LINE_BYTES * directions.len() as u64;
        Ok(gb_per_s(bytes, median(&mut samples[1..])))
    };
    Ok(Line {
        out: timed(&[Direction::Out])?,
        back_in: timed(&[Direction::In])?,
        both: timed(&[Direction::Out, Direction::In])?,
    })
}

/// Contiguous copies whose end is noticed by a thread that sleeps on its event and unparks the
/// caller: the same way as the backend's.
pub(crate) struct Noticed {
    ways: [(Stream, DeviceBytes, Pinned, Event); 2],
    events: Sender<Arc<Event>>,
    over: Arc<AtomicBool>,
    device: Device,
}

impl Noticed {
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self, Failure> {
        let (events, sleeping) = bounded::<Arc<Event>>(1);
        let over = Arc::new(AtomicBool::new(false));
        let (told, caller) = (Arc::clone(&over), thread::current());
        thread::spawn(move || {
            for event in sleeping {
                let waited = event.wait();
                told.store(waited.is_ok(), Ordering::Release);
                caller.unpark();
            }
        });
        let way = || -> Result<_, Failure> {
            Ok((
                Stream::new(device, StreamPriority::Low)?,
                DeviceBytes::new(device, bytes)?,
                Pinned::new(device, bytes)?,
                Event::new(device)?,
            ))
        };
        Ok(Self {
            ways: [way()?, way()?],
            events,
            over,
            device: device.clone(),
        })
    }

    /// Nanoseconds from the call to the end of all copies being noticed on this thread.
    pub(crate) fn measure(&self, directions: &[Direction], bytes: u64) -> Result<f64, Failure> {
        let event = Arc::new(Event::new(&self.device)?);
        self.over.store(false, Ordering::Release);
        let start = clock();
        for (direction, (stream, gpu, host, _)) in directions.iter().zip(&self.ways) {
            copy(stream, *direction, gpu, host, bytes)?;
        }
        if directions.len() > 1 {
            let (other, _, _, joined) = &self.ways[1];
            joined.record(other)?;
            self.ways[0].0.wait(joined)?;
        }
        event.record(&self.ways[0].0)?;
        self.events.send(Arc::clone(&event))?;
        while !self.over.load(Ordering::Acquire) {
            thread::park();
        }
        Ok(start.elapsed().as_nanos() as f64)
    }
}

/// Contiguous copies without a pause, on a thread of their own, until dropped.
pub(crate) struct Steady {
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
}

const STEADY_BYTES: u64 = 64 << 20;

impl Steady {
    pub(crate) fn start(device: &Device, direction: Direction) -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let bytes = Arc::new(AtomicU64::new(0));
        let stream = Stream::new(device, StreamPriority::Low)?;
        let gpu = DeviceBytes::new(device, STEADY_BYTES)?;
        let host = Pinned::new(device, STEADY_BYTES)?;
        let events = [Event::new(device)?, Event::new(device)?];
        let (stopped, moved, device) = (Arc::clone(&stop), Arc::clone(&bytes), device.clone());
        let thread = thread::spawn(move || {
            let run = || -> Result<(), Failure> {
                device.bind()?;
                while !stopped.load(Ordering::Relaxed) {
                    // Two copies are always queued: each event is waited for one copy later.
                    for event in &events {
                        event.wait()?;
                        copy(&stream, direction, &gpu, &host, STEADY_BYTES)?;
                        event.record(&stream)?;
                        moved.fetch_add(STEADY_BYTES, Ordering::Relaxed);
                    }
                }
                Ok(stream.synchronize()?)
            };
            if let Err(error) = run() {
                eprintln!("contiguous copies stopped: {error}");
            }
        });
        Ok(Self {
            stop,
            bytes,
            thread: Some(thread),
        })
    }

    /// Bytes that were queued so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Spins until the word at that address of a pinned pool has that value; says when.
pub(crate) fn watch(address: u64, value: u64) -> std::time::Instant {
    let word = address as *const u64;
    loop {
        // SAFETY: the word lies in a slot of a pool that the measuring thread keeps until it has
        // joined this one; the device writes it, so that it is read as volatile.
        if unsafe { word.read_volatile() } == value {
            return clock();
        }
        std::hint::spin_loop();
    }
}
