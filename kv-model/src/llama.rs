//! A Llama-family model on the CPU, over the paged cache.
//!
//! Weights come from a GGUF file and are kept as `bf16`; activations and sums are `f32`; keys and
//! values are rounded to `bf16` before anything reads them, whether in the same step or later.
//!
//! **The logits of a sequence are bitwise the same** alone, in any batch, in any chunking of its
//! prompt, on any number of threads and with any instruction set: every sum is one chain in a
//! fixed order (`llama/kernels.rs`). So pausing, resuming and recomputing can't change a token.
//!
//! Keys and values live only in the [`PlainMemory`] that the backend copies from and to; a step
//! holds the locks of exactly the blocks that its batch names.

mod attention;
mod config;
mod crew;
mod forward;
mod kernels;
mod math;
mod plan;
mod portable;
mod weights;

use std::num::NonZero;
use std::sync::Arc;

use kv_core::Fence;
use kv_core::host::PlainMemory;
use kv_scheduler::{Batch, ExecuteError, Executor, RowFault, Sampled, StepOutput};
use parking_lot::Mutex;

pub use self::config::{KV_VALUE_BYTES, ModelConfig};
use self::forward::{SampleSlot, Scratch, Step, Workspace};
use self::kernels::Isa;
use self::plan::{Guard, Limits, Plan};
use self::weights::Weights;
use crate::ModelError;
use crate::gguf::GgufFile;

/// Weights of a model, ready to run; shared by any number of [`LlamaCpu`].
#[derive(Debug)]
pub struct LlamaModel {
    config: ModelConfig,
    weights: Weights,
}

impl LlamaModel {
    /// Reads a model, on `threads` threads.
    ///
    /// # Errors
    ///
    /// [`ModelError`] names the file and what can't be used: another architecture, a missing
    /// tensor, a wrong shape, a variant that isn't implemented.
    pub fn load(file: &GgufFile, threads: NonZero<usize>) -> Result<Self, ModelError> {
        let config = ModelConfig::from_gguf(file)?;
        let weights = Weights::load(file, &config, threads)?;
        Ok(Self { config, weights })
    }

    /// Its sizes.
    #[must_use]
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }
}

/// Runs a [`LlamaModel`] on the CPU.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use kv_core::host::PlainMemory;
/// use kv_model::gguf::GgufFile;
/// use kv_model::llama::{LlamaCpu, LlamaModel};
///
/// let threads = std::thread::available_parallelism()?;
/// let model = Arc::new(LlamaModel::load(&GgufFile::open("model.gguf")?, threads)?);
/// // 256 blocks of 16 tokens, shared with a backend that swaps them.
/// let memory = Arc::new(PlainMemory::new(model.config().kv_layout(256, 16)?));
/// let executor = LlamaCpu::new(model, Arc::clone(&memory), threads)?;
/// # drop(executor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LlamaCpu {
    model: Arc<LlamaModel>,
    memory: Arc<PlainMemory>,
    isa: Isa,
    workspace: Workspace,
    /// One per thread.
    scratch: Vec<Scratch>,
    rope: Vec<(f32, f32)>,
}

impl std::fmt::Debug for LlamaCpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LlamaCpu")
            .field("config", &self.model.config)
            .field("isa", &self.isa)
            .field("threads", &self.scratch.len())
            .finish_non_exhaustive()
    }
}

impl LlamaCpu {
    /// An executor over a pool made with [`ModelConfig::kv_layout`].
    ///
    /// # Errors
    ///
    /// [`ModelError::Pool`] if the pool was made for another model.
    pub fn new(
        model: Arc<LlamaModel>,
        memory: Arc<PlainMemory>,
        threads: NonZero<usize>,
    ) -> Result<Self, ModelError> {
        check_pool(&model.config, &memory)?;
        let threads = threads.get();
        Ok(Self {
            isa: Isa::best(),
            workspace: Workspace::new(&model.config, threads),
            scratch: (0..threads).map(|_| Scratch::default()).collect(),
            rope: Vec::new(),
            model,
            memory,
        })
    }

