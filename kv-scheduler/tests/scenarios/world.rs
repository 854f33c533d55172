//! An engine over the hash oracle and the simulated backend, in virtual time, with one client
//! that writes down what it sees. Every pass is followed by all checkers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use kv_core::host::PlainMemory;
use kv_core::testing::{Pending, SimBackend, SimConfig, SimControl};
use kv_core::{
    Backend, Checksum, Choice, Completion, Direction, Event, HostSide, Layout, Machine,
    MachineConfig, Outcome, Refused, Span, Stats, Time,
};
use kv_model::oracle::{Oracle, OracleConfig};
use kv_scheduler::{
    Engine, EngineConfig, EngineStats, FinishReason, Next, Output, Rejection, Request, RequestId,
    SamplingParams, TokenId,
};

/// One pass of the model takes that long.
pub(crate) const STEP: Span = Span::from_millis(10);

/// Damage goes unseen once in as many cases.
pub(crate) const VOCAB: u32 = 1 << 30;

/// How copies end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// As `Done`, that long after they were taken, seen by the next pass.
    After(Span),
    /// When the test says so.
    Held,
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) gpu_blocks: u32,
    pub(crate) host_slots: u32,
    pub(crate) block_tokens: u32,
    /// `None`: no limit that matters.
    pub(crate) inflight_blocks: Option<u64>,
    pub(crate) checksum: Checksum,
    pub(crate) copies: Copies,
    pub(crate) engine: EngineConfig,
    pub(crate) oracle: OracleConfig,
}

impl Setup {
    /// The common ground of the scenarios: 16 tokens per block, no watermark.
    pub(crate) fn new(gpu_blocks: u32, host_slots: u32) -> Self {
        Self {
            gpu_blocks,
            host_slots,
            block_tokens: 16,
            inflight_blocks: None,
            checksum: Checksum::Off,
            copies: Copies::After(Span::ZERO),
            engine: EngineConfig {
                lookahead_tokens: 0,
                resume_slack_tokens: 0,
                watermark_permille: 0,
                slice: None,
                ..EngineConfig::default()
            },
            oracle: OracleConfig {
                vocab: VOCAB,
                ..OracleConfig::default()
            },
        }
    }

    fn layout(&self, blocks: u32) -> Layout {
        Layout::stacked(2, blocks, self.block_tokens, 1, 2, 2).unwrap()
    }
}

/// What a client saw of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) choices: Vec<Vec<TokenId>>,
    pub(crate) finish: Vec<Option<FinishReason>>,
    pub(crate) failed: Option<String>,
    pub(crate) cancelled: bool,
    /// When each token came, over all choices.
    pub(crate) token_at: Vec<Time>,
    /// How often the request came back after it had been made to leave.
    pub(crate) pauses: Vec<Span>,
    pub(crate) admitted_at: Option<Time>,
}

