//! The blocking backend: pageable buffers, and a copy that is over when `submit` returns.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::task::Waker;

use super::{Clock, PlainMemory, copy};
use crate::{
    Backend, Closed, Command, Completion, CopyFault, Digest, DigestWork, Direction, Refused,
    SlotIndex, Span, SubmitRefusal, Time,
};

/// Copies on the caller's thread, into buffers that exist only while they hold something.
///
/// It has no pool and no threads. A slot index is only a name here: its buffer is made by the
/// `Out` that fills it and dropped by [`Backend::forget`].
/// `submit` waits for the command's fence and for the copy, the one exception to clause 1 of
/// [`Backend`].
pub struct SyncBackend {
    memory: Arc<PlainMemory>,
    clock: Clock,
    fence_limit: Span,
    buffers: BTreeMap<SlotIndex, Box<[u8]>>,
    completions: Vec<Completion>,
    waker: Option<Waker>,
    closed: bool,
}

impl fmt::Debug for SyncBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SyncBackend")
            .field("buffers", &self.buffers.len())
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

impl SyncBackend {
    /// A backend that waits for the end of a step at most `fence_limit`.
    #[must_use]
    pub fn new(memory: Arc<PlainMemory>, fence_limit: Span, clock: Clock) -> Self {
        Self {
            memory,
            clock,
            fence_limit,
            buffers: BTreeMap::new(),
            completions: Vec::new(),
            waker: None,
            closed: false,
        }
    }

    /// Number of buffers that exist now.
    #[must_use]
    pub fn buffers(&self) -> usize {
        self.buffers.len()
    }

    pub(super) fn buffer_mut(&mut self, slot: SlotIndex) -> Option<&mut [u8]> {
        self.buffers.get_mut(&slot).map(|bytes| &mut **bytes)
    }

    fn copy(&mut self, command: &Command) -> Result<Vec<Digest>, CopyFault> {
        if !self.memory.wait_step(command.after(), self.fence_limit) {
            return Err(CopyFault::FenceTimeout);
        }
        match command.direction() {
            Direction::In => self.copy_in(command),
            Direction::Out => self.copy_out(command),
        }
    }

    fn copy_out(&mut self, command: &Command) -> Result<Vec<Digest>, CopyFault> {
        let mut digests = Vec::new();
        for (index, step) in command.moves().iter().enumerate() {
            let layout = self.memory.layout();
            let slot = self
                .buffers
                .entry(step.slot)
                .or_insert_with(|| copy::empty_slot(layout));
            copy::out(&self.memory, index, step.block, slot)?;
            if *command.digest() == DigestWork::Compute {
                digests.push(Digest::of(slot));
            }
        }
        Ok(digests)
    }

    fn copy_in(&self, command: &Command) -> Result<Vec<Digest>, CopyFault> {
        let mut slots = Vec::with_capacity(command.moves().len());
        for (index, step) in command.moves().iter().enumerate() {
            let slot = self
                .buffers
                .get(&step.slot)
                .ok_or_else(|| CopyFault::SlotEmpty {
                    index: copy::number(index),
                })?;
            copy::verify(command.digest(), index, slot)?;
            slots.push(slot);
        }
        for (index, (step, slot)) in command.moves().iter().zip(slots).enumerate() {
            copy::back_in(&self.memory, index, step.block, slot)?;
        }
        Ok(Vec::new())
    }

    /// The bytes of a slot, if it has a buffer.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn slot_bytes(&self, slot: SlotIndex) -> Option<Vec<u8>> {
        self.buffers.get(&slot).map(|bytes| bytes.to_vec())
    }

    /// Damages one bit of a slot; says whether the slot has a buffer.
    #[cfg(feature = "testing")]
    pub fn flip_slot_bit(&mut self, slot: SlotIndex, bit: usize) -> bool {
        let Some(bytes) = self.buffers.get_mut(&slot) else {
            return false;
        };
        bytes[bit / 8] ^= 1 << (bit % 8);
        true
    }
}

impl Backend for SyncBackend {
    /// Waits for the fence and copies.
    ///
    /// # Panics
    ///
    /// If the command breaks a promise of the machine: a block outside the pool, a wrong number
    /// of bytes or digests.
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        if self.closed {
            return Err(Refused {
                why: SubmitRefusal::Closed,
                back: command,
            });
        }
        copy::check(self.memory.layout(), &command);
        let result = self.copy(&command);
        let completed_at = (self.clock)().max(now);
        self.completions
            .push(copy::completion(&command, now, completed_at, result));
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.completions);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.waker = Some(waker);
    }

    fn forget(&mut self, slots: &[SlotIndex]) {
        for slot in slots {
            self.buffers.remove(slot);
        }
    }

    fn close(&mut self, _limit: Span) -> Closed {
        self.closed = true;
        Closed::default()
    }
}
