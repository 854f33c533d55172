//! The acceptance scenarios on the hash oracle and the simulated backend, in virtual time, with
//! exact numbers; and what else the engine promises about order, refusals and retries.
//!
//! `s01_...` guards scenario S1, `i07_...` guards invariant I07.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the switches for tests don't reach helper functions in integration tests"
)]

mod atomic;
mod cancel;
mod damage;
mod door;
mod exact;
mod ladder;
mod order;
mod stream;
mod world;
