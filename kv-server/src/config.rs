//! The configuration: defaults < file < environment < flags.
//!
//! One table, [`SETTINGS`], holds every setting with its default and its help. All four layers
//! speak in the names of that table and in text values, so a wrong value gets the same answer
//! wherever it comes from: the flag's name, the value, and what is allowed.

mod settings;
#[cfg(test)]
mod tests;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv_core::Span;
use kv_scheduler::{EngineConfig, SwapPolicy, VictimPolicy};

pub use self::settings::{ConfigError, SETTINGS, Setting, Source};
pub(crate) use self::settings::{Layers, kind};
use crate::faults::{self, FaultPlan};

/// Which model to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelChoice {
    /// A GGUF file.
    Gguf(PathBuf),
    /// The hash oracle: no weights, the text depends on every byte of the KV cache.
    Oracle,
}

/// Where a victim's KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapMode {
    /// To the host, copied beside decoding.
    Async,
    /// Nowhere: it is computed again.
    Off,
    /// To the host, copied while everything waits.
    Sync,
}

impl SwapMode {
    /// The name used in flags and in statistics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Off => "off",
            Self::Sync => "sync",
        }
    }
}

/// Whether host copies carry a digest per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// No.
    Off,
    /// Computed after each copy out, verified before each copy in.
    On,
}

/// What happens if the asynchronous backend can't be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The server doesn't start.
    Refused,
    /// The blocking backend takes its place, and `/admin/stats` says why.
    Sync,
}

/// Moving KV to host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapConfig {
    /// Where a victim goes.
    pub mode: SwapMode,
    /// Most host memory for parked KV, bytes.
    pub host_bytes: u64,
    /// Most bytes that are submitted to the backend and not yet settled.
    pub inflight_bytes_max: u64,
    /// Digests on host copies.
    pub checksum: Checksum,
    /// What to do without an asynchronous backend.
    pub fallback: Fallback,
    /// How long a copy may take, besides ten times what its bytes need; then its memory is lost.
    pub deadline: Duration,
    /// Imitates a slow link: bytes per second in each direction. A test aid.
    pub link_bytes_per_second: Option<NonZeroU64>,
    /// Imitates a slow link: time added to each copy. A test aid.
    pub link_delay: Duration,
}

/// The hash oracle's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OracleConfig {
    /// Number of layers.
    pub layers: u32,
    /// Bytes of KV per token and layer.
    pub token_bytes: u32,
}

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which model.
    pub model: ModelChoice,
    /// Address or name to listen on.
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    pub port: u16,
    /// Blocks in the GPU pool.
    pub gpu_blocks: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Longest sequence, prompt and answer; `None` takes what the model allows.
    pub max_seq_len: Option<u32>,
    /// Engine settings; `max_seq_len` in there is filled in once the model is known.
    pub engine: EngineConfig,
    /// Moving KV to host memory.
    pub swap: SwapConfig,
    /// The hash oracle's size.
    pub oracle: OracleConfig,
    /// Threads that run the model; `None` takes what the machine has.
    pub threads: Option<u32>,
    /// Longest request body, bytes.
    pub body_bytes_max: usize,
    /// How long running requests may go on after a request to stop.
    pub shutdown_grace: Duration,
    /// What to log: a `tracing` filter.
    pub log: String,
    /// What shall go wrong on purpose; `None` unless fault injection was asked for.
    pub faults: Option<FaultPlan>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Print this and exit with success.
    Print(String),
    /// Serve.
    Serve(Box<Config>),
}

