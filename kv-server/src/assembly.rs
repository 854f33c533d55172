//! Puts a server's inside together from its configuration: model, pool, machine, backend, engine.

mod gguf;
mod room;
mod timed;

use std::path::PathBuf;
use std::sync::Arc;

use kv_core::host::{self, DamageSlot, HostBackend, HostConfig, Link, PlainMemory, SyncBackend};
use kv_core::{Backend, Deadlines, HostSide, Layout, Machine, MachineConfig, Span};
use kv_model::chat::ChatTemplate;
use kv_model::oracle::{Oracle, OracleConfig};
use kv_model::tokenizer::OracleTokenizer;
use kv_scheduler::{Engine, EngineConfig, EngineConfigError, Executor};
use kv_telemetry::{Identity, Telemetry};

use self::timed::Timed;
use crate::api::params::Limits;
use crate::clock::Clock;
use crate::config::{Checksum, Config, Fallback, ModelChoice, SwapConfig, SwapMode};
use crate::engine_thread::EnginePort;
use crate::faults::{Delay, FaultPlan, FaultyBackend, FaultyExecutor, ForcedSwaps};
use crate::state::{AppState, Sizes, SwapFacts};
use crate::telemetry::{Recorder, StallMeter};
use crate::text::Text;

/// Words of the oracle's vocabulary, besides the bytes.
const ORACLE_WORDS: u16 = 2048;

/// How long a copy waits for the step that it must come after.
const FENCE_LIMIT: Span = Span::from_secs(60);

/// Longest sequence of the oracle, which has no limit of its own.
const ORACLE_CONTEXT: u32 = 4096;

