//! Rights that callers hold: linear handles that can't be copied, forged or used twice.
//!
//! A handle has no `Drop`: losing one strands what it stands for, visibly, and never frees memory
//! that a copy may touch.

use core::fmt;
use core::marker::PhantomData;

use crate::{RecordKey, TicketId};

mod sealed {
    #[expect(
        unnameable_types,
        reason = "that nobody can name it is the point of sealing"
    )]
    pub trait Sealed {}
    impl Sealed for super::OnGpu {}
    impl Sealed for super::OnHost {}
}

/// The side on which a group's bytes are.
pub trait Place: sealed::Sealed {
    /// The other side.
    type Other: Place;
    /// For messages.
    const NAME: &'static str;
}

/// On the GPU.
#[derive(Debug)]
pub enum OnGpu {}

/// On the host.
#[derive(Debug)]
pub enum OnHost {}

impl Place for OnGpu {
    type Other = OnHost;
    const NAME: &'static str = "gpu";
}

impl Place for OnHost {
    type Other = OnGpu;
    const NAME: &'static str = "host";
}

/// The sole right to a group's blocks (on the GPU) or slots (on the host).
#[must_use = "dropping a lease strands its memory; release it"]
pub struct Lease<P: Place> {
    pub(crate) machine: u64,
    pub(crate) index: u32,
    pub(crate) key: RecordKey,
    place: PhantomData<P>,
}

/// The right to what a flight yields that left `P`.
#[must_use = "dropping a ticket strands its memory; redeem or cancel it"]
pub struct Ticket<P: Place> {
    pub(crate) machine: u64,
    pub(crate) index: u32,
    pub(crate) key: RecordKey,
    pub(crate) id: TicketId,
    place: PhantomData<P>,
}

impl<P: Place> Lease<P> {
    pub(crate) const fn new(machine: u64, index: u32, key: RecordKey) -> Self {
        Self {
            machine,
            index,
            key,
            place: PhantomData,
        }
    }

    /// Which life of which group.
    #[must_use]
    pub const fn key(&self) -> RecordKey {
        self.key
    }
}

impl<P: Place> Ticket<P> {
    pub(crate) const fn new(machine: u64, index: u32, key: RecordKey, id: TicketId) -> Self {
        Self {
            machine,
            index,
            key,
            id,
            place: PhantomData,
        }
    }

    /// Which life of which group.
    #[must_use]
    pub const fn key(&self) -> RecordKey {
        self.key
    }

    /// Which flight; [`Event::Settled`](crate::Event::Settled) names it.
    #[must_use]
    pub const fn id(&self) -> TicketId {
        self.id
    }
}

impl<P: Place> fmt::Debug for Lease<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease<{}>({:?})", P::NAME, self.key)
    }
}

impl<P: Place> fmt::Debug for Ticket<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket<from {}>({:?}, {:?})", P::NAME, self.id, self.key)
    }
}

/// What a settled flight yields.
#[derive(Debug)]
pub enum Redeemed<P: Place> {
    /// The group is on the other side.
    Moved(Lease<P::Other>),
    /// The group is where it was; the flight may be tried again.
    Stayed(Lease<P>),
    /// The bytes are gone; the group has to be computed again.
    Gone(Gone),
}

/// Why bytes are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The host bytes were damaged; the digest showed it before anything was restored.
    Corrupt,
    /// Nobody can say how the flight ended.
    Unknown,
}
