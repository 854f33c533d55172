//! A full-duplex link as a model: each direction moves one command after the other; both share
//! what the link can do when both are busy.

use std::collections::VecDeque;

use kv_core::{Command, CommandId, Completion, Direction, Outcome, Span, Time};
use serde::Serialize;

/// What the link can do. Defaults are those of one H200 on PCIe 5 ×16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct LinkCost {
    /// One direction while the other one is idle.
    pub(crate) bytes_per_second: f64,
    /// Both directions together while both are busy.
    pub(crate) duplex_bytes_per_second: f64,
    /// From the end of a copy to the engine's thread hearing of it, submitting included.
    pub(crate) latency_seconds: f64,
    /// The blocking way through pageable memory, to the host.
    pub(crate) pageable_out_bytes_per_second: f64,
    /// The blocking way through pageable memory, back.
    pub(crate) pageable_in_bytes_per_second: f64,
    /// Share by which a step takes longer while something moves to the host.
    pub(crate) slows_step_out: f64,
    /// Share by which a step takes longer while something moves back.
    pub(crate) slows_step_in: f64,
}

impl Default for LinkCost {
    fn default() -> Self {
        Self {
            bytes_per_second: 55.4e9,
            duplex_bytes_per_second: 101.6e9,
            latency_seconds: 60e-6,
            pageable_out_bytes_per_second: 17.4e9,
            pageable_in_bytes_per_second: 9.4e9,
            slows_step_out: 0.04,
            slows_step_in: 0.10,
        }
    }
}

impl LinkCost {
    /// How long a blocking copy holds the engine's thread.
    pub(crate) fn blocking_span(&self, direction: Direction, bytes: u64) -> Span {
        let rate = match direction {
            Direction::In => self.pageable_in_bytes_per_second,
            Direction::Out => self.pageable_out_bytes_per_second,
        };
        crate::cost::span(self.latency_seconds + bytes as f64 / rate)
    }
}

/// A command on its way.
#[derive(Clone, Copy, Debug)]
struct Copying {
    id: CommandId,
    bytes: u64,
    left_bytes: f64,
    submitted_at: Time,
}

/// One direction.
type Lane = VecDeque<Copying>;

/// Both directions at one moment.
#[derive(Clone, Debug)]
struct Lanes {
    at: Time,
    out: Lane,
    back_in: Lane,
}

/// For how long each direction moved something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Busy {
    /// To the host.
    pub(crate) out: Span,
    /// Back.
    pub(crate) back_in: Span,
}

impl Lanes {
    /// Moves on to that time; hands what is over, with its end, to `over`.
    fn advance(&mut self, to: Time, cost: &LinkCost, mut over: impl FnMut(Copying, Time)) -> Busy {
        let mut busy = Busy::default();
        while self.at < to && !(self.out.is_empty() && self.back_in.is_empty()) {
            let both = !self.out.is_empty() && !self.back_in.is_empty();
            let rate = if both {
                cost.duplex_bytes_per_second / 2.0
            } else {
                cost.bytes_per_second
            };
            let heads = self.out.front().into_iter().chain(self.back_in.front());
            let soonest = heads
                .map(|copy| copy.left_bytes / rate)
                .fold(f64::MAX, f64::min);
            // At least a nanosecond, so that rounding can't stop the clock.
            let soonest = crate::cost::span(soonest).max(Span::from_nanos(1));
            let span = soonest.min(to.since(self.at));
            let moved = span.as_duration().as_secs_f64() * rate;
            self.at = self.at + span;
            for (lane, busy) in [
                (&mut self.out, &mut busy.out),
                (&mut self.back_in, &mut busy.back_in),
            ] {
                let Some(head) = lane.front_mut() else {
                    continue;
                };
                *busy = *busy + span;
                head.left_bytes -= moved;
                // Half a nanosecond's worth is what rounding leaves behind.
                if head.left_bytes <= rate * 0.5e-9 {
                    over(*head, self.at);
                    lane.pop_front();
                }
            }
        }
        self.at = self.at.max(to);
        busy
    }
}