/// Why the inside could not be put together. Nothing was left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssemblyError {
    /// A flag has a value that doesn't go with the model.
    #[error("--{flag} is {value}, must be {allowed}")]
    Flag {
        /// The flag without its dashes.
        flag: &'static str,
        /// Its value.
        value: String,
        /// What is allowed with this model.
        allowed: String,
    },
    /// The model can't be used.
    #[error("--model {path:?} can't be served")]
    Model {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The asynchronous backend can't be set up, and the blocking one is not wanted.
    #[error("the asynchronous swap can't be set up, and --no-kv-swap-sync-fallback is given")]
    Backend(#[from] host::HostStartError),
    /// The system gave no thread for the engine.
    #[error("the engine thread can't be started")]
    Thread(#[source] std::io::Error),
    /// Settings that don't go together.
    #[error("{0}")]
    Settings(String),
}

/// A model that is ready to run.
pub struct Model {
    /// Name for clients.
    pub name: String,
    /// Runs it.
    pub executor: Box<dyn Executor + Send>,
    /// Its pool.
    pub memory: Arc<PlainMemory>,
    /// Its tokenizer and chat template.
    pub text: Text,
    /// Longest sequence that it was made for.
    pub context: u32,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Loads what the configuration names.
    ///
    /// # Errors
    ///
    /// [`AssemblyError`] names the file or the flag.
    pub fn load(config: &Config) -> Result<Self, AssemblyError> {
        match &config.model {
            ModelChoice::Gguf(path) => gguf::load(path, config).map_err(|source| {
                // Some of it is about flags and not about the file.
                match source.downcast() {
                    Ok(error) => *error,
                    Err(source) => AssemblyError::Model {
                        path: path.clone(),
                        source,
                    },
                }
            }),
            ModelChoice::Oracle => Self::oracle(config),
        }
    }

    /// The hash oracle with words of its own.
    fn oracle(config: &Config) -> Result<Self, AssemblyError> {
        let tokenizer = OracleTokenizer::new(ORACLE_WORDS);
        let oracle = tokenizer.oracle_config();
        Self::oracle_with(config, tokenizer, oracle)
    }

    /// The hash oracle with any vocabulary and script.
    ///
    /// # Errors
    ///
    /// [`AssemblyError::Settings`] if the pool or the vocabulary can't be used.
    pub fn oracle_with(
        config: &Config,
        tokenizer: OracleTokenizer,
        oracle: OracleConfig,
    ) -> Result<Self, AssemblyError> {
        let settings = |error: &dyn std::error::Error| AssemblyError::Settings(error.to_string());
        let layout = Layout::latent(
            config.oracle.layers,
            config.gpu_blocks,
            config.block_tokens,
            config.oracle.token_bytes,
            1,
        )
        .map_err(|error| settings(&error))?;
        room::for_pool(&layout)?;
        let memory = Arc::new(PlainMemory::new(layout));
        let executor =
            Oracle::new(Arc::clone(&memory), oracle).map_err(|error| settings(&error))?;
        Ok(Self {
            name: "oracle".to_owned(),
            executor: Box::new(executor),
            memory,
            text: Text::new(Arc::new(tokenizer), ChatTemplate::plain()),
            context: ORACLE_CONTEXT,
        })
    }
}

/// A running inside: what handlers share. The engine thread runs until it is drained.
pub(crate) fn assemble(config: &Config, model: Model) -> Result<AppState, AssemblyError> {
    let clock = Clock::start();
    let port = EnginePort::new(clock);
    let max_seq_len = sequence_limit(config, model.context)?;
    let (inner, host, swap) = backend(config, &model.memory, clock)?;
    let stalls = Arc::new(StallMeter::default());
    let meter = Arc::clone(&stalls);
    let mut backend = Timed {
        inner,
        clock,
        meter,
    };
    backend.set_waker(port.waker());
    let machine = machine(config, model.memory.layout(), host)?;
    let engine_config = EngineConfig {
        max_seq_len,
        // Slices and blocking copies don't go together, also not after a fallback.
        slice: config.engine.slice.filter(|_| swap.mode == SwapMode::Async),
        ..config.engine
    };
    let executor = executor(model.executor, config.faults.as_ref());
    let engine = Engine::new(engine_config, machine, executor, backend)
        .map_err(|error| engine_flag(&error))?;
    let telemetry = Arc::new(Telemetry::new(&Identity {
        version: env!("CARGO_PKG_VERSION"),
        mode: swap.mode.name(),
        configured_mode: config.swap.mode.name(),
        fallback: swap
            .fallback_reason
            .as_ref()
            .map_or("", |_| "no_copy_threads"),
        ..Identity::default()
    }));
    let recorder = Recorder::new(Arc::clone(&telemetry));
    let every = config
        .faults
        .as_ref()
        .and_then(|plan| plan.force_swap_every);
    let started = match every {
        Some(every) => port.start(ForcedSwaps::new(engine, every), recorder, stalls),
        None => port.start(engine, recorder, stalls),
    };
    let engine = started.map_err(AssemblyError::Thread)?;
    let limits = Limits {
        model: model.name,
        max_n: config.engine.max_n,
        vocabulary: model.text.vocabulary(),
    };
    let sizes = Sizes {
        max_seq_len,
        max_waiting: config.engine.max_waiting,
        gpu_blocks: config.gpu_blocks,
        block_tokens: config.block_tokens,
        body_bytes_max: config.body_bytes_max,
    };
    Ok(AppState::new(
        engine,
        Arc::new(model.text),
        limits,
        sizes,
        swap,
        telemetry,
    ))
}

fn sequence_limit(config: &Config, context: u32) -> Result<u32, AssemblyError> {
    match config.max_seq_len {
        Some(asked) if asked > context || asked < 2 => Err(AssemblyError::Flag {
            flag: "max-seq-len",
            value: asked.to_string(),
            allowed: format!("between 2 and what the model was made for, which is {context}"),
        }),
        Some(asked) => Ok(asked),
        None => Ok(context),
    }
}

fn engine_flag(error: &EngineConfigError) -> AssemblyError {
    let flag = match error.name {
        "max_batch_size" => "max-batch-size",
        "max_tokens_per_step" => "max-tokens-per-step",
        "prefill_chunk" => "prefill-chunk",
        "max_seq_len" => "max-seq-len",
        "max_n" => "max-n",
        _ => return AssemblyError::Settings(error.to_string()),
    };
    let allowed = match error.name {
        "max_tokens_per_step" => format!("at least --max-batch-size, which is {}", error.least),
        _ => format!("at least {}", error.least),
    };
    AssemblyError::Flag {
        flag,
        value: error.value.to_string(),
        allowed,
    }
}

fn machine(config: &Config, layout: &Layout, host: HostSide) -> Result<Machine, AssemblyError> {
    let checksum = match config.swap.checksum {
        Checksum::Off => kv_core::Checksum::Off,
        Checksum::On => kv_core::Checksum::On,
    };
    let settings = MachineConfig::new(layout, host, config.swap.inflight_bytes_max);
    Machine::new(MachineConfig {
        checksum,
        deadlines: Deadlines {
            base: config.swap.deadline.into(),
            ..settings.deadlines
        },
        ..settings
    })
    .map_err(|error| AssemblyError::Settings(error.to_string()))
}

/// Whatever moves the bytes.
type AnyBackend = Box<dyn Backend + Send>;

/// The backend itself, or one that fails as planned around it.
fn faulty(
    inner: impl DamageSlot + Send + 'static,
    plan: Option<&FaultPlan>,
    clock: Clock,
    delay: Delay,
) -> AnyBackend {
    match plan {
        Some(plan) => Box::new(FaultyBackend::new(inner, plan.clone(), clock, delay)),
        None => Box::new(inner),
    }
}

/// The model itself, or one that fails as planned around it.
fn executor(inner: Box<dyn Executor + Send>, plan: Option<&FaultPlan>) -> Box<dyn Executor + Send> {
    match plan.and_then(|plan| plan.step_error) {
        Some(step) => Box::new(FaultyExecutor::new(inner, step)),
        None => inner,
    }
}

/// The backend for the configured way of swapping, and what the machine must know about it.
fn backend(
    config: &Config,
    memory: &Arc<PlainMemory>,
    clock: Clock,
) -> Result<(AnyBackend, HostSide, SwapFacts), AssemblyError> {
    let swap = &config.swap;
    let block_bytes = memory.layout().block_bytes();
    let least = format!("at least one block, which is {block_bytes} bytes with this model");
    for (flag, bytes) in [
        ("kv-swap-host-memory-bytes", swap.host_bytes),
        ("kv-swap-max-inflight-bytes", swap.inflight_bytes_max),
    ] {
        if bytes < block_bytes {
            let value = bytes.to_string();
            return Err(AssemblyError::Flag {
                flag,
                value,
                allowed: least,
            });
        }
    }
    let tell = Arc::new(move || clock.now());
    let blocking = || {
        let backend = SyncBackend::new(Arc::clone(memory), FENCE_LIMIT, tell.clone());
        let backend = faulty(backend, config.faults.as_ref(), clock, Delay::Block);
        (backend, HostSide::Pageable)
    };
    let facts = |mode, fallback_reason| SwapFacts {
        mode,
        fallback_reason,
    };
    if swap.mode != SwapMode::Async {
        let (backend, host) = blocking();
        return Ok((backend, host, facts(swap.mode, None)));
    }
    room::for_host(swap.host_bytes)?;
    let slots = u32::try_from(swap.host_bytes / block_bytes).unwrap_or(u32::MAX);
    match HostBackend::new(Arc::clone(memory), host_config(swap, slots), tell.clone()) {
        Ok(backend) => Ok((
            faulty(backend, config.faults.as_ref(), clock, Delay::HoldBack),
            HostSide::Slots(slots),
            facts(SwapMode::Async, None),
        )),
        Err(error) if swap.fallback == Fallback::Sync => {
            tracing::warn!(%error, "the asynchronous swap can't be set up; copies block instead");
            let (backend, host) = blocking();
            Ok((
                backend,
                host,
                facts(SwapMode::Sync, Some(error.to_string())),
            ))
        }
        Err(error) => Err(error.into()),
    }
}

fn host_config(swap: &SwapConfig, slots: u32) -> HostConfig {
    let link = Link {
        bandwidth_bytes_per_second: swap.link_bytes_per_second,
        delay: swap.link_delay.into(),
    };
    HostConfig {
        link_out: link,
        link_in: link,
        ..HostConfig::new(slots)
    }
}
