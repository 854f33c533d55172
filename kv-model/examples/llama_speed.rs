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
/// Positions behind which tokens are run.
const SHORT: u32 = 128;
const LONG: u32 = 2048;
const RUNS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: llama_speed MODEL.gguf [THREADS [INSTRUCTION-SET]]";
    let path = arguments.next().ok_or(usage)?;
    let threads = match arguments.next() {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?,
    };
    let start = Instant::now();
    let model = Arc::new(LlamaModel::load(&GgufFile::open(&path)?, threads)?);
    let load_s = start.elapsed().as_secs_f64();
    let mut bench = Bench::new(&model, threads)?;
    if let Some(name) = arguments
        .next()
        .filter(|name| !bench.executor.use_instruction_set(name))
    {
        let there = LlamaCpu::instruction_sets().join(", ");
        return Err(format!("no instruction set {name:?}; there are {there}").into());
    }
    println!("model     {path}");
    println!("threads   {threads}, {}", bench.executor.instruction_set());
    println!("load      {load_s:.2} s");

    for position in [0, LONG - PROMPT_TOKENS] {
        let prefill = measure(threads, || bench.prefill(position))?;
        println!("prefill   chunk {PROMPT_TOKENS} at {position:4}  {prefill}");
        if let Some(resident) = resident_mib() {
            println!("resident  {resident} MiB");
        }
    }
    for position in [SHORT, LONG] {
        for batch in [1, 4, 8, Bench::SEQUENCES] {
            let decode = measure(threads, || bench.decode(batch, position))?;
            println!("decode    batch {batch:2} at {position:4}  {decode}");
        }
    }
    Ok(())
}

/// Tokens per second of a few runs: best and median; and what the processor time that they took
/// would allow on a machine that does nothing else.
fn measure(
    threads: NonZero<usize>,
    mut run: impl FnMut() -> Result<f64, Box<dyn Error>>,
) -> Result<String, Box<dyn Error>> {
    let mut speeds = vec![run()?];
    let (start, used) = (Instant::now(), processor_seconds());
    while speeds.len() <= RUNS {
        speeds.push(run()?);
    }
    let wall = start.elapsed().as_secs_f64();
    let free = match (used, processor_seconds()) {
        (Some(before), Some(after)) if after > before => {
            let mean = speeds[1..].len() as f64 / speeds[1..].iter().map(|s| 1.0 / s).sum::<f64>();
            format!(
                "  undisturbed {:6.1}",
                mean * wall * threads.get() as f64 / (after - before)
            )
        }
        _ => String::new(),
    };
    speeds.remove(0);
    speeds.sort_by(f64::total_cmp);
    let (best, median) = (speeds[RUNS - 1], speeds[RUNS / 2]);
    Ok(format!(
        "best {best:6.1}  median {median:6.1}{free}  tokens/s"
    ))
}

/// Processor time of this process, where the system says it.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    // The unit is fixed at 1/100 s for programs.
    Some(ticks as f64 / 100.0)
}

struct Bench {
    executor: LlamaCpu,
    vocab: u32,
    params: SamplingParams,
}

impl Bench {
    const SEQUENCES: u32 = 16;
    const SEQUENCE_BLOCKS: u32 = (LONG + DECODE_STEPS).div_ceil(BLOCK_TOKENS);

    fn new(model: &Arc<LlamaModel>, threads: NonZero<usize>) -> Result<Self, Box<dyn Error>> {
        let blocks = Self::SEQUENCES * Self::SEQUENCE_BLOCKS;
        let layout = model.config().kv_layout(blocks, BLOCK_TOKENS)?;
        let memory = Arc::new(PlainMemory::new(layout));
        let executor = LlamaCpu::new(Arc::clone(model), memory, threads)?;
        let vocab = model.config().vocab;
        Ok(Self {
            executor,
            vocab,
            params: SamplingParams::default(),
        })
    }

    fn prefill(&mut self, position: u32) -> Result<f64, Box<dyn Error>> {
        let tokens: Vec<_> = (0..PROMPT_TOKENS)
            .map(|i| TokenId((i * 7919 + 13) % self.vocab))
            .collect();
        let seconds = self.step(1, position, &tokens)?;
        Ok(f64::from(PROMPT_TOKENS) / seconds)
    }

    /// Some steps behind so many positions; what those hold doesn't matter for speed.
    fn decode(&mut self, batch: u32, position: u32) -> Result<f64, Box<dyn Error>> {
        let mut seconds = 0.0;
        for step in 0..DECODE_STEPS {
            seconds += self.step(batch, position + step, &[TokenId(step * 31 % self.vocab)])?;
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