impl Seen {
    pub(crate) fn new(n: u32) -> Self {
        Self {
            choices: vec![Vec::new(); n as usize],
            finish: vec![None; n as usize],
            ..Self::default()
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.cancelled || self.failed.is_some() || self.finish.iter().all(Option::is_some)
    }

    pub(crate) fn tokens(&self) -> usize {
        self.choices.iter().map(Vec::len).sum()
    }

    /// What a run with ample memory must give, too.
    pub(crate) fn text(&self) -> (&[Vec<TokenId>], &[Option<FinishReason>]) {
        (&self.choices, &self.finish)
    }

    fn take(&mut self, now: Time, output: Output) {
        match output {
            Output::Token {
                choice,
                sampled,
                finish,
                ..
            } => {
                let choice = choice.value() as usize;
                assert!(!self.is_over(), "I10: a token for a request that is over");
                assert_eq!(self.finish[choice], None, "I10: a token after the end");
                self.choices[choice].push(sampled.token);
                self.finish[choice] = finish;
                self.token_at.push(now);
            }
            Output::Failed { what, .. } => self.failed = Some(what),
            Output::Resumed { pause, .. } => self.pauses.push(pause),
            Output::Admitted { .. } => {
                assert_eq!(self.admitted_at, None, "a request is admitted once");
                self.admitted_at = Some(now);
            }
            other => panic!("an output that the scenarios don't know: {other:?}"),
        }
    }
}

/// A request with a prompt of its own: `tokens` long, told apart by `id`.
pub(crate) fn request(id: u64, n: u32, prompt: u32, max_tokens: u32) -> Request {
    let own = u32::try_from(id % 100_000).unwrap() * 10_000;
    Request {
        id: RequestId(id),
        prompt: (0..prompt).map(|token| TokenId(own + token)).collect(),
        n,
        max_tokens,
        stop_tokens: Vec::new(),
        sampling: SamplingParams::default(),
        priority: 0,
    }
}

/// Remembers that the engine was woken.
#[derive(Debug, Default)]
pub(crate) struct Bell(AtomicBool);

impl Bell {
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) struct World {
    pub(crate) engine: Engine<Oracle, SimBackend>,
    pub(crate) control: SimControl,
    pub(crate) bell: Arc<Bell>,
    pub(crate) now: Time,
    pub(crate) seen: BTreeMap<RequestId, Seen>,
    pub(crate) setup: Setup,
    pub(crate) events: Vec<Event>,
    pub(crate) passes: u64,
    /// When the last pass was.
    pub(crate) passed_at: Time,
    outputs: Vec<Output>,
    last: (EngineStats, Stats),
}

impl World {
    pub(crate) fn new(setup: Setup) -> Self {
        let layout = setup.layout(setup.gpu_blocks);
        let block_bytes = layout.block_bytes();
        let cap = setup.inflight_blocks.unwrap_or(1 << 20) * block_bytes;
        let mut config = MachineConfig::new(&layout, HostSide::Slots(setup.host_slots), cap);
        config.checksum = setup.checksum;
        let memory = Arc::new(PlainMemory::new(layout));
        let oracle = Oracle::new(Arc::clone(&memory), setup.oracle.clone()).unwrap();
        let mut backend = SimBackend::new(Arc::clone(&memory), SimConfig::new(setup.host_slots));
        let control = backend.control();
        let bell = Arc::new(Bell::default());
        backend.set_waker(Waker::from(Arc::clone(&bell)));
        let machine = Machine::new(config).unwrap();
        let engine = Engine::new(setup.engine, machine, oracle, backend).unwrap();
        let last = engine.stats();
        Self {
            engine,
            control,
            bell,
            now: Time::ZERO,
            seen: BTreeMap::new(),
            setup,
            events: Vec::new(),
            passes: 0,
            passed_at: Time::ZERO,
            outputs: Vec::new(),
            last,
        }
    }

    pub(crate) fn submit(&mut self, request: Request) -> RequestId {
        let (id, n) = (request.id, request.n);
        self.engine.submit(self.now, request).unwrap();
        self.seen.insert(id, Seen::new(n));
        id
    }

    pub(crate) fn refuse(&mut self, request: Request) -> Rejection {
        let (before, audit) = (self.engine.stats(), self.engine.audit());
        let asked = request.clone();
        let Refused { why, back } = self.engine.submit(self.now, request).unwrap_err();
        assert_eq!(back, asked, "I12: the request comes back");
        let after = self.engine.stats();
        assert_eq!(after.0.rejected, before.0.rejected + 1);
        let mut counted = after;
        counted.0.rejected = before.0.rejected;
        assert_eq!((counted, self.engine.audit()), (before, audit), "I12");
        why
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        assert!(self.engine.cancel(self.now, id), "{id:?} is live");
        self.seen.get_mut(&id).unwrap().cancelled = true;
        self.check();
    }

    pub(crate) fn stop(&mut self, id: RequestId, choice: Choice) {
        self.engine.stop(self.now, id, choice);
        let seen = self.seen.get_mut(&id).unwrap();
        seen.finish[choice.value() as usize] = Some(FinishReason::Stop);
        self.check();
    }

