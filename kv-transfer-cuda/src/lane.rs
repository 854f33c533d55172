//! One direction: what waits, what runs, and the thread that queues the one and waits for the
//! other.
//!
//! Who may touch what: `state` is behind one lock. It is held while a submitting thread queues the
//! first part of a small or lone flight (a few driver calls that don't wait for the device), and
//! never while the lane's thread calls the driver, waits for the device or wakes anybody. While the
//! lane's thread queues, it has taken the mover out of the state; others then only append to the
//! list of waiting flights. Marks are in the order of their streams, and only the lane's thread
//! takes them off.

use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use kv_core::{Completion, CopyFault, DigestWork, SubmitRefusal};
use parking_lot::{Condvar, Mutex};

use crate::CudaError;
use crate::clock::instant;
use crate::config::{CudaConfig, Notice};
use crate::copy::{Common, Mover};
use crate::cost::{Costs, Path};
use crate::digest::DigestPool;
use crate::error::DriverError;
use crate::event::{Event, Progress};
use crate::flight::Flight;
use crate::graveyard::bury_command;
use crate::outbox::{Number, Outbox};

/// Marks that may be in the streams at the same time.
pub(crate) const MARKS_MAX: usize = 16;

/// Entries that may be in a stream's own queue at the same time before more is put in.
///
/// A driver was seen to hold the calling thread when about 115 entries were queued behind a step
/// that had not ended; with so few it never comes to that.
const ENTRIES_MAX: u64 = 48;

/// Entries that are put in before they are marked.
const MARK_ENTRIES: u64 = 24;

/// Payload that may be in the streams at the same time before more is queued, bytes. It takes
/// more than a millisecond, many times what the lane's thread needs to wake up.
const STREAM_BYTES_MAX: u64 = 96 << 20;

/// Payload that the lane's thread queues before it marks and looks around, bytes.
const MARK_BYTES: u64 = 32 << 20;

/// Payload that a submitting thread queues itself, bytes: enough for the link to be busy until
/// the lane's thread has woken up.
const INLINE_BYTES: u64 = 8 << 20;

/// Flights that are longer than this are left to the lane's thread as a whole, bytes: the time it
/// needs to wake up is next to nothing of what they take, and the submitting thread is spared.
const INLINE_FLIGHT_BYTES_MAX: u64 = 256 << 20;

/// Copies that a submitting thread queues itself; more are left to the lane's thread.
const INLINE_COPIES_MAX: u64 = 20;

/// A timed sleep before a spin ends so much earlier than the copy should.
const SPIN_LEAD: Duration = Duration::from_micros(80);

/// One direction of a backend.
#[derive(Debug)]
pub(crate) struct Lane {
    common: Arc<Common>,
    outbox: Arc<Outbox>,
    digests: Arc<DigestPool>,
    notice: Notice,
    queue_max: usize,
    costs: Costs,
    state: Mutex<State>,
    /// There is something to queue or to wait for, or the lane closes.
    work: Condvar,
}

#[derive(Debug)]
struct State {
    /// Absent while the lane's thread uses it.
    mover: Option<Mover>,
    /// Not queued as a whole; only the first one may be queued in part.
    waiting: VecDeque<Flight>,
    marks: VecDeque<Mark>,
    /// Payload that the marks stand for, bytes.
    stream_bytes: u64,
    /// Entries that the marks stand for.
    entries: u64,
    /// When the last mark should be over, by the measured costs.
    expected: Option<Instant>,
    /// Commands that were taken and have not left the lane.
    taken: usize,
    closing: bool,
    broken: Option<CopyFault>,
}

/// A point in the streams.
#[derive(Debug)]
struct Mark {
    event: Arc<Event>,
    /// The flight that is over when the event is.
    ends: Option<Flight>,
    bytes: u64,
    entries: u64,
    expected: Option<Instant>,
}

/// Commands that ended; told only after the lock was let go.
type Ended = Vec<(Number, Completion)>;

