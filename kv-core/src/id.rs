//! Ids: newtypes that can't be mixed up.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name($inner);

        impl $name {
            /// Wraps the number.
            #[must_use]
            pub const fn new(value: $inner) -> Self {
                Self(value)
            }

            /// The number.
            #[must_use]
            pub const fn value(self) -> $inner {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

id!(
    /// A place for one block in the GPU pool, counted from 0.
    BlockId(u32)
);
id!(
    /// A place for one block in the host pool, counted from 0.
    SlotIndex(u32)
);
id!(
    /// One of the sequences of a group, counted from 0.
    Choice(u32)
);
id!(
    /// The caller's name for a group. May be used again as soon as the group was released or
    /// cancelled, even while an old flight is still under way.
    GroupId(u64)
);

/// A number that is never used again within one machine; tells the lives of a [`GroupId`] apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub(crate) u64);

impl Generation {
    /// The number.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}

/// Names one flight. Never used again within one process, so that a completion which reaches the
/// wrong machine is dead there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId(pub(crate) u64);

impl TicketId {
    /// The number.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }

    /// A ticket outside any machine, for tests of backends.
    #[cfg(feature = "testing")]
    #[must_use]
    pub const fn for_testing(value: u64) -> Self {
        Self(value)
    }
}

/// Names one life of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey {
    /// The caller's name.
    pub group: GroupId,
    /// Which life of that name.
    pub generation: Generation,
}
