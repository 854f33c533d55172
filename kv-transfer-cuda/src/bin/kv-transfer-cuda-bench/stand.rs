//! A pool, a backend and a thread that behaves as an engine does: it submits and sleeps.

use core::task::Waker;
use std::sync::Arc;
use std::task::Wake;
use std::thread::{self, Thread};
use std::time::Instant;

use kv_core::testing::Rng;
use kv_core::{
    Backend, BlockId, BlockMove, Command, Completion, DigestWork, Direction, Fence, Layout,
    Outcome, SlotIndex, Span, TicketId, Time,
};
use kv_transfer_cuda::{CudaBackend, CudaConfig, Device, GpuMemory, StepFences};

use super::Failure;

/// This moment.
#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
pub(crate) fn clock() -> Instant {
    Instant::now()
}

/// How the slots of a command lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// One behind the other.
    InARow,
    /// Anywhere.
    Shuffled,
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A backend and its engine thread, which is the one that made it.
pub(crate) struct Stand {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) backend: CudaBackend,
    ended: Vec<Completion>,
    next_ticket: u64,
    start: Instant,
    rng: Rng,
}

impl Stand {
    pub(crate) fn new(
        device: &Device,
        layout: Layout,
        config: &CudaConfig,
    ) -> Result<Self, Failure> {
        let memory = Arc::new(GpuMemory::allocate(device, layout)?);
        let fences = Arc::new(StepFences::new(device)?);
        let mut backend = CudaBackend::new(Arc::clone(&memory), fences, config)?;
        backend.wait_slots(Span::from_secs(120))?;
        backend.set_waker(Waker::from(Arc::new(Unpark(thread::current()))));
        let (ended, start, rng) = (Vec::new(), clock(), Rng::new(11));
        Ok(Self {
            memory,
            backend,
            ended,
            next_ticket: 1,
            start,
            rng,
        })
    }

    /// Shuffled blocks, each with a slot.
    pub(crate) fn moves(&mut self, blocks: u32, slots: Slots) -> Vec<BlockMove> {
        let mut ids: Vec<u32> = (0..self.memory.layout().blocks()).collect();
        self.rng.shuffle(&mut ids);
        let mut places: Vec<u32> = (0..blocks).collect();
        if slots == Slots::Shuffled {
            places = (0..self.backend.slots_ready()).collect();
            self.rng.shuffle(&mut places);
        }
        ids.into_iter()
            .zip(places)
            .take(blocks as usize)
            .map(|(block, slot)| BlockMove {
                block: BlockId::new(block),
                slot: SlotIndex::new(slot),
            })
            .collect()
    }

    pub(crate) fn command(&mut self, direction: Direction, moves: &[BlockMove]) -> Command {
        let ticket = TicketId::for_testing(self.next_ticket);
        self.next_ticket += 1;
        Command::for_testing(
            ticket,
            direction,
            moves.to_vec(),
            Fence::NONE,
            self.memory.layout().block_bytes(),
            DigestWork::Skip,
        )
    }

    pub(crate) fn submit(&mut self, command: Command) -> Result<(), Failure> {
        let now = Time::ZERO + Span::from(self.start.elapsed());
        self.backend
            .submit(now, command)
            .map_err(|refused| refused.why.to_string().into())
    }

    /// Sleeps until so many commands have ended; all must be done.
    pub(crate) fn wait(&mut self, commands: usize) -> Result<(), Failure> {
        let mut ended = 0;
        loop {
            self.backend.poll(&mut self.ended);
            for completion in self.ended.drain(..) {
                if completion.outcome != Outcome::Done {
                    return Err(format!("{completion:?}").into());
                }
                ended += 1;
            }
            if ended >= commands {
                return Ok(());
            }
            thread::park();
        }
    }

    /// Nanoseconds from the submit of all commands to this thread having seen all their ends.
    pub(crate) fn measure(&mut self, commands: Vec<Command>) -> Result<f64, Failure> {
        let count = commands.len();
        let start = clock();
        for command in commands {
            self.submit(command)?;
        }
        self.wait(count)?;
        Ok(start.elapsed().as_nanos() as f64)
    }

    /// As [`measure`](Self::measure), but this thread does not sleep: for rates, of which wake-ups
    /// are no part.
    pub(crate) fn measure_awake(&mut self, commands: Vec<Command>) -> Result<f64, Failure> {
        let mut open = commands.len();
        let start = clock();
        for command in commands {
            self.submit(command)?;
        }
        while open > 0 {
            open -= self.ended_by_now()?;
            std::hint::spin_loop();
        }
        Ok(start.elapsed().as_nanos() as f64)
    }

    /// Ends that have arrived by now.
    pub(crate) fn ended_by_now(&mut self) -> Result<usize, Failure> {
        self.backend.poll(&mut self.ended);
        let wrong = self
            .ended
            .iter()
            .find(|ended| ended.outcome != Outcome::Done);
        if let Some(wrong) = wrong {
            return Err(format!("{wrong:?}").into());
        }
        Ok(self.ended.drain(..).count())
    }
}
