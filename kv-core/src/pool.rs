//! Who holds each GPU block and each host slot, at any moment.

mod gpu;
mod host;
mod runs;

pub(crate) use gpu::{BlockState, GpuPool};
pub use host::HostSide;
pub(crate) use host::{CleanOwner, HostPool, SlotState};
