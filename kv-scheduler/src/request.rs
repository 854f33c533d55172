//! What a client asks for.

/// A token of the model's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

/// The caller's name for a request; may be used again once the request is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_tokens` were generated.
    Length,
    /// A stop token was generated, or the caller found a stop string.
    Stop,
}

/// How tokens are drawn. Plain data; whoever runs the model gives it meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; else logits are divided by it. In 0..=2.
    pub temperature: f32,
    /// Only the `top_k` most probable tokens; 0 is no limit.
    pub top_k: u32,
    /// Only the most probable tokens whose probabilities sum up to this. In (0, 1].
    pub top_p: f32,
    /// Only tokens at least this share of the most probable one's probability. In 0..=1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. In
    /// 0.01..=100; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens seen in the output. In -2..=2.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output. In -2..=2.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens. In -100..=100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Together with choice and position it decides every draw.
    pub seed: u64,
    /// How many of the most probable tokens to report with each token; `None` reports nothing.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    /// Greedy, nothing else.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

/// A parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}, must be {allowed}")]
pub struct InvalidParam {
    /// Which, as in the OpenAI API.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What is allowed.
    pub allowed: &'static str,
}

impl SamplingParams {
    /// Most alternatives that can be asked for with [`logprobs`](Self::logprobs).
    pub const LOGPROBS_MAX: u32 = 20;

    /// Checks every range; NaN is outside all of them.
    ///
    /// # Errors
    ///
    /// The first parameter that is outside its range.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        let check = |name, value: f32, ok: bool, allowed| {
            if ok {
                Ok(())
            } else {
                Err(InvalidParam {
                    name,
                    value: value.to_string(),
                    allowed,
                })
            }
        };
        let within = |value: f32, low: f32, high: f32| (low..=high).contains(&value);
        let Self {
            temperature,
            top_p,
            min_p,
            ..
        } = *self;
        check(
            "temperature",
            temperature,
            within(temperature, 0.0, 2.0),
            "between 0 and 2",
        )?;
        check(
            "top_p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "above 0 and at most 1",
        )?;
        check("min_p", min_p, within(min_p, 0.0, 1.0), "between 0 and 1")?;
        // A logit divided by something tiny would be infinite, and no token could be drawn.
        let repetition = self.repetition_penalty;
        check(
            "repetition_penalty",
            repetition,
            within(repetition, 0.01, 100.0),
            "between 0.01 and 100",
        )?;
        let presence = self.presence_penalty;
        check(
            "presence_penalty",
            presence,
            within(presence, -2.0, 2.0),
            "between -2 and 2",
        )?;
        let frequency = self.frequency_penalty;
        check(
            "frequency_penalty",
            frequency,
            within(frequency, -2.0, 2.0),
            "between -2 and 2",
        )?;
        for &(_, bias) in &self.logit_bias {
            check(
                "logit_bias",
                bias,
                within(bias, -100.0, 100.0),
                "between -100 and 100",
            )?;
        }
        if let Some(top) = self.logprobs.filter(|&top| top > Self::LOGPROBS_MAX) {
            let allowed = "between 0 and 20";
            return Err(InvalidParam {
                name: "top_logprobs",
                value: top.to_string(),
                allowed,
            });
        }
        Ok(())
    }
}

/// One request: `n` sequences that share a prompt and are moved as one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The caller's name for it.
    pub id: RequestId,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Number of choices, at least 1.
    pub n: u32,
    /// Most tokens per choice, at least 1.
    pub max_tokens: u32,
    /// Tokens that end a choice; they are reported with [`FinishReason::Stop`].
    pub stop_tokens: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Lower is more urgent; 0 is usual. A more urgent request goes first and may make less urgent
    /// ones leave; who waits long becomes more urgent with time.
    pub priority: i32,
}
