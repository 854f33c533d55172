//! A backend in virtual time: it holds every command until the test says how it ends.
//!
//! Bytes are really moved, at the moment that the test chose, so that a machine which gives
//! memory away too early is caught by whoever compares bytes.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::task::Waker;

use parking_lot::Mutex;

use crate::host::{PlainMemory, copy};
use crate::{
    Backend, BlockMove, Closed, Command, CommandId, Completion, CopyFault, Digest, DigestWork,
    Direction, Fence, Outcome, Refused, SlotIndex, Span, SubmitRefusal, Time,
};

/// Ended commands whose completion can still be repeated.
const HISTORY_MAX: usize = 4_096;

/// When a simulated copy reads and writes its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyAt {
    /// When it ends: catches memory that is given away while a copy is under way.
    End,
    /// When it is submitted if its step is over by then, else when it ends.
    Start,
}

/// What [`Backend::close`] does with commands that have not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnClose {
    /// They stay as they are and are reported as unconfirmed.
    Abandon,
    /// They end as `Failed` with [`CopyFault::Closed`].
    Fail,
}

/// How a [`SimBackend`] behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// Host slots.
    pub slots: u32,
    /// How many of them are set up at first.
    pub slots_ready: u32,
    /// Commands that may be unfinished; the next one is refused as busy.
    pub queue_max: usize,
    /// When bytes move.
    pub copy_at: CopyAt,
    /// What closing does.
    pub on_close: OnClose,
}

impl SimConfig {
    /// That many slots, 1,024 unfinished commands, bytes move at the end, closing fails the rest.
    #[must_use]
    pub const fn new(slots: u32) -> Self {
        Self {
            slots,
            slots_ready: slots,
            queue_max: 1_024,
            copy_at: CopyAt::End,
            on_close: OnClose::Fail,
        }
    }
}

/// A command that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Its name.
    pub id: CommandId,
    /// Which way.
    pub direction: Direction,
    /// What it moves.
    pub moves: Vec<BlockMove>,
    /// What it waits for.
    pub after: Fence,
    /// Payload.
    pub bytes: u64,
    /// When it was taken.
    pub submitted_at: Time,
}

/// Why a command can't be ended that way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The step that the copy must come after is not over.
    #[error("{0:?} is still under way")]
    FenceOpen(Fence),
    /// No such command is pending, or none that ended is remembered.
    #[error("no such command: {0:?}")]
    NoSuchCommand(CommandId),
}

/// The backend itself, for the machine; [`control`](Self::control) is for the test.
#[derive(Debug)]
pub struct SimBackend {
    control: SimControl,
}

/// Decides how the commands of a [`SimBackend`] end. Clones speak of the same backend.
#[derive(Clone, Debug)]
pub struct SimControl {
    memory: Arc<PlainMemory>,
    config: SimConfig,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    slots: Vec<Box<[u8]>>,
    slots_ready: u32,
    pending: BTreeMap<u64, Held>,
    next_number: u64,
    ended: BTreeMap<CommandId, Completion>,
    /// Commands that were reported as unknown: the device may still be at it.
    zombies: Vec<Command>,
    completions: Vec<Completion>,
    waker: Option<Waker>,
    refuse_next: VecDeque<SubmitRefusal>,
    now: Time,
    closed: bool,
}

#[derive(Debug)]
struct Held {
    command: Command,
    submitted_at: Time,
    /// What copying at the start gave.
    copied: Option<Result<Vec<Digest>, CopyFault>>,
}

impl SimBackend {
    /// A backend over that pool.
    #[must_use]
    pub fn new(memory: Arc<PlainMemory>, config: SimConfig) -> Self {
        let state = State {
            slots: (0..config.slots)
                .map(|_| copy::empty_slot(memory.layout()))
                .collect(),
            slots_ready: config.slots_ready,
            pending: BTreeMap::new(),
            next_number: 0,
            ended: BTreeMap::new(),
            zombies: Vec::new(),
            completions: Vec::new(),
            waker: None,
            refuse_next: VecDeque::new(),
            now: Time::ZERO,
            closed: false,
        };
        let state = Arc::new(Mutex::new(state));
        Self {
            control: SimControl {
                memory,
                config,
                state,
            },
        }
    }

    /// The test's end of it.
    #[must_use]
    pub fn control(&self) -> SimControl {
        self.control.clone()
    }
}

impl SimControl {
    /// Commands that have not ended, in the order in which they were taken.
    #[must_use]
    pub fn pending(&self) -> Vec<Pending> {
        let state = self.state.lock();
        state.pending.values().map(Held::describe).collect()
    }

