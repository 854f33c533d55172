//! What the server says about itself once the load is over.

use anyhow::{Context, Result};
use serde_json::Value;

use super::client::Client;
use super::summary::Percentiles;

/// The page with gauges and counters.
const STATS: &str = "/admin/stats";

/// The page with histograms.
const METRICS: &str = "/metrics";

/// How long preempted groups were away from decoding: from being picked as a victim to the next
/// token.
const PAUSE: &str = "kv_request_pause_seconds";

/// Gauges, as JSON pointers into [`STATS`]: all 0 when nobody is served.
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
    "/groups/gpu_resident",
    "/groups/cancel_pending",
    "/groups/failed",
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
    /// Rows of running sequences that had to wait in a step because no block was free.
    pub(super) stalled_rows: u64,
    pub(super) pause_ms: Option<Percentiles>,
    /// Gauges that are not 0.
    taken: Vec<(&'static str, u64)>,
}

impl Stats {
    /// Asks the server.
    pub(super) fn read(client: &Client) -> Result<Self> {
        let mut stats = Self::parse(&client.json(STATS)?)?;
        stats.pause_ms = pauses(&client.text(METRICS)?)?;
        Ok(stats)
    }

    fn parse(page: &Value) -> Result<Self> {
        let number = |pointer: &str| {
            let value = page.pointer(pointer).and_then(Value::as_u64);
            value.with_context(|| format!("{STATS} has no number at {pointer}"))
        };
        let mut taken = Vec::new();
        for &gauge in GAUGES {
            let value = number(gauge)?;
            if value != 0 {
                taken.push((gauge, value));
            }
        }
        // A block that is in no state at all would be a leak, too.
        let blocks = |state: &str| number(&format!("/gpu_blocks/{state}"));
        if blocks("free")? != blocks("total")? && taken.is_empty() {
            taken.push(("/gpu_blocks/free", blocks("free")?));
        }
        Ok(Self {
            swaps_out: number("/out/done")?,
            swaps_in: number("/in/done")?,
            bytes_out: number("/out/bytes")?,
            bytes_in: number("/in/bytes")?,
            recomputed_tokens: number("/engine/recomputed_tokens")?,
            stalled_rows: number("/engine/stalled_rows")?,
            pause_ms: None,
            taken,
        })
    }

    /// Takes lost blocks and slots for what they are, and not for leaks.
    pub(super) fn forgive_lost(&mut self) {
        self.taken.retain(|(gauge, _)| !gauge.ends_with("/lost"));
    }

    /// What is still taken although nobody is served, one line each.
    pub(super) fn leaks(&self) -> Vec<String> {
        let leak = |(name, value): &(&str, u64)| format!("{name} is {value} on the idle server");
        self.taken.iter().map(leak).collect()
    }
}

fn pauses(metrics: &str) -> Result<Option<Percentiles>> {
    let buckets = buckets(metrics, PAUSE);
    anyhow::ensure!(!buckets.is_empty(), "{METRICS} has no histogram {PAUSE}");
    let millis = |share| quantile(&buckets, share).map(|seconds| seconds * 1e3);
    Ok(millis(0.50)
        .zip(millis(0.99))
        .map(|(p50, p99)| Percentiles { p50, p99 }))
}

/// Upper bounds and cumulative counts of a histogram, over all of its labels, in the order of the
/// bounds.
fn buckets(metrics: &str, name: &str) -> Vec<(f64, f64)> {
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for line in metrics.lines() {
        let Some(rest) = line
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix("_bucket{"))
        else {
            continue;
        };
        let bound = rest
            .split_once("le=\"")
            .and_then(|(_, after)| after.split_once('"'));
        let bound = bound.and_then(|(bound, _)| bound.parse::<f64>().ok());
        let count = rest
            .split_once("} ")
            .and_then(|(_, after)| after.split_whitespace().next());
        let count = count.and_then(|count| count.parse::<f64>().ok());
        let (Some(bound), Some(count)) = (bound, count) else {
            continue;
        };
        match buckets
            .iter_mut()
            .find(|bucket| bucket.0.total_cmp(&bound).is_eq())
        {
            Some(bucket) => bucket.1 += count,
            None => buckets.push((bound, count)),
        }
    }
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    buckets
}

/// An estimate of a quantile: inside a bucket its samples are taken as spread evenly, above the
/// last finite bound that bound is the answer.
fn quantile(buckets: &[(f64, f64)], share: f64) -> Option<f64> {
    let total = buckets.last()?.1;
    if total <= 0.0 {
        return None;
    }
    let rank = share * total;
    let (mut low, mut below) = (0.0, 0.0);
    for &(bound, count) in buckets {
        if count >= rank {
            if bound.is_infinite() {
                return Some(low);
            }
            return Some(low + (bound - low) * (rank - below) / (count - below).max(1.0));
        }
        (low, below) = (bound, count);
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_histogram() {
        let text = "# TYPE kv_pause_seconds histogram\n\
                    kv_pause_seconds_sum 3.5\n\
                    kv_pause_seconds_bucket{le=\"0.1\"} 0\n\
                    kv_pause_seconds_bucket{le=\"0.2\"} 10\n\
                    kv_pause_seconds_bucket{le=\"+Inf\"} 10\n";
        let buckets = buckets(text, "kv_pause_seconds");
        assert_eq!(buckets.len(), 3);
        let near =
            |share, expected: f64| (quantile(&buckets, share).unwrap() - expected).abs() < 1e-9;
        assert!(near(0.5, 0.15) && near(1.0, 0.2));
    }

    #[test]
    fn labels_are_added_up_and_nothing_is_none() {
        let text = "x_bucket{why=\"a\",le=\"1.0\"} 1\nx_bucket{why=\"b\",le=\"1.0\"} 2\n\
                    x_bucket{why=\"a\",le=\"+Inf\"} 1\nx_bucket{why=\"b\",le=\"+Inf\"} 3\n";
        assert_eq!(buckets(text, "x"), [(1.0, 3.0), (f64::INFINITY, 4.0)]);
        assert_eq!(quantile(&buckets(text, "x"), 0.99), Some(1.0));
        assert_eq!(quantile(&[(1.0, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn a_block_that_did_not_come_back_is_a_leak() {
        let mut page = serde_json::json!({
            "engine": { "recomputed_tokens": 0, "stalled_rows": 0 },
            "gpu_blocks": { "total": 8, "free": 8 },
            "host_slots": {},
            "groups": {},
            "out": { "done": 1, "bytes": 1 },
            "in": { "done": 1, "bytes": 1 },
            "flights": 0,
            "inflight_bytes": 0,
        });
        for gauge in GAUGES
            .iter()
            .filter(|gauge| gauge.matches('/').count() == 2)
        {
            let (section, name) = gauge[1..].split_once('/').unwrap();
            page[section][name] = 0.into();
        }
        assert!(Stats::parse(&page).unwrap().leaks().is_empty());
        page["host_slots"]["parked"] = 2.into();
        let leaks = Stats::parse(&page).unwrap().leaks();
        assert_eq!(leaks, ["/host_slots/parked is 2 on the idle server"]);
        page["host_slots"]["parked"] = 0.into();
        page["gpu_blocks"]["free"] = 7.into();
        assert_eq!(Stats::parse(&page).unwrap().leaks().len(), 1);
    }
}
