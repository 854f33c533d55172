//! Everything that can go wrong with a GPU, and what the caller may still assume.

use core::fmt;
use std::path::PathBuf;

use kv_core::SlotIndex;

/// What a driver call answered, by number and by name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} answered {name} ({code})")]
pub struct DriverError {
    /// The call that answered. An error of an earlier, asynchronous piece of work may show here.
    pub call: &'static str,
    /// The driver's number.
    pub code: i32,
    /// The driver's name for it.
    pub name: String,
}

/// Which limit of the system forbids page-locking so much memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// The memory limit of a control group, read from that file.
    ControlGroup(PathBuf),
    /// The resource limit on locked memory.
    LockedMemory,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ControlGroup(file) => write!(
                f,
                "the container's memory limit in {} (raise it, for example with --memory)",
                file.display()
            ),
            Self::LockedMemory => {
                f.write_str("RLIMIT_MEMLOCK (raise it with ulimit -l or --ulimit memlock=-1)")
            }
        }
    }
}

/// Why there is no CUDA backend, or why it did not get what it asked for.
///
/// Whatever an erring constructor had taken was given back, unless a variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library could not be opened: no NVIDIA driver is installed here, or the
    /// container does not show it.
    #[error("no NVIDIA driver: the library libcuda.so.1 could not be opened")]
    NoDriver,
    /// There is a driver, but it shows fewer GPUs.
    #[error("no GPU number {ordinal}: the driver shows {count}")]
    NoDevice {
        /// The GPU that was asked for, counted from 0.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver is too old for this crate.
    #[error("the driver speaks CUDA {found}, at least {needed} is needed (both times 1000)")]
    DriverTooOld {
        /// What it speaks, as major × 1000 + minor × 10.
        found: i32,
        /// What is needed, in the same form.
        needed: i32,
    },
    /// The GPU is too old for the kernels of this crate.
    #[error("the GPU has compute capability {major}.{minor}, at least 8.0 is needed")]
    DeviceTooOld {
        /// Of the capability.
        major: i32,
        /// Of the capability.
        minor: i32,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The operating system refused memory.
    #[error("{call} of {bytes} bytes failed: {reason}")]
    System {
        /// The call.
        call: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
    /// A limit of the system forbids so large a host pool.
    #[error(
        "the host pool asks for {asked} bytes of page-locked memory, but {allowed} are allowed by \
         {limit}; or ask for less with {flag}"
    )]
    MemoryLimit {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that could be had.
        allowed: u64,
        /// What forbids more.
        limit: MemoryLimit,
        /// The setting that asks for the memory.
        flag: &'static str,
    },
    /// A setting can't be used.
    #[error("{what}")]
    Config {
        /// What is wrong with which setting.
        what: String,
    },
    /// Foreign memory was described by a list of the wrong length.
    #[error("{given} base addresses for a layout of {regions} regions")]
    RegionCount {
        /// Length of the list.
        given: usize,
        /// Regions of the layout.
        regions: usize,
    },
    /// A thread could not be started.
    #[error("no thread could be started: {reason}")]
    Thread {
        /// What the system said.
        reason: String,
    },
    /// A slot's bytes were asked for while a copy may touch them, or there is no such slot.
    #[error("{slot:?} is not at rest")]
    SlotBusy {
        /// Which.
        slot: SlotIndex,
    },
    /// Bytes of the wrong length were passed for a block.
    #[error("{given} bytes for a block of {block_bytes}")]
    BlockLength {
        /// Length that was passed.
        given: usize,
        /// Length of a block.
        block_bytes: u64,
    },
}

impl CudaError {
    /// The driver's number, where there is one.
    #[must_use]
    pub const fn driver_code(&self) -> Option<i32> {
        match self {
            Self::Driver(error) => Some(error.code),
            _ => None,
        }
    }
}