    /// Ends a command. `Done` moves its bytes; a digest that doesn't match or a block that
    /// somebody holds turns `Done` into `Failed`. Says what was reported.
    ///
    /// # Errors
    ///
    /// [`SimError`] if there is no such command, or if it may not move bytes yet.
    pub fn complete(
        &self,
        id: CommandId,
        now: Time,
        outcome: Outcome,
    ) -> Result<Outcome, SimError> {
        match outcome {
            Outcome::Done => self.end(id, now, None),
            Outcome::Failed | Outcome::Unknown => self.break_off(id, now, outcome, 0),
        }
    }

    /// Ends a command with an outcome other than `Done` after its first `blocks_moved` blocks
    /// were really moved. Says what was reported.
    ///
    /// # Errors
    ///
    /// [`SimError`] if there is no such command, or if it may not move bytes yet.
    ///
    /// # Panics
    ///
    /// If the outcome is `Done`.
    pub fn break_off(
        &self,
        id: CommandId,
        now: Time,
        outcome: Outcome,
        blocks_moved: usize,
    ) -> Result<Outcome, SimError> {
        assert_ne!(
            outcome,
            Outcome::Done,
            "a copy that is done is not broken off"
        );
        self.end(id, now, Some((outcome, blocks_moved)))
    }

    /// Ends as `Done` every command whose step is over, oldest first; says how many.
    pub fn complete_all(&self, now: Time) -> usize {
        let pending = self.pending();
        pending
            .iter()
            .filter(|command| self.complete(command.id, now, Outcome::Done).is_ok())
            .count()
    }

    /// Reports the end of a command once more.
    ///
    /// # Errors
    ///
    /// [`SimError::NoSuchCommand`] if none that ended is remembered under that name.
    pub fn repeat(&self, id: CommandId) -> Result<(), SimError> {
        let ended = self.remembered(id)?;
        self.forge(ended);
        Ok(())
    }

    /// Reports the opposite of what was reported: `Failed` for `Done`, `Done` for all else.
    ///
    /// # Errors
    ///
    /// [`SimError::NoSuchCommand`] if none that ended is remembered under that name.
    pub fn contradict(&self, id: CommandId) -> Result<(), SimError> {
        let ended = self.remembered(id)?;
        let (outcome, fault) = match ended.outcome {
            Outcome::Done => (Outcome::Failed, Some(CopyFault::Injected)),
            Outcome::Failed | Outcome::Unknown => (Outcome::Done, None),
        };
        self.forge(Completion {
            outcome,
            fault,
            ..ended
        });
        Ok(())
    }

    /// Reports whatever the test likes, and moves nothing.
    pub fn forge(&self, completion: Completion) {
        let mut state = self.state.lock();
        state.completions.push(completion);
        let waker = state.waker.clone();
        drop(state);
        wake(waker);
    }

    /// Refuses the next command for that reason; several calls refuse several commands.
    pub fn refuse_next(&self, why: SubmitRefusal) {
        self.state.lock().refuse_next.push_back(why);
    }

    /// Says that so many slots are set up by now; fewer than before changes nothing.
    pub fn set_slots_ready(&self, slots: u32) {
        let mut state = self.state.lock();
        state.slots_ready = slots.min(self.config.slots).max(state.slots_ready);
    }

