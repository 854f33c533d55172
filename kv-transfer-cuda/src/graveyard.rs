//! Memory that the device may still be touching, kept for ever and counted.
//!
//! Freeing it would hand pages that a copy still writes to somebody else. It stays reachable, so
//! that it is no leak to a leak checker, and its payload can be read as a number.

use core::any::Any;

use core::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// What lies in the graveyard of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buried {
    /// Commands whose end was never confirmed.
    pub commands: u64,
    /// Their payload, bytes.
    pub payload_bytes: u64,
    /// Backends whose pools, streams and events are kept.
    pub backends: u64,
}

struct Graveyard {
    count: Buried,
    kept: Vec<Box<dyn Any + Send>>,
}

static GRAVEYARD: Mutex<Graveyard> = Mutex::new(Graveyard {
    count: Buried {
        commands: 0,
        payload_bytes: 0,
        backends: 0,
    },
    kept: Vec::new(),
});

/// Backends that were dropped and are still giving back what they own.
static BEING_FREED: AtomicUsize = AtomicUsize::new(0);

/// How many dropped backends are still giving back what they own, on threads of their own.
///
/// The driver may wait until the GPU is idle for that, and hold up other calls as long.
#[must_use]
pub fn being_freed() -> usize {
    BEING_FREED.load(Ordering::Acquire)
}

/// Counts one backend as being freed as long as it lives.
#[derive(Debug)]
pub(crate) struct BeingFreed(());

impl BeingFreed {
    pub(crate) fn new() -> Self {
        BEING_FREED.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for BeingFreed {
    fn drop(&mut self) {
        BEING_FREED.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What lies in the graveyard of this process. It never goes down.
#[must_use]
pub fn buried() -> Buried {
    GRAVEYARD.lock().count
}

/// Keeps what a backend owns for ever, because of one command.
pub(crate) fn bury_command(owned: impl Any + Send, payload_bytes: u64) {
    let mut graveyard = GRAVEYARD.lock();
    graveyard.count.commands += 1;
    graveyard.count.payload_bytes += payload_bytes;
    graveyard.kept.push(Box::new(owned));
}

/// Keeps what a backend owns for ever, because it was closed with so many commands unconfirmed.
pub(crate) fn bury_backend(owned: impl Any + Send, commands: u64, payload_bytes: u64) {
    let mut graveyard = GRAVEYARD.lock();
    graveyard.count.backends += 1;
    graveyard.count.commands += commands;
    graveyard.count.payload_bytes += payload_bytes;
    graveyard.kept.push(Box::new(owned));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{buried, bury_backend, bury_command};

    #[test]
    fn i14_what_is_buried_is_kept_and_counted() {
        let owned = Arc::new(());
        let before = buried();
        bury_command(Arc::clone(&owned), 100);
        bury_backend(Arc::clone(&owned), 2, 30);
        let after = buried();
        assert_eq!(after.commands - before.commands, 3);
        assert_eq!(after.payload_bytes - before.payload_bytes, 130);
        assert_eq!(after.backends - before.backends, 1);
        assert_eq!(Arc::strong_count(&owned), 3);
    }
}
