//! One command on its way.

use kv_core::{
    BlockMove, Command, CommandId, Completion, CopyFault, Digest, DigestWork, Fence, Outcome,
};

use crate::clock::Anchor;
use crate::cost::Path;
use crate::outbox::Number;
use crate::plan::Cursor;

/// A command that was taken, and how far it has come.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) number: Number,
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) after: Fence,
    pub(crate) path: Path,
    pub(crate) cursor: Cursor,
    /// Payload that was queued, bytes.
    pub(crate) queued_bytes: u64,
    /// It went through the ring as one piece, on one stream.
    pub(crate) alone: bool,
    /// Its stream waits for its fence.
    pub(crate) ordered: bool,
    /// The device was told something about its memory.
    pub(crate) queued: bool,
    pub(crate) digest: DigestWork,
    /// Why the rest of it is not queued any more, if that was decided.
    pub(crate) cut: Option<CopyFault>,
    id: CommandId,
    bytes: u64,
    taken: Anchor,
}

impl Flight {
    pub(crate) fn new(number: Number, command: &Command, path: Path, taken: Anchor) -> Self {
        Self {
            number,
            moves: command.moves().to_vec(),
            after: command.after(),
            path,
            cursor: Cursor::default(),
            queued_bytes: 0,
            alone: false,
            ordered: false,
            queued: false,
            digest: command.digest().clone(),
            cut: None,
            id: command.id(),
            bytes: command.bytes(),
            taken,
        }
    }

    /// Exact payload, bytes.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all of it was queued.
    pub(crate) fn is_queued_whole(&self) -> bool {
        self.cursor.next_move >= self.moves.len()
    }

    /// It arrived.
    pub(crate) fn done(&self, digests: Vec<Digest>) -> Completion {
        self.completion(Outcome::Done, None, self.bytes, digests)
    }

    /// It is surely over and did not arrive.
    pub(crate) fn failed(&self, fault: CopyFault) -> Completion {
        self.completion(Outcome::Failed, Some(fault), 0, Vec::new())
    }

    /// Nobody can say.
    pub(crate) fn unknown(&self, fault: CopyFault) -> Completion {
        self.completion(Outcome::Unknown, Some(fault), 0, Vec::new())
    }

    fn completion(
        &self,
        outcome: Outcome,
        fault: Option<CopyFault>,
        bytes: u64,
        digests: Vec<Digest>,
    ) -> Completion {
        Completion {
            id: self.id,
            outcome,
            fault,
            bytes,
            submitted_at: self.taken.told(),
            completed_at: self.taken.now(),
            digests,
        }
    }
}
