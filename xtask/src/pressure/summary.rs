//! What is said about the arms: one row each, as a table and as JSON, and what is wrong.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::arm::{ArmResult, Mode};
use super::client::{Answer, Choice};

/// Arms shorter than this are not compared for speed.
const LONG_ENOUGH_S: f64 = 5.0;

/// Median and 99th percentile, nearest rank, milliseconds. None if there was nothing to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

impl Percentiles {
    pub(super) fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        let rank = |percent: usize| {
            let rank = (samples.len() * percent).div_ceil(100);
            samples.get(rank.saturating_sub(1)).copied()
        };
        Some(Self {
            p50: rank(50)?,
            p99: rank(99)?,
        })
    }

    fn json(this: Option<Self>) -> Value {
        json!({ "p50": this.map(|p| p.p50), "p99": this.map(|p| p.p99) })
    }

    fn text(this: Option<Self>) -> String {
        // Three digits are enough for people.
        let digits = |value: f64| usize::from(value < 10.0);
        this.map_or_else(
            || "–".to_owned(),
            |p| format!("{:.*} / {:.*}", digits(p.p50), p.p50, digits(p.p99), p.p99),
        )
    }
}

/// One arm in numbers.
#[derive(Debug)]
pub(super) struct Row {
    name: &'static str,
    gpu_blocks: u32,
    swaps_out: u64,
    swaps_in: u64,
    bytes_out: u64,
    bytes_in: u64,
    recomputed_tokens: u64,
    stalled_rows: u64,
    /// From sending a request to its first piece of text.
    ttft_ms: Option<Percentiles>,
    /// Between two pieces of text of one choice.
    itl_ms: Option<Percentiles>,
    /// How long a preempted group was away from decoding.
    pause_ms: Option<Percentiles>,
    tokens_per_s: f64,
    /// From the first request to the last answer.
    wall_s: f64,
    failed: usize,
    texts_equal: usize,
    texts_total: usize,
}

impl Row {
    /// Compares with the ample arm.
    pub(super) fn new(arm: &ArmResult, reference: &ArmResult) -> Self {
        let answers = || arm.answers.iter().flatten();
        let first = |answer: &Answer| {
            let first = answer
                .choices
                .iter()
                .filter_map(|choice| choice.times.first())
                .min()?;
            Some(millis(first.duration_since(answer.sent)))
        };
        let gaps = answers()
            .flat_map(|answer| &answer.choices)
            .flat_map(|choice| {
                choice
                    .times
                    .windows(2)
                    .map(|pair| millis(pair[1].duration_since(pair[0])))
            });
        let tokens: u64 = answers().map(Answer::tokens).sum();
        let texts_total = reference
            .references
            .iter()
            .map(|answer| answer.choices.len())
            .sum();
        Self {
            name: arm.mode.name(),
            gpu_blocks: arm.gpu_blocks,
            swaps_out: arm.stats.swaps_out,
            swaps_in: arm.stats.swaps_in,
            bytes_out: arm.stats.bytes_out,
            bytes_in: arm.stats.bytes_in,
            recomputed_tokens: arm.stats.recomputed_tokens,
            stalled_rows: arm.stats.stalled_rows,
            ttft_ms: Percentiles::of(answers().filter_map(first).collect()),
            itl_ms: Percentiles::of(gaps.collect()),
            pause_ms: arm.stats.pause_ms,
            tokens_per_s: per_second(tokens, arm.wall),
            wall_s: arm.wall.as_secs_f64(),
            failed: arm.answers.iter().filter(|answer| answer.is_err()).count(),
            texts_equal: texts_total - different(arm, reference).len(),
            texts_total,
        }
    }

    /// The fields that other programs read.
    pub(super) fn json(&self) -> Value {
        json!({
            "name": self.name,
            "gpu_blocks": self.gpu_blocks,
            "swaps_out": self.swaps_out,
            "swaps_in": self.swaps_in,
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
            "recomputed_tokens": self.recomputed_tokens,
            "stalled_rows": self.stalled_rows,
            "ttft_ms": Percentiles::json(self.ttft_ms),
            "itl_ms": Percentiles::json(self.itl_ms),
            "pause_ms": Percentiles::json(self.pause_ms),
            "tokens_per_s": self.tokens_per_s,
            "wall_s": self.wall_s,
            "failed": self.failed,
            "texts_equal": self.texts_equal,
            "texts_total": self.texts_total,
        })
    }

    /// All that is wrong with the arm.
    pub(super) fn faults(&self, arm: &ArmResult, reference: &ArmResult) -> Vec<String> {
        let mut faults = Vec::new();
        for (index, answer) in arm.answers.iter().enumerate() {
            if let Err(error) = answer
                && !arm.may_fail
            {
                faults.push(format!("request {index} failed: {error:#}"));
            }
        }
        faults.extend(different(arm, reference));
        faults.extend(arm.stats.leaks());
        let swaps = self.swaps_out > 0 && self.swaps_in > 0;
        match arm.mode {
            Mode::Ample if self.swaps_out > 0 || self.recomputed_tokens > 0 => {
                faults.push("memory was short although it should be ample".to_owned());
            }
            Mode::Async | Mode::Sync if !swaps && !arm.may_fail => {
                faults.push("nothing was swapped both ways".to_owned());
            }
            Mode::Recompute if self.swaps_out > 0 || self.recomputed_tokens == 0 => {
                faults.push("something was swapped, or nothing recomputed".to_owned());
            }
            Mode::Ample | Mode::Async | Mode::Recompute | Mode::Sync => {}
        }
        let mut named: Vec<_> = faults
            .iter()
            .map(|what| format!("{}: {what}", self.name))
            .collect();
        if let Some(last) = named.last_mut() {
            last.push_str(&arm.log);
        }
        named
    }
}

