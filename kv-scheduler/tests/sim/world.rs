//! One world, from its seed to its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::testing::{Fates, Odds, Rng, SimBackend, SimConfig, SimControl};
use kv_core::{Checksum, HostSide, Machine, MachineConfig, SlotIndex, Span, Time};
use kv_model::oracle::Oracle;
use kv_scheduler::{
    Engine, EngineConfig, EngineStats, FinishReason, Next, Output, Request, RequestId, TokenId,
};

use crate::executor::{FaultyOracle, StepOdds};
use crate::plan::{Client, Plan};

/// What worlds have met; a run that never met a fault proves nothing about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Met {
    pub(crate) passes: u64,
    pub(crate) tokens: u64,
    pub(crate) swaps_out: u64,
    pub(crate) swaps_in: u64,
    pub(crate) recomputes: u64,
    pub(crate) retries: u64,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) unknown: u64,
    pub(crate) never: u64,
    pub(crate) repeated: u64,
    pub(crate) contradicted: u64,
    pub(crate) stale: u64,
    pub(crate) busy: u64,
    pub(crate) flips: u64,
    pub(crate) checksum_failures: u64,
    pub(crate) step_faults: u64,
    pub(crate) row_faults: u64,
    pub(crate) clock_jumps: u64,
    pub(crate) haunted: u64,
    pub(crate) late: u64,
    pub(crate) cancelled: u64,
    pub(crate) cancelled_in_flight: u64,
    pub(crate) rejected: u64,
    pub(crate) host_backpressure: u64,
    pub(crate) inflight_backpressure: u64,
    pub(crate) lost_blocks: u64,
    pub(crate) given_up: u64,
    pub(crate) clean_kept: u64,
    pub(crate) clean_reclaimed: u64,
    pub(crate) texts_compared: u64,
}

macro_rules! each_field {
    ($macro:ident, $self:expr, $other:expr) => {
        $macro!($self, $other; given_up, passes, tokens, swaps_out, swaps_in, recomputes, retries, done,
            failed, unknown, never, repeated, contradicted, stale, busy, flips,
            checksum_failures, step_faults, row_faults, clock_jumps, haunted,
            late, cancelled,
            cancelled_in_flight, rejected, host_backpressure, inflight_backpressure, lost_blocks,
            clean_kept, clean_reclaimed, texts_compared)
    };
}

macro_rules! add_fields {
    ($self:expr, $other:expr; $($field:ident),*) => { $( $self.$field += $other.$field; )* };
}

macro_rules! assert_fields {
    ($self:expr, $other:expr; $($field:ident),*) => {
        $( assert!($self.$field > 0, concat!("no world met: ", stringify!($field))); )*
    };
}

impl Met {
    pub(crate) fn add(&mut self, other: &Self) {
        each_field!(add_fields, self, other);
    }

    pub(crate) fn assert_complete(&self) {
        each_field!(assert_fields, self, self);
    }
}

/// What one request's client saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    choices: Vec<Vec<TokenId>>,
    finish: Vec<Option<FinishReason>>,
    failed: bool,
    cancelled: bool,
}

impl Seen {
    fn new(n: u32) -> Self {
        let n = n as usize;
        Self {
            choices: vec![Vec::new(); n],
            finish: vec![None; n],
            failed: false,
            cancelled: false,
        }
    }

    fn is_over(&self) -> bool {
        self.failed || self.cancelled || self.finish.iter().all(Option::is_some)
    }
}

type SimEngine = Engine<FaultyOracle, SimBackend>;