/// What came of queueing a part of a flight.
struct Pushed {
    bytes: u64,
    entries: u64,
    mark: Result<Event, CopyFault>,
}

impl Lane {
    pub(crate) fn new(
        mover: Mover,
        outbox: Arc<Outbox>,
        digests: Arc<DigestPool>,
        config: &CudaConfig,
    ) -> Arc<Self> {
        let common = Arc::clone(mover.common());
        Arc::new(Self {
            costs: *mover.costs(),
            common,
            outbox,
            digests,
            notice: config.notice,
            queue_max: config.queue_max,
            state: Mutex::new(State {
                mover: Some(mover),
                waiting: VecDeque::new(),
                marks: VecDeque::new(),
                stream_bytes: 0,
                entries: 0,
                expected: None,
                taken: 0,
                closing: false,
                broken: None,
            }),
            work: Condvar::new(),
        })
    }

    /// Starts the lane's thread. It ends after [`close`](Self::close), when nothing runs any more;
    /// if the device never answers it sleeps for ever, with what it owns.
    pub(crate) fn start(self: &Arc<Self>, name: &str) -> Result<JoinHandle<()>, CudaError> {
        let lane = Arc::clone(self);
        let thread = thread::Builder::new()
            .name(String::from(name))
            .spawn(move || lane.run());
        thread.map_err(|error| CudaError::Thread {
            reason: error.to_string(),
        })
    }

    pub(crate) const fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Takes a place in the lane.
    pub(crate) fn reserve(&self) -> Result<(), SubmitRefusal> {
        let mut state = self.state.lock();
        if state.closing || state.broken.is_some() {
            return Err(SubmitRefusal::Closed);
        }
        if state.taken >= self.queue_max {
            return Err(SubmitRefusal::Busy);
        }
        state.taken += 1;
        Ok(())
    }

    /// Puts a flight in, after its place was taken. Does not wait for the device.
    pub(crate) fn enqueue(&self, flight: Flight) {
        let mut ended = Ended::new();
        let few = flight.bytes() <= INLINE_FLIGHT_BYTES_MAX
            && self.copies_at_first(&flight) <= INLINE_COPIES_MAX;
        let mut state = self.state.lock();
        if let Some(fault) = state.refusal() {
            state.leave(&mut ended, &flight, flight.failed(fault));
        } else {
            state.waiting.push_back(flight);
            if state.waiting.len() == 1 && few && state.may_push() {
                self.push_under_lock(&mut state, &mut ended);
            }
        }
        drop(state);
        self.work.notify_one();
        self.tell(ended);
    }

    /// Copies of the part of a flight that a submitting thread may queue.
    fn copies_at_first(&self, flight: &Flight) -> u64 {
        let blocks = INLINE_BYTES.div_ceil(self.common.shape.block_bytes);
        let blocks = usize::try_from(blocks)
            .unwrap_or(usize::MAX)
            .min(flight.moves.len());
        let moves = &flight.moves[..blocks];
        match flight.path {
            Path::Rows => blocks as u64 * u64::from(self.common.memory.layout().rows_per_block()),
            Path::Ring => {
                let breaks = moves
                    .windows(2)
                    .filter(|pair| pair[0].slot.value() + 1 != pair[1].slot.value())
                    .count();
                1 + breaks as u64
            }
        }
    }

    /// Leaves the lane without having come to the device.
    pub(crate) fn fail(&self, flight: &Flight, fault: CopyFault) {
        let mut ended = Ended::new();
        self.state
            .lock()
            .leave(&mut ended, flight, flight.failed(fault));
        self.tell(ended);
    }

    /// Takes nothing any more; what the device knows nothing of ends as failed, at once.
    pub(crate) fn close(&self) {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        state.closing = true;
        let waiting = std::mem::take(&mut state.waiting);
        for flight in waiting {
            state.cut(&mut ended, flight);
        }
        drop(state);
        self.work.notify_all();
        self.tell(ended);
    }

    fn tell(&self, ended: Ended) {
        for (number, completion) in ended {
            self.outbox.end(number, completion);
        }
    }