/// One line for each text that differs from the ample arm's; a failed request's texts all do.
fn different(arm: &ArmResult, reference: &ArmResult) -> Vec<String> {
    let mut lines = Vec::new();
    for (index, (answer, expected)) in arm.answers.iter().zip(&reference.references).enumerate() {
        for (choice, expected_choice) in expected.choices.iter().enumerate() {
            let fault = match answer {
                Err(_) => (!arm.may_fail).then_some("did not come"),
                Ok(answer) => {
                    difference(answer, &answer.choices[choice], expected, expected_choice)
                }
            };
            if let Some(fault) = fault {
                lines.push(format!(
                    "request {index}, choice {choice}: the text {fault}"
                ));
            }
        }
    }
    lines
}

/// What differs; a client who left must have seen a beginning of the whole text.
fn difference(
    answer: &Answer,
    choice: &Choice,
    expected: &Answer,
    expected_choice: &Choice,
) -> Option<&'static str> {
    if answer.usage.is_none() {
        let beginning = expected_choice.text.starts_with(&choice.text);
        return (!beginning).then_some("is no beginning of the ample arm's");
    }
    if choice.text != expected_choice.text {
        return Some("is not the ample arm's");
    }
    if choice.finish != expected_choice.finish {
        return Some("is right, but its finish reason is not the ample arm's");
    }
    (answer.usage != expected.usage).then_some("is right, but its usage is not the ample arm's")
}

/// One row per arm, as Markdown.
pub(super) fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| arm | blocks | swaps out / in | MiB out / in | recomputed tokens | first token ms p50 / p99 | \
         next token ms p50 / p99 | pause ms p50 / p99 | tokens/s | failed | texts equal |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let line = format!(
            "| {} | {} | {} / {} | {:.1} / {:.1} | {} | {} | {} | {} | {:.1} | {} | {} of {} |\n",
            row.name,
            row.gpu_blocks,
            row.swaps_out,
            row.swaps_in,
            mebibytes(row.bytes_out),
            mebibytes(row.bytes_in),
            row.recomputed_tokens,
            Percentiles::text(row.ttft_ms),
            Percentiles::text(row.itl_ms),
            Percentiles::text(row.pause_ms),
            row.tokens_per_s,
            row.failed,
            row.texts_equal,
            row.texts_total,
        );
        text.push_str(&line);
    }
    if let Some(note) = slower(rows) {
        // Writing to a string can't fail.
        _ = writeln!(text, "\n{note}");
    }
    text
}

/// A word when the async arm was slower than another short one by more than noise. Arms that are
/// over at once say nothing about speed.
fn slower(rows: &[Row]) -> Option<String> {
    if rows.iter().any(|row| row.wall_s < LONG_ENOUGH_S) {
        return None;
    }
    let speed = |name| {
        rows.iter()
            .find(|row| row.name == name)
            .map(|row| row.tokens_per_s)
    };
    let swapped = speed(Mode::Async.name())?;
    let others = [Mode::Sync, Mode::Recompute].map(Mode::name);
    let (name, other) = others
        .into_iter()
        .filter_map(|name| Some((name, speed(name)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    (swapped < other * 0.95)
        .then(|| format!("Note: async had {swapped:.1} tokens/s, {name} had {other:.1}."))
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts for people; far below 2^53"
)]
fn per_second(count: u64, duration: std::time::Duration) -> f64 {
    count as f64 / duration.as_secs_f64().max(f64::MIN_POSITIVE)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "sizes for people; far below 2^53"
)]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::super::client::Usage;
    use super::*;
    use crate::clock;

    fn answer(text: &str, usage: Option<Usage>) -> Answer {
        let choice = Choice {
            text: text.into(),
            finish: Some("stop".into()),
            times: Vec::new(),
        };
        Answer {
            sent: clock::now(),
            choices: vec![choice],
            usage,
        }
    }

    fn compare(answer: &Answer, expected: &Answer) -> Option<&'static str> {
        difference(answer, &answer.choices[0], expected, &expected.choices[0])
    }

    #[test]
    fn percentiles_are_samples() {
        let samples = |count: u32| (1..=count).rev().map(f64::from).collect::<Vec<_>>();
        assert_eq!(Percentiles::of(samples(0)), None);
        assert_eq!(
            Percentiles::of(samples(1)),
            Some(Percentiles { p50: 1.0, p99: 1.0 })
        );
        assert_eq!(
            Percentiles::of(samples(200)),
            Some(Percentiles {
                p50: 100.0,
                p99: 198.0
            })
        );
    }

    #[test]
    fn one_different_letter_is_a_difference() {
        let usage = Some(Usage {
            prompt: 3,
            completion: 2,
        });
        let expected = answer("abc", usage);
        assert_eq!(compare(&answer("abc", usage), &expected), None);
        assert!(compare(&answer("abd", usage), &expected).is_some());
        assert!(compare(&answer("ab", usage), &expected).is_some());
        let more = Some(Usage {
            prompt: 3,
            completion: 3,
        });
        assert!(compare(&answer("abc", more), &expected).is_some());
        let mut other_end = answer("abc", usage);
        other_end.choices[0].finish = Some("length".into());
        assert!(compare(&other_end, &expected).is_some());
    }

    #[test]
    fn a_client_who_left_has_seen_a_beginning() {
        let expected = answer(
            "abc",
            Some(Usage {
                prompt: 3,
                completion: 3,
            }),
        );
        assert_eq!(compare(&answer("ab", None), &expected), None);
        assert!(compare(&answer("b", None), &expected).is_some());
        assert!(compare(&answer("abcd", None), &expected).is_some());
    }
}
