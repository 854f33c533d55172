//! What a seed decides before anything runs.

use kv_core::testing::{Odds, Rng};
use kv_core::{Checksum, Deadlines, HostSide, Layout, MachineConfig, Span, Time};
use kv_model::oracle::OracleConfig;
use kv_scheduler::{
    EngineConfig, Request, RequestId, SamplingParams, SwapPolicy, TokenId, VictimPolicy,
};

use crate::executor::StepOdds;

/// One client.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) arrives_at: Time,
    pub(crate) cancels_at: Option<Time>,
    pub(crate) request: Request,
}

/// What a block looks like; the same with any number of blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    kind: u64,
    layers: u32,
    block_tokens: u32,
}

impl Shape {
    pub(crate) fn layout(self, blocks: u32) -> Layout {
        let Self {
            kind,
            layers,
            block_tokens,
        } = self;
        match kind {
            0 => Layout::stacked(layers, blocks, block_tokens, 1, 2, 2),
            1 => Layout::per_layer(layers, blocks, block_tokens, 1, 3, 2),
            _ => Layout::latent(layers, blocks, block_tokens, 5, 1),
        }
        .unwrap()
    }
}

/// One world.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    pub(crate) layout: Layout,
    pub(crate) slots: u32,
    pub(crate) machine: MachineConfig,
    pub(crate) engine: EngineConfig,
    pub(crate) oracle: OracleConfig,
    pub(crate) clients: Vec<Client>,
    pub(crate) odds: Odds,
    pub(crate) steps: StepOdds,
    /// Out of 1,000, per pass.
    pub(crate) busy: u32,
    pub(crate) flips: u32,
    pub(crate) haunts: u32,
    pub(crate) clock_jumps: u32,
    pub(crate) faults_end_at: Time,
    pub(crate) step_span: Span,
}

fn between(rng: &mut Rng, low: u32, high: u32) -> u32 {
    low + u32::try_from(rng.below(u64::from(high - low) + 1)).unwrap()
}

fn millis(rng: &mut Rng, most: u64) -> Span {
    Span::from_nanos(rng.below(most * 1_000_000 + 1))
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let block_tokens = [1, 2, 4, 16][rng.index(4)];
        let blocks = between(rng, 4, 32);
        let shape = Shape {
            kind: rng.below(3),
            layers: between(rng, 1, 3),
            block_tokens,
        };
        let layout = shape.layout(blocks);
        let slots = if rng.chance(100) {
            0
        } else {
            between(rng, 1, 48)
        };
        let most_in_flight = if rng.chance(500) { 4 } else { 40 };
        let inflight_blocks = u64::from(between(rng, 1, most_in_flight));
        let stormy = rng.chance(600);
        let checksum = if rng.chance(400) {
            Checksum::On
        } else {
            Checksum::Off
        };
        let cap = inflight_blocks * layout.block_bytes();
        let mut machine = MachineConfig::new(&layout, HostSide::Slots(slots), cap);
        machine.checksum = checksum;
        machine.deadlines = Deadlines {
            base: Span::from_millis(400),
            factor: 10,
            assumed_rate: 1 << 20,
        };
        let max_batch_size = between(rng, 3, 12);
        let engine = Self::engine(rng, max_batch_size);
        let oracle = OracleConfig {
            vocab: 4_096,
            eos: Some(TokenId(1)),
            lowest: TokenId(2),
            eos_every: [0, 0, 20][rng.index(3)],
            seed,
            script: None,
        };
        let clients = Self::clients(rng, block_tokens, blocks);
        Self {
            slots,
            machine,
            engine,
            oracle,
            clients,
            odds: if stormy { Odds::stormy() } else { Odds::calm() },
            steps: if stormy && rng.chance(300) {
                StepOdds {
                    step_fails: 5,
                    row_fails: 5,
                }
            } else {
                StepOdds::default()
            },
            busy: if stormy { 50 } else { 0 },
            flips: if stormy && checksum == Checksum::On {
                100
            } else {
                0
            },
            haunts: if stormy { 100 } else { 0 },
            clock_jumps: if stormy { 3 } else { 0 },
            faults_end_at: Time::ZERO + Span::from_millis(3_000),
            step_span: millis(rng, 12) + Span::from_nanos(1),
            shape,
            layout,
        }
    }

    fn engine(rng: &mut Rng, max_batch_size: u32) -> EngineConfig {
        EngineConfig {
            max_batch_size,
            max_tokens_per_step: between(rng, max_batch_size, 64),
            prefill_chunk: between(rng, 1, 24),
            max_seq_len: 512,
            max_waiting: 0,
            max_n: 4,
            swap: if rng.chance(900) {
                SwapPolicy::On
            } else {
                SwapPolicy::Off
            },
            victim: [
                VictimPolicy::Newest,
                VictimPolicy::Oldest,
                VictimPolicy::Cost,
            ][rng.index(3)],
            max_retries: between(rng, 0, 3),
            retry_backoff: Span::from_millis(5),
            lookahead_tokens: between(rng, 0, 6),
            watermark_permille: [0, 0, 50, 200][rng.index(4)],
            slice: rng.chance(300).then(|| millis(rng, 200)),
            max_swaps: [1_000, 3, 0][rng.index(3)],
            lost_permille_max: [1_000, 1_000, 100][rng.index(3)],
            priority_aging: millis(rng, 500) + Span::from_nanos(1),
            resume_slack_tokens: between(rng, 0, 20),
        }
    }

    fn clients(rng: &mut Rng, block_tokens: u32, blocks: u32) -> Vec<Client> {
        let n_clients = between(rng, 2, 12);
        let burst = rng.chance(400);
        let ranked = rng.chance(300);
        // Ids are used again: a later request may take the id of a cancelled one.
        let ids = u64::from(between(rng, n_clients.div_ceil(2), n_clients));
        (0..n_clients)
            .map(|index| {
                let n = [1, 1, 2, 3][rng.index(4)];
                let most = (block_tokens * blocks).min(96);
                let prompt = between(rng, 1, (most / 4).max(1));
                // Long answers: pressure comes from growth, not from prompts.
                let max_tokens = between(rng, 1, (most / (2 * n)).max(1));
                let arrives_at = Time::ZERO + if burst { Span::ZERO } else { millis(rng, 400) };
                let cancels = rng.chance(250);
                let after = millis(rng, 600);
                Client {
                    arrives_at,
                    cancels_at: cancels.then_some(arrives_at + after),
                    request: Request {
                        id: RequestId(u64::from(index) % ids),
                        prompt: (0..prompt)
                            .map(|_| TokenId(between(rng, 2, 4_000)))
                            .collect(),
                        n,
                        max_tokens,
                        stop_tokens: vec![TokenId(1)],
                        sampling: SamplingParams::default(),
                        priority: if ranked {
                            i32::try_from(rng.below(4)).unwrap() - 1
                        } else {
                            0
                        },
                    },
                }
            })
            .collect()
    }
}
