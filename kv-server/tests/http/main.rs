//! The whole server over HTTP, in this process, on the hash oracle: any byte of the KV cache that
//! is lost, stale or foreign changes a text here.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "this is a test"
)]

mod answers;
mod client;
mod faults;
mod lifecycle;
mod refusals;
mod setup;
mod swap;
