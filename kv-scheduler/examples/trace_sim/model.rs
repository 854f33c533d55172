//! An executor that runs no model and backends that move no bytes: both only let time pass.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;

use kv_core::{
    Backend, Closed, Command, Completion, DigestWork, Fence, Outcome, Refused, SlotIndex, Span,
    SubmitRefusal, Time,
};
use kv_scheduler::{Batch, ExecuteError, Executor, Sampled, StepOutput, TokenId};

use crate::cost::{StepCost, StepWork, span};
use crate::link::{Link, LinkCost};

/// What executor, backend and driver have in common: the clock and the link.
#[derive(Debug)]
pub(crate) struct Shared {
    clock: Cell<Time>,
    pub(crate) link: RefCell<Link>,
}

impl Shared {
    pub(crate) const fn new(link: LinkCost) -> Self {
        Self {
            clock: Cell::new(Time::ZERO),
            link: RefCell::new(Link::new(link)),
        }
    }

    pub(crate) const fn now(&self) -> Time {
        self.clock.get()
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, span: Span) {
        self.clock.set(self.now() + span);
    }

    /// Lets time pass up to that moment, if it is not over.
    pub(crate) fn pass_until(&self, time: Time) {
        self.clock.set(self.now().max(time));
    }
}

/// What the steps of a run were like.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepLog {
    /// How long each step took, in microseconds.
    pub(crate) micros: Vec<u32>,
    /// Rows of one token, of all steps.
    pub(crate) decode_rows: u64,
    /// All steps together.
    pub(crate) span: Span,
    /// By how much copies that ran beside them made the steps longer.
    pub(crate) slowed: Span,
}

/// Lets each step take as long as the model says; every token is the same one.
#[derive(Debug)]
pub(crate) struct ModelledExecutor {
    shared: Rc<Shared>,
    cost: StepCost,
    link: LinkCost,
    block_tokens: u32,
    log: StepLog,
}

impl ModelledExecutor {
    pub(crate) fn new(
        shared: Rc<Shared>,
        cost: StepCost,
        link: LinkCost,
        block_tokens: u32,
    ) -> Self {
        Self {
            shared,
            cost,
            link,
            block_tokens,
            log: StepLog::default(),
        }
    }

    pub(crate) const fn log(&self) -> &StepLog {
        &self.log
    }
}

impl Executor for ModelledExecutor {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        let work = StepWork::of(batch, self.block_tokens);
        let alone = span(self.cost.seconds(&work));
        let now = self.shared.now();
        let beside = self.shared.link.borrow_mut().busy_within(now, alone);
        let seconds = |span: Span| span.as_duration().as_secs_f64();
        let slowed = span(
            seconds(beside.out) * self.link.slows_step_out
                + seconds(beside.back_in) * self.link.slows_step_in,
        );
        let took = alone + slowed;
        self.shared.pass(took);

        let micros = u32::try_from(took.as_nanos() / 1_000).unwrap_or(u32::MAX);
        self.log.micros.push(micros);
        self.log.decode_rows += work.decode_rows;
        self.log.span = self.log.span + took;
        self.log.slowed = self.log.slowed + slowed;
        let token = || Sampled {
            token: TokenId(1),
            logprobs: None,
        };
        let rows = batch.rows.iter();
        Ok(StepOutput {
            rows: rows
                .map(|row| Ok(row.samples.iter().map(|_| token()).collect()))
                .collect(),
            fence: Fence::of_step(self.log.micros.len() as u64),
        })
    }
}

/// Which way blocks take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Over the link, while steps run.
    Beside,
    /// Through pageable memory, while the engine waits.
    Blocking,
}

/// Moves no bytes; lets the time pass that moving them takes.
#[derive(Debug)]
pub(crate) struct ModelledBackend {
    shared: Rc<Shared>,
    cost: LinkCost,
    way: Way,
    /// Blocking copies that are over.
    over: Vec<Completion>,
    /// How long blocking copies held the engine.
    held: Span,
    closed: bool,
}

impl ModelledBackend {
    pub(crate) const fn new(shared: Rc<Shared>, cost: LinkCost, way: Way) -> Self {
        Self {
            shared,
            cost,
            way,
            over: Vec::new(),
            held: Span::ZERO,
            closed: false,
        }
    }

    /// How long blocking copies held the engine.
    pub(crate) const fn held(&self) -> Span {
        self.held
    }
}

impl Backend for ModelledBackend {
    /// Takes the clock's time, not the pass's: within a pass the step has let time pass already.
    fn submit(
        &mut self,
        _pass_started: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        assert_eq!(
            command.digest(),
            &DigestWork::Skip,
            "there are no bytes to make digests of"
        );
        if self.closed {
            let why = SubmitRefusal::Closed;
            return Err(Refused { why, back: command });
        }
        let submitted_at = self.shared.now();
        match self.way {
            Way::Beside => self.shared.link.borrow_mut().submit(submitted_at, &command),
            Way::Blocking => {
                let took = self
                    .cost
                    .blocking_span(command.direction(), command.bytes());
                self.shared.pass(took);
                self.held = self.held + took;
                self.over.push(Completion {
                    id: command.id(),
                    outcome: Outcome::Done,
                    fault: None,
                    bytes: command.bytes(),
                    submitted_at,
                    completed_at: self.shared.now(),
                    digests: Vec::new(),
                });
            }
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.over);
        let now = self.shared.now();
        self.shared.link.borrow_mut().poll(now, out);
    }

    /// Nobody sleeps here: the driver asks the link when there is news.
    fn set_waker(&mut self, _waker: Waker) {}

    fn forget(&mut self, _slots: &[SlotIndex]) {}

    fn close(&mut self, _limit: Span) -> Closed {
        self.closed = true;
        let (unconfirmed, leaked_bytes) = self.shared.link.borrow().unheard();
        Closed {
            unconfirmed,
            leaked_bytes,
        }
    }
}