impl Config {
    /// Reads the four layers. `args` starts with the program's name; `environment` may hold
    /// anything, only `KV_SERVER_*` counts.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with where it came from.
    pub fn load(
        args: impl IntoIterator<Item = String>,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Invocation, ConfigError> {
        let mut layers = Layers::new();
        let file = match layers.read_flags(args)? {
            settings::Flags::Print(text) => return Ok(Invocation::Print(text)),
            settings::Flags::Read { file } => file,
        };
        layers.read_environment(environment)?;
        if let Some(path) = file.or_else(|| layers.file_from_environment()) {
            layers.read_file(Path::new(&path))?;
        }
        Ok(Invocation::Serve(Box::new(Self::from_layers(&layers)?)))
    }

    fn from_layers(layers: &Layers) -> Result<Self, ConfigError> {
        let model = match layers.text("model") {
            "oracle" => ModelChoice::Oracle,
            "" => return Err(layers.wrong("model", "a path of a GGUF file, or `oracle`")),
            path => ModelChoice::Gguf(path.into()),
        };
        let host = layers.text("host");
        if host.is_empty() {
            return Err(layers.wrong("host", "an IP address or a host name"));
        }
        let log = layers.text("log");
        if log.parse::<tracing_subscriber::EnvFilter>().is_err() {
            return Err(layers.wrong("log", "a filter such as `info` or `warn,kv_server=debug`"));
        }
        let swap = swap(layers)?;
        let faults = faults::plan(layers, swap.mode)?;
        Ok(Self {
            model,
            host: host.to_owned(),
            port: layers.read(
                "port",
                "a port number from 0 to 65535",
                kind::number(0..=65_535),
            )?,
            gpu_blocks: layers.count("gpu-blocks")?,
            block_tokens: layers.read(
                "block-tokens",
                "a whole number from 1 to 4096",
                kind::number(1..=4096),
            )?,
            max_seq_len: layers.optional("max-seq-len", Layers::count)?,
            engine: engine(layers)?,
            swap,
            faults,
            oracle: OracleConfig {
                layers: layers.read(
                    "oracle-layers",
                    "a whole number from 1 to 1024",
                    kind::number(1..=1024),
                )?,
                token_bytes: layers.read(
                    "oracle-token-bytes",
                    "a whole number from 8 to 1048576",
                    kind::number(8..=1 << 20),
                )?,
            },
            threads: layers.optional("threads", |layers, name| {
                layers.read(
                    name,
                    "a whole number from 1 to 1024",
                    kind::number(1..=1024),
                )
            })?,
            body_bytes_max: layers.read(
                "max-body-bytes",
                "a size from 1KiB to 1GiB, such as `4MiB`",
                |text| kind::size(text, 1 << 10..=1 << 30).and_then(|size| size.try_into().ok()),
            )?,
            shutdown_grace: layers.read(
                "shutdown-grace",
                "a time of at most 24 hours, such as `30s`, `1500ms` or `30` (seconds)",
                kind::duration,
            )?,
            log: log.to_owned(),
        })
    }
}

fn engine(layers: &Layers) -> Result<EngineConfig, ConfigError> {
    let whole = "a whole number from 0 to 4294967295";
    let mode = layers.read("kv-swap-mode", "one of off, sync, async", kind::swap_mode)?;
    let lookahead = layers.optional("lookahead-tokens", |layers, name| {
        layers.read(name, whole, kind::number(0..=u32::MAX))
    })?;
    let millis = |name, least: u64| {
        let allowed = format!("a whole number from {least} to 86400000");
        layers.read(name, &allowed, kind::number(least..=86_400_000))
    };
    let slice_ms = millis("slice-ms", 0)?;
    if slice_ms > 0 && mode != SwapMode::Async {
        return Err(layers.wrong("slice-ms", "0 unless --kv-swap-mode is async"));
    }
    Ok(EngineConfig {
        max_batch_size: layers.count("max-batch-size")?,
        max_tokens_per_step: layers.count("max-tokens-per-step")?,
        prefill_chunk: layers.count("prefill-chunk")?,
        max_waiting: layers.read("max-waiting-requests", whole, kind::number(0..=u32::MAX))?,
        max_n: layers.read(
            "max-n",
            "a whole number from 1 to 1024",
            kind::number(1..=1024),
        )?,
        swap: match mode {
            SwapMode::Async | SwapMode::Sync => SwapPolicy::On,
            SwapMode::Off => SwapPolicy::Off,
        },
        victim: layers.read("victim", "one of newest, oldest, cost", |text| match text {
            "newest" => Some(VictimPolicy::Newest),
            "oldest" => Some(VictimPolicy::Oldest),
            "cost" => Some(VictimPolicy::Cost),
            _ => None,
        })?,
        max_retries: layers.read("kv-swap-max-retries", whole, kind::number(0..=u32::MAX))?,
        lost_permille_max: layers.read(
            "kv-swap-max-lost-permille",
            "a whole number from 0 to 1000",
            kind::number(0..=1_000),
        )?,
        lookahead_tokens: lookahead.unwrap_or_else(|| match mode {
            // What leaves in time is not waited for. Where copies block, and where nothing is
            // copied, leaving early only costs.
            SwapMode::Async => EngineConfig::default().lookahead_tokens,
            SwapMode::Off | SwapMode::Sync => 0,
        }),
        watermark_permille: layers.read(
            "watermark-permille",
            "a whole number from 0 to 500",
            kind::number(0..=500),
        )?,
        slice: (slice_ms > 0).then(|| Span::from_millis(slice_ms)),
        max_swaps: layers.read("max-swaps", whole, kind::number(0..=u32::MAX))?,
        priority_aging: Span::from_millis(millis("priority-aging-ms", 1)?),
        resume_slack_tokens: layers.read(
            "resume-slack-tokens",
            whole,
            kind::number(0..=u32::MAX),
        )?,
        ..EngineConfig::default()
    })
}

fn swap(layers: &Layers) -> Result<SwapConfig, ConfigError> {
    let size = |name| {
        layers.read(
            name,
            "a size above 0, such as `512MiB`, `2GiB` or plain bytes",
            |text| kind::size(text, 1..=1 << 50),
        )
    };
    let switch = |name| layers.read(name, "true or false", kind::switch);
    let host_bytes = size("kv-swap-host-memory-bytes")?;
    let inflight_bytes_max = size("kv-swap-max-inflight-bytes")?;
    if inflight_bytes_max > host_bytes {
        let allowed = format!(
            "at most --kv-swap-host-memory-bytes, which is {}",
            layers.text("kv-swap-host-memory-bytes")
        );
        return Err(layers.wrong("kv-swap-max-inflight-bytes", &allowed));
    }
    Ok(SwapConfig {
        mode: layers.read("kv-swap-mode", "one of off, sync, async", kind::swap_mode)?,
        host_bytes,
        inflight_bytes_max,
        checksum: if switch("kv-swap-checksum")? {
            Checksum::On
        } else {
            Checksum::Off
        },
        fallback: if switch("no-kv-swap-sync-fallback")? {
            Fallback::Refused
        } else {
            Fallback::Sync
        },
        deadline: layers.read(
            "kv-swap-deadline-ms",
            "a whole number of milliseconds from 1 to 86400000",
            |text| kind::number(1..=86_400_000)(text).map(Duration::from_millis),
        )?,
        link_bytes_per_second: layers
            .optional("host-link-bandwidth", |layers, name| {
                layers.read(name, "bytes per second above 0, such as `100MiB`", |text| {
                    kind::size(text, 1..=1 << 50)
                })
            })?
            .and_then(NonZeroU64::new),
        link_delay: layers.read(
            "host-link-delay-ms",
            "a whole number of milliseconds from 0 to 600000",
            |text| kind::number(0..=600_000)(text).map(Duration::from_millis),
        )?,
    })
}
