//! From logits to a token: a pure function of logits, parameters, prompt, output and choice.
//!
//! The order is fixed:
//!
//! 1. **Repetition penalty** on tokens seen in prompt or output: positive logits are divided by
//!    it, negative ones multiplied.
//! 2. **Frequency** and **presence penalty** on tokens seen in the output: `count * frequency +
//!    presence` is subtracted.
//! 3. **Bias** is added, last of what changes logits, so that ±100 forces or bans a token whatever
//!    was said before.
//! 4. **Temperature** 0 takes the highest logit. Else logits are divided by it, and softmax makes
//!    probabilities of them.
//! 5. **min-p** keeps tokens with at least that share of the highest probability, then **top-k**
//!    the `k` most probable ones, then **top-p** the fewest most probable ones whose renormalised
//!    probabilities sum up to `p`.
//! 6. One number decides among those left. It is a hash of seed, choice and position, where the
//!    position is `prompt.len() + output.len()`: there is no generator whose state a pause, a
//!    resume or a recomputation could disturb.
//!
//! Equal logits rank by id, lowest first. The exponential is our own, so that tokens don't depend
//! on the system's mathematical library.

use kv_core::Choice;
use kv_scheduler::{InvalidParam, Logprobs, Sample, Sampled, SamplingParams, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::candidates::Candidates;
use self::penalty::Penalties;
use self::scan::{exp, highest, sum_exp};

mod candidates;
mod penalty;
mod scan;

/// Why no token could be sampled. Only this sample is concerned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model gave no logits.
    #[error("there are no logits")]
    Empty,
    /// The model, or what was added to its logits, gave NaN or positive infinity.
    #[error("a logit is NaN or positive infinity")]
    NotFinite,
    /// Every logit is negative infinity.
    #[error("every token is excluded")]
    NothingLeft,
    /// A bias names a token that the model doesn't have.
    #[error("logit_bias names a token outside the vocabulary of {vocab}")]
    Bias {
        /// Number of logits.
        vocab: usize,
    },
    /// A parameter is outside its range.
    #[error(transparent)]
    Param(#[from] InvalidParam),
}

/// Samples tokens; see the [module](self) for what and in which order.
///
/// It keeps memory between calls and nothing else: the result doesn't depend on earlier calls.
///
/// Log-probabilities are natural logarithms of the model's own distribution: softmax over the
/// logits as given, before penalties, bias, temperature and truncation. Tokens with a probability
/// of 0 are not among the most probable ones, however many were asked for.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after penalties and bias.
    adjusted: Vec<f32>,
    penalties: Penalties,
    candidates: Candidates,
}

impl Sampler {
    /// A sampler without memory yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples one token from the logits of the whole vocabulary, index = id.
    ///
    /// # Errors
    ///
    /// [`SampleError`] if logits or parameters can't be used; the sampler is as good as before.
    pub fn sample(
        &mut self,
        logits: &[f32],
        prompt: &[TokenId],
        sample: &Sample<'_>,
    ) -> Result<Sampled, SampleError> {
        let params = sample.params;
        params.validate()?;
        if logits.is_empty() {
            return Err(SampleError::Empty);
        }
        let adjusted = if changes_logits(params) {
            self.adjusted.clear();
            self.adjusted.extend_from_slice(logits);
            self.penalties
                .apply(&mut self.adjusted, params, prompt, sample.output);
            bias(&mut self.adjusted, params)?;
            self.adjusted.as_slice()
        } else {
            logits
        };
        let (best, max) = highest(adjusted)?;
        let token = if params.temperature > 0.0 {
            let position = prompt.len() + sample.output.len();
            let point = point(params.seed, sample.choice, position);
            self.candidates.draw(adjusted, max, params, point)
        } else {
            best
        };
        let logprobs = params
            .logprobs
            .map(|top| self.logprobs(logits, token, top))
            .transpose()?;
        Ok(Sampled {
            token: id(token),
            logprobs,
        })
    }

    fn logprobs(
        &mut self,
        logits: &[f32],
        token: usize,
        top: u32,
    ) -> Result<Logprobs, SampleError> {
        // The logits as given may hold what a bias has hidden: they are checked on their own.
        let (_, max) = highest(logits)?;
        let log_sum = sum_exp(logits, max).ln();
        let logprob = |logit: f32| rounded(f64::from(logit) - f64::from(max) - log_sum);
        let top = self
            .candidates
            .top(logits, max, top as usize)
            .iter()
            .filter(|ranked| ranked.logit > f32::NEG_INFINITY)
            .map(|ranked| (TokenId(ranked.token), logprob(ranked.logit)))
            .collect();
        Ok(Logprobs {
            chosen: logprob(logits[token]),
            top,
        })
    }
}

fn changes_logits(params: &SamplingParams) -> bool {
    !params.logit_bias.is_empty() || penalty::is_on(params)
}

fn bias(logits: &mut [f32], params: &SamplingParams) -> Result<(), SampleError> {
    let vocab = logits.len();
    for &(token, bias) in &params.logit_bias {
        *logits
            .get_mut(token.0 as usize)
            .ok_or(SampleError::Bias { vocab })? += bias;
    }
    Ok(())
}

/// A number in `0.0..1.0` that belongs to one position of one choice.
fn point(seed: u64, choice: Choice, position: usize) -> f64 {
    let mut key = [0u8; 12];
    key[..4].copy_from_slice(&choice.value().to_le_bytes());
    key[4..].copy_from_slice(&(position as u64).to_le_bytes());
    let [a, b, c, d, e, f, g, _] = xxh3_64_with_seed(&key, seed).to_le_bytes();
    // 52 bits: exact in a double, and the result stays below 1.
    let high = u32::from_le_bytes([a, b, c, d]);
    let low = u32::from_le_bytes([e, f, g & 0xf, 0]);
    (f64::from(low) * 4_294_967_296.0 + f64::from(high)) / 4_503_599_627_370_496.0
}

fn id(index: usize) -> TokenId {
    TokenId(u32::try_from(index).expect("token ids have 32 bits, so has the vocabulary"))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding to the precision of the result"
)]
const fn rounded(value: f64) -> f32 {
    value as f32
}
