//! A backend that fails as told, around one that doesn't.
//!
//! Completions that the wrapper holds back or makes up are announced like real ones: a thread
//! with nothing else to do wakes the engine when a delayed one is due.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::task::Waker;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, never, unbounded};
use kv_core::host::DamageSlot;
use kv_core::{
    Backend, Closed, Command, CommandId, Completion, CopyFault, Direction, Outcome, Refused,
    SlotIndex, Span, SubmitRefusal, Time,
};

use super::FaultPlan;
use crate::clock::Clock;

/// The bit that is flipped: anywhere in the first byte will do, every byte of a block counts.
const BIT: usize = 3;

/// How a delay is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delay {
    /// The caller waits, as it does for a blocking copy.
    Block,
    /// The completion is held back.
    HoldBack,
}

/// Passes commands on to a real backend, except for the ones that shall go wrong.
pub(crate) struct FaultyBackend<B> {
    inner: B,
    plan: FaultPlan,
    clock: Clock,
    delay: Delay,
    /// Copies taken so far; the last one's number.
    copies: u64,
    copies_out: u64,
    lost: Option<Lost>,
    /// Commands whose end has a meaning for a fault.
    marked: BTreeMap<CommandId, Marks>,
    /// Completions that nobody may see before that time; in the order of their times.
    held: VecDeque<(Time, Completion)>,
    arrived: Vec<Completion>,
    alarm: Option<Sender<Time>>,
    waker: Option<Waker>,
}

/// What happens at the end of a command.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    repeat: bool,
    flip: Option<SlotIndex>,
}

/// The copy whose end nobody hears of.
#[derive(Clone, Copy, Debug)]
struct Lost {
    id: CommandId,
    bytes: u64,
}

impl<B: DamageSlot> FaultyBackend<B> {
    pub(crate) const fn new(inner: B, plan: FaultPlan, clock: Clock, delay: Delay) -> Self {
        Self {
            inner,
            plan,
            clock,
            delay,
            copies: 0,
            copies_out: 0,
            lost: None,
            marked: BTreeMap::new(),
            held: VecDeque::new(),
            arrived: Vec::new(),
            alarm: None,
            waker: None,
        }
    }

    /// Notes what shall happen at the end of a copy that was just taken.
    fn mark(&mut self, number: u64, id: CommandId, bytes: u64, out_to: Option<SlotIndex>) {
        let plan = &self.plan;
        let is = |wanted: Option<NonZeroU64>, number| {
            wanted.is_some_and(|wanted| wanted.get() == number)
        };
        if is(plan.lose_copy, number) {
            tracing::warn!(copy = number, "fault: the end of this copy is kept secret");
            self.lost = Some(Lost { id, bytes });
        }
        let flips = is(plan.flip_host_bit, self.copies_out);
        let marks = Marks {
            repeat: is(plan.repeat_completion, number),
            flip: out_to.filter(|_| flips),
        };
        if marks.repeat || marks.flip.is_some() {
            self.marked.insert(id, marks);
        }
    }

    /// The end of a copy, as the inner backend tells it.
    fn arrive(&mut self, completion: Completion) {
        if self.lost.is_some_and(|lost| lost.id == completion.id) {
            return;
        }
        let marks = self.marked.remove(&completion.id).unwrap_or_default();
        if let Some(slot) = marks.flip
            && completion.outcome == Outcome::Done
        {
            // The machine doesn't know of the end yet, so nobody uses the slot.
            let flipped = self.inner.flip_bit(slot, BIT);
            tracing::warn!(?slot, flipped, "fault: a bit of a host slot is flipped");
        }
        let again = marks.repeat.then(|| completion.clone());
        for completion in [Some(completion), again].into_iter().flatten() {
            if marks.repeat {
                tracing::warn!(id = ?completion.id, "fault: the end of this copy is told twice");
            }
            self.hold(completion);
        }
    }

    fn hold(&mut self, completion: Completion) {
        let delay = self.plan.copy_delay;
        if delay.is_zero() || self.delay == Delay::Block {
            self.arrived.push(completion);
            return;
        }
        let due = completion.completed_at + Span::from(delay);
        let place = self.held.partition_point(|(time, _)| *time <= due);
        self.held.insert(place, (due, completion));
        if let Some(alarm) = &self.alarm
            && alarm.send(due).is_err()
        {
            tracing::error!("fault: nobody wakes the engine after a delay");
        }
    }

    fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

impl<B: DamageSlot> Backend for FaultyBackend<B> {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        let number = self.copies + 1;
        let (id, bytes, direction) = (command.id(), command.bytes(), command.direction());
        let first = command.moves().first().map(|step| step.slot);
        if self.plan.fail_copies.contains(&number) {
            tracing::warn!(copy = number, "fault: this copy fails");
            self.copies = number;
            self.copies_out += u64::from(direction == Direction::Out);
            self.hold(Completion {
                id,
                outcome: Outcome::Failed,
                fault: Some(CopyFault::Injected),
                bytes: 0,
                submitted_at: now,
                completed_at: now,
                digests: Vec::new(),
            });
            self.wake();
            return Ok(());
        }
        self.inner.submit(now, command)?;
        // Only what was taken counts: a refused command comes again.
        self.copies = number;
        let out = direction == Direction::Out;
        self.copies_out += u64::from(out);
        self.mark(number, id, bytes, first.filter(|_| out));
        let delay = self.plan.copy_delay;
        if self.delay == Delay::Block && !delay.is_zero() {
            wait(delay);
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut arrived = Vec::new();
        self.inner.poll(&mut arrived);
        for completion in arrived {
            self.arrive(completion);
        }
        let now = self.clock.now();
        while let Some((_, completion)) = self.held.pop_front_if(|(due, _)| *due <= now) {
            self.arrived.push(completion);
        }
        out.append(&mut self.arrived);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.inner.set_waker(waker.clone());
        self.alarm = (!self.plan.copy_delay.is_zero() && self.delay == Delay::HoldBack)
            .then(|| start_alarm(waker.clone(), self.clock))
            .flatten();
        self.waker = Some(waker);
    }

    fn forget(&mut self, slots: &[SlotIndex]) {
        self.inner.forget(slots);
    }

    fn slots_ready(&self) -> u32 {
        self.inner.slots_ready()
    }

    /// The lost copy counts as unconfirmed.
    fn close(&mut self, limit: Span) -> Closed {
        let mut closed = self.inner.close(limit);
        if let Some(lost) = self.lost {
            closed.unconfirmed += 1;
            closed.leaked_bytes += lost.bytes;
        }
        // Nobody wakes an engine that is closing.
        for (_, completion) in self.held.drain(..) {
            self.arrived.push(completion);
        }
        closed
    }
}

/// A thread that wakes at each time that it is sent. Times come in order, or nearly: one that
/// comes after a later one is a little late. Ends with its channel.
fn start_alarm(waker: Waker, clock: Clock) -> Option<Sender<Time>> {
    let (sender, times) = unbounded::<Time>();
    let body = move || {
        for due in times {
            wait(due.since(clock.now()).as_duration());
            waker.wake_by_ref();
        }
    };
    let thread = thread::Builder::new().name("fault-alarm".to_owned());
    match thread.spawn(body) {
        Ok(_handle) => Some(sender),
        Err(error) => {
            tracing::error!(%error, "fault: no thread to wake the engine after a delay");
            None
        }
    }
}

/// Nothing ever comes from this channel: it is a wait with a limit.
fn wait(span: Duration) {
    let waited = never::<()>().recv_timeout(span);
    debug_assert_eq!(waited, Err(RecvTimeoutError::Timeout));
}
