//! Everything that a group moves in one direction, as one unit, issued in pieces.

use alloc::vec::Vec;
use core::ops::Range;

use crate::{
    BlockMove, Command, CommandId, CopyFault, Digest, DigestWork, Direction, Fence, Outcome,
    TicketId, Time,
};

/// What is known about a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceState {
    /// Handed out as a command, no completion yet.
    Issued,
    /// Over.
    Over(Outcome),
}

/// One command's share of a flight.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) range: Range<usize>,
    pub(crate) state: PieceState,
}

/// One block of a flight, with the cell that it belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CellMove {
    pub(crate) cell: u32,
    pub(crate) place: BlockMove,
}

#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) ticket: TicketId,
    pub(crate) record: u32,
    pub(crate) direction: Direction,
    pub(crate) moves: Vec<CellMove>,
    /// In the order of `moves`: to verify on the way in, computed on the way out.
    pub(crate) digests: Vec<Option<Digest>>,
    /// First move that is in no piece yet.
    pub(crate) next: usize,
    /// Blocks per piece.
    pub(crate) piece_blocks: usize,
    pub(crate) pieces: Vec<Piece>,
    /// Share of the in-flight budget that this flight holds until it settles, bytes.
    pub(crate) reserved_bytes: u64,
    /// Bytes of issued pieces that are not over.
    pub(crate) unsettled_bytes: u64,
    pub(crate) after: Fence,
    pub(crate) started_at: Time,
    pub(crate) deadline: Time,
    /// Worst outcome so far.
    pub(crate) worst: Outcome,
    pub(crate) fault: Option<CopyFault>,
    pub(crate) last_completed_at: Time,
    pub(crate) bytes_done: u64,
    pub(crate) checksum: bool,
    pub(crate) cancelled: bool,
}

impl Flight {
    /// Whether another piece may be issued now.
    pub(crate) fn can_issue(&self, block_bytes: u64) -> bool {
        let blocks = self.piece_blocks.min(self.moves.len() - self.next) as u64;
        !self.stopped()
            && blocks > 0
            && self.unsettled_bytes + blocks * block_bytes <= self.reserved_bytes
    }

    /// Whether nothing more will be issued.
    pub(crate) fn stopped(&self) -> bool {
        self.cancelled || self.worst != Outcome::Done
    }

    /// Whether every issued piece is over and nothing more will be issued.
    pub(crate) fn is_over(&self) -> bool {
        (self.stopped() || self.next == self.moves.len())
            && self
                .pieces
                .iter()
                .all(|piece| piece.state != PieceState::Issued)
    }

    /// Makes the next piece. Call it only if [`can_issue`](Self::can_issue).
    pub(crate) fn issue(&mut self, block_bytes: u64) -> Command {
        let end = (self.next + self.piece_blocks).min(self.moves.len());
        let range = self.next..end;
        let piece = u32::try_from(self.pieces.len()).expect("fewer pieces than blocks");
        let bytes = range.len() as u64 * block_bytes;
        let digest = match self.direction {
            Direction::Out if self.checksum => DigestWork::Compute,
            Direction::In if self.checksum => DigestWork::Verify(
                self.digests[range.clone()]
                    .iter()
                    .map(|digest| digest.expect("with digests on, every slot has one"))
                    .collect(),
            ),
            Direction::In | Direction::Out => DigestWork::Skip,
        };
        let command = Command {
            id: CommandId {
                ticket: self.ticket,
                piece,
            },
            direction: self.direction,
            moves: self.moves[range.clone()].iter().map(|m| m.place).collect(),
            after: self.after,
            bytes,
            digest,
        };
        self.pieces.push(Piece {
            range,
            state: PieceState::Issued,
        });
        self.next = end;
        self.unsettled_bytes += bytes;
        command
    }

    /// Marks a piece as over; returns its bytes.
    pub(crate) fn end_piece(&mut self, piece: usize, outcome: Outcome, block_bytes: u64) -> u64 {
        let piece = &mut self.pieces[piece];
        assert!(piece.state == PieceState::Issued, "a piece ends once");
        piece.state = PieceState::Over(outcome);
        self.worst = self.worst.max(outcome);
        let bytes = piece.range.len() as u64 * block_bytes;
        self.unsettled_bytes -= bytes;
        bytes
    }

    /// Each move with the outcome of its piece; moves that were never issued surely touched
    /// nothing and count as failed.
    pub(crate) fn moves_with_outcome(&self) -> Vec<(CellMove, Outcome)> {
        let mut all: Vec<_> = self.moves.iter().map(|&m| (m, Outcome::Failed)).collect();
        for piece in &self.pieces {
            let outcome = match piece.state {
                PieceState::Over(outcome) => outcome,
                PieceState::Issued => Outcome::Unknown,
            };
            for (_, place) in &mut all[piece.range.clone()] {
                *place = outcome;
            }
        }
        all
    }
}
