//! The backends over plain memory and the simulated one: the suite of the contract, and what is
//! peculiar to each.

#![expect(
    clippy::unwrap_used,
    reason = "the switches for tests don't reach helper functions in integration tests"
)]

mod conformance;
mod host;
mod order;
mod round_trip;
mod sim;
mod sync;
mod world;
