//! Asynchronous if it can be had, else blocking, with the reason.

use std::sync::Arc;

use crate::config::CudaConfig;
use crate::fences::StepFences;
use crate::memory::GpuMemory;
use crate::{BlockingCudaBackend, CudaBackend, CudaError};

/// What to do if the asynchronous backend can't be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Take the blocking one.
    Blocking,
    /// Fail.
    Refuse,
}

/// What was had.
#[derive(Debug)]
pub enum Opened {
    /// What was asked for.
    Asynchronous(CudaBackend),
    /// The blocking backend instead.
    Blocking {
        /// The backend.
        backend: BlockingCudaBackend,
        /// Why not the asynchronous one.
        reason: CudaError,
    },
}

/// Makes an asynchronous backend, or a blocking one if that is allowed.
///
/// # Errors
///
/// Why there is no asynchronous backend, if no other is allowed; or why there is no blocking one
/// either.
pub fn open(
    memory: &Arc<GpuMemory>,
    fences: &Arc<StepFences>,
    config: &CudaConfig,
    fallback: Fallback,
) -> Result<Opened, CudaError> {
    match (
        CudaBackend::new(Arc::clone(memory), Arc::clone(fences), config),
        fallback,
    ) {
        (Ok(backend), _) => Ok(Opened::Asynchronous(backend)),
        (Err(reason), Fallback::Blocking) => {
            let backend = BlockingCudaBackend::new(Arc::clone(memory), Arc::clone(fences))?;
            Ok(Opened::Blocking { backend, reason })
        }
        (Err(reason), Fallback::Refuse) => Err(reason),
    }
}
