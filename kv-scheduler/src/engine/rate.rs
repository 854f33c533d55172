//! How fast prompts are computed, as measured from the outside.

use kv_core::{Span, Time};

/// Tokens and time of steps that were mostly prefill.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefillRate {
    tokens: u64,
    span: Span,
    /// A step that is being measured: when it started, and its prefill tokens.
    open: Option<(Time, u64)>,
}

impl PrefillRate {
    /// A pass starts: what was measured since the last one started is a step's length.
    pub(super) fn pass_starts(&mut self, now: Time) {
        if let Some((started, tokens)) = self.open.take() {
            self.tokens += tokens;
            self.span = self.span + now.since(started);
        }
    }

    /// A step starts. Only steps whose rows are mostly prefill say something about prefill.
    pub(super) fn step_starts(&mut self, now: Time, prefill_tokens: u64, decode_rows: u64) {
        if prefill_tokens > 2 * decode_rows {
            self.open = Some((now, prefill_tokens));
        }
    }

    /// Time to compute that many tokens; the longest span while nothing was measured.
    pub(super) fn span_of(&self, tokens: u64) -> Span {
        if self.tokens == 0 || self.span == Span::ZERO {
            return Span::from_nanos(u64::MAX);
        }
        let nanos = u128::from(tokens) * u128::from(self.span.as_nanos()) / u128::from(self.tokens);
        Span::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_are_mostly_prefill_count() {
        let mut rate = PrefillRate::default();
        let at = |millis| Time::ZERO + Span::from_millis(millis);
        assert_eq!(rate.span_of(1), Span::from_nanos(u64::MAX));
        rate.pass_starts(at(0));
        rate.step_starts(at(0), 4, 2);
        rate.pass_starts(at(10));
        assert_eq!(
            rate.span_of(1),
            Span::from_nanos(u64::MAX),
            "mostly decoding"
        );
        rate.step_starts(at(10), 100, 2);
        rate.pass_starts(at(60));
        assert_eq!(rate.span_of(10), Span::from_millis(5));
    }
}
