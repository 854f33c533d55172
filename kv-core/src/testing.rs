//! What tests of this crate and of others need: a simulated backend, a suite that any backend
//! must pass, and a small generator.
//!
//! Nothing here is part of a production build; things panic when a test is wrong.

pub mod conformance;
mod fate;
mod flat;
mod rng;
mod sim;

pub use fate::{Fates, Met, Odds};
pub use flat::FlatPool;
pub use rng::Rng;
pub use sim::{CopyAt, OnClose, Pending, SimBackend, SimConfig, SimControl, SimError};
