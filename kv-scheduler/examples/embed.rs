//! The crates in an engine of your own: a pool that is too small for its load, plain memory
//! instead of a GPU, the hash oracle instead of a model.
//!
//! Run it with `cargo run -p kv-scheduler --example embed`.

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::task::{Wake, Waker};
use std::time::Instant;

use kv_core::host::{HostBackend, HostConfig, PlainMemory};
use kv_core::{Backend, HostSide, Layout, Machine, MachineConfig, Span, Time};
use kv_model::oracle::{Oracle, OracleConfig};
use kv_scheduler::{
    Engine, EngineConfig, Next, Output, Request, RequestId, SamplingParams, TokenId,
};

/// Wakes the engine's thread when a copy is over.
struct Bell(std::sync::mpsc::SyncSender<()>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        // A bell that rings already needs no second pull.
        let _rings_already = self.0.try_send(());
    }
}

#[expect(clippy::disallowed_methods, reason = "a driver has the one clock")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let now = move || Time::ZERO + Span::from(start.elapsed());
    let (ring, bell): (_, Receiver<()>) = sync_channel(1);

    // A pool of 24 blocks of 16 tokens, host memory for 64 more.
    let layout = Layout::per_layer(4, 24, 16, 2, 32, 2)?;
    let config = MachineConfig::new(&layout, HostSide::Slots(64), 1 << 20);
    let memory = Arc::new(PlainMemory::new(layout));
    let oracle = Oracle::new(Arc::clone(&memory), OracleConfig::default())?;
    let mut backend = HostBackend::new(memory, HostConfig::new(64), Arc::new(now))?;
    backend.set_waker(Waker::from(Arc::new(Bell(ring))));
    let mut engine = Engine::new(
        EngineConfig::default(),
        Machine::new(config)?,
        oracle,
        backend,
    )?;

    for id in 0..6 {
        let request = Request {
            id: RequestId(id),
            prompt: (0..40).map(|token| TokenId(token + 1)).collect(),
            n: 1,
            max_tokens: 100,
            stop_tokens: Vec::new(),
            sampling: SamplingParams::default(),
            priority: 0,
        };
        engine.submit(now(), request)?;
    }
    let (mut outputs, mut tokens) = (Vec::new(), 0);
    while !engine.is_idle() {
        let next = engine.step(now(), &mut outputs);
        for output in outputs.drain(..) {
            tokens += usize::from(matches!(output, Output::Token { .. }));
        }
        if let Next::Wait(until) = next {
            // Blocks until a copy is over, or until the machine wants to look at a deadline.
            let limit = until.map_or(Span::from_secs(1), |until| until.since(now()));
            let _rang = bell.recv_timeout(limit.as_duration());
        }
    }
    let (stats, kv) = engine.stats();
    engine.shutdown(now(), Span::from_secs(5));
    println!(
        "{} requests, {tokens} tokens in {} steps; {} swaps out, {} in, {} tokens computed again",
        stats.finished, stats.steps, kv.out.done, kv.back_in.done, stats.recomputed_tokens
    );
    Ok(())
}
