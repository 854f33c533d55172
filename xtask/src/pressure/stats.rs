//! What the server says about itself once the load is over.

use anyhow::{Context, Result};
use serde_json::Value;

use super::client::Client;
use super::summary::Percentiles;

/// The page with all numbers.
const PAGE: &str = "/admin/stats";

/// Gauges, as JSON pointers into the page: all 0 when nobody is served.
const GAUGES: &[&str] = &[
    "/engine/waiting",
    "/engine/running",
    "/engine/swapped",
    "/engine/recompute_pending",
    "/gpu_blocks/allocated",
    "/gpu_blocks/evicting",
    "/gpu_blocks/restoring",
    "/gpu_blocks/lost",
    "/host_slots/parked",
    "/host_slots/filling",
    "/host_slots/clean",
    "/host_slots/lost",
    "/flights",
    "/inflight_bytes",
];

/// The numbers that matter here.
#[derive(Clone, Debug)]
pub(super) struct Stats {
    pub(super) swaps_out: u64,
    pub(super) swaps_in: u64,
    pub(super) bytes_out: u64,
    pub(super) bytes_in: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) pause_ms: Option<Percentiles>,
    /// Gauges that are not 0.
    taken: Vec<(&'static str, u64)>,
}

impl Stats {
    /// Asks the server.
    pub(super) fn read(client: &Client) -> Result<Self> {
        Self::parse(&client.json(PAGE)?)
    }

    fn parse(page: &Value) -> Result<Self> {
        let number = |pointer: &str| {
            let value = page.pointer(pointer).and_then(Value::as_u64);
            value.with_context(|| format!("{PAGE} has no number at {pointer}"))
        };
        let mut taken = Vec::new();
        for &gauge in GAUGES {
            let value = number(gauge)?;
            if value != 0 {
                taken.push((gauge, value));
            }
        }
        Ok(Self {
            swaps_out: number("/out/done")?,
            swaps_in: number("/in/done")?,
            bytes_out: number("/out/bytes")?,
            bytes_in: number("/in/bytes")?,
            recomputed_tokens: number("/engine/recomputed_tokens")?,
            pause_ms: None,
            taken,
        })
    }

    /// What is still taken although nobody is served, one line each.
    pub(super) fn leaks(&self) -> Vec<String> {
        self.taken
            .iter()
            .map(|(name, value)| format!("{name} is {value} on the idle server"))
            .collect()
    }
}
