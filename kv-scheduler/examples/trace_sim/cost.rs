//! How long a step takes, from what it reads and what it computes.
//!
//! A step reads the weights once and the KV of every row, and multiplies. Reading weights and
//! multiplying overlap, so the longer of both counts; attention comes on top, and so does a fixed
//! part for launches and sampling. Defaults describe Llama-3-8B in bf16 on one H200; how they
//! were found stands in `docs/policies.md`.

use std::time::Duration;

use kv_core::Span;
use kv_scheduler::Batch;
use serde::Serialize;

/// The parts of a step's price. Rates and sizes as floating point numbers: this is a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct StepCost {
    /// Launches and the scheduler: per step, whatever is in it.
    pub(crate) fixed_seconds: f64,
    /// Sampling and handing out: per row.
    pub(crate) row_seconds: f64,
    /// A pass that runs no step.
    pub(crate) pass_seconds: f64,
    /// Read once per step.
    pub(crate) weight_bytes: f64,
    /// KV of one token over all layers.
    pub(crate) kv_bytes_per_token: u32,
    /// What the GPU's memory really delivers.
    pub(crate) hbm_bytes_per_second: f64,
    /// Matrix products, for each token that is run.
    pub(crate) flops_per_token: f64,
    /// Attention of a prefill chunk, for each pair of a token and a position that it looks at.
    pub(crate) flops_per_pair: f64,
    /// What the GPU really computes.
    pub(crate) flops_per_second: f64,
}

impl Default for StepCost {
    /// Llama-3-8B in bf16 on one H200.
    fn default() -> Self {
        Self {
            fixed_seconds: 1.2e-3,
            row_seconds: 10e-6,
            pass_seconds: 20e-6,
            // 8.03e9 parameters less the embedding table, of which a step reads a few rows.
            weight_bytes: 15.0e9,
            // 32 layers, K and V, 8 heads of 128 values, 2 bytes each.
            kv_bytes_per_token: 131_072,
            hbm_bytes_per_second: 4.3e12,
            flops_per_token: 15.0e9,
            // 32 layers, 32 heads of 128 values; 2 products of 2 FLOP each.
            flops_per_pair: 524_288.0,
            flops_per_second: 650e12,
        }
    }
}

/// What there is to do in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepWork {
    /// Tokens run, of all rows.
    pub(crate) tokens: u64,
    /// Rows, and those of them that are of one token.
    pub(crate) rows: u64,
    pub(crate) decode_rows: u64,
    /// Positions whose KV is read, of all rows.
    pub(crate) kv_tokens_read: u64,
    /// Pairs of a token and a position that it looks at, in rows of several tokens.
    pub(crate) prefill_pairs: u64,
    /// Tokens whose KV is copied because choices part.
    pub(crate) kv_tokens_copied: u64,
}

impl StepWork {
    /// Adds up the rows of a batch.
    pub(crate) fn of(batch: &Batch<'_>, block_tokens: u32) -> Self {
        let copies = batch.copies.len() as u64;
        let mut work = Self {
            kv_tokens_copied: copies * u64::from(block_tokens),
            ..Self::default()
        };
        for row in batch.rows {
            work.add_row(row.position.into(), row.tokens.len() as u64);
        }
        work
    }

    fn add_row(&mut self, position: u64, tokens: u64) {
        self.rows += 1;
        self.tokens += tokens;
        self.kv_tokens_read += position + tokens;
        if tokens == 1 {
            self.decode_rows += 1;
        } else {
            self.prefill_pairs += tokens * position + tokens * (tokens + 1) / 2;
        }
    }
}