    fn push_under_lock(&self, state: &mut State, ended: &mut Ended) {
        let (Some(mut mover), Some(mut flight)) = (state.mover.take(), state.waiting.pop_front())
        else {
            return;
        };
        if state.marks.is_empty() {
            mover.rest();
        }
        let pushed = push(&mut mover, &mut flight, INLINE_BYTES);
        state.mover = Some(mover);
        self.pushed(state, ended, flight, pushed);
    }

    /// Books what came of queueing a part of a flight.
    fn pushed(&self, state: &mut State, ended: &mut Ended, flight: Flight, pushed: Pushed) {
        let event = match pushed.mark {
            Ok(event) => event,
            Err(fault) => {
                let breaks = flight.queued || matches!(fault, CopyFault::Device { .. });
                self.lose(state, ended, &flight, fault);
                if breaks {
                    self.break_off(state, ended, fault);
                }
                return;
            }
        };
        state.stream_bytes += pushed.bytes;
        state.entries += pushed.entries;
        let expected = self.expect(state, pushed.bytes);
        state.expected = expected;
        let mut mark = Mark {
            event: Arc::new(event),
            ends: None,
            bytes: pushed.bytes,
            entries: pushed.entries,
            expected,
        };
        if flight.is_queued_whole() {
            mark.ends = Some(flight);
            state.marks.push_back(mark);
        } else {
            state.marks.push_back(mark);
            if state.closing {
                state.cut(ended, flight);
            } else {
                state.waiting.push_front(flight);
            }
        }
    }

