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
