//! Digests of host slots, computed by a few threads beside everything else.
//!
//! Who may touch what: a job's slots belong to one flight, between the end of its copy and its
//! completion, or before its copy is queued. The threads take the slots of a job one by one off a
//! counter; the thread that finishes the last one calls `finish`, once.

use core::fmt;
use core::num::NonZeroUsize;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use kv_core::{Digest, SlotIndex};
use parking_lot::Mutex;

use crate::arena::HostArena;

type Finish = Box<dyn FnOnce(Vec<Digest>) + Send>;

/// The threads; started with the first job.
pub(crate) struct DigestPool {
    threads: NonZeroUsize,
    jobs: Mutex<Option<Sender<Arc<Job>>>>,
}

impl fmt::Debug for DigestPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DigestPool")
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

struct Job {
    arena: Arc<HostArena>,
    slots: Vec<SlotIndex>,
    next: AtomicUsize,
    left: AtomicUsize,
    digests: Mutex<Vec<Option<Digest>>>,
    finish: Mutex<Option<Finish>>,
}

impl DigestPool {
    pub(crate) const fn new(threads: NonZeroUsize) -> Self {
        Self {
            threads,
            jobs: Mutex::new(None),
        }
    }

    /// Computes the digest of each slot, in any order, and then calls `finish` on one of the
    /// threads. Does not wait. Where no thread can be started, the caller does the work.
    pub(crate) fn run(
        &self,
        arena: &Arc<HostArena>,
        slots: Vec<SlotIndex>,
        finish: impl FnOnce(Vec<Digest>) + Send + 'static,
    ) {
        let job = Arc::new(Job {
            arena: Arc::clone(arena),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(slots.len()),
            digests: Mutex::new(vec![None; slots.len()]),
            finish: Mutex::new(Some(Box::new(finish))),
            slots,
        });
        let useful = self.threads.get().min(job.slots.len());
        let Some(sender) = self.sender() else {
            job.work();
            return;
        };
        for _ in 0..useful {
            // The receivers live as long as this sender, so that nothing is lost.
            drop(sender.send(Arc::clone(&job)));
        }
    }

    /// The way to the threads, which are started if need be.
    fn sender(&self) -> Option<Sender<Arc<Job>>> {
        let mut jobs = self.jobs.lock();
        if let Some(sender) = &*jobs {
            return Some(sender.clone());
        }
        let (sender, receiver) = unbounded();
        let mut started = 0;
        for _ in 0..self.threads.get() {
            let receiver: Receiver<Arc<Job>> = receiver.clone();
            let worker = thread::Builder::new().name(String::from("kv-digest"));
            let work = move || receiver.iter().for_each(|job: Arc<Job>| job.work());
            started += usize::from(worker.spawn(work).is_ok());
        }
        if started > 0 {
            *jobs = Some(sender.clone());
            Some(sender)
        } else {
            None
        }
    }
}

impl Job {
    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&slot) = self.slots.get(index) else {
                return;
            };
            let digest = self.arena.digest(slot);
            self.digests.lock()[index] = Some(digest);
            // The last one sees what all others wrote, through the lock above.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let digests = self.digests.lock().iter().flatten().copied().collect();
                let finish = self.finish.lock().take();
                if let Some(finish) = finish {
                    finish(digests);
                }
            }
        }
    }
}
