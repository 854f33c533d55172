//! What was measured, as a table for people and as JSON.

use kv_transfer_cuda::DeviceFacts;
use serde_json::{Value, json};

use super::Failure;
use super::contiguous::Line;

/// Everything that was measured.
pub(crate) struct Report {
    head: Value,
    rows: Vec<Value>,
    targets: Vec<Target>,
}

struct Target {
    id: &'static str,
    what: String,
    value: f64,
    limit: f64,
    at_least: bool,
}

impl Target {
    fn met(&self) -> bool {
        if self.at_least {
            self.value >= self.limit
        } else {
            self.value <= self.limit
        }
    }

    fn verdict(&self) -> &'static str {
        if self.met() { "met" } else { "missed" }
    }
}

impl Report {
    pub(crate) fn new(facts: &DeviceFacts, commit: &str) -> Self {
        println!(
            "{}, driver CUDA {}, {} multiprocessors, {} copy engines, commit {commit}",
            facts.name, facts.driver_version, facts.multiprocessors, facts.copy_engines
        );
        let head = json!({
            "gpu": facts.name,
            "driver_cuda": facts.driver_version,
            "multiprocessors": facts.multiprocessors,
            "copy_engines": facts.copy_engines,
            "commit": commit,
        });
        Self {
            head,
            rows: Vec::new(),
            targets: Vec::new(),
        }
    }

    pub(crate) fn line(&mut self, line: &Line) {
        println!(
            "line: out {:.1} GB/s, in {:.1} GB/s, both {:.1} GB/s",
            line.out, line.back_in, line.both
        );
        self.row(
            "line",
            &json!({"out": line.out, "in": line.back_in, "both": line.both}),
        );
    }

    /// Keeps a row for the JSON.
    pub(crate) fn row(&mut self, section: &str, values: &Value) {
        self.rows
            .push(json!({"section": section, "values": values}));
    }

    /// A target of which more is better.
    pub(crate) fn at_least(&mut self, id: &'static str, what: String, value: f64, limit: f64) {
        self.targets.push(Target {
            id,
            what,
            value,
            limit,
            at_least: true,
        });
    }

    /// A target of which less is better.
    pub(crate) fn at_most(&mut self, id: &'static str, what: String, value: f64, limit: f64) {
        self.targets.push(Target {
            id,
            what,
            value,
            limit,
            at_least: false,
        });
    }

    pub(crate) fn print(&self) {
        println!("\ntarget                                                   value   limit");
        for target in &self.targets {
            let sign = if target.at_least { ">=" } else { "<=" };
            println!(
                "{} {:<52} {:>8.3} {sign}{:>7.3} {}",
                target.id,
                target.what,
                target.value,
                target.limit,
                target.verdict()
            );
        }
    }

    pub(crate) fn json(&self) -> Result<String, Failure> {
        let targets: Vec<_> = self
            .targets
            .iter()
            .map(|t| {
                json!({
                    "id": t.id, "what": t.what, "value": t.value, "limit": t.limit,
                    "better": if t.at_least { "more" } else { "less" }, "verdict": t.verdict(),
                })
            })
            .collect();
        let all = json!({"machine": self.head, "rows": self.rows, "targets": targets});
        Ok(serde_json::to_string_pretty(&all)?)
    }
}

/// The value below which that share of the samples lies; sorts them.
pub(crate) fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index below the length"
    )]
    let index = ((samples.len() as f64 * share) as usize).min(samples.len() - 1);
    samples[index]
}

/// The middle one; sorts them.
pub(crate) fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Bytes per nanosecond are gigabytes per second.
#[expect(clippy::cast_precision_loss, reason = "far below 2 to the 52nd bytes")]
pub(crate) fn gb_per_s(bytes: u64, nanos: f64) -> f64 {
    bytes as f64 / nanos
}
