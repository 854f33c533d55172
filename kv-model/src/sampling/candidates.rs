//! The tokens that truncation leaves, and the choice among them.

use std::cmp::Ordering;

use kv_scheduler::SamplingParams;

use super::exp;
use super::scan::{CHUNK, sum, sum_above};

/// Up to this many tokens are sorted rather than divided once more.
const FEW: usize = 32;

/// A token and what its rank is made of: higher logits first, then lower ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ranked {
    pub(super) logit: f32,
    pub(super) token: u32,
    /// Not normalised; 1 for the highest logit.
    weight: f32,
}

impl Ranked {
    fn order(&self, other: &Self) -> Ordering {
        // Not the total order: zeros of both signs are equal logits.
        let logits = other
            .logit
            .partial_cmp(&self.logit)
            .unwrap_or(Ordering::Equal);
        logits.then(self.token.cmp(&other.token))
    }
}

/// Memory for the tokens in question.
///
/// Everywhere here logits must be free of NaN, and `max` is the highest of them.
/// Nothing ever sorts a vocabulary: truncation looks for the last token that stays, and the draw
/// walks by id over what is left.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// By token; 0 for those that can't be drawn.
    weights: Vec<f32>,
    chunk_sums: Vec<f64>,
    ranked: Vec<Ranked>,
}

impl Candidates {
    /// Draws a token by `point`, a number in `0.0..1.0`.
    pub(super) fn draw(
        &mut self,
        logits: &[f32],
        max: f32,
        params: &SamplingParams,
        point: f64,
    ) -> usize {
        let scale = params.temperature;
        self.weights.clear();
        self.weights
            .extend(logits.iter().map(|&logit| exp((logit - max) / scale)));
        if params.min_p > 0.0 {
            for weight in &mut self.weights {
                *weight = if *weight >= params.min_p {
                    *weight
                } else {
                    0.0
                };
            }
        }
        let top_k = if params.top_k == 0 {
            usize::MAX
        } else {
            params.top_k as usize
        };
        let top_p = f64::from(params.top_p);
        let last = if top_k < logits.len() {
            self.select(logits, max, top_k, scale);
            let mass: f64 = self
                .ranked
                .iter()
                .map(|ranked| f64::from(ranked.weight))
                .sum();
            if top_p < 1.0 {
                self.cut(top_p * mass)
            } else {
                self.ranked.last().copied()
            }
        } else if top_p < 1.0 {
            self.nucleus(logits, max, top_p, scale)
        } else {
            None
        };
        if let Some(last) = last {
            self.drop_after(logits, last);
        }
        self.pick(point)
    }

    /// The `count` highest logits, best first.
    pub(super) fn top(&mut self, logits: &[f32], max: f32, count: usize) -> &[Ranked] {
        // Their weights are of no interest here.
        self.weights.clear();
        self.weights.resize(logits.len(), 0.0);
        self.select(logits, max, count.min(logits.len()), 1.0);
        self.ranked.sort_unstable_by(Ranked::order);
        &self.ranked
    }

    /// Ranks the `count` highest logits, the lowest of them last, the others in no order. `scale`
    /// is the step of the search for them, in logits; it has no influence on which they are.
    fn select(&mut self, logits: &[f32], max: f32, count: usize, scale: f32) {
        let reach = floors(max, scale)
            .find(|&floor| logits.iter().filter(|&&logit| logit >= floor).count() >= count);
        self.collect(logits, reach);
        if count > 0 {
            self.ranked.select_nth_unstable_by(count - 1, Ranked::order);
        }
        self.ranked.truncate(count);
    }

    /// The last of the fewest most probable tokens that have the share `top_p` of the weight.
    fn nucleus(&mut self, logits: &[f32], max: f32, top_p: f64, scale: f32) -> Option<Ranked> {
        let needed = top_p * sum(&self.weights);
        // A bit more than needed, since sums in another order round differently.
        let enough = needed * (1.0 + 1e-9);
        let reach =
            floors(max, scale).find(|&floor| sum_above(logits, &self.weights, floor) >= enough);
        self.collect(logits, reach);
        self.cut(needed)
    }

    /// The last of the fewest highest ranked tokens whose weights sum up to `needed`: the ranked
    /// ones are halved by rank, and the half goes on in which the sum is reached.
    fn cut(&mut self, needed: f64) -> Option<Ranked> {
        let mut rest = self.ranked.as_mut_slice();
        let mut mass = 0.0;
        while rest.len() > FEW {
            let middle = rest.len() / 2;
            rest.select_nth_unstable_by(middle, Ranked::order);
            let (upper, lower) = rest.split_at_mut(middle);
            let upper_mass: f64 = upper.iter().map(|ranked| f64::from(ranked.weight)).sum();
            if mass + upper_mass >= needed {
                rest = upper;
            } else {
                mass += upper_mass;
                rest = lower;
            }
        }
        rest.sort_unstable_by(Ranked::order);
        let reached = rest.iter().find(|ranked| {
            mass += f64::from(ranked.weight);
            mass >= needed
        });
        reached.or_else(|| rest.last()).copied()
    }

    /// Takes the weight from all tokens that rank after `last`.
    fn drop_after(&mut self, logits: &[f32], last: Ranked) {
        for ((token, weight), &logit) in (0u32..).zip(&mut self.weights).zip(logits) {
            let stays = logit > last.logit || (logit == last.logit && token <= last.token);
            *weight = if stays { *weight } else { 0.0 };
        }
    }

    /// Walks by id to the token in whose weight `point` falls.
    fn pick(&mut self, point: f64) -> usize {
        self.chunk_sums.clear();
        self.chunk_sums.extend(self.weights.chunks(CHUNK).map(sum));
        let mut left = point * self.chunk_sums.iter().sum::<f64>();
        for (chunk, &chunk_sum) in self.chunk_sums.iter().enumerate() {
            if left >= chunk_sum {
                left -= chunk_sum;
                continue;
            }
            let start = chunk * CHUNK;
            let end = self.weights.len().min(start + CHUNK);
            let weights = &self.weights[start..end];
            let inside = weights.iter().position(|&weight| {
                left -= f64::from(weight);
                left < 0.0
            });
            // Rounding may leave a crumb: it belongs to the last token that has a weight at all.
            let last = || weights.iter().rposition(|&weight| weight > 0.0);
            if let Some(inside) = inside.or_else(last) {
                return start + inside;
            }
        }
        let last = self.weights.iter().rposition(|&weight| weight > 0.0);
        last.expect("the highest logit has weight 1, and no truncation takes it")
    }

    /// Ranks the logits down to `floor`, or all, in the order of their ids.
    fn collect(&mut self, logits: &[f32], floor: Option<f32>) {
        let floor = floor.unwrap_or(f32::NEG_INFINITY);
        self.ranked.clear();
        let all = (0u32..).zip(logits).zip(&self.weights);
        let ranked =
            all.filter(|&((_, &logit), _)| logit >= floor)
                .map(|((token, &logit), &weight)| Ranked {
                    logit,
                    token,
                    weight,
                });
        self.ranked.extend(ranked);
    }
}

/// How far down to look for what is wanted: most of the time the first steps do, and most of the
/// vocabulary is never ranked.
fn floors(max: f32, scale: f32) -> impl Iterator<Item = f32> {
    [4.0, 8.0, 16.0, 32.0]
        .into_iter()
        .map(move |steps| max - steps * scale)
}