impl StepCost {
    /// How long a step with that work takes when nothing else uses the GPU.
    pub(crate) fn seconds(&self, work: &StepWork) -> f64 {
        let weights = self.weight_bytes / self.hbm_bytes_per_second;
        let products = work.tokens as f64 * self.flops_per_token / self.flops_per_second;
        // A copy reads and writes.
        let kv_tokens = (work.kv_tokens_read + 2 * work.kv_tokens_copied) as f64;
        let kv = kv_tokens * f64::from(self.kv_bytes_per_token) / self.hbm_bytes_per_second;
        let attention = work.prefill_pairs as f64 * self.flops_per_pair / self.flops_per_second;
        let fixed = self.fixed_seconds + work.rows as f64 * self.row_seconds;
        fixed + weights.max(products) + kv + attention
    }
}

/// Seconds as a span of whole nanoseconds; what can't be one becomes the longest span.
pub(crate) fn span(seconds: f64) -> Span {
    Duration::try_from_secs_f64(seconds).map_or(Span::from_nanos(u64::MAX), Span::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: impl IntoIterator<Item = (u64, u64)>) -> StepWork {
        let mut work = StepWork::default();
        for (position, tokens) in rows {
            work.add_row(position, tokens);
        }
        work
    }

    fn millis(work: &StepWork) -> f64 {
        StepCost::default().seconds(work) * 1e3
    }

    fn assert_near(found: f64, expected: f64, off: f64) {
        assert!((found - expected).abs() <= off, "{found}, not {expected}");
    }

    #[test]
    fn a_batch_adds_up() {
        let work = rows([(99, 1), (0, 4), (10, 2)]);
        let expected = StepWork {
            tokens: 7,
            rows: 3,
            decode_rows: 1,
            kv_tokens_read: 100 + 4 + 12,
            prefill_pairs: (1 + 2 + 3 + 4) + (11 + 12),
            kv_tokens_copied: 0,
        };
        assert_eq!(work, expected);
    }

    #[test]
    fn each_part_of_the_price_is_what_its_name_says() {
        let cost = StepCost {
            fixed_seconds: 1.0,
            row_seconds: 0.25,
            pass_seconds: 0.0,
            weight_bytes: 200.0,
            kv_bytes_per_token: 10,
            hbm_bytes_per_second: 100.0,
            flops_per_token: 30.0,
            flops_per_pair: 5.0,
            flops_per_second: 10.0,
        };
        let mut work = StepWork::default();
        assert_near(cost.seconds(&work), 1.0 + 2.0, 1e-9);
        work.tokens = 1;
        assert_near(cost.seconds(&work), 1.0 + 3.0, 1e-9);
        work.kv_tokens_read = 20;
        assert_near(cost.seconds(&work), 1.0 + 3.0 + 2.0, 1e-9);
        work.prefill_pairs = 4;
        assert_near(cost.seconds(&work), 1.0 + 3.0 + 2.0 + 2.0, 1e-9);
        work.kv_tokens_copied = 5;
        assert_near(cost.seconds(&work), 1.0 + 3.0 + 2.0 + 2.0 + 1.0, 1e-9);
        work.rows = 8;
        assert_near(cost.seconds(&work), 3.0 + 3.0 + 2.0 + 2.0 + 1.0, 1e-9);
    }

    #[test]
    fn defaults_are_near_what_was_measured() {
        // 190,000 tokens of KV in 90 rows: 11.2 ms a step.
        assert_near(millis(&rows((0..90).map(|_| (2_110, 1)))), 11.2, 0.3);
        // Among these a prompt of 2,000 tokens computed again: 60 ms a step.
        let with_prompt = (0..90).map(|_| (2_110, 1)).chain([(0, 2_000)]);
        assert_near(millis(&rows(with_prompt)), 60.0, 6.0);
        // 128 prompts of 1,000 tokens, 8 a step: the last first token after 3 s.
        let first_tokens = 16.0 * millis(&rows((0..8).map(|_| (0, 1_000))));
        assert_near(first_tokens, 3_000.0, 250.0);
    }

    #[test]
    fn spans_are_whole_nanoseconds() {
        assert_eq!(span(1.5e-6), Span::from_nanos(1_500));
        assert_eq!(span(-1.0), Span::from_nanos(u64::MAX));
        assert_eq!(span(f64::NAN), Span::from_nanos(u64::MAX));
    }
}
