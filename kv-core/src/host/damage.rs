//! Damage on purpose: what a fault injector needs in order to change a host slot.

use super::{HostBackend, SyncBackend};
use crate::{Backend, SlotIndex};

/// A backend whose host slots can be damaged, to show what becomes of damage.
///
/// Nothing in a server calls this unless it was told to inject faults.
pub trait DamageSlot: Backend {
    /// Flips one bit of a slot that no copy uses now; bit 0 is the lowest one of the first byte.
    /// Answers whether there was such a bit, and nobody in the way.
    fn flip_bit(&mut self, slot: SlotIndex, bit: usize) -> bool;
}

impl DamageSlot for HostBackend {
    fn flip_bit(&mut self, slot: SlotIndex, bit: usize) -> bool {
        if slot.value() >= self.shared().config().slots {
            return false;
        }
        let bytes = self.shared().slot(slot).try_write();
        bytes.is_some_and(|mut bytes| flip(&mut bytes, bit))
    }
}

impl DamageSlot for SyncBackend {
    fn flip_bit(&mut self, slot: SlotIndex, bit: usize) -> bool {
        let bytes = self.buffer_mut(slot);
        bytes.is_some_and(|bytes| flip(bytes, bit))
    }
}

fn flip(bytes: &mut [u8], bit: usize) -> bool {
    let byte = bytes.get_mut(bit / 8);
    byte.is_some_and(|byte| {
        *byte ^= 1 << (bit % 8);
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_is_flipped_and_none_beyond_the_end() {
        let mut bytes = [0u8; 2];
        assert!(flip(&mut bytes, 9));
        assert_eq!(bytes, [0, 2]);
        assert!(!flip(&mut bytes, 16));
        assert_eq!(bytes, [0, 2]);
    }
}
