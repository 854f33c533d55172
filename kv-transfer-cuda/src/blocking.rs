//! The blocking backend: pageable memory, and `submit` returns when the copy is over.

use core::task::Waker;
use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::{
    Backend, Closed, Command, Completion, CopyFault, Digest, DigestWork, Direction, Outcome,
    Refused, SlotIndex, Span, SubmitRefusal, Time,
};

use crate::clock::Anchor;
use crate::device::Stream;
use crate::fences::{FenceFault, StepFences};
use crate::graveyard::bury_command;
use crate::memory::GpuMemory;
use crate::{CudaError, StreamPriority};

/// Copies while everything waits, into ordinary memory that is allocated per block.
///
/// It builds no pool and takes no slot: the slots of a command only name its buffers, which live
/// until [`Backend::forget`].
#[derive(Debug)]
pub struct BlockingCudaBackend {
    memory: Arc<GpuMemory>,
    fences: Arc<StepFences>,
    stream: Stream,
    buffers: BTreeMap<SlotIndex, Box<[u8]>>,
    ended: Vec<Completion>,
    waker: Option<Waker>,
    closed: bool,
}

impl BlockingCudaBackend {
    /// Takes a stream.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn new(memory: Arc<GpuMemory>, fences: Arc<StepFences>) -> Result<Self, CudaError> {
        let stream = Stream::new(memory.device(), StreamPriority::High)?;
        Ok(Self {
            memory,
            fences,
            stream,
            buffers: BTreeMap::new(),
            ended: Vec::new(),
            waker: None,
            closed: false,
        })
    }

    /// The bytes behind a slot, if it holds any.
    #[must_use]
    pub fn slot_bytes(&self, slot: SlotIndex) -> Option<&[u8]> {
        self.buffers.get(&slot).map(|buffer| &**buffer)
    }

    /// The bytes behind a slot, for tests of what protects against damage.
    #[must_use]
    pub fn slot_bytes_mut(&mut self, slot: SlotIndex) -> Option<&mut [u8]> {
        self.buffers.get_mut(&slot).map(|buffer| &mut **buffer)
    }

    fn run(&mut self, command: &Command) -> Result<Vec<Digest>, (Outcome, CopyFault)> {
        let failed = |fault| (Outcome::Failed, fault);
        self.verify(command).map_err(failed)?;
        self.memory
            .device()
            .bind()
            .map_err(|error| failed(fault_of(&error.into())))?;
        self.fences
            .order(&self.stream, command.after())
            .map_err(|fault| match fault {
                FenceFault::NeverRecorded => failed(CopyFault::FenceTimeout),
                FenceFault::Driver(error) => failed(fault_of(&error.into())),
            })?;
        let copied = match command.direction() {
            Direction::In => self.copy_in(command),
            Direction::Out => self.copy_out(command),
        };
        copied.map_err(|error| (Outcome::Unknown, fault_of(&error)))?;
        Ok(match command.digest() {
            DigestWork::Compute => self.digests(command),
            DigestWork::Skip | DigestWork::Verify(_) => Vec::new(),
        })
    }

    fn copy_out(&mut self, command: &Command) -> Result<(), CudaError> {
        let bytes = usize::try_from(self.memory.layout().block_bytes()).unwrap_or(usize::MAX);
        for step in command.moves() {
            let mut buffer = vec![0u8; bytes].into_boxed_slice();
            if let Err(error) = self.memory.copy_out(&self.stream, step.block, &mut buffer) {
                bury_command(buffer, self.memory.layout().block_bytes());
                return Err(error);
            }
            self.buffers.insert(step.slot, buffer);
        }
        Ok(())
    }

    fn copy_in(&mut self, command: &Command) -> Result<(), CudaError> {
        for step in command.moves() {
            let buffer = self.buffers.get(&step.slot);
            let buffer = buffer.ok_or(CudaError::SlotBusy { slot: step.slot })?;
            if let Err(error) = self.memory.copy_in(&self.stream, step.block, buffer) {
                let buffer = self.buffers.remove(&step.slot);
                bury_command(buffer, self.memory.layout().block_bytes());
                return Err(error);
            }
        }
        Ok(())
    }

    fn digests(&self, command: &Command) -> Vec<Digest> {
        let buffers = command
            .moves()
            .iter()
            .filter_map(|step| self.buffers.get(&step.slot));
        buffers.map(|buffer| Digest::of(buffer)).collect()
    }

    /// Compares the digests that an `In` carries with its buffers.
    fn verify(&self, command: &Command) -> Result<(), CopyFault> {
        let DigestWork::Verify(expected) = command.digest() else {
            return Ok(());
        };
        let found = self.digests(command);
        let right = |index: &usize| found.get(*index) == expected.get(*index);
        match (0..expected.len()).find(|index| !right(index)) {
            None => Ok(()),
            Some(index) => {
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                Err(CopyFault::DigestMismatch { index })
            }
        }
    }
}

/// A fault for the machine; -1 stands for errors that are not the driver's.
fn fault_of(error: &CudaError) -> CopyFault {
    CopyFault::Device {
        code: error.driver_code().unwrap_or(-1),
    }
}

impl Backend for BlockingCudaBackend {
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
        let taken = Anchor::new(now);
        let result = self.run(&command);
        let (outcome, fault, bytes, digests) = match result {
            Ok(digests) => (Outcome::Done, None, command.bytes(), digests),
            Err((outcome, fault)) => (outcome, Some(fault), 0, Vec::new()),
        };
        self.ended.push(Completion {
            id: command.id(),
            outcome,
            fault,
            bytes,
            submitted_at: taken.told(),
            completed_at: taken.now(),
            digests,
        });
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ended);
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
