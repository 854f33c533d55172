//! The machine's conversation with a backend: commands, completions, time-outs.

use alloc::vec::Vec;

use crate::flight::PieceState;
use crate::{
    Command, Completion, CopyFault, Direction, Event, Machine, Outcome, PlantedFault, Refused,
    SlotIndex, SubmitRefusal, TicketId, Time,
};

/// What became of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It ended a piece; the flight goes on.
    Piece,
    /// It ended the flight.
    Flight,
    /// It names nothing that is under way; it was counted and changed nothing (I13).
    Stale,
}

impl Machine {
    /// The next piece to hand to the backend, or `None` if nothing is to be done now.
    ///
    /// What is handed out counts as submitted until its completion arrives or
    /// [`handle_refused`](Self::handle_refused) takes it back.
    pub fn poll_command(&mut self) -> Option<Command> {
        if let Some(command) = self.handed_back.pop_front() {
            return Some(command);
        }
        let block_bytes = self.config.block_bytes;
        while let Some(&ticket) = self.issuing.front() {
            let flight = self.flights.get_mut(&ticket);
            if let Some(flight) = flight.filter(|flight| flight.can_issue(block_bytes)) {
                let command = flight.issue(block_bytes);
                self.stats.inflight_bytes += command.bytes;
                return Some(command);
            }
            // Over, or its budget is in use: the end of a piece puts it back.
            self.issuing.pop_front();
        }
        None
    }

    /// Slots whose buffers a pageable backend may drop; empty for a slab.
    pub fn poll_forgotten(&mut self) -> Vec<SlotIndex> {
        self.host.take_forgotten()
    }

    /// The backend did not take a command. When it was busy, the command comes again from
    /// [`poll_command`](Self::poll_command): offer it after the next completion. When it is
    /// closed, the piece has surely failed.
    pub fn handle_refused(&mut self, now: Time, refused: Refused<Command, SubmitRefusal>) {
        let Refused { why, back: command } = refused;
        let stopped = self
            .flights
            .get(&command.id.ticket)
            .is_none_or(crate::flight::Flight::stopped);
        if why == SubmitRefusal::Busy && !stopped {
            self.handed_back.push_front(command);
            return;
        }
        self.end_piece(now, &command, CopyFault::Closed);
    }

    /// Ends a piece that the backend surely never started.
    fn end_piece(&mut self, now: Time, command: &Command, fault: CopyFault) {
        let completion = Completion {
            id: command.id,
            outcome: Outcome::Failed,
            fault: Some(fault),
            bytes: 0,
            submitted_at: now,
            completed_at: now,
            digests: Vec::new(),
        };
        self.handle_completion(now, completion);
    }

    /// Takes the end of a command, whenever and however often the backend reports it.
    ///
    /// A completion that contradicts its command (wrong payload, missing digests) proves nothing:
    /// the piece is `Unknown` then.
    pub fn handle_completion(&mut self, now: Time, completion: Completion) -> Accepted {
        let mut completion = completion;
        if PlantedFault::AcceptStale.is_on()
            && !self.flights.contains_key(&completion.id.ticket)
            && let Some(&ticket) = self.flights.keys().next()
        {
            completion.id.ticket = ticket;
        }
        let Completion {
            id,
            outcome,
            fault,
            bytes,
            completed_at,
            digests,
            ..
        } = completion;
        let block_bytes = self.config.block_bytes;
        let piece = id.piece as usize;
        let flight = self.flights.get_mut(&id.ticket).filter(|flight| {
            flight
                .pieces
                .get(piece)
                .is_some_and(|piece| piece.state == PieceState::Issued)
        });
        let Some(flight) = flight else {
            self.stats.stale_completions += 1;
            self.events.push_back(Event::StaleCompletion);
            return Accepted::Stale;
        };
        let range = flight.pieces[piece].range.clone();
        let wants_digests = flight.checksum && flight.direction == Direction::Out;
        let right = bytes == range.len() as u64 * block_bytes
            && digests.len() == if wants_digests { range.len() } else { 0 };
        let outcome = match outcome {
            Outcome::Failed if PlantedFault::SwallowFailedPiece.is_on() && piece > 0 => {
                Outcome::Done
            }
            Outcome::Done if !right => Outcome::Unknown,
            Outcome::Done | Outcome::Failed | Outcome::Unknown => outcome,
        };
        self.stats.inflight_bytes -= flight.end_piece(piece, outcome, block_bytes);
        flight.last_completed_at = flight.last_completed_at.max(completed_at.min(now));
        if outcome == Outcome::Done {
            flight.bytes_done += bytes;
            for (place, digest) in flight.digests[range].iter_mut().zip(digests) {
                *place = Some(digest);
            }
        } else if flight.fault.is_none() {
            flight.fault = fault;
        }
        self.after_piece(now, id.ticket)
    }

