//! Tests on a real GPU. Built with `--cfg kv_gpu` only; without a GPU they fail.
//!
//! `cargo xtask gpu build` builds them into one binary that runs where the GPU is; run it with
//! `--test-threads=1`, since steps that one test holds up would delay the others. The number of
//! rounds of the long ones can be set with `KV_GPU_ROUNDS`, for tools that slow everything down.

#![cfg(kv_gpu)]
#![expect(clippy::panic, reason = "that is how a test fails")]

mod bytes;
mod conform;
mod life;
mod order;
mod poison;
mod rig;
mod soak;
