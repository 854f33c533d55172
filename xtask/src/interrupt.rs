//! Ctrl-C and SIGTERM: no server that a task started outlives it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::process::{self, Signal};

/// Processes that must end with us and are not reaped yet.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What the children hear when we are told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnSignal {
    /// They are killed.
    Kill,
    /// They are asked to end in good order.
    Terminate,
}

/// From now on a signal reaches the children, and this process goes on until they are gone.
///
/// # Errors
///
/// If the signals can't be caught.
pub(crate) fn forward_to_children(on_signal: OnSignal) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("catching signals")?;
    thread::spawn(move || {
        for signal in signals.forever() {
            INTERRUPTED.store(true, Ordering::Relaxed);
            let how = match (on_signal, signal) {
                (OnSignal::Kill, _) => Signal::Kill,
                // A terminal sends Ctrl-C to all of its processes: they have heard it already.
                (OnSignal::Terminate, SIGINT) => continue,
                (OnSignal::Terminate, _) => Signal::Terminate,
            };
            for pid in children().iter() {
                process::signal(*pid, how);
            }
        }
    });
    Ok(())
}

/// Names a process that must not outlive us.
pub(crate) fn watch(pid: u32) {
    children().insert(pid);
}

/// Forgets a process that is about to be reaped; its number may mean another one after that.
pub(crate) fn forget(pid: u32) {
    children().remove(&pid);
}

/// # Errors
///
/// If we were told to end.
pub(crate) fn check() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

fn children() -> MutexGuard<'static, BTreeSet<u32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}