/// The texts of the same requests with ample memory, one after the other.
fn reference(plan: &Plan, request: &Request) -> Seen {
    let block_tokens = plan.layout.block_tokens();
    let tokens = request.n * (u32::try_from(request.prompt.len()).unwrap() + request.max_tokens);
    let blocks = tokens.div_ceil(block_tokens) + request.n + 1;
    let layout = plan.shape.layout(blocks);
    let config = MachineConfig::new(&layout, HostSide::Slots(0), 1 << 30);
    let memory = Arc::new(PlainMemory::new(layout));
    let oracle = Oracle::new(Arc::clone(&memory), plan.oracle.clone()).unwrap();
    let backend = SimBackend::new(memory, SimConfig::new(0));
    let executor = FaultyOracle {
        oracle,
        rng: Rng::new(0),
        odds: StepOdds::default(),
        faults: crate::executor::StepFaults::default(),
    };
    let engine_config = EngineConfig {
        max_batch_size: 64,
        ..EngineConfig::default()
    };
    let machine = Machine::new(config).unwrap();
    let mut engine = Engine::new(engine_config, machine, executor, backend).unwrap();
    engine.submit(Time::ZERO, request.clone()).unwrap();
    let mut seen = Seen::new(request.n);
    let mut outputs = Vec::new();
    while !engine.is_idle() {
        let next = engine.step(Time::ZERO, &mut outputs);
        assert!(
            next == Next::Again || engine.is_idle(),
            "nothing can hold an ample engine up"
        );
        for output in outputs.drain(..) {
            take(&mut seen, output);
        }
    }
    seen
}

fn take(seen: &mut Seen, output: Output) {
    match output {
        Output::Token {
            choice,
            sampled,
            finish,
            ..
        } => {
            let choice = choice.value() as usize;
            assert!(seen.finish[choice].is_none(), "I10: a token after the end");
            assert!(
                !seen.cancelled && !seen.failed,
                "I10: a token for a request that is over"
            );
            seen.choices[choice].push(sampled.token);
            seen.finish[choice] = finish;
        }
        Output::Failed { .. } => seen.failed = true,
        Output::Resumed { .. } | Output::Admitted { .. } => {}
        other => panic!("an output that the simulation doesn't know: {other:?}"),
    }
}

struct World {
    plan: Plan,
    engine: SimEngine,
    control: SimControl,
    fates: Fates,
    rng: Rng,
    now: Time,
    met: Met,
    /// By index of the client.
    seen: Vec<Seen>,
    arrived: Vec<bool>,
    /// Which client a live id belongs to.
    live: BTreeMap<RequestId, usize>,
    last_stats: EngineStats,
    calm: bool,
}

pub(crate) fn run(seed: u64) -> Met {
    let plan = Plan::new(seed);
    let memory = Arc::new(PlainMemory::new(plan.layout.clone()));
    let oracle = Oracle::new(Arc::clone(&memory), plan.oracle.clone()).unwrap();
    let mut rng = Rng::new(seed ^ 0x5eed);
    let backend = SimBackend::new(memory, SimConfig::new(plan.slots));
    let control = backend.control();
    let executor = FaultyOracle {
        oracle,
        rng: Rng::new(rng.next_u64()),
        odds: plan.steps,
        faults: crate::executor::StepFaults::default(),
    };
    let machine = Machine::new(plan.machine).unwrap();
    let engine = Engine::new(plan.engine, machine, executor, backend).unwrap();
    let fates = Fates::new(rng.next_u64(), plan.odds);
    let seen = plan
        .clients
        .iter()
        .map(|client| Seen::new(client.request.n))
        .collect();
    let arrived = vec![false; plan.clients.len()];
    let mut world = World {
        plan,
        engine,
        control,
        fates,
        rng,
        now: Time::ZERO,
        met: Met::default(),
        seen,
        arrived,
        live: BTreeMap::new(),
        last_stats: EngineStats::default(),
        calm: false,
    };
    world.run();
    world.met
}

impl World {
    fn run(&mut self) {
        let mut outputs = Vec::new();
        // Far more passes than any world needs: I08.
        for _ in 0..60_000 {
            self.clients();
            self.faults();
            self.fates.run(self.now, &self.control);
            let next = self.engine.step(self.now, &mut outputs);
            self.met.passes += 1;
            self.hand_out(&mut outputs);
            self.check();
            let all_arrived = self.arrived.iter().all(|&arrived| arrived);
            let stats = self.engine.stats();
            if all_arrived && self.engine.is_idle() && stats.1.flights == 0 {
                return self.end();
            }
            self.advance(next);
        }
        panic!(
            "I08: no end in sight: {:?} {:?}",
            self.engine.stats(),
            self.seen
        );
    }