    /// One pass at the present time; then the time of a step goes by, or the time until the next
    /// thing that happens by itself.
    pub(crate) fn pass(&mut self) -> Next {
        self.end_copies();
        let next = self.step();
        self.now = match next {
            Next::Again => self.now + STEP,
            Next::Wait(until) => {
                let due = self.next_copy_end();
                let wake = due.into_iter().chain(until).min();
                wake.map_or(self.now + STEP, |wake| {
                    wake.max(self.now + Span::from_nanos(1))
                })
            }
        };
        next
    }

    /// One pass; the time stays as it is, and copies stay as they are.
    pub(crate) fn step(&mut self) -> Next {
        let next = self.engine.step(self.now, &mut self.outputs);
        self.passes += 1;
        self.passed_at = self.now;
        for output in std::mem::take(&mut self.outputs) {
            let id = owner(&output);
            let seen = self
                .seen
                .get_mut(&id)
                .expect("an output for a known request");
            seen.take(self.now, output);
        }
        self.engine.drain_events(&mut self.events);
        self.check();
        next
    }

    /// Passes until it holds; panics after far more passes than anything here needs (I08).
    pub(crate) fn pass_until(&mut self, mut holds: impl FnMut(&Self) -> bool) {
        for _ in 0..20_000 {
            if holds(self) {
                return;
            }
            self.pass();
        }
        panic!("I08: no end in sight: {:?}", self.engine.stats());
    }

    /// Runs until nothing is there and nothing is under way.
    pub(crate) fn finish(&mut self) {
        self.pass_until(|world| {
            world.engine.is_idle() && world.engine.machine().stats().flights == 0
        });
    }

    /// All checkers: I01 to I07 by counting again, I03 and I17 by the numbers that leave the
    /// engine.
    pub(crate) fn check(&mut self) {
        self.engine.audit().unwrap();
        let (engine, machine) = self.engine.stats();
        let cap = self.engine.machine().config().inflight_bytes_max;
        assert!(machine.inflight_bytes <= cap, "I03: {machine:?}");
        assert!(
            machine.host.peak <= self.setup.host_slots,
            "I03: {machine:?}"
        );
        assert_eq!(engine.stuck_passes, 0, "I08: {engine:?}");
        let counters = |(engine, machine): &(EngineStats, Stats)| {
            [
                engine.steps,
                engine.tokens,
                engine.prefill_tokens,
                engine.recomputed_tokens,
                engine.accepted,
                engine.rejected,
                engine.finished,
                engine.cancelled,
                engine.failed,
                engine.preempted_swap,
                engine.preempted_recompute,
                engine.resumed,
                engine.stalled_rows,
                machine.out.started,
                machine.out.done,
                machine.out.failed,
                machine.out.unknown,
                machine.out.bytes,
                machine.back_in.started,
                machine.back_in.done,
                machine.back_in.failed,
                machine.back_in.unknown,
                machine.back_in.bytes,
                machine.cancelled,
                machine.checksum_failures,
                machine.stale_completions,
                machine.host_backpressure,
                machine.inflight_backpressure,
                machine.clean_blocks_kept,
                machine.clean_copies_reclaimed,
            ]
        };
        let now = (engine, machine);
        let pairs = counters(&self.last).into_iter().zip(counters(&now));
        for (index, (before, after)) in pairs.enumerate() {
            assert!(before <= after, "I17: counter {index} went down");
        }
        self.last = now;
    }

    /// I11 and I17: nothing is held any more; clean copies went with their groups.
    pub(crate) fn assert_empty(&self) {
        let (engine, machine) = self.engine.stats();
        assert_eq!(self.engine.live_requests(), 0);
        let gauges = [
            engine.waiting,
            engine.running,
            engine.swapped,
            engine.recompute_pending,
        ];
        assert_eq!(gauges, [0; 4], "I17");
        assert_eq!(machine.gpu.free, machine.gpu.total, "I11: {machine:?}");
        assert_eq!(machine.host.free, machine.host.total, "I11: {machine:?}");
        assert_eq!(machine.groups, kv_core::GroupStates::default(), "I11");
        assert_eq!((machine.flights, machine.inflight_bytes), (0, 0), "I11");
    }

    pub(crate) fn stats(&self) -> EngineStats {
        self.engine.stats().0
    }

    pub(crate) fn machine(&self) -> Stats {
        self.engine.stats().1
    }

