//! The machine alone: completions are made by hand, every operation is followed by a recount.
//!
//! `i04_...` guards invariant I04.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the switches for tests don't reach helper functions in integration tests"
)]

mod blocks;
mod cancel;
mod clean;
mod deadline;
mod ops;
mod pieces;
mod refusal;
mod rig;
mod swap;
mod ui;
