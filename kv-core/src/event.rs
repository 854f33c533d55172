//! What the machine tells the world: values without ids of requests, tokens or text.

use crate::{CopyFault, Direction, Outcome, Span, TicketId};

/// A flight is over, for better or worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Which flight.
    pub ticket: TicketId,
    /// Which way it went.
    pub direction: Direction,
    /// The worst outcome of its pieces.
    pub outcome: Outcome,
    /// Why, unless `Done`.
    pub fault: Option<CopyFault>,
    /// Whether it had been cancelled: a tombstone was retired, nobody holds a ticket any more.
    pub cancelled: bool,
    /// Payload that arrived, bytes.
    pub bytes: u64,
    /// Blocks that were moved.
    pub blocks: u32,
    /// From the request to the moment at which the last piece was over.
    pub copy_span: Span,
    /// From that moment to the moment at which the machine heard of it.
    pub notice_span: Span,
}

/// Something that happened, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A swap was refused because host slots are short.
    HostBackpressure,
    /// A swap was refused because the in-flight budget is spent.
    InflightBackpressure,
    /// Clean copies were given up because slots were needed.
    CleanCopiesReclaimed {
        /// Number of slots.
        slots: u32,
    },
    /// A flight is over.
    Settled(Settled),
    /// A completion named a flight or piece that is over, or contradicted what was known.
    StaleCompletion,
    /// Memory of a flight that nobody can vouch for was put aside for ever.
    Lost {
        /// GPU blocks.
        blocks: u32,
        /// Host slots.
        slots: u32,
    },
}
