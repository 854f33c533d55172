//! Settings of the backend.

use core::num::NonZeroUsize;
use std::thread;

use crate::CudaError;

const MIB: u64 = 1 << 20;

/// Fixed device memory that all staging slabs together may take.
const STAGING_BYTES_MAX: u64 = 96 * MIB;

/// How urgent the work of a stream is beside that of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPriority {
    /// As urgent as the GPU knows: for computing.
    High,
    /// As little urgent as the GPU knows: for copies.
    Low,
}

/// Whether staging slabs should stay in the second-level cache of the GPU between the kernel that
/// fills them and the copy engine that reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabCaching {
    /// The kernel marks what it writes as the last to be evicted.
    EvictLast,
    /// Part of the cache is set aside for the slabs. This concerns the whole context: other work
    /// has that much less of the cache.
    Persisting,
    /// Nothing is asked for.
    Plain,
}

/// How the thread that waits for a copy waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It sleeps.
    Sleep,
    /// It sleeps, but asks again and again while a flight's last copy is under way, for at most
    /// so many microseconds per flight; then it sleeps again.
    SpinBriefly {
        /// Longest spin, microseconds.
        micros_max: u32,
    },
}

/// Which way copies take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChoice {
    /// The one that a short measurement at construction makes out as the cheapest.
    Measured,
    /// Always through the staging ring.
    Ring,
    /// Always one copy per row.
    Rows,
}

/// Staging slabs of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingConfig {
    /// Number of slabs, used in turn.
    pub slabs: u32,
    /// Length of each, bytes.
    pub slab_bytes: u64,
    /// Streams that the copies take in turn, 1 or 2.
    pub copy_streams: u32,
}

/// Settings of the pinned pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// Host slots, one block each.
    pub slots: u32,
    /// Memory is page-locked in chunks of at most so many bytes. At most 1 GiB.
    pub chunk_bytes: u64,
    /// Threads that touch the memory at the same time.
    pub touch_threads: NonZeroUsize,
    /// What the user calls the setting that asks for the pool; errors name it.
    pub flag: &'static str,
}

impl ArenaConfig {
    /// So many slots, and defaults for the rest.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let cores = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let most = NonZeroUsize::new(16).unwrap_or(NonZeroUsize::MIN);
        Self {
            slots,
            chunk_bytes: 512 * MIB,
            touch_threads: cores.min(most),
            flag: "--kv-swap-host-memory-bytes",
        }
    }
}

/// Settings of the backend. The defaults are what `docs/benchmarks.md` measured as best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// The pinned pool.
    pub arena: ArenaConfig,
    /// Staging for copies out.
    pub staging_out: StagingConfig,
    /// Staging for copies in.
    pub staging_in: StagingConfig,
    /// Where the slabs of copies out stay.
    pub slab_caching: SlabCaching,
    /// Which way copies take.
    pub path: PathChoice,
    /// How the end of a copy is noticed.
    pub notice: Notice,
    /// Commands per direction that wait or run at the same time; more are refused as busy.
    pub queue_max: usize,
    /// Threads that compute digests; started with the first command that asks for one.
    pub digest_threads: NonZeroUsize,
    /// Thread blocks of a gather or scatter kernel at most.
    pub grid_max: u32,
    /// Priority of the gather and scatter kernels.
    pub pack_priority: StreamPriority,
}

impl CudaConfig {
    /// So many host slots, and defaults for the rest.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            arena: ArenaConfig::new(slots),
            staging_out: StagingConfig {
                slabs: 2,
                slab_bytes: 8 * MIB,
                copy_streams: 1,
            },
            staging_in: StagingConfig {
                slabs: 2,
                slab_bytes: 16 * MIB,
                copy_streams: 1,
            },
            slab_caching: SlabCaching::EvictLast,
            path: PathChoice::Measured,
            notice: Notice::Sleep,
            queue_max: 1024,
            digest_threads: NonZeroUsize::new((cores / 4).clamp(1, 4)).unwrap_or(NonZeroUsize::MIN),
            grid_max: 64,
            pack_priority: StreamPriority::Low,
        }
    }

    /// Fixed device memory of the staging slabs, bytes.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        [self.staging_out, self.staging_in]
            .iter()
            .map(|staging| u64::from(staging.slabs).saturating_mul(staging.slab_bytes))
            .fold(0, u64::saturating_add)
    }

    pub(crate) fn check(&self) -> Result<(), CudaError> {
        let refuse = |what: String| Err(CudaError::Config { what });
        for (name, staging) in [("out", self.staging_out), ("in", self.staging_in)] {
            if staging.slabs < 2 {
                return refuse(format!("staging {name} needs at least 2 slabs"));
            }
            if staging.slab_bytes < 64 * 1024 || !staging.slab_bytes.is_multiple_of(4096) {
                return refuse(format!(
                    "a slab of staging {name} must be at least 64 KiB and whole pages of 4 KiB"
                ));
            }
            if !(1..=2).contains(&staging.copy_streams) {
                return refuse(format!("staging {name} takes 1 or 2 copy streams"));
            }
        }
        let staging = self.staging_bytes();
        if staging > STAGING_BYTES_MAX {
            return refuse(format!(
                "staging takes {staging} bytes of the GPU, at most {STAGING_BYTES_MAX} are allowed"
            ));
        }
        if self.queue_max == 0 || self.grid_max == 0 || self.arena.slots == 0 {
            return refuse(String::from(
                "queue_max, grid_max and slots must be at least 1",
            ));
        }
        if !(2 * MIB..=1024 * MIB).contains(&self.arena.chunk_bytes) {
            return refuse(String::from("chunk_bytes must lie between 2 MiB and 1 GiB"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{CudaConfig, MIB};

    #[test]
    fn the_defaults_are_valid_and_within_the_staging_budget() {
        let config = CudaConfig::new(8);
        assert_eq!(config.check(), Ok(()));
        assert_eq!(config.staging_bytes(), 48 * MIB);
    }

    #[test]
    fn what_can_not_work_is_refused_by_name() {
        let mut config = CudaConfig::new(8);
        config.staging_in.slab_bytes = 48 * MIB;
        let error = config.check().expect_err("112 MiB are too many");
        assert!(error.to_string().contains("staging takes"), "{error}");
        let mut config = CudaConfig::new(8);
        config.arena.chunk_bytes = 4096 * MIB;
        let error = config.check().expect_err("chunks are at most 1 GiB");
        assert!(error.to_string().contains("chunk_bytes"), "{error}");
        assert!(CudaConfig::new(0).check().is_err());
    }
}
