//! OpenAI-compatible server over the swapping engine.
//!
//! A request's way: handler, bounded channel, engine thread, per-request channel, answer. The
//! engine thread is the only one that touches engine, backend and model.
//! A library with a thin program, so that tests start servers in their own process.

#![forbid(unsafe_code)]

mod api;
mod app;
mod assembly;
mod body;
mod cli;
mod clock;
pub mod config;
mod engine_thread;
mod error;
pub mod faults;
mod generation;
mod listen;
mod plan;
mod routes;
mod shutdown;
mod state;
mod telemetry;
mod text;

pub use app::{Ended, Server, StartError};
pub use assembly::{AssemblyError, Model};
pub use cli::run;
pub use text::Text;
