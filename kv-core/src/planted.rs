//! Faults planted on purpose, to show that the simulation's checkers catch them.
//!
//! Without the feature `planted-faults` every question is answered with a constant `false`, and
//! nothing of this is in the program. With it, one fault at a time can be switched on; the
//! simulation must fail then.

/// Known mistakes of this field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PlantedFault {
    /// The blocks of a flight out are handed to others while they are still being read.
    FreeBlocksAtSubmit = 1,
    /// A table can be read before its blocks have arrived.
    PublishBeforeDone,
    /// A failed flight in counts as done.
    FailedAsDone,
    /// Memory that a lost copy may still write is used again.
    ReuseAfterUnknown,
    /// A completion for a dead flight ends a live one.
    AcceptStale,
    /// A cancelled flight is forgotten, and its memory used again at once.
    ForgetTombstone,
    /// A failed piece of a flight is overlooked.
    SwallowFailedPiece,
    /// A refused swap-out keeps a slot.
    LeakSlotOnRefusal,
    /// A clean copy is still believed in after its block was written.
    TrustStaleCopy,
    /// Host bytes are not verified.
    SkipVerify,
    /// Blocks on their way out are not counted when victims are picked.
    NoArrivingCredit,
    /// A group that was served in this pass can be a victim of this pass.
    SamePassVictim,
    /// The engine waits although there is work.
    LoseWakeUp,
    /// A token that was emitted before a recompute is emitted again.
    EmitTwice,
    /// A shared block is written without having been copied.
    ForgetCopyOnWrite,
}

impl PlantedFault {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::FreeBlocksAtSubmit,
        Self::PublishBeforeDone,
        Self::FailedAsDone,
        Self::ReuseAfterUnknown,
        Self::AcceptStale,
        Self::ForgetTombstone,
        Self::SwallowFailedPiece,
        Self::LeakSlotOnRefusal,
        Self::TrustStaleCopy,
        Self::SkipVerify,
        Self::NoArrivingCredit,
        Self::SamePassVictim,
        Self::LoseWakeUp,
        Self::EmitTwice,
        Self::ForgetCopyOnWrite,
    ];

    /// Whether this fault is switched on.
    #[cfg(feature = "planted-faults")]
    #[must_use]
    pub fn is_on(self) -> bool {
        switch::ACTIVE.load(core::sync::atomic::Ordering::Relaxed) == self as u8
    }

    /// Whether this fault is switched on: never.
    #[cfg(not(feature = "planted-faults"))]
    #[must_use]
    pub const fn is_on(self) -> bool {
        false
    }
}

#[cfg(feature = "planted-faults")]
mod switch {
    use core::sync::atomic::{AtomicU8, Ordering};

    use super::PlantedFault;

    pub(super) static ACTIVE: AtomicU8 = AtomicU8::new(0);

    impl PlantedFault {
        /// Switches this fault on, for the whole process, and any other one off.
        pub fn plant(self) {
            ACTIVE.store(self as u8, Ordering::Relaxed);
        }

        /// Switches every fault off.
        pub fn uproot() {
            ACTIVE.store(0, Ordering::Relaxed);
        }
    }
}