    fn clients(&mut self) {
        for index in 0..self.plan.clients.len() {
            let Client {
                arrives_at,
                cancels_at,
                request,
            } = self.plan.clients[index].clone();
            if !self.arrived[index] && arrives_at <= self.now {
                // An id that is still in use is refused; its client gives up.
                self.arrived[index] = true;
                match self.engine.submit(self.now, request.clone()) {
                    Ok(()) => {
                        self.live.insert(request.id, index);
                    }
                    Err(refused) => {
                        assert_eq!(refused.back, request, "I12: a refusal hands back");
                        self.met.rejected += 1;
                        self.seen[index].failed = true;
                    }
                }
            }
            let cancels = cancels_at.is_some_and(|at| at <= self.now);
            if cancels && self.arrived[index] && !self.seen[index].is_over() {
                let (_, before) = self.engine.stats();
                assert!(self.engine.cancel(self.now, request.id));
                let (_, after) = self.engine.stats();
                self.met.cancelled += 1;
                let tombstone = after.groups.cancel_pending > before.groups.cancel_pending;
                self.met.cancelled_in_flight += u64::from(tombstone);
                self.seen[index].cancelled = true;
                self.live.remove(&request.id);
            }
        }
    }

    fn faults(&mut self) {
        if self.now >= self.plan.faults_end_at {
            if !self.calm {
                self.calm = true;
                self.fates.set_odds(Odds::calm());
            }
            return;
        }
        if self.rng.chance(self.plan.busy) {
            self.control.refuse_next(kv_core::SubmitRefusal::Busy);
            self.met.busy += 1;
        }
        if self.plan.slots > 0 && self.rng.chance(self.plan.flips) {
            assert_eq!(self.plan.machine.checksum, Checksum::On);
            let slot =
                SlotIndex::new(u32::try_from(self.rng.index(self.plan.slots as usize)).unwrap());
            let bits = usize::try_from(self.plan.layout.block_bytes()).unwrap() * 8;
            self.control.flip_host_bit(slot, self.rng.index(bits));
            self.met.flips += 1;
        }
        if self.rng.chance(self.plan.haunts) {
            self.met.haunted += self.control.haunt() as u64;
            self.late_ends();
        }
        if self.rng.chance(self.plan.clock_jumps) {
            self.now = self.now + Span::from_secs(2);
            self.met.clock_jumps += 1;
        }
    }

    /// Commands that the machine gave up long ago end after all.
    fn late_ends(&mut self) {
        let limit = self.plan.machine.deadlines.base.saturating_mul(3);
        for command in self.control.pending() {
            if self.now.since(command.submitted_at) > limit {
                let ended = self
                    .control
                    .complete(command.id, self.now, kv_core::Outcome::Done);
                self.met.late += u64::from(ended.is_ok());
            }
        }
    }

    fn hand_out(&mut self, outputs: &mut Vec<Output>) {
        for output in outputs.drain(..) {
            let (Output::Token { request, .. }
            | Output::Failed { request, .. }
            | Output::Resumed { request, .. }
            | Output::Admitted { request, .. }) = &output
            else {
                panic!("an output that the simulation doesn't know: {output:?}");
            };
            let index = self.live[request];
            let id = *request;
            take(&mut self.seen[index], output);
            if self.seen[index].is_over() {
                self.live.remove(&id);
            }
        }
    }

    fn check(&mut self) {
        if let Err(broken) = self.engine.audit() {
            panic!("{broken}");
        }
        let mut events = Vec::new();
        self.engine.drain_events(&mut events);
        let (stats, _) = self.engine.stats();
        let last = self.last_stats;
        let monotonic = [
            (last.steps, stats.steps),
            (last.tokens, stats.tokens),
            (last.finished, stats.finished),
            (last.cancelled, stats.cancelled),
            (last.resumed, stats.resumed),
        ];
        assert!(
            monotonic.iter().all(|(before, now)| before <= now),
            "I17: {last:?} {stats:?}"
        );
        assert_eq!(stats.stuck_passes, 0, "I08: {stats:?}");
        self.last_stats = stats;
    }

