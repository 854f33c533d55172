//! What the plain-memory backend and its threads share, and what a thread does.
//!
//! Who may touch what: `state` is behind one lock, held for a few list operations and never
//! during a copy, a wait for a step or a wake-up. A slot is locked by the one copy that names it.
//! A running job is taken off the list by whoever ends it first, its thread or the one who
//! closes; the other then finds it gone and says nothing, so each command ends once.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::panic::AssertUnwindSafe;
use core::task::Waker;
use core::time::Duration;
use std::panic::catch_unwind;

use parking_lot::{Condvar, Mutex, RwLock};

use super::{Clock, HostConfig, Link, PlainMemory, copy};
use crate::{
    Closed, Command, CommandId, Completion, CopyFault, Digest, DigestWork, Direction, Outcome,
    Refused, SlotIndex, Span, SubmitRefusal, Time,
};

/// Waits for an imitated link are collected up to this, because a shorter wait is mostly error.
const LINK_WAIT_MIN: Span = Span::from_millis(1);

/// No wait is longer than a day, so that no sum with a clock's reading overflows.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

/// Memory, queues and results, kept alive by the backend and by each of its threads.
pub(super) struct Shared {
    memory: Arc<PlainMemory>,
    slots: Vec<RwLock<Box<[u8]>>>,
    config: HostConfig,
    clock: Clock,
    state: Mutex<State>,
    /// A command was queued for `Out`, or for `In`, or the threads shall stop.
    work_out: Condvar,
    work_in: Condvar,
    /// A copy is over.
    idle: Condvar,
    /// The threads shall stop.
    stopping: Condvar,
}

#[derive(Default)]
struct State {
    out: Lane,
    back_in: Lane,
    next_number: u64,
    completions: Vec<Completion>,
    waker: Option<Waker>,
    stopping: bool,
}

/// One direction.
#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    running: Vec<Running>,
}

/// A command that was taken.
struct Job {
    /// Never used again within this backend.
    number: u64,
    command: Command,
    submitted_at: Time,
}

/// What is known about a job while a thread has it.
struct Running {
    number: u64,
    id: CommandId,
    bytes: u64,
    submitted_at: Time,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits for a step to end; has touched nothing.
    Waiting,
    Copying,
}

impl State {
    fn lane(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::In => &mut self.back_in,
            Direction::Out => &mut self.out,
        }
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.out.running.iter().chain(&self.back_in.running)
    }
}

impl Shared {
    pub(super) fn new(memory: Arc<PlainMemory>, config: HostConfig, clock: Clock) -> Self {
        let slots = (0..config.slots)
            .map(|_| RwLock::new(copy::empty_slot(memory.layout())))
            .collect();
        Self {
            memory,
            slots,
            config,
            clock,
            state: Mutex::default(),
            work_out: Condvar::new(),
            work_in: Condvar::new(),
            idle: Condvar::new(),
            stopping: Condvar::new(),
        }
    }

    pub(super) const fn config(&self) -> &HostConfig {
        &self.config
    }

    pub(super) fn memory(&self) -> &PlainMemory {
        &self.memory
    }

    pub(super) fn slot(&self, slot: SlotIndex) -> &RwLock<Box<[u8]>> {
        &self.slots[slot.value() as usize]
    }

    pub(super) fn enqueue(
        &self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        let direction = command.direction();
        let mut state = self.state.lock();
        if state.stopping {
            return Err(Refused {
                why: SubmitRefusal::Closed,
                back: command,
            });
        }
        let number = state.next_number;
        let lane = state.lane(direction);
        if lane.queue.len() + lane.running.len() >= self.config.queue_max.get() as usize {
            return Err(Refused {
                why: SubmitRefusal::Busy,
                back: command,
            });
        }
        lane.queue.push_back(Job {
            number,
            command,
            submitted_at: now,
        });
        state.next_number += 1;
        drop(state);
        self.work(direction).notify_one();
        Ok(())
    }

    pub(super) fn take_completions(&self, out: &mut Vec<Completion>) {
        out.append(&mut self.state.lock().completions);
    }

