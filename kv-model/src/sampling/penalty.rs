//! Repetition, presence and frequency penalties.

use kv_scheduler::{SamplingParams, TokenId};

/// Set in a count if the token was seen at all; the other bits count the output.
const SEEN: u32 = 1 << 31;

/// Whether any penalty changes anything.
pub(super) fn is_on(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
        || params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0
}

/// Counts tokens without sorting or hashing them.
#[derive(Debug, Default)]
pub(super) struct Penalties {
    /// By token; all zero between calls.
    counts: Vec<u32>,
}

impl Penalties {
    /// Applies all three. Tokens outside the vocabulary have no logit to change.
    pub(super) fn apply(
        &mut self,
        logits: &mut [f32],
        params: &SamplingParams,
        prompt: &[TokenId],
        output: &[TokenId],
    ) {
        if !is_on(params) {
            return;
        }
        if self.counts.len() < logits.len() {
            self.counts.resize(logits.len(), 0);
        }
        let counts = &mut self.counts[..logits.len()];
        // Only the repetition penalty looks at the prompt.
        let prompt = if params.repetition_penalty == 1.0 {
            &[]
        } else {
            prompt
        };
        for token in prompt {
            if let Some(count) = counts.get_mut(token.0 as usize) {
                *count |= SEEN;
            }
        }
        for token in output {
            if let Some(count) = counts.get_mut(token.0 as usize) {
                *count = (*count | SEEN) + 1;
            }
        }
        // The second walk changes each token at its first sight and clears its count.
        for token in prompt.iter().chain(output) {
            let index = token.0 as usize;
            let Some(count) = counts.get_mut(index).map(std::mem::take) else {
                continue;
            };
            if count != 0 {
                logits[index] = penalised(logits[index], count & !SEEN, params);
            }
        }
    }
}

fn penalised(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    let repetition = params.repetition_penalty;
    let logit = if logit > 0.0 {
        logit / repetition
    } else {
        logit * repetition
    };
    if count == 0 {
        return logit;
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "beyond 2^24 occurrences one more is nothing"
    )]
    let count = count as f32;
    logit - count * params.frequency_penalty - params.presence_penalty
}
