//! Swaps the KV cache of LLM serving between an NVIDIA GPU and pinned host memory.
//!
//! [`CudaBackend`] implements [`kv_core::Backend`]: scattered blocks go through a small staging
//! ring on the GPU, one ring per direction, so that they move at the speed of the link whatever
//! their size; or directly, where a short measurement at construction says that this is as fast.
//! [`BlockingCudaBackend`] copies while everything waits, into pageable memory.
//! [`open`] takes the second if the first can't be had.
//!
//! The driver is opened at run time: this crate builds and its programs start on machines without
//! CUDA, where [`Device::open`] answers [`CudaError::NoDriver`].
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use kv_core::Layout;
//! use kv_transfer_cuda::{CudaBackend, CudaConfig, Device, GpuMemory, StepFences};
//!
//! let device = Device::open(0)?;
//! let layout = Layout::stacked(32, 4_096, 16, 8, 128, 2)?;
//! let memory = Arc::new(GpuMemory::allocate(&device, layout)?);
//! let fences = Arc::new(StepFences::new(&device)?);
//! // An executor shares both, and ends each step with `fences.record(&stream)`.
//! let backend = CudaBackend::new(memory, fences, &CudaConfig::new(1_024))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A process that swaps should be started with `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the driver's
//! default of 8, streams of copies and of computing may share a hardware queue and wait for each
//! other.
//!
//! # Who owns what
//!
//! * An executor and a backend share a [`GpuMemory`] (the pool of blocks) and [`StepFences`] (the
//!   ends of steps). The executor records a fence after each step; copies wait for it on the GPU.
//! * A backend owns its pinned pool, staging slabs, streams and threads. What a running copy
//!   touches lives until the copy is confirmed over, whatever is dropped; what is never confirmed
//!   goes to the graveyard, see [`buried`].
//!
//! # Features
//!
//! * `bench`: the program `kv-transfer-cuda-bench`.

mod arena;
mod backend;
mod blocking;
mod clock;
mod config;
mod copy;
mod cost;
mod device;
mod digest;
mod error;
mod event;
mod fences;
mod flight;
mod graveyard;
mod kernels;
mod lane;
mod limits;
mod memory;
mod open;
mod outbox;
mod plan;

pub use arena::PoolTimes;
pub use backend::{CudaBackend, Findings};
pub use blocking::BlockingCudaBackend;
pub use config::{
    ArenaConfig, CudaConfig, Notice, PathChoice, SlabCaching, StagingConfig, StreamPriority,
};
pub use cost::Costs;
pub use device::{Device, DeviceFacts, LoadedKernel, Stream};
pub use error::{CudaError, DriverError, MemoryLimit};
pub use event::{Event, Progress};
pub use fences::StepFences;
pub use graveyard::{Buried, being_freed, buried};
pub use memory::{DeviceBytes, GpuMemory};
pub use open::{Fallback, Opened, open};
