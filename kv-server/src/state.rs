//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_scheduler::RequestId;
use kv_telemetry::Telemetry;
use tokio::sync::Semaphore;

use crate::api::params::Limits;
use crate::config::SwapMode;
use crate::engine_thread::{EngineHandle, Health};
use crate::error::ApiError;
use crate::text::Text;

/// Bytes of request bodies that may be in memory at the same time, at least.
const BODY_BYTES_TOTAL: usize = 256 << 20;

/// Requests that may be between the handlers and the engine's own queue, beyond what that takes.
const DOOR_EXTRA: u32 = 1024;

/// Requests that may be there if the engine's queue has no limit.
const DOOR_UNLIMITED: u32 = 1 << 16;

/// What became of the wish for a way of swapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SwapFacts {
    /// The way that is used.
    pub(crate) mode: SwapMode,
    /// Why it is not the one that was asked for.
    pub(crate) fallback_reason: Option<String>,
}

/// Sizes that handlers need for defaults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) max_seq_len: u32,
    pub(crate) max_waiting: u32,
    pub(crate) gpu_blocks: u32,
    pub(crate) block_tokens: u32,
    pub(crate) body_bytes_max: usize,
}

/// Shared by all handlers.
#[derive(Debug)]
pub(crate) struct AppState {
    pub(crate) engine: EngineHandle,
    pub(crate) text: Arc<Text>,
    pub(crate) limits: Limits,
    pub(crate) sizes: Sizes,
    pub(crate) swap: SwapFacts,
    pub(crate) telemetry: Arc<Telemetry>,
    /// When the model was loaded, seconds since 1970.
    pub(crate) created: u64,
    /// One permit per request that the engine has not answered yet.
    pub(crate) door: Semaphore,
    door_max: u32,
    /// One permit per byte of a request body in memory.
    pub(crate) bodies: Arc<Semaphore>,
    last_id: AtomicU64,
    /// Tells the ids of this process from those of the one before.
    prefix: u64,
}

impl AppState {
    pub(crate) fn new(
        engine: EngineHandle,
        text: Arc<Text>,
        limits: Limits,
        sizes: Sizes,
        swap: SwapFacts,
        telemetry: Arc<Telemetry>,
    ) -> Self {
        let door_max = match sizes.max_waiting {
            0 => DOOR_UNLIMITED,
            waiting => waiting.saturating_add(DOOR_EXTRA).min(DOOR_UNLIMITED),
        };
        let body_bytes = BODY_BYTES_TOTAL.max(sizes.body_bytes_max);
        Self {
            engine,
            text,
            limits,
            sizes,
            swap,
            telemetry,
            created: crate::clock::epoch_s(),
            door: Semaphore::new(door_max as usize),
            door_max,
            bodies: Arc::new(Semaphore::new(body_bytes)),
            last_id: AtomicU64::new(0),
            prefix: draw(),
        }
    }

    /// An id for the engine, not used before.
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.last_id.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// A name for a call, as clients see it.
    pub(crate) fn call_name(&self, kind: &str) -> String {
        let number = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        format!("{kind}-{:016x}{number:08x}", self.prefix)
    }

    /// Too many requests are at the door.
    pub(crate) fn door_full(&self) -> ApiError {
        ApiError::queue_full(self.door_max, self.door_max)
    }

    /// Refuses early what the engine would refuse or could not answer.
    pub(crate) fn check_open(&self) -> Result<(), ApiError> {
        match self.engine.health() {
            Health::Dead => Err(ApiError::engine_dead()),
            Health::Draining => Err(ApiError::shutting_down()),
            Health::Degraded
            | Health::Failing(_)
            | Health::Healthy
            | Health::Stuck(_)
            | Health::Wedged => Ok(()),
        }
    }
}

/// A number that nobody can guess well, from the standard library's hasher keys.
pub(crate) fn draw() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