    /// When the streams should be through with so many more bytes.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an estimate; what does not fit saturates"
    )]
    fn expect(&self, state: &State, bytes: u64) -> Option<Instant> {
        let nanos = bytes as f64 * self.costs.byte_ns + self.costs.pack_ns;
        let now = instant();
        let from = state.expected.map_or(now, |expected| expected.max(now));
        from.checked_add(Duration::from_nanos(nanos as u64))
    }

    /// Ends a flight that errs: as failed if the device knows nothing of it.
    fn lose(&self, state: &mut State, ended: &mut Ended, flight: &Flight, fault: CopyFault) {
        if flight.queued {
            bury_command(Arc::clone(&self.common), flight.bytes());
            state.leave(ended, flight, flight.unknown(fault));
            // The slabs and streams may still be in use; they stay with the lane's mover.
            if let Some(mover) = state.mover.take() {
                bury_command(mover, 0);
            }
        } else {
            state.leave(ended, flight, flight.failed(fault));
        }
    }

    /// Nothing more is queued after the device erred.
    fn break_off(&self, state: &mut State, ended: &mut Ended, fault: CopyFault) {
        state.broken = Some(fault);
        let waiting = std::mem::take(&mut state.waiting);
        for flight in waiting {
            self.lose(state, ended, &flight, fault);
        }
    }

    /// What the lane's thread does.
    fn run(&self) {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        loop {
            if let Some((mut mover, mut flight)) = state.take_work() {
                if state.marks.is_empty() {
                    mover.rest();
                }
                drop(state);
                let pushed = push(&mut mover, &mut flight, MARK_BYTES);
                state = self.state.lock();
                state.mover = Some(mover);
                self.pushed(&mut state, &mut ended, flight, pushed);
            } else if let Some(mark) = state.marks.front() {
                let (event, expected, ends) =
                    (Arc::clone(&mark.event), mark.expected, mark.ends.is_some());
                drop(state);
                let over = self.wait(&event, if ends { expected } else { None });
                drop(event);
                state = self.state.lock();
                self.mark_over(&mut state, &mut ended, over);
            } else if state.closing {
                return;
            } else {
                self.work.wait(&mut state);
            }
            if !ended.is_empty() {
                drop(state);
                self.tell(std::mem::take(&mut ended));
                state = self.state.lock();
            }
        }
    }

    /// Waits for a mark: asleep, but near the expected end awake if that was asked for.
    fn wait(&self, event: &Event, expected: Option<Instant>) -> Result<(), DriverError> {
        if let (Notice::SpinBriefly { micros_max }, Some(expected)) = (self.notice, expected) {
            let limit = Duration::from_micros(micros_max.into());
            let early = expected
                .saturating_duration_since(instant())
                .saturating_sub(SPIN_LEAD);
            if early > SPIN_LEAD {
                thread::park_timeout(early);
            }
            let start = instant();
            while start.elapsed() < limit {
                if event.progress()? == Progress::Over {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        event.wait()
    }

    /// Takes the first mark off and ends its flight.
    fn mark_over(&self, state: &mut State, ended: &mut Ended, over: Result<(), DriverError>) {
        let Some(mark) = state.marks.pop_front() else {
            return;
        };
        state.stream_bytes -= mark.bytes;
        state.entries -= mark.entries;
        if let Some(event) = Arc::into_inner(mark.event) {
            self.common.events.put_back(event);
        }
        if let Err(error) = over {
            let fault = CopyFault::Device { code: error.code };
            if let Some(flight) = mark.ends {
                self.lose(state, ended, &flight, fault);
            }
            self.break_off(state, ended, fault);
            return;
        }
        let Some(flight) = mark.ends else { return };
        if let Some(fault) = flight.cut {
            state.leave(ended, &flight, flight.failed(fault));
        } else if matches!(flight.digest, DigestWork::Compute) {
            state.taken -= 1;
            let slots = flight.moves.iter().map(|step| step.slot).collect();
            let outbox = Arc::clone(&self.outbox);
            self.digests.run(&self.common.arena, slots, move |digests| {
                outbox.end(flight.number, flight.done(digests));
            });
        } else {
            state.leave(ended, &flight, flight.done(Vec::new()));
        }
    }
}

impl State {
    /// Why nothing is queued any more, if so.
    fn refusal(&self) -> Option<CopyFault> {
        self.broken.or(if self.closing {
            Some(CopyFault::Closed)
        } else {
            None
        })
    }

    fn may_push(&self) -> bool {
        self.mover.is_some()
            && !self.waiting.is_empty()
            && self.marks.len() < MARKS_MAX
            && self.stream_bytes < STREAM_BYTES_MAX
            && self.entries < ENTRIES_MAX
    }

    fn take_work(&mut self) -> Option<(Mover, Flight)> {
        if !self.may_push() {
            return None;
        }
        self.mover.take().zip(self.waiting.pop_front())
    }

    /// Ends a flight whose rest will not be queued: now, or with its last mark.
    fn cut(&mut self, ended: &mut Ended, mut flight: Flight) {
        flight.cut = Some(CopyFault::Closed);
        match self.marks.back_mut() {
            // Only the first waiting flight may be queued in part, and the last mark is then its.
            Some(mark) if flight.queued && mark.ends.is_none() => mark.ends = Some(flight),
            _ => self.leave(ended, &flight, flight.failed(CopyFault::Closed)),
        }
    }

    fn leave(&mut self, ended: &mut Ended, flight: &Flight, completion: Completion) {
        self.taken -= 1;
        ended.push((flight.number, completion));
    }
}

/// Queues the next parts of a flight, about so many bytes, and marks them.
fn push(mover: &mut Mover, flight: &mut Flight, bytes: u64) -> Pushed {
    let device_fault = |error: DriverError| CopyFault::Device { code: error.code };
    let (before, entries) = (flight.queued_bytes, mover.entries());
    let mut pushed = || {
        mover.device().bind().map_err(device_fault)?;
        while !flight.is_queued_whole()
            && flight.queued_bytes - before < bytes
            && mover.entries() - entries < MARK_ENTRIES
        {
            mover.advance(flight)?;
        }
        mover.mark(flight).map_err(device_fault)
    };
    let mark = pushed();
    // The mark and the wait for the fence are entries too.
    let entries = mover.entries() - entries + 2;
    Pushed {
        bytes: flight.queued_bytes - before,
        entries,
        mark,
    }
}
