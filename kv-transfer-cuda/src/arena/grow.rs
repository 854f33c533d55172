//! Fills a reserved arena with memory: touched in parallel, page-locked chunk by chunk.
//!
//! The first chunk is set up by the caller's thread, so that a system without page-locked memory
//! shows at construction. The others follow on two threads of their own, one that touches and one
//! that locks, so that the two overlap. Both hold the arena weakly: dropping it stops them.

use std::fs;
use std::sync::{Arc, Weak};
use std::thread;

use core::num::NonZeroUsize;
use core::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, bounded};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::HostArena;
use crate::clock::instant;
use crate::config::ArenaConfig;
use crate::{CudaError, limits};

/// Makes the first chunk ready and starts the threads for the others.
///
/// # Errors
///
/// If the first chunk can't be had; its memory was given back then.
pub(crate) fn grow(
    arena: &Arc<HostArena>,
    config: &ArenaConfig,
    pci_bus_id: &str,
) -> Result<(), CudaError> {
    let allowed = limits::raise_locked_memory();
    let near = CoresNear::of(pci_bus_id);
    touch(arena, 0, config.touch_threads, &near)?;
    lock(arena, 0, allowed, config.flag)?;
    if arena.geometry.chunks() == 1 {
        end(arena, None);
        return Ok(());
    }
    let (sender, receiver) = bounded(1);
    let (weak, threads) = (Arc::downgrade(arena), config.touch_threads);
    let chunks = 1..arena.geometry.chunks();
    let flag = config.flag;
    let locking = Arc::downgrade(arena);
    spawn("kv-arena-lock", move || {
        lock_all(&locking, &receiver, allowed, flag)
    })?;
    spawn("kv-arena-touch", move || {
        for chunk in chunks {
            let Some(arena) = weak.upgrade() else { return };
            let touched = touch(&arena, chunk, threads, &near);
            drop(arena);
            if sender.send((chunk, touched)).is_err() {
                return;
            }
        }
    })
}

fn spawn(name: &str, f: impl FnOnce() + Send + 'static) -> Result<(), CudaError> {
    let started = thread::Builder::new().name(String::from(name)).spawn(f);
    // Nobody joins these threads: they end with their work or with the arena.
    started.map(drop).map_err(|error| CudaError::Thread {
        reason: error.to_string(),
    })
}

/// A chunk that was touched, or why not.
type Touched = (u32, Result<(), CudaError>);

fn lock_all(
    weak: &Weak<HostArena>,
    touched: &Receiver<Touched>,
    allowed: Option<u64>,
    flag: &'static str,
) {
    while let Ok((chunk, touched)) = touched.recv() {
        let Some(arena) = weak.upgrade() else { return };
        if let Err(error) = touched.and_then(|()| lock(&arena, chunk, allowed, flag)) {
            end(&arena, Some(error));
            return;
        }
    }
    if let Some(arena) = weak.upgrade() {
        end(&arena, None);
    }
}

fn end(arena: &HostArena, failed: Option<CudaError>) {
    let mut growth = arena.growth.lock();
    growth.ended = true;
    growth.failed = failed;
    drop(growth);
    arena.grown.notify_all();
}

/// Touches a chunk with several threads at once. On an error the chunk is given back.
fn touch(
    arena: &HostArena,
    chunk: u32,
    threads: NonZeroUsize,
    near: &CoresNear,
) -> Result<(), CudaError> {
    let start = u64::from(chunk) * arena.geometry.chunk_stride;
    let bytes = arena.geometry.chunk_bytes(chunk);
    let begun = instant();
    let share = bytes
        .div_ceil(threads.get() as u64)
        .next_multiple_of(super::HUGE_PAGE_BYTES);
    let result = thread::scope(|scope| {
        let mut started = Vec::new();
        let mut at = 0;
        while at < bytes {
            let part = share.min(bytes - at);
            let offset = start + at;
            let worker = thread::Builder::new().spawn_scoped(scope, move || {
                near.stay();
                arena.mapping.touch(offset, part)
            });
            match worker {
                Ok(worker) => started.push(worker),
                // Out of threads: this one does it.
                Err(_) => arena.mapping.touch(offset, part)?,
            }
            at += part;
        }
        started.into_iter().try_for_each(|worker| {
            let lost = || CudaError::Thread {
                reason: String::from("a touching thread died"),
            };
            worker.join().unwrap_or_else(|_| Err(lost()))
        })
    });
    if result.is_err() {
        arena.mapping.give_back(start, bytes);
    }
    arena.growth.lock().times.touch += begun.elapsed();
    result
}

/// Page-locks a chunk and makes its slots ready. On an error the chunk is given back.
fn lock(
    arena: &HostArena,
    chunk: u32,
    allowed: Option<u64>,
    flag: &'static str,
) -> Result<(), CudaError> {
    let start = u64::from(chunk) * arena.geometry.chunk_stride;
    let bytes = arena.geometry.chunk_bytes(chunk);
    let length = usize::try_from(bytes).expect("inside the mapping");
    let begun = instant();
    if let Err(error) = arena.lock.lock(arena.mapping.at(start), length) {
        arena.mapping.give_back(start, bytes);
        let asked = arena.geometry.mapped_bytes();
        let limited = limits::locked_memory_error(asked, allowed, flag);
        return Err(limited.unwrap_or_else(|| error.into()));
    }
    let mut growth = arena.growth.lock();
    growth.locked = chunk + 1;
    growth.times.lock += begun.elapsed();
    drop(growth);
    let before = chunk * arena.geometry.slots_per_chunk;
    // Pairs with the acquiring load in `slots_ready`: who sees a slot as ready sees its chunk
    // touched and locked.
    arena
        .ready
        .store(before + arena.geometry.slots_in(chunk), Ordering::Release);
    Ok(())
}

/// The processor cores of the memory node that the GPU is plugged in to.
struct CoresNear(Option<Vec<usize>>);

impl CoresNear {
    /// Unknown if the system has one node only, or doesn't say.
    fn of(pci_bus_id: &str) -> Self {
        let read = |path: String| fs::read_to_string(path).ok();
        let node = read(format!("/sys/bus/pci/devices/{pci_bus_id}/numa_node"))
            .and_then(|text| text.trim().parse::<u32>().ok());
        let cores = node
            .and_then(|node| read(format!("/sys/devices/system/node/node{node}/cpulist")))
            .map(|list| parse_list(&list))
            .filter(|cores| !cores.is_empty());
        Self(cores)
    }

    /// Keeps the calling thread on these cores. Where that is forbidden it goes on elsewhere: its
    /// memory is then farther away, and as good.
    fn stay(&self) {
        let Some(cores) = &self.0 else { return };
        let mut set = CpuSet::new();
        for &core in cores {
            if core < CpuSet::MAX_CPU {
                set.set(core);
            }
        }
        let _kept = sched_setaffinity(None, &set);
    }
}

/// Parses the kernel's notation for sets of cores: `0-3,8,10-11`.
fn parse_list(list: &str) -> Vec<usize> {
    let mut cores = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cores.extend(first..=last);
        }
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::parse_list;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(parse_list("").is_empty());
    }
}
