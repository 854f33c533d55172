//! Speed of the CPU model: `cargo run -p kv-model --release --example llama_speed -- MODEL.gguf`.
//!
//! Prints load time, resident memory, prefill speed in chunks of 512 and decode speed at several
//! batch sizes, best and median of a few runs.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::error::Error;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use kv_core::host::PlainMemory;
use kv_core::{BlockId, Choice};
use kv_model::gguf::GgufFile;
use kv_model::llama::{LlamaCpu, LlamaModel};
use kv_scheduler::{
    Batch, BatchRow, Executor, RequestId, Sample, SamplingParams, StepOutput, TokenId,
};

const BLOCK_TOKENS: u32 = 16;
const PROMPT_TOKENS: u32 = 512;
const DECODE_STEPS: u32 = 32;
const RUNS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments
        .next()
        .ok_or("usage: llama_speed MODEL.gguf [THREADS]")?;
    let threads = match arguments.next() {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?,
    };
    let start = Instant::now();
    let model = Arc::new(LlamaModel::load(&GgufFile::open(&path)?, threads)?);
    let load_s = start.elapsed().as_secs_f64();
    let mut bench = Bench::new(&model, threads)?;
    println!("model     {path}");
    println!("threads   {threads}, {}", bench.executor.instruction_set());
    println!("load      {load_s:.2} s");

    let prefill = measure(|| bench.prefill())?;
    println!("prefill   chunk {PROMPT_TOKENS:3}  {prefill}");
    for batch in [1, 4, 8, 16] {
        let decode = measure(|| bench.decode(batch))?;
        println!("decode    batch {batch:3}  {decode}");
    }
    if let Some(resident) = resident_mib() {
        println!(
            "resident  {resident} MiB with a KV pool of {} MiB",
            bench.pool_mib()
        );
    }
    Ok(())
}

/// Best and median tokens per second.
fn measure(mut run: impl FnMut() -> Result<f64, Box<dyn Error>>) -> Result<String, Box<dyn Error>> {
    run()?;
    let mut speeds = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    speeds.sort_by(f64::total_cmp);
    Ok(format!(
        "best {:6.1}  median {:6.1} tokens/s",
        speeds[RUNS - 1],
        speeds[RUNS / 2]
    ))
}

struct Bench {
    memory: Arc<PlainMemory>,
    executor: LlamaCpu,
    vocab: u32,
    params: SamplingParams,
}

impl Bench {
    const SEQUENCES: u32 = 16;
    const SEQUENCE_BLOCKS: u32 = (PROMPT_TOKENS + DECODE_STEPS).div_ceil(BLOCK_TOKENS);

    fn new(model: &Arc<LlamaModel>, threads: NonZero<usize>) -> Result<Self, Box<dyn Error>> {
        let blocks = Self::SEQUENCES * Self::SEQUENCE_BLOCKS;
        let layout = model.config().kv_layout(blocks, BLOCK_TOKENS)?;
        let memory = Arc::new(PlainMemory::new(layout));
        let executor = LlamaCpu::new(Arc::clone(model), Arc::clone(&memory), threads)?;
        let vocab = model.config().vocab;
        Ok(Self {
            memory,
            executor,
            vocab,
            params: SamplingParams::default(),
        })
    }

    fn pool_mib(&self) -> u64 {
        let layout = self.memory.layout();
        (layout.block_bytes() * u64::from(layout.blocks())) >> 20
    }

    fn prefill(&mut self) -> Result<f64, Box<dyn Error>> {
        let tokens: Vec<_> = (0..PROMPT_TOKENS)
            .map(|i| TokenId((i * 7919 + 13) % self.vocab))
            .collect();
        let seconds = self.step(1, 0, &tokens)?;
        Ok(f64::from(PROMPT_TOKENS) / seconds)
    }

    /// Some steps behind 128 positions; what those hold doesn't matter for speed.
    fn decode(&mut self, batch: u32) -> Result<f64, Box<dyn Error>> {
        let mut seconds = 0.0;
        for step in 0..DECODE_STEPS {
            seconds += self.step(batch, 128 + step, &[TokenId(step * 31 % self.vocab)])?;
        }
        Ok(f64::from(batch * DECODE_STEPS) / seconds)
    }

    fn step(
        &mut self,
        batch: u32,
        position: u32,
        tokens: &[TokenId],
    ) -> Result<f64, Box<dyn Error>> {
        let tables: Vec<Vec<_>> = (0..batch)
            .map(|sequence| {
                let first = sequence * Self::SEQUENCE_BLOCKS;
                (first..first + Self::SEQUENCE_BLOCKS)
                    .map(BlockId::new)
                    .collect()
            })
            .collect();
        let sample = Sample {
            choice: Choice::new(0),
            params: &self.params,
            output: &[],
        };
        let rows: Vec<_> = (0..)
            .zip(&tables)
            .map(|(request, blocks)| BatchRow {
                request: RequestId(request),
                choice: Choice::new(0),
                blocks,
                position,
                tokens,
                prompt: tokens,
                samples: vec![sample],
            })
            .collect();
        let start = Instant::now();
        let StepOutput { rows, .. } = self.executor.execute(&Batch {
            copies: &[],
            rows: &rows,
        })?;
        let seconds = start.elapsed().as_secs_f64();
        rows.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(seconds)
    }
}

/// Resident memory of this process, where the system says it.
fn resident_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}
