//! The requests, made from a seed: mixed lengths, mixed sampling, a third with two choices, some
//! cancelled midway.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::arm::ArmResult;

/// Tokens per block; what the server is told.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// Tokens that a chat template adds to a prompt, at most.
const TEMPLATE_TOKENS: u32 = 64;

/// What prompts are made of.
const WORDS: &[&str] = &[
    "river", "engine", "memory", "garden", "winter", "letter", "bridge", "market", "signal",
    "window", "planet", "story", "copper", "island", "number", "teacher", "harbour", "forest",
    "camera", "village", "silver", "kitchen", "machine", "summer",
];

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// What the user says.
    pub(super) content: String,
    pub(super) max_tokens: u32,
    /// Choices.
    pub(super) n: u32,
    /// 0 is greedy.
    pub(super) temperature: f32,
    pub(super) seed: u32,
    /// The client leaves after so many pieces of text.
    pub(super) cancel_after: Option<u32>,
}

impl Request {
    /// The body of the HTTP request.
    pub(super) fn body(&self) -> Value {
        json!({
            "messages": [{ "role": "user", "content": self.content }],
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": true,
            "stream_options": { "include_usage": true },
        })
    }

    /// The same request by a client who stays.
    pub(super) fn patient(&self) -> Self {
        Self {
            cancel_after: None,
            ..self.clone()
        }
    }

    /// Blocks at the end, when each choice has so many tokens: the prompt's full blocks once,
    /// everything after that per choice.
    fn blocks(&self, prompt_tokens: u32, tokens: u32) -> u32 {
        let shared = prompt_tokens / BLOCK_TOKENS;
        let own = (prompt_tokens % BLOCK_TOKENS + tokens).div_ceil(BLOCK_TOKENS);
        shared + own * self.n
    }
}

/// All requests of one run, in the order in which they are sent.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) requests: Vec<Request>,
    /// At most so many tokens per four bytes of text.
    tokens_per_word: u32,
}

impl Load {
    /// The same for the same arguments.
    pub(super) fn new(count: u32, seed: u64, bytes_are_tokens: bool) -> Self {
        let mut random = Random(seed);
        let scale = if bytes_are_tokens { ORACLE } else { MODEL };
        let requests = (0..count)
            .map(|index| request(index, &mut random, scale))
            .collect();
        Self {
            requests,
            tokens_per_word: if bytes_are_tokens { 4 } else { 2 },
        }
    }

    /// Choices of all requests.
    pub(super) fn choices(&self) -> u32 {
        self.requests.iter().map(|request| request.n).sum()
    }

    /// Requests that are cancelled midway.
    pub(super) fn cancelled(&self) -> usize {
        self.requests
            .iter()
            .filter(|request| request.cancel_after.is_some())
            .count()
    }

    /// A pool in which nothing has to leave while at most `batch` choices run: a bound from the
    /// lengths of the texts, since nobody has counted tokens yet.
    pub(super) fn blocks_at_most(&self, batch: u32) -> u32 {
        let mut sizes: Vec<u32> = self
            .requests
            .iter()
            .map(|r| r.blocks(self.guess(r), r.max_tokens))
            .collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.iter().take(batch as usize).sum()
    }

    fn guess(&self, request: &Request) -> u32 {
        let bytes = u32::try_from(request.content.len()).unwrap_or(u32::MAX / 8);
        bytes.div_ceil(4) * self.tokens_per_word + TEMPLATE_TOKENS
    }

    /// A pool of about a third of what the load wants: the blocks of as many choices as can run at
    /// the same time, by the lengths that the ample arm reported.
    pub(super) fn short_pool(&self, ample: &ArmResult, batch: u32) -> Result<u32> {
        let mut wanted = 0;
        let mut largest = 1;
        for (request, answer) in self.requests.iter().zip(&ample.references) {
            let usage = answer.usage.context("the ample arm reported no usage")?;
            wanted += request.blocks(usage.prompt, usage.completion.div_ceil(request.n));
            // Nobody may be refused because the request alone could outgrow the pool.
            largest = largest.max(request.blocks(usage.prompt, request.max_tokens));
        }
        let at_once = u64::from(wanted) * u64::from(batch.min(self.choices()));
        let third = at_once.div_ceil(3 * u64::from(self.choices()));
        Ok(u32::try_from(third)
            .context("a pool has less than 2^32 blocks")?
            .max(largest))
    }
}

/// Lengths of prompts and answers.
#[derive(Clone, Copy)]
struct Scale {
    short_words: [u32; 2],
    long_words: [u32; 2],
    max_tokens: [u32; 2],
}

/// Answers are long enough to outgrow the pool after everybody was admitted.
const MODEL: Scale = Scale {
    short_words: [8, 40],
    long_words: [80, 160],
    max_tokens: [48, 160],
};

/// The oracle takes each byte of a prompt for a token, and answers as fast as it is asked.
const ORACLE: Scale = Scale {
    short_words: [2, 10],
    long_words: [20, 40],
    max_tokens: [96, 320],
};

fn request(index: u32, random: &mut Random, scale: Scale) -> Request {
    // Most prompts are short, some are long.
    let [least, most] = if index % 4 == 3 {
        scale.long_words
    } else {
        scale.short_words
    };
    let words = random.between(least, most);
    let mut content = format!("Story {index}. Continue it in your own words:");
    for _ in 0..words {
        let word = random.between(0, u32::try_from(WORDS.len()).unwrap_or(1) - 1);
        content.push(' ');
        content.push_str(WORDS[word as usize]);
    }
    let [least, most] = scale.max_tokens;
    let max_tokens = random.between(least, most);
    Request {
        content,
        max_tokens,
        n: if index.is_multiple_of(3) { 2 } else { 1 },
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.8 },
        seed: random.between(0, 1 << 20),
        cancel_after: (index % 6 == 4).then(|| random.between(4, max_tokens / 2)),
    }
}

/// A generator whose numbers stay the same for ever, so that a seed stays a load.
struct Random(u64);

impl Random {
    fn between(&mut self, low: u32, high: u32) -> u32 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let span = u64::from(high - low) + 1;
        low + u32::try_from(mixed % span).expect("less than the span of two u32")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_load() {
        let bodies = |seed| {
            let load = Load::new(24, seed, false);
            load.requests
                .iter()
                .map(|request| request.body().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(bodies(7), bodies(7));
        assert_ne!(bodies(7), bodies(8));
    }

    #[test]
    fn the_load_is_mixed() {
        let load = Load::new(24, 1, false);
        assert_eq!(
            load.requests
                .iter()
                .filter(|request| request.n == 2)
                .count(),
            8
        );
        assert_eq!(load.cancelled(), 4);
        for request in &load.requests {
            assert!(
                request
                    .cancel_after
                    .is_none_or(|after| after < request.max_tokens)
            );
        }
    }

    #[test]
    fn shared_blocks_count_once() {
        let mut request = Load::new(1, 1, false).requests.remove(0);
        request.n = 2;
        request.max_tokens = 20;
        // 32 prompt tokens are shared; 8 + 20 tokens per choice are 2 blocks each.
        assert_eq!(request.blocks(40, request.max_tokens), 2 + 4);
    }
}