/// The link, its queue, and what nobody heard of yet.
#[derive(Debug)]
pub(crate) struct Link {
    cost: LinkCost,
    lanes: Lanes,
    /// Ends of copies, each with the time at which it can be heard of, in that order.
    ended: VecDeque<(Time, Completion)>,
    busy: Busy,
}

impl Link {
    pub(crate) const fn new(cost: LinkCost) -> Self {
        Self {
            cost,
            lanes: Lanes {
                at: Time::ZERO,
                out: Lane::new(),
                back_in: Lane::new(),
            },
            ended: VecDeque::new(),
            busy: Busy {
                out: Span::ZERO,
                back_in: Span::ZERO,
            },
        }
    }

    /// Takes a command.
    pub(crate) fn submit(&mut self, now: Time, command: &Command) {
        self.advance(now);
        let copy = Copying {
            id: command.id(),
            bytes: command.bytes(),
            left_bytes: command.bytes() as f64,
            submitted_at: now,
        };
        match command.direction() {
            Direction::In => self.lanes.back_in.push_back(copy),
            Direction::Out => self.lanes.out.push_back(copy),
        }
    }

    fn advance(&mut self, now: Time) {
        let latency = crate::cost::span(self.cost.latency_seconds);
        let Self {
            cost, lanes, ended, ..
        } = self;
        let busy = lanes.advance(now, cost, |copy, at| {
            ended.push_back((at + latency, done(&copy, at)));
        });
        self.busy.out = self.busy.out + busy.out;
        self.busy.back_in = self.busy.back_in + busy.back_in;
    }

    /// Moves what can be heard of by now to the end of `heard`.
    pub(crate) fn poll(&mut self, now: Time, heard: &mut Vec<Completion>) {
        self.advance(now);
        while self.ended.front().is_some_and(|&(at, _)| at <= now) {
            heard.extend(self.ended.pop_front().map(|(_, completion)| completion));
        }
    }

    /// When something can be heard of next, if nothing is submitted until then.
    pub(crate) fn next_news(&self) -> Option<Time> {
        if let Some(&(at, _)) = self.ended.front() {
            return Some(at);
        }
        let mut lanes = self.lanes.clone();
        lanes.out.truncate(1);
        lanes.back_in.truncate(1);
        let mut first = None;
        lanes.advance(Time::from_nanos(u64::MAX), &self.cost, |_, at| {
            first = first.or(Some(at));
        });
        first.map(|at| at + crate::cost::span(self.cost.latency_seconds))
    }

    /// For how long each direction is going to be busy in that span from now on, as far as it is
    /// known by now.
    pub(crate) fn busy_within(&mut self, now: Time, span: Span) -> Busy {
        self.advance(now);
        self.lanes
            .clone()
            .advance(now + span, &self.cost, |_, _| ())
    }

    /// For how long each direction moved something so far.
    pub(crate) const fn busy(&self) -> Busy {
        self.busy
    }

    /// Commands that nobody heard the end of, and their bytes.
    pub(crate) fn unheard(&self) -> (u32, u64) {
        let moving = self.lanes.out.iter().chain(&self.lanes.back_in);
        let moving = moving.map(|copy| copy.bytes);
        let bytes: Vec<u64> = moving
            .chain(self.ended.iter().map(|(_, completion)| completion.bytes))
            .collect();
        let commands = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        (commands, bytes.iter().sum())
    }
}