    /// The bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self, slot: SlotIndex) -> Vec<u8> {
        self.state.lock().slots[slot.value() as usize].to_vec()
    }

    /// Moves all bytes of every command that was reported as unknown, as a device may do that
    /// nobody can ask any more; says how many commands did. What somebody holds is left alone.
    pub fn haunt(&self) -> usize {
        let mut state = self.state.lock();
        let zombies = core::mem::take(&mut state.zombies);
        for command in &zombies {
            for (index, step) in command.moves().iter().enumerate() {
                let slot = &mut state.slots[step.slot.value() as usize];
                // A block that a step holds can't be written here; the next one can.
                let _left_alone = match command.direction() {
                    Direction::In => copy::back_in(&self.memory, index, step.block, slot),
                    Direction::Out => copy::out(&self.memory, index, step.block, slot),
                };
            }
        }
        let haunted = zombies.len();
        state.zombies = zombies;
        haunted
    }

    /// Damages one bit of a slot.
    pub fn flip_host_bit(&self, slot: SlotIndex, bit: usize) {
        self.state.lock().slots[slot.value() as usize][bit / 8] ^= 1 << (bit % 8);
    }

    fn remembered(&self, id: CommandId) -> Result<Completion, SimError> {
        self.state
            .lock()
            .ended
            .get(&id)
            .cloned()
            .ok_or(SimError::NoSuchCommand(id))
    }

    fn end(
        &self,
        id: CommandId,
        now: Time,
        broken: Option<(Outcome, usize)>,
    ) -> Result<Outcome, SimError> {
        let mut state = self.state.lock();
        let (&number, held) = state
            .pending
            .iter()
            .find(|(_, held)| held.command.id() == id)
            .ok_or(SimError::NoSuchCommand(id))?;
        let after = held.command.after();
        let moves_bytes = !matches!(broken, Some((_, 0)));
        if moves_bytes && !self.over(after) {
            return Err(SimError::FenceOpen(after));
        }
        let held = state
            .pending
            .remove(&number)
            .expect("it was found under this number");
        let Held {
            command,
            submitted_at,
            copied,
        } = held;
        let blocks = broken.map_or_else(|| command.moves().len(), |(_, blocks)| blocks);
        let result = match copied {
            Some(result) => result,
            None => self.copy(&mut state, &command, blocks),
        };
        let completed_at = now.max(submitted_at);
        let completion = match broken {
            None => copy::completion(&command, submitted_at, completed_at, result),
            Some((outcome, _)) => Completion {
                outcome,
                ..copy::completion(
                    &command,
                    submitted_at,
                    completed_at,
                    Err(CopyFault::Injected),
                )
            },
        };
        let outcome = completion.outcome;
        if outcome == Outcome::Unknown {
            state.zombies.push(command);
        }
        state.now = state.now.max(now);
        state.remember(&completion);
        state.completions.push(completion);
        let waker = state.waker.clone();
        drop(state);
        wake(waker);
        Ok(outcome)
    }

    fn over(&self, fence: Fence) -> bool {
        self.memory.wait_step(fence, Span::ZERO)
    }

    /// Moves the first `blocks` blocks.
    fn copy(
        &self,
        state: &mut State,
        command: &Command,
        blocks: usize,
    ) -> Result<Vec<Digest>, CopyFault> {
        let memory = &self.memory;
        let mut digests = Vec::new();
        if command.direction() == Direction::In {
            for (index, step) in command.moves().iter().enumerate() {
                let slot = &state.slots[step.slot.value() as usize];
                copy::verify(command.digest(), index, slot)?;
            }
        }
        for (index, step) in command.moves().iter().enumerate().take(blocks) {
            let slot = &mut state.slots[step.slot.value() as usize];
            match command.direction() {
                Direction::In => copy::back_in(memory, index, step.block, slot)?,
                Direction::Out => {
                    copy::out(memory, index, step.block, slot)?;
                    if *command.digest() == DigestWork::Compute {
                        digests.push(Digest::of(slot));
                    }
                }
            }
        }
        Ok(digests)
    }
}

impl State {
    fn remember(&mut self, completion: &Completion) {
        self.ended.insert(completion.id, completion.clone());
        if self.ended.len() > HISTORY_MAX {
            self.ended.pop_first();
        }
    }
}

impl Held {
    fn describe(&self) -> Pending {
        Pending {
            id: self.command.id(),
            direction: self.command.direction(),
            moves: self.command.moves().to_vec(),
            after: self.command.after(),
            bytes: self.command.bytes(),
            submitted_at: self.submitted_at,
        }
    }
}

impl Backend for SimBackend {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        let control = &self.control;
        copy::check(control.memory.layout(), &command);
        let mut state = control.state.lock();
        state.now = state.now.max(now);
        let refusal = if state.closed {
            Some(SubmitRefusal::Closed)
        } else if let Some(why) = state.refuse_next.pop_front() {
            Some(why)
        } else {
            (state.pending.len() >= control.config.queue_max).then_some(SubmitRefusal::Busy)
        };
        if let Some(why) = refusal {
            return Err(Refused { why, back: command });
        }
        let start = control.config.copy_at == CopyAt::Start && control.over(command.after());
        let copied = start.then(|| control.copy(&mut state, &command, command.moves().len()));
        let number = state.next_number;
        state.next_number += 1;
        state.pending.insert(
            number,
            Held {
                command,
                submitted_at: now,
                copied,
            },
        );
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.control.state.lock().completions);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.control.state.lock().waker = Some(waker);
    }

    fn slots_ready(&self) -> u32 {
        self.control.state.lock().slots_ready
    }

    fn close(&mut self, _limit: Span) -> Closed {
        let mut state = self.control.state.lock();
        state.closed = true;
        let mut closed = Closed::default();
        match self.control.config.on_close {
            OnClose::Abandon => {
                for held in state.pending.values() {
                    closed.unconfirmed += 1;
                    closed.leaked_bytes += held.command.bytes();
                }
            }
            OnClose::Fail => {
                let now = state.now;
                for held in core::mem::take(&mut state.pending).into_values() {
                    let at = now.max(held.submitted_at);
                    let why = Err(CopyFault::Closed);
                    let completion = copy::completion(&held.command, held.submitted_at, at, why);
                    state.remember(&completion);
                    state.completions.push(completion);
                }
            }
        }
        let waker = state.waker.clone();
        let news = !state.completions.is_empty();
        drop(state);
        wake(waker.filter(|_| news));
        closed
    }
}

/// Outside the lock, because a waker is somebody else's code.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}
