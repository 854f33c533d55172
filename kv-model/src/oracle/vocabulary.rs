//! From a hash to a token and to made-up log-probabilities.

use kv_core::Choice;
use kv_scheduler::{Logprobs, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{OracleConfig, OracleError};

/// The tokens that an oracle can emit.
#[derive(Debug)]
pub(super) struct Vocabulary {
    lowest: u32,
    /// Tokens from `lowest` on, without `eos`.
    ordinary: u32,
    eos: Option<TokenId>,
    eos_every: u32,
    seed: u64,
}

impl Vocabulary {
    pub(super) fn new(config: &OracleConfig) -> Result<Self, OracleError> {
        let (vocab, lowest) = (config.vocab, config.lowest.0);
        if let Some(TokenId(eos)) = config.eos.filter(|eos| eos.0 >= vocab) {
            return Err(OracleError::Eos { eos, vocab });
        }
        let all = vocab.saturating_sub(lowest);
        let ordinary = all.saturating_sub(config.eos.is_some_and(|eos| eos.0 >= lowest).into());
        if ordinary < 2 {
            return Err(OracleError::Vocabulary { ordinary });
        }
        Ok(Self {
            lowest,
            ordinary,
            eos: config.eos,
            eos_every: config.eos_every,
            seed: config.seed,
        })
    }

    pub(super) const fn seed(&self) -> u64 {
        self.seed
    }

    /// One choice's view of a hash over KV bytes that it may share with others.
    pub(super) fn mix(&self, hash: u64, choice: Choice) -> u64 {
        xxh3_64_with_seed(&choice.value().to_le_bytes(), hash ^ self.seed)
    }

    pub(super) fn token(&self, hash: u64) -> TokenId {
        match self.eos {
            Some(eos) if self.eos_every > 0 && below(draw(hash, 0), self.eos_every) == 0 => eos,
            _ => self.ordinary(below(draw(hash, 1), self.ordinary)),
        }
    }

    /// A token that isn't the given one.
    pub(super) fn other(&self, token: TokenId) -> TokenId {
        let first = self.ordinary(0);
        if token == first {
            self.ordinary(1)
        } else {
            first
        }
    }

    /// The `index`th ordinary token.
    fn ordinary(&self, index: u32) -> TokenId {
        let id = self.lowest + index;
        let eos_before = self
            .eos
            .is_some_and(|eos| (self.lowest..=id).contains(&eos.0));
        TokenId(id + u32::from(eos_before))
    }

    /// The emitted token is the most probable one, with a probability from 1/2 on; the others have
    /// half of what is left each. They follow it in the order of their ids, round about.
    pub(super) fn logprobs(&self, hash: u64, token: TokenId, top: u32) -> Logprobs {
        let chosen = 0.5 + f64::from(below(draw(hash, 2), 1 << 20)) / f64::from(1u32 << 22);
        let mut left = 1.0 - chosen;
        let start = below(draw(hash, 3), self.ordinary);
        let others = (start..self.ordinary)
            .chain(0..start)
            .map(|index| self.ordinary(index))
            .filter(|&other| other != token)
            .map(|other| {
                left /= 2.0;
                (other, left)
            });
        let top = std::iter::once((token, chosen))
            .chain(others)
            .take(top as usize)
            .map(|(token, probability)| (token, ln(probability)))
            .collect();
        Logprobs {
            chosen: ln(chosen),
            top,
        }
    }
}

/// Independent numbers from one hash.
fn draw(hash: u64, which: u8) -> u64 {
    xxh3_64_with_seed(&[which], hash)
}

/// A number below `bound`, even but for a bias of `bound` in 2^64.
fn below(draw: u64, bound: u32) -> u32 {
    let scaled = (u128::from(draw) * u128::from(bound)) >> 64;
    u32::try_from(scaled).expect("a product shifted down is below its 32-bit factor")
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding to the precision of the result"
)]
fn ln(probability: f64) -> f32 {
    probability.ln() as f32
}