    /// Time goes on by a step, or to the next thing that happens.
    fn advance(&mut self, next: Next) {
        let step = self.now + self.plan.step_span;
        let Next::Wait(until) = next else {
            self.now = step;
            return;
        };
        let arrivals = self.plan.clients.iter().zip(&self.arrived);
        let arrivals = arrivals
            .filter(|(_, arrived)| !**arrived)
            .map(|(c, _)| c.arrives_at);
        let cancels = self.plan.clients.iter().zip(&self.seen).zip(&self.arrived);
        let cancels = cancels
            .filter(|((_, seen), arrived)| **arrived && !seen.is_over())
            .filter_map(|((client, _), _)| client.cancels_at);
        // The copies that were started in this pass get their ends now.
        self.fates.run(self.now, &self.control);
        let wakes = arrivals
            .chain(cancels)
            .chain(until)
            .chain(self.fates.next_due());
        let Some(wake) = wakes.min() else {
            panic!("I08: nothing will ever happen: {:?}", self.engine.stats());
        };
        self.now = wake.max(self.now + Span::from_nanos(1));
    }

    fn end(&mut self) {
        let (stats, machine) = self.engine.stats();
        assert!(
            self.live.is_empty(),
            "clients that nobody answered: {:?}",
            self.live
        );
        let gpu = machine.gpu;
        assert_eq!(gpu.free + gpu.lost, gpu.total, "I11: {gpu:?}");
        let host = machine.host;
        assert_eq!(host.free + host.lost, host.total, "I11: {host:?}");
        assert_eq!(machine.inflight_bytes, 0, "I11");
        assert_eq!(machine.groups, kv_core::GroupStates::default(), "I11");
        for index in 0..self.seen.len() {
            self.compare(index, gpu.lost > 0);
        }
        let met = self.fates.met();
        self.met.add(&Met {
            tokens: stats.tokens,
            swaps_out: machine.out.done,
            swaps_in: machine.back_in.done,
            recomputes: stats.preempted_recompute,
            retries: machine.back_in.failed,
            done: met.done,
            failed: met.failed,
            unknown: met.unknown,
            never: met.never,
            repeated: met.repeated,
            contradicted: met.contradicted,
            stale: machine.stale_completions,
            checksum_failures: machine.checksum_failures,
            host_backpressure: machine.host_backpressure,
            inflight_backpressure: machine.inflight_backpressure,
            lost_blocks: gpu.lost.into(),
            given_up: u64::from(stats.swap_given_up),
            clean_kept: machine.clean_blocks_kept,
            clean_reclaimed: machine.clean_copies_reclaimed,
            step_faults: self.engine.executor().faults.steps,
            row_faults: self.engine.executor().faults.rows,
            ..Met::default()
        });
    }

    /// I10: what a client saw is what it would have seen with ample memory, or its beginning if
    /// it left, or if something failed that a client has to be told of.
    fn compare(&mut self, index: usize, lost_blocks: bool) {
        let request = self.plan.clients[index].request.clone();
        let seen = &self.seen[index];
        let expected = reference(&self.plan, &request);
        let may_fail = self.plan.steps.step_fails > 0 || lost_blocks;
        let refused = seen.choices.iter().all(Vec::is_empty);
        assert!(
            !seen.failed || may_fail || refused,
            "client {index} failed without a fault"
        );
        for (choice, (found, whole)) in seen.choices.iter().zip(&expected.choices).enumerate() {
            if seen.failed || seen.cancelled {
                assert!(
                    whole.starts_with(found),
                    "I10: client {index}, choice {choice}"
                );
            } else {
                assert_eq!(found, whole, "I10: client {index}, choice {choice}");
                assert_eq!(
                    seen.finish[choice], expected.finish[choice],
                    "I10: client {index}"
                );
                self.met.texts_compared += 1;
            }
        }
    }
}