    /// Blocks that went one way, from the exact bytes.
    pub(crate) fn blocks_moved(&self, direction: Direction) -> u64 {
        let stats = self.machine();
        let bytes = match direction {
            Direction::In => stats.back_in.bytes,
            Direction::Out => stats.out.bytes,
        };
        assert!(bytes.is_multiple_of(stats.block_bytes));
        bytes / stats.block_bytes
    }

    pub(crate) fn pending(&self) -> Vec<Pending> {
        self.control.pending()
    }

    /// Ends the oldest running copy.
    pub(crate) fn end_copy(&self, outcome: Outcome) -> Pending {
        let pending = self
            .pending()
            .into_iter()
            .next()
            .expect("a copy is under way");
        let ended = self
            .control
            .complete(pending.id, self.now, outcome)
            .unwrap();
        assert_eq!(ended, outcome, "nothing else may end a copy");
        pending
    }

    pub(crate) fn repeat(&self, pending: &Pending) {
        self.control.repeat(pending.id).unwrap();
    }

    fn end_copies(&self) {
        let Copies::After(span) = self.setup.copies else {
            return;
        };
        for pending in self.pending() {
            if pending.submitted_at + span <= self.now {
                self.control
                    .complete(pending.id, self.now, Outcome::Done)
                    .unwrap();
            }
        }
    }

    fn next_copy_end(&self) -> Option<Time> {
        let Copies::After(span) = self.setup.copies else {
            return None;
        };
        let ends = self.pending().into_iter().map(|p| p.submitted_at + span);
        ends.min()
    }

    pub(crate) fn seen(&self, id: RequestId) -> &Seen {
        &self.seen[&id]
    }

    /// I10: what the client of that request saw is what it sees with ample memory.
    pub(crate) fn assert_text(&self, request: &Request) {
        let seen = self.seen(request.id);
        let reference = reference(&self.setup, request);
        assert_eq!(seen.failed, None, "{:?}", request.id);
        assert_eq!(seen.text(), reference.text(), "I10: {:?}", request.id);
    }

    /// I10 for a request that was cancelled: the beginning of the right text.
    pub(crate) fn assert_beginning(&self, request: &Request) {
        let seen = self.seen(request.id);
        let reference = reference(&self.setup, request);
        for (found, whole) in seen.choices.iter().zip(&reference.choices) {
            assert!(whole.starts_with(found), "I10: {:?}", request.id);
        }
    }
}

/// The same request alone, with ample memory.
pub(crate) fn reference(setup: &Setup, request: &Request) -> Seen {
    let longest = u32::try_from(request.prompt.len()).unwrap() + request.max_tokens;
    let blocks = request.n * (longest.div_ceil(setup.block_tokens) + 1);
    let ample = Setup {
        gpu_blocks: blocks,
        host_slots: 0,
        inflight_blocks: None,
        checksum: Checksum::Off,
        copies: Copies::Held,
        engine: EngineConfig {
            max_batch_size: 64,
            max_seq_len: u32::MAX,
            ..EngineConfig::default()
        },
        ..setup.clone()
    };
    let mut world = World::new(ample);
    let id = world.submit(request.clone());
    world.pass_until(|world| world.engine.is_idle());
    let (stats, machine) = world.engine.stats();
    assert_eq!((stats.preempted_swap, stats.preempted_recompute), (0, 0));
    assert_eq!(machine.out.started, 0, "ample memory needs no copies");
    world.seen.remove(&id).unwrap()
}

/// A completion that the test makes up from a command.
pub(crate) fn forged(pending: &Pending, outcome: Outcome, bytes: u64) -> Completion {
    Completion {
        id: pending.id,
        outcome,
        fault: None,
        bytes,
        submitted_at: pending.submitted_at,
        completed_at: pending.submitted_at,
        digests: Vec::new(),
    }
}

fn owner(output: &Output) -> RequestId {
    match output {
        Output::Admitted { request, .. }
        | Output::Token { request, .. }
        | Output::Failed { request, .. }
        | Output::Resumed { request, .. } => *request,
        other => panic!("an output that the scenarios don't know: {other:?}"),
    }
}