    /// The instruction set in use, for the log.
    #[must_use]
    pub const fn instruction_set(&self) -> &'static str {
        self.isa.name()
    }

    /// The instruction sets of this machine, fastest first.
    #[must_use]
    pub fn instruction_sets() -> Vec<&'static str> {
        Isa::available().into_iter().map(Isa::name).collect()
    }

    /// Uses another instruction set of this machine; the tokens stay the same. Returns whether it
    /// is there.
    pub fn use_instruction_set(&mut self, name: &str) -> bool {
        let isa = Isa::available().into_iter().find(|isa| isa.name() == name);
        if let Some(isa) = isa {
            self.isa = isa;
        }
        isa.is_some()
    }

    /// Logits of the `index`-th row with samples of the last step, index = token; for evaluation.
    /// `None` if there was no such row.
    #[must_use]
    pub fn last_logits(&self, index: usize) -> Option<Vec<f32>> {
        let mut logits = Vec::with_capacity(self.model.config.vocab as usize);
        self.workspace
            .copy_logits(index, &self.model.config, &mut logits)
            .then_some(logits)
    }

    fn run(&mut self, batch: &Batch<'_>, fence: Fence) -> Result<StepOutput, ExecuteError> {
        let memory = Arc::clone(&self.memory);
        let layout = memory.layout();
        let model = Arc::clone(&self.model);
        let config = &model.config;
        let limits = Limits {
            vocab: config.vocab,
            positions: config.context_length,
        };
        let plan = Plan::new(batch, layout, limits)?;
        plan::copy_blocks(&memory, batch.copies)?;
        let mut guards = plan::lock(&memory, &plan.blocks)?;
        let held: Vec<_> = guards.iter_mut().map(Guard::held).collect();
        self.workspace
            .fit(config, plan.tokens.len(), plan.sampled.len());
        angles(&mut self.rope, &model.weights.rope, &plan);
        let step = Step {
            config,
            weights: &model.weights,
            isa: self.isa,
            batch,
            plan: &plan,
            held: &held,
            block_tokens: layout.block_tokens() as usize,
            workspace: &self.workspace,
            rope: &self.rope,
            sampled_tiles: forward::tiles(plan.sampled.len()),
            results: plan.sampled.iter().map(|_| Mutex::default()).collect(),
        };
        if !plan.rows.is_empty() {
            self.scratch.iter_mut().for_each(Scratch::forget);
            let task = |scratch: &mut Scratch, phase, task| step.task(scratch, phase, task);
            crew::run(&mut self.scratch, &step.phases(), &task).map_err(|crew::Panicked| {
                ExecuteError {
                    what: "a thread panicked".to_owned(),
                }
            })?;
        }
        let results = step.results;
        Ok(StepOutput {
            rows: collect(&plan, results),
            fence,
        })
    }
}

impl Executor for LlamaCpu {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        let fence = self.memory.begin_step();
        // Over in any case, and after the blocks were let go.
        let _end = EndStep {
            memory: Arc::clone(&self.memory),
            fence,
        };
        self.run(batch, fence)
    }
}

/// Ends a step when dropped.
struct EndStep {
    memory: Arc<PlainMemory>,
    fence: Fence,
}

impl Drop for EndStep {
    fn drop(&mut self) {
        self.memory.end_step(self.fence);
    }
}

/// Cosine and sine of all tokens.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the rotation is done in f32"
)]
fn angles(rope: &mut Vec<(f32, f32)>, radians: &[f64], plan: &Plan) {
    rope.clear();
    for token in &plan.tokens {
        #[expect(clippy::cast_precision_loss, reason = "positions are below 2^32")]
        let position = token.position as f64;
        rope.extend(radians.iter().map(|radians| {
            let (sin, cos) = (position * radians).sin_cos();
            (cos as f32, sin as f32)
        }));
    }
}

/// Results in the order of the batch.
fn collect(plan: &Plan, results: Vec<SampleSlot>) -> Vec<Result<Vec<Sampled>, RowFault>> {
    let mut rows: Vec<_> = plan
        .faults
        .iter()
        .map(|fault| fault.clone().map_or(Ok(Vec::new()), Err))
        .collect();
    for (&row, result) in plan.sampled.iter().zip(results) {
        let result = result.into_inner().expect("every sampled row was sampled");
        rows[plan.rows[row].index] = result;
    }
    rows
}

fn check_pool(config: &ModelConfig, memory: &PlainMemory) -> Result<(), ModelError> {
    let layout = memory.layout();
    let check = |what, found: u64, expected: u64| {
        if found == expected {
            return Ok(());
        }
        Err(ModelError::Pool {
            what,
            found,
            expected,
        })
    };
    let rows = u64::from(config.layers) * 2;
    check("rows per block", layout.rows_per_block().into(), rows)?;
    let values = u64::from(config.kv_heads) * u64::from(config.head_dim);
    let bytes = values * u64::from(KV_VALUE_BYTES) * u64::from(layout.block_tokens());
    for group in layout.row_groups() {
        check("bytes per row", group.row_bytes, bytes)?;
    }
    Ok(())
}
