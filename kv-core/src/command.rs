//! The vocabulary between the machine and a backend: commands out, completions in.

use alloc::vec::Vec;

use crate::{BlockId, Digest, SlotIndex, TicketId, Time};

/// Which way bytes go, seen from the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Host to GPU.
    In,
    /// GPU to host.
    Out,
}

/// The end of a step, in the order in which steps were issued.
///
/// Whoever executes steps hands them out; a backend makes a copy wait for one.
/// `Fence::NONE` is always over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// Nothing to wait for.
    pub const NONE: Self = Self(0);

    /// The fence of the step with that number, counted from 1.
    #[must_use]
    pub const fn of_step(number: u64) -> Self {
        Self(number)
    }

    /// Number of the step; 0 means none.
    #[must_use]
    pub const fn step(self) -> u64 {
        self.0
    }
}

/// One block's place on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMove {
    /// Place in the GPU pool.
    pub block: BlockId,
    /// Place in the host pool.
    pub slot: SlotIndex,
}

/// What a backend does about digests of the blocks it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DigestWork {
    /// Compute one digest per block over the host bytes after an `Out`, and report them.
    Compute,
    /// Nothing.
    Skip,
    /// Before an `In` touches the GPU: compare the host bytes of every block with these digests,
    /// in the order of the moves. On a mismatch nothing is copied and the command ends `Failed`
    /// with [`CopyFault::DigestMismatch`].
    Verify(Vec<Digest>),
}

/// Names one command: a piece of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId {
    pub(crate) ticket: TicketId,
    pub(crate) piece: u32,
}

impl CommandId {
    /// The flight.
    #[must_use]
    pub const fn ticket(self) -> TicketId {
        self.ticket
    }

    /// Which piece of the flight, counted from 0.
    #[must_use]
    pub const fn piece(self) -> u32 {
        self.piece
    }

    /// A name outside any machine, for tests that forge completions.
    #[cfg(feature = "testing")]
    #[must_use]
    pub const fn for_testing(ticket: TicketId, piece: u32) -> Self {
        Self { ticket, piece }
    }
}

/// One piece of a flight, to be copied by a backend. Made by the machine only.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    pub(crate) id: CommandId,
    pub(crate) direction: Direction,
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) after: Fence,
    pub(crate) bytes: u64,
    pub(crate) digest: DigestWork,
}

impl Command {
    /// Its name; the completion carries it.
    #[must_use]
    pub const fn id(&self) -> CommandId {
        self.id
    }

    /// Which way.
    #[must_use]
    pub const fn direction(&self) -> Direction {
        self.direction
    }

    /// The blocks, each with its slot. Never empty, no block and no slot twice.
    #[must_use]
    pub fn moves(&self) -> &[BlockMove] {
        &self.moves
    }

    /// The copy may start when this step is over: for an `Out` the last step that wrote the
    /// blocks, for an `In` the last step that read them.
    #[must_use]
    pub const fn after(&self) -> Fence {
        self.after
    }

    /// Exact payload: number of blocks times bytes per block.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What to do about digests.
    #[must_use]
    pub const fn digest(&self) -> &DigestWork {
        &self.digest
    }

    /// A command outside any machine, for tests of backends.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn for_testing(
        ticket: TicketId,
        direction: Direction,
        moves: Vec<BlockMove>,
        after: Fence,
        block_bytes: u64,
        digest: DigestWork,
    ) -> Self {
        let bytes = moves.len() as u64 * block_bytes;
        Self {
            id: CommandId { ticket, piece: 0 },
            direction,
            moves,
            after,
            bytes,
            digest,
        }
    }
}

/// How a copy ended. It is about memory, not about success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Over, all bytes arrived.
    Done,
    /// Surely over, bytes not usable. The device has stopped touching both sides.
    Failed,
    /// Nobody can say whether the device is still touching memory.
    Unknown,
}

/// Why a copy did not end as `Done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyFault {
    /// The backend was closed before the copy was started.
    Closed,
    /// The machine gave the flight up at its deadline.
    Deadline,
    /// The host bytes of that block (index into the command's moves) don't have the digest that
    /// was computed when they were written; nothing of this command reached the GPU.
    DigestMismatch {
        /// Index into [`Command::moves`].
        index: u32,
    },
    /// A driver call failed with this code.
    Device {
        /// The driver's number.
        code: i32,
    },
    /// The step that the copy waits for did not end within the backend's limit.
    FenceTimeout,
    /// A fault planted on purpose.
    Injected,
    /// Somebody else held that block (index into the command's moves): a violated contract.
    /// Blocks of an `In` before it may have been written already.
    BlockBusy {
        /// Index into [`Command::moves`].
        index: u32,
    },
    /// Somebody else held that host slot (index into the command's moves): a violated contract.
    SlotBusy {
        /// Index into [`Command::moves`].
        index: u32,
    },
    /// That host slot (index into the command's moves) holds nothing: a violated contract.
    SlotEmpty {
        /// Index into [`Command::moves`].
        index: u32,
    },
    /// The code that copies panicked.
    Panicked,
}

/// The end of one command. Each command has exactly one, in any order, from any thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which command.
    pub id: CommandId,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, unless `Done`.
    pub fault: Option<CopyFault>,
    /// Exact payload bytes that arrived; 0 unless `Done`.
    pub bytes: u64,
    /// When the backend took the command.
    pub submitted_at: Time,
    /// When the copy was over.
    pub completed_at: Time,
    /// One per move, if the command asked for [`DigestWork::Compute`]; else empty.
    pub digests: Vec<Digest>,
}
