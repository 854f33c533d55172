//! The tokens that truncation leaves, and the choice among them.

use std::cmp::Ordering;

use kv_scheduler::SamplingParams;

use super::exp;
use super::scan::{CHUNK, sum, sum_above};

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
#[derive(Debug, Default)]
pub(super) struct Candidates {
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
        let top_k = if params.top_k == 0 {
            usize::MAX
        } else {
            params.top_k as usize
        };
        if top_k < logits.len() {
            self.top(logits, max, top_k, params.temperature);
            self.ranked.retain(|ranked| ranked.weight >= params.min_p);
            self.cut(f64::from(params.top_p) * self.mass());
        } else if params.top_p < 1.0 || params.min_p > 0.0 {
            self.nucleus(logits, max, params);
        } else {
            return self.draw_from_all(logits, max, params.temperature, point);
        }
        let mut left = point * self.mass();
        for ranked in &self.ranked {
            left -= f64::from(ranked.weight);
            if left < 0.0 {
                return ranked.token as usize;
            }
        }
        // Rounding left a crumb: it belongs to the last token that has a probability at all.
        let last = self.ranked.iter().rfind(|ranked| ranked.weight > 0.0);
        last.expect("the most probable token is always among them")
            .token as usize
    }

    /// The `count` highest logits, best first. `scale` is the step of the search for them, in
    /// logits, and what their weights are for: it has no influence on which they are.
    pub(super) fn top(&mut self, logits: &[f32], max: f32, count: usize, scale: f32) -> &[Ranked] {
        let count = count.min(logits.len());
        let reach = floors(max, scale)
            .find(|&floor| logits.iter().filter(|&&logit| logit >= floor).count() >= count);
        self.collect(logits, reach, |logit| exp((logit - max) / scale));
        if count > 0 && count < self.ranked.len() {
            self.ranked.select_nth_unstable_by(count - 1, Ranked::order);
        }
        self.ranked.truncate(count);
        self.ranked.sort_unstable_by(Ranked::order);
        &self.ranked
    }

    /// The tokens that min-p and top-p leave, best first.
    fn nucleus(&mut self, logits: &[f32], max: f32, params: &SamplingParams) {
        let scale = params.temperature;
        self.weigh(logits, max, scale);
        for weight in &mut self.weights {
            *weight = if *weight >= params.min_p {
                *weight
            } else {
                0.0
            };
        }
        let needed = f64::from(params.top_p) * sum(&self.weights);
        // A bit more than needed, since sums in another order round differently.
        let enough = needed * (1.0 + 1e-9);
        let reach =
            floors(max, scale).find(|&floor| sum_above(logits, &self.weights, floor) >= enough);
        self.collect(logits, reach, |logit| exp((logit - max) / scale));
        self.ranked.retain(|ranked| ranked.weight >= params.min_p);
        self.ranked.sort_unstable_by(Ranked::order);
        self.cut(needed);
    }

    /// Keeps the fewest of the ranked tokens whose weights sum up to `needed`.
    fn cut(&mut self, needed: f64) {
        let mut mass = 0.0;
        let last = self.ranked.iter().position(|ranked| {
            mass += f64::from(ranked.weight);
            mass >= needed
        });
        if let Some(last) = last {
            self.ranked.truncate(last + 1);
        }
    }

    fn mass(&self) -> f64 {
        self.ranked
            .iter()
            .map(|ranked| f64::from(ranked.weight))
            .sum()
    }

    /// Without truncation nothing is ranked: the draw walks the vocabulary by id.
    fn draw_from_all(&mut self, logits: &[f32], max: f32, scale: f32, point: f64) -> usize {
        self.weigh(logits, max, scale);
        self.chunk_sums.clear();
        self.chunk_sums.extend(self.weights.chunks(CHUNK).map(sum));
        let mut left = point * self.chunk_sums.iter().sum::<f64>();
        let chunk = self.chunk_sums.iter().position(|&mass| {
            left -= mass;
            left < 0.0
        });
        if let Some(chunk) = chunk {
            left += self.chunk_sums[chunk];
            let start = chunk * CHUNK;
            let end = self.weights.len().min(start + CHUNK);
            let inside = self.weights[start..end].iter().position(|&weight| {
                left -= f64::from(weight);
                left < 0.0
            });
            if let Some(inside) = inside {
                return start + inside;
            }
            // Rounding left a crumb: it belongs to the chunk's last token with a probability.
            if let Some(last) = self.weights[start..end]
                .iter()
                .rposition(|&weight| weight > 0.0)
            {
                return start + last;
            }
        }
        let last = self.weights.iter().rposition(|&weight| weight > 0.0);
        last.expect("the highest logit has weight 1")
    }

    fn weigh(&mut self, logits: &[f32], max: f32, scale: f32) {
        self.weights.clear();
        self.weights
            .extend(logits.iter().map(|&logit| exp((logit - max) / scale)));
    }

    /// Collects the logits down to `floor`, or all.
    fn collect(&mut self, logits: &[f32], floor: Option<f32>, weight: impl Fn(f32) -> f32) {
        let floor = floor.unwrap_or(f32::NEG_INFINITY);
        self.ranked.clear();
        let above = (0u32..).zip(logits).filter(|&(_, &logit)| logit >= floor);
        let ranked = above.map(|(token, &logit)| Ranked {
            logit,
            token,
            weight: weight(logit),
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