    pub(super) fn set_waker(&self, waker: Waker) {
        let old = self.state.lock().waker.replace(waker);
        // Dropped after the lock is free: it is somebody else's code.
        drop(old);
    }

    /// Takes nothing more, ends every command whose copy has not begun, and hurries the others.
    pub(super) fn stop(&self) {
        let now = (self.clock)();
        let mut state = self.state.lock();
        if mem::replace(&mut state.stopping, true) {
            return;
        }
        let mut ended = Vec::new();
        for direction in [Direction::Out, Direction::In] {
            let lane = state.lane(direction);
            let queued = lane
                .queue
                .drain(..)
                .map(|job| (job.command.id(), job.submitted_at));
            ended.extend(queued);
            let waiting = lane
                .running
                .extract_if(.., |job| job.phase == Phase::Waiting);
            ended.extend(waiting.map(|job| (job.id, job.submitted_at)));
        }
        let waker = if ended.is_empty() {
            None
        } else {
            state.waker.clone()
        };
        state
            .completions
            .extend(ended.into_iter().map(|(id, submitted_at)| Completion {
                id,
                outcome: Outcome::Failed,
                fault: Some(CopyFault::Closed),
                bytes: 0,
                submitted_at,
                completed_at: now.max(submitted_at),
                digests: Vec::new(),
            }));
        drop(state);
        for condvar in [&self.work_out, &self.work_in, &self.stopping] {
            condvar.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until no copy runs, at most `limit`; says what runs even then.
    pub(super) fn wait_idle(&self, limit: Span) -> Closed {
        let limit = limit.as_duration().min(WAIT_MAX);
        let mut state = self.state.lock();
        let busy = |state: &mut State| state.running().next().is_some();
        self.idle.wait_while_for(&mut state, busy, limit);
        let mut closed = Closed::default();
        for job in state.running() {
            closed.unconfirmed += 1;
            closed.leaked_bytes += job.bytes;
        }
        closed
    }

    #[cfg(feature = "testing")]
    pub(super) fn under_way(&self) -> usize {
        self.state.lock().running().count()
    }

    const fn work(&self, direction: Direction) -> &Condvar {
        match direction {
            Direction::In => &self.work_in,
            Direction::Out => &self.work_out,
        }
    }

    const fn link(&self, direction: Direction) -> &Link {
        match direction {
            Direction::In => &self.config.link_in,
            Direction::Out => &self.config.link_out,
        }
    }

    /// The next command of that direction, or `None` when the thread shall end.
    fn next_job(&self, direction: Direction) -> Option<Job> {
        let mut state = self.state.lock();
        self.work(direction).wait_while(&mut state, |state| {
            !state.stopping && state.lane(direction).queue.is_empty()
        });
        let lane = state.lane(direction);
        let job = lane.queue.pop_front()?;
        lane.running.push(Running {
            number: job.number,
            id: job.command.id(),
            bytes: job.command.bytes(),
            submitted_at: job.submitted_at,
            phase: Phase::Waiting,
        });
        Some(job)
    }

    /// Waits for the step, then copies.
    fn perform(&self, job: &Job) -> Result<Vec<Digest>, CopyFault> {
        if !self
            .memory
            .wait_step(job.command.after(), self.config.fence_limit)
        {
            return Err(CopyFault::FenceTimeout);
        }
        self.begin(job)?;
        match job.command.direction() {
            Direction::In => self.copy_in(&job.command),
            Direction::Out => self.copy_out(&job.command),
        }
    }

    /// Marks the job as copying, unless it was ended while it waited.
    fn begin(&self, job: &Job) -> Result<(), CopyFault> {
        let mut state = self.state.lock();
        let mut running = state.lane(job.command.direction()).running.iter_mut();
        let running = running
            .find(|running| running.number == job.number)
            .ok_or(CopyFault::Closed)?;
        running.phase = Phase::Copying;
        Ok(())
    }

    fn copy_out(&self, command: &Command) -> Result<Vec<Digest>, CopyFault> {
        let mut slots = Vec::with_capacity(command.moves().len());
        for (index, step) in command.moves().iter().enumerate() {
            let busy = CopyFault::SlotBusy {
                index: copy::number(index),
            };
            slots.push(self.slot(step.slot).try_write().ok_or(busy)?);
        }
        let mut pace = self.pace(command.direction());
        for (index, (step, slot)) in command.moves().iter().zip(&mut slots).enumerate() {
            copy::out(&self.memory, index, step.block, slot)?;
            pace.moved(self.memory.layout().block_bytes());
        }
        pace.end();
        Ok(match command.digest() {
            DigestWork::Compute => slots.iter().map(|slot| Digest::of(slot)).collect(),
            DigestWork::Skip | DigestWork::Verify(_) => Vec::new(),
        })
    }

    fn copy_in(&self, command: &Command) -> Result<Vec<Digest>, CopyFault> {
        let mut slots = Vec::with_capacity(command.moves().len());
        for (index, step) in command.moves().iter().enumerate() {
            let busy = CopyFault::SlotBusy {
                index: copy::number(index),
            };
            let slot = self.slot(step.slot).try_read().ok_or(busy)?;
            // All are compared, and stay locked, before the first byte goes to the GPU.
            copy::verify(command.digest(), index, &slot)?;
            slots.push(slot);
        }
        let mut pace = self.pace(command.direction());
        for (index, (step, slot)) in command.moves().iter().zip(&slots).enumerate() {
            copy::back_in(&self.memory, index, step.block, slot)?;
            pace.moved(self.memory.layout().block_bytes());
        }
        pace.end();
        Ok(Vec::new())
    }

    /// Starts to imitate the link: waits its delay.
    fn pace(&self, direction: Direction) -> Pace<'_> {
        let link = self.link(direction);
        self.wait_link(link.delay);
        Pace {
            shared: self,
            link,
            owed: Span::ZERO,
        }
    }

    /// Waits that long, or until the threads shall stop.
    fn wait_link(&self, span: Span) {
        if span > Span::ZERO {
            let limit = span.as_duration().min(WAIT_MAX);
            let mut state = self.state.lock();
            self.stopping
                .wait_while_for(&mut state, |state| !state.stopping, limit);
        }
    }

    /// Reports the end of a job, unless it was reported already.
    fn finish(&self, direction: Direction, number: u64, completion: Completion) {
        let mut state = self.state.lock();
        let running = &mut state.lane(direction).running;
        let Some(place) = running.iter().position(|job| job.number == number) else {
            return;
        };
        running.swap_remove(place);
        state.completions.push(completion);
        let waker = state.waker.clone();
        drop(state);
        self.idle.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Slows a copy down to the pace of the imitated link.
struct Pace<'a> {
    shared: &'a Shared,
    link: &'a Link,
    owed: Span,
}

impl Pace<'_> {
    fn moved(&mut self, bytes: u64) {
        let shares = self.shared.config.threads_per_direction;
        self.owed = self.owed + self.link.span_of(bytes, shares);
        if self.owed >= LINK_WAIT_MIN {
            self.end();
        }
    }

    fn end(&mut self) {
        self.shared.wait_link(mem::take(&mut self.owed));
    }
}

/// What a thread does until the backend stops.
pub(super) fn work(shared: &Shared, direction: Direction) {
    while let Some(job) = shared.next_job(direction) {
        // Nothing that is shared is left half changed by a panic: lists are changed under their
        // lock by code that doesn't panic, and half a block is what `Unknown` says.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let result = shared.perform(&job);
            let completed_at = (shared.clock)().max(job.submitted_at);
            copy::completion(&job.command, job.submitted_at, completed_at, result)
        }));
        let completion = ended.unwrap_or_else(|_panic| Completion {
            id: job.command.id(),
            outcome: Outcome::Unknown,
            fault: Some(CopyFault::Panicked),
            bytes: 0,
            submitted_at: job.submitted_at,
            completed_at: job.submitted_at,
            digests: Vec::new(),
        });
        let waking = catch_unwind(AssertUnwindSafe(|| {
            shared.finish(direction, job.number, completion)
        }));
        // A waker that panics is not ours to mend; the completion is visible, the thread goes on.
        drop(waking);
    }
}
