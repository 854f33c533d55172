//! The plain-memory backend: a slab of host slots, and threads that copy both ways at once.

use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::task::Waker;
use std::thread;

use super::worker::{Shared, work};
use super::{Clock, HostConfig, PlainMemory, copy};
use crate::{Backend, Closed, Command, Completion, Direction, Refused, Span, SubmitRefusal, Time};

/// Why a [`HostBackend`] could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostStartError {
    /// The system gave no thread.
    #[error("can't start the copy thread {name}")]
    Thread {
        /// Name of the thread.
        name: Box<str>,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Really copies, between [`PlainMemory`] and a slab of host slots, on threads of its own.
///
/// Slots cost no resident memory until they are first written.
/// Dropping it without [`close`](Backend::close) waits for nothing: copies that are under way end
/// by themselves, over memory that their threads keep alive, and nothing else is started.
///
/// ```
/// use std::sync::Arc;
///
/// use kv_core::host::{HostBackend, HostConfig, PlainMemory};
/// use kv_core::{Backend, Layout, Span, Time};
///
/// let memory = Arc::new(PlainMemory::new(Layout::latent(2, 8, 16, 64, 2)?));
/// let clock = Arc::new(|| Time::ZERO);
/// let mut backend = HostBackend::new(memory, HostConfig::new(4), clock)?;
/// assert_eq!(backend.slots_ready(), 4);
/// assert_eq!(backend.close(Span::from_secs(1)).unconfirmed, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HostBackend {
    shared: Arc<Shared>,
}

impl fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBackend")
            .field("config", self.shared.config())
            .finish_non_exhaustive()
    }
}

impl HostBackend {
    /// Maps the slab and starts the threads.
    ///
    /// # Errors
    ///
    /// [`HostStartError`] if a thread can't be started; the ones that were are told to stop.
    pub fn new(
        memory: Arc<PlainMemory>,
        config: HostConfig,
        clock: Clock,
    ) -> Result<Self, HostStartError> {
        let backend = Self {
            shared: Arc::new(Shared::new(memory, config, clock)),
        };
        for direction in [Direction::Out, Direction::In] {
            for number in 0..config.threads_per_direction.get() {
                let way = match direction {
                    Direction::In => "in",
                    Direction::Out => "out",
                };
                let name = format!("kv-host-{way}-{number}");
                let shared = Arc::clone(&backend.shared);
                // The handle is dropped: whoever closes waits for copies, not for threads, and a
                // thread that waits for a step may outlive the backend.
                let started = thread::Builder::new()
                    .name(name.clone())
                    .spawn(move || work(&shared, direction));
                if let Err(source) = started {
                    return Err(HostStartError::Thread {
                        name: name.into(),
                        source,
                    });
                }
            }
        }
        Ok(backend)
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Looks at host slots from outside, and damages them.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn probe(&self) -> super::SlotProbe {
        super::SlotProbe::new(Arc::clone(&self.shared))
    }
}

impl Backend for HostBackend {
    /// Queues the command.
    ///
    /// # Panics
    ///
    /// If the command breaks a promise of the machine: a block or slot outside its pool, a wrong
    /// number of bytes or digests.
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        let config = self.shared.config();
        copy::check(self.shared.memory().layout(), &command);
        for step in command.moves() {
            assert!(
                step.slot.value() < config.slots,
                "{:?} of a slab of {} slots",
                step.slot,
                config.slots
            );
        }
        self.shared.enqueue(now, command)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.shared.take_completions(out);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.shared.set_waker(waker);
    }

    fn slots_ready(&self) -> u32 {
        self.shared.config().slots
    }

    /// Commands whose copy has not begun end as `Failed` with
    /// [`CopyFault::Closed`](crate::CopyFault::Closed); imitated links stop slowing down the
    /// others, which are waited for.
    fn close(&mut self, limit: Span) -> Closed {
        self.shared.stop();
        self.shared.wait_idle(limit)
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
