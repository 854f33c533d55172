//! What a pass costs beside the model: schedule and machine, with an executor that does nothing.
//!
//! `cargo bench -p kv-scheduler --bench schedule`.

#![expect(clippy::unwrap_used, reason = "a bench that can't run says where")]

use std::task::Waker;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kv_core::{
    Backend, Closed, Command, Completion, Fence, HostSide, Layout, Machine, MachineConfig, Outcome,
    Refused, Span, SubmitRefusal, Time,
};
use kv_scheduler::{
    Batch, Engine, EngineConfig, ExecuteError, Executor, Output, Request, RequestId, Sampled,
    SamplingParams, StepOutput, TokenId,
};

const BLOCK_TOKENS: u32 = 16;

/// Answers at once, whatever it is asked.
struct Nothing {
    step: u64,
}

impl Executor for Nothing {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        self.step += 1;
        let sampled = |_: &_| Sampled {
            token: TokenId(7),
            logprobs: None,
        };
        let rows = batch.rows.iter();
        Ok(StepOutput {
            rows: rows
                .map(|row| Ok(row.samples.iter().map(sampled).collect()))
                .collect(),
            fence: Fence::of_step(self.step),
        })
    }
}

/// Every copy is over when somebody looks.
#[derive(Default)]
struct AtOnce {
    done: Vec<Completion>,
}

impl Backend for AtOnce {
    fn submit(
        &mut self,
        now: Time,
        command: Command,
    ) -> Result<(), Refused<Command, SubmitRefusal>> {
        self.done.push(Completion {
            id: command.id(),
            outcome: Outcome::Done,
            fault: None,
            bytes: command.bytes(),
            submitted_at: now,
            completed_at: now,
            digests: Vec::new(),
        });
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }

    fn set_waker(&mut self, _waker: Waker) {}

    fn close(&mut self, _limit: Span) -> Closed {
        Closed::default()
    }
}

struct World {
    engine: Engine<Nothing, AtOnce>,
    outputs: Vec<Output>,
    now: Time,
}

impl World {
    fn new(gpu_blocks: u32, slots: u32, sequences: u32) -> Self {
        let layout = Layout::stacked(2, gpu_blocks, BLOCK_TOKENS, 1, 2, 2).unwrap();
        let config = MachineConfig::new(&layout, HostSide::Slots(slots), 1 << 40);
        let engine = EngineConfig {
            max_batch_size: sequences,
            max_tokens_per_step: 1 << 20,
            max_seq_len: 1 << 20,
            lookahead_tokens: 0,
            watermark_permille: 0,
            resume_slack_tokens: 0,
            ..EngineConfig::default()
        };
        let machine = Machine::new(config).unwrap();
        let executor = Nothing { step: 0 };
        Self {
            engine: Engine::new(engine, machine, executor, AtOnce::default()).unwrap(),
            outputs: Vec::new(),
            now: Time::ZERO,
        }
    }

    fn submit(&mut self, id: u64, prompt: u32) {
        let request = Request {
            id: RequestId(id),
            prompt: vec![TokenId(1); prompt as usize],
            n: 1,
            max_tokens: 1_000,
            stop_tokens: Vec::new(),
            sampling: SamplingParams::default(),
            priority: 0,
        };
        self.engine.submit(self.now, request).unwrap();
    }

    fn pass(&mut self) {
        self.now = self.now + Span::from_millis(1);
        self.engine.step(self.now, &mut self.outputs);
        self.outputs.clear();
    }
}

/// Passes in which nobody needs a further block.
const QUIET_PASSES: u64 = 12;

/// So many groups on the GPU, each with two blocks, beside so many parked ones for whom no block
/// is left; nobody moves in the next passes.
///
/// All are admitted at first: a runner with one full block, a later one with so many full blocks
/// that the runners' next ones are there just when all later ones have left.
fn prepared(running: u32, parked: u32) -> World {
    let blocks = running.checked_div(parked).unwrap_or(0);
    let mut world = World::new(2 * running, 2 * running, running + parked);
    for id in 0..u64::from(running) {
        world.submit(id, BLOCK_TOKENS);
    }
    for id in 0..u64::from(parked) {
        world.submit(10_000 + id, blocks * BLOCK_TOKENS);
    }
    world.pass();
    world.pass();
    let (stats, machine) = world.engine.stats();
    assert_eq!(
        (stats.running, stats.swapped),
        (running, parked),
        "{stats:?}"
    );
    assert_eq!((machine.gpu.free, machine.flights), (0, 0));
    world
}

#[expect(clippy::disallowed_methods, reason = "a bench measures time")]
fn quiet_passes(running: u32, parked: u32, passes: u64) -> Duration {
    let (mut left, mut spent) = (passes, Duration::ZERO);
    while left > 0 {
        let mut world = prepared(running, parked);
        let now = left.min(QUIET_PASSES);
        let start = Instant::now();
        for _ in 0..now {
            world.pass();
        }
        spent += start.elapsed();
        left -= now;
        let (stats, _) = world.engine.stats();
        assert_eq!(
            (stats.running, stats.swapped),
            (running, parked),
            "{stats:?}"
        );
        assert_eq!(stats.stalled_rows, 0);
    }
    spent
}

fn schedule(c: &mut Criterion) {
    let mut group = c.benchmark_group("pass");
    for (running, parked) in [(32, 0), (32, 32), (1_024, 0), (1_024, 256)] {
        let name = BenchmarkId::from_parameter(format!("{running} running, {parked} parked"));
        group.bench_function(name, |bench| {
            bench.iter_custom(|passes| quiet_passes(running, parked, passes));
        });
    }
    group.finish();
}

criterion_group!(benches, schedule);
criterion_main!(benches);
