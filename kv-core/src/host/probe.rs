//! Looks into a backend from outside, for tests.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use super::worker::Shared;
use crate::SlotIndex;

/// Reads and damages the host slots of a [`HostBackend`](super::HostBackend) that somebody else owns by now.
#[derive(Clone)]
pub struct SlotProbe {
    shared: Arc<Shared>,
}

impl fmt::Debug for SlotProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotProbe").finish_non_exhaustive()
    }
}

impl SlotProbe {
    pub(super) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// The bytes of a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    #[must_use]
    pub fn bytes(&self, slot: SlotIndex) -> Vec<u8> {
        self.shared.slot(slot).read().to_vec()
    }

    /// Commands that threads have taken and not ended, the ones that wait for a step included.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.shared.under_way()
    }

    /// Whether a copy is writing the slot at this moment.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    #[must_use]
    pub fn is_held(&self, slot: SlotIndex) -> bool {
        self.shared.slot(slot).is_locked_exclusive()
    }

    /// Damages one bit of a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot or bit.
    pub fn flip_bit(&self, slot: SlotIndex, bit: usize) {
        self.shared.slot(slot).write()[bit / 8] ^= 1 << (bit % 8);
    }
}