    /// Goes on with a flight after one of its pieces ended.
    fn after_piece(&mut self, now: Time, ticket: TicketId) -> Accepted {
        let Some(flight) = self.flights.get(&ticket) else {
            return Accepted::Flight;
        };
        if flight.stopped() {
            self.drop_handed_back(now, ticket);
        }
        let Some(flight) = self.flights.get(&ticket) else {
            return Accepted::Flight;
        };
        if flight.is_over() {
            if let Some(flight) = self.flights.remove(&ticket) {
                self.deadlines.remove(&(flight.deadline, ticket));
                self.settle(now, &flight);
            }
            return Accepted::Flight;
        }
        if flight.can_issue(self.config.block_bytes) && !self.issuing.contains(&ticket) {
            self.issuing.push_back(ticket);
        }
        Accepted::Piece
    }

    /// Commands of a stopped flight that wait for a busy backend are surely never started.
    fn drop_handed_back(&mut self, now: Time, ticket: TicketId) {
        while let Some(at) = self.handed_back.iter().position(|c| c.id.ticket == ticket) {
            if let Some(command) = self.handed_back.remove(at) {
                self.end_piece(now, &command, CopyFault::Closed);
            }
        }
    }

    /// The next moment at which [`handle_timeout`](Self::handle_timeout) has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Gives up every flight whose deadline is over: pieces that the backend did not report are
    /// `Unknown` from now on, whatever it says later.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(deadline, ticket)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.give_up(now, ticket);
        }
    }

    /// Gives up every flight, as if its deadline were over: the end of a drain.
    pub fn abandon_flights(&mut self, now: Time) {
        while let Some(&(_, ticket)) = self.deadlines.first() {
            self.give_up(now, ticket);
        }
    }

    fn give_up(&mut self, now: Time, ticket: TicketId) {
        // What still waits for a busy backend was surely not started.
        let waiting: Vec<u32> = self
            .handed_back
            .iter()
            .filter(|command| command.id.ticket == ticket)
            .map(|command| command.id.piece)
            .collect();
        self.handed_back
            .retain(|command| command.id.ticket != ticket);
        let Some(mut flight) = self.flights.remove(&ticket) else {
            return;
        };
        self.deadlines.remove(&(flight.deadline, ticket));
        let block_bytes = self.config.block_bytes;
        // Nothing more is issued, also if nothing had been issued yet.
        flight.worst = flight.worst.max(Outcome::Failed);
        for piece in 0..flight.pieces.len() {
            if flight.pieces[piece].state == PieceState::Issued {
                let never = waiting.iter().any(|&waits| waits as usize == piece);
                let outcome = if never {
                    Outcome::Failed
                } else {
                    Outcome::Unknown
                };
                self.stats.inflight_bytes -= flight.end_piece(piece, outcome, block_bytes);
            }
        }
        flight.fault = flight.fault.or(Some(CopyFault::Deadline));
        flight.last_completed_at = now;
        self.settle(now, &flight);
    }

    /// Stops a flight whose holder gave it up. If nothing of it was ever handed out, it is over
    /// now.
    pub(super) fn cancel_flight(&mut self, now: Time, ticket: TicketId) {
        let Some(flight) = self.flights.get_mut(&ticket) else {
            return;
        };
        flight.cancelled = true;
        if PlantedFault::ForgetTombstone.is_on() {
            for piece in &mut flight.pieces {
                piece.state = PieceState::Over(Outcome::Failed);
            }
            self.stats.inflight_bytes -= flight.unsettled_bytes;
            flight.unsettled_bytes = 0;
        }
        if flight.direction == Direction::In {
            let blocks = u32::try_from(flight.moves.len()).unwrap_or(u32::MAX);
            self.retiring_blocks += blocks;
        }
        self.after_piece(now, ticket);
    }
}