fn done(copy: &Copying, at: Time) -> Completion {
    Completion {
        id: copy.id,
        outcome: Outcome::Done,
        fault: None,
        bytes: copy.bytes,
        submitted_at: copy.submitted_at,
        completed_at: at,
        digests: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{BlockId, BlockMove, DigestWork, Fence, SlotIndex, TicketId};

    use super::*;

    const MEGA: u64 = 1_000_000;

    /// 1 byte per nanosecond alone, 0.8 each when both are busy, heard of after 5 ns.
    fn cost() -> LinkCost {
        LinkCost {
            bytes_per_second: 1e9,
            duplex_bytes_per_second: 1.6e9,
            latency_seconds: 5e-9,
            pageable_out_bytes_per_second: 0.5e9,
            pageable_in_bytes_per_second: 0.25e9,
            ..LinkCost::default()
        }
    }

    fn command(ticket: u64, direction: Direction, bytes: u64) -> Command {
        let moves = vec![BlockMove {
            block: BlockId::new(0),
            slot: SlotIndex::new(0),
        }];
        let ticket = TicketId::for_testing(ticket);
        Command::for_testing(
            ticket,
            direction,
            moves,
            Fence::NONE,
            bytes,
            DigestWork::Skip,
        )
    }

    fn at(nanos: u64) -> Time {
        Time::from_nanos(nanos)
    }

    /// Tickets and ends of everything that was submitted at time 0.
    fn ends(commands: &[(Direction, u64)]) -> Vec<(usize, u64)> {
        let mut link = Link::new(cost());
        let mut ids = Vec::new();
        for (ticket, &(direction, bytes)) in (1..).zip(commands) {
            let command = command(ticket, direction, bytes);
            ids.push(command.id());
            link.submit(at(0), &command);
        }
        let mut ends = Vec::new();
        while let Some(news) = link.next_news() {
            let mut heard = Vec::new();
            link.poll(news, &mut heard);
            assert!(!heard.is_empty(), "there was news");
            for completion in heard {
                assert_eq!(news, completion.completed_at + Span::from_nanos(5));
                let index = ids.iter().position(|&id| id == completion.id).unwrap();
                ends.push((index, completion.completed_at.as_nanos()));
            }
        }
        assert_eq!(link.unheard(), (0, 0));
        ends
    }

    #[test]
    fn one_direction_is_a_queue() {
        let out = Direction::Out;
        assert_eq!(
            ends(&[(out, MEGA), (out, 2 * MEGA)]),
            [(0, MEGA), (1, 3 * MEGA)]
        );
    }

    #[test]
    fn both_directions_share_the_link() {
        let both = [(Direction::Out, 8 * MEGA), (Direction::In, 4 * MEGA)];
        // 0.8 bytes/ns each for 5 ms; then 4 MB are left to go out alone.
        assert_eq!(ends(&both), [(1, 5 * MEGA), (0, 9 * MEGA)]);
    }

    #[test]
    fn nothing_is_heard_before_its_time() {
        let mut link = Link::new(cost());
        link.submit(at(10), &command(1, Direction::Out, 100));
        assert_eq!(link.next_news(), Some(at(115)));
        let mut heard = Vec::new();
        link.poll(at(114), &mut heard);
        assert_eq!((heard.len(), link.unheard()), (0, (1, 100)));
        link.poll(at(115), &mut heard);
        assert_eq!(heard[0].completed_at, at(110));
        assert_eq!(heard[0].submitted_at, at(10));
        assert_eq!((heard[0].bytes, link.next_news()), (100, None));
        assert_eq!(link.busy().out, Span::from_nanos(100));
    }

    #[test]
    fn a_look_ahead_changes_nothing() {
        let mut link = Link::new(cost());
        link.submit(at(0), &command(1, Direction::In, 100));
        for _ in 0..2 {
            let busy = link.busy_within(at(30), Span::from_nanos(50));
            assert_eq!(busy.back_in, Span::from_nanos(50));
            let busy = link.busy_within(at(30), Span::from_nanos(500));
            assert_eq!((busy.back_in, busy.out), (Span::from_nanos(70), Span::ZERO));
        }
    }

    #[test]
    fn a_blocking_copy_has_the_rate_of_its_direction() {
        let nanos = |direction| cost().blocking_span(direction, 1_000).as_nanos();
        assert_eq!(
            (nanos(Direction::Out), nanos(Direction::In)),
            (2_005, 4_005)
        );
    }
}
