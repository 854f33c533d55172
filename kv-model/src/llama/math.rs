//! Element by element: exponential, softmax, SiLU, RMS norm.
//!
//! Plain loops over 16 lanes, inlined into [`Isa::run`](super::kernels::Isa::run) so that the
//! compiler uses the machine's vectors. Multiply-adds are fused by name; nothing else may be
//! reordered, so all instruction sets give the same bits.

use super::kernels::LANES;

/// `e` to the power of `x`, relative error below 2e-7; 0 below -87, and as at 88 above.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let below = x < -87.0;
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(core::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with few digits, so that the products are exact.
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_2e-4f32.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_6e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    let result = p * f32::from_bits(exponent << 23);
    if below { 0.0 } else { result }
}

/// Sums 16 lanes, always in the same order.
#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    let mut lanes = lanes;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Turns the first `count` scores into `exp(score - max)` and the rest into zeros; returns their
/// sum. Lane `l` adds up positions `l`, `l + 16`, and so on: the order depends on nothing but
/// the positions.
///
/// The length of `scores` is a multiple of 16.
#[inline(always)]
pub(super) fn softmax(scores: &mut [f32], count: usize) -> f32 {
    scores[count..].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores.as_chunks_mut::<LANES>();
    let mut max = [f32::NEG_INFINITY; LANES];
    for chunk in &*chunks {
        for (max, &score) in max.iter_mut().zip(chunk) {
            *max = if score > *max { score } else { *max };
        }
    }
    let max = max
        .iter()
        .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            *score = exp(*score - max);
            *sum += *score;
        }
    }
    total(sums)
}

/// `gate = silu(gate) * up`.
#[inline(always)]
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// Sum of squares, lane by lane; for [`rms_scale`].
#[derive(Debug)]
pub(super) struct Squares([f32; LANES]);

impl Squares {
    pub(super) const ZERO: Self = Self([0.0; LANES]);

    /// Adds values whose first one has an index that is a multiple of 16.
    #[inline(always)]
    pub(super) fn add(&mut self, values: &[f32]) {
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (sum, &x) in self.0.iter_mut().zip(chunk) {
                *sum = x.mul_add(x, *sum);
            }
        }
        for (sum, &x) in self.0.iter_mut().zip(rest) {
            *sum = x.mul_add(x, *sum);
        }
    }
}

/// What every value is multiplied with in RMS norm.
pub(super) fn rms_scale(squares: &Squares, count: f32, epsilon: f32) -> f32 {
    1.0 / (total(squares.0) / count + epsilon).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_monotone_at_the_ends() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let right = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - right).abs() / right);
        }
        assert!(worst < 2e-7, "relative error {worst}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert!(exp(1000.0).is_finite());
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn softmax_is_the_same_whatever_lies_behind() {
        let scores: Vec<f32> = (0..40).map(|i| ((i * 37) % 23) as f32 - 11.0).collect();
        let mut short = scores[..32].to_vec();
        let mut long = scores.clone();
        long.resize(96, f32::NAN);
        let sums = (softmax(&mut short, 29), softmax(&mut long, 29));
        assert_eq!(sums.0.to_bits(), sums.1.to_bits());
        assert_eq!(short[..29], long[..29]);
        assert!(long[29..].iter().all(|&x| x == 0.0));
        let right: f64 = scores[..29]
            .iter()
            .map(|&s| (f64::from(s) - 11.0).exp())
            .sum();
        assert!((f64::from(sums.0) - right).abs() < 1e-5 * right);
    }
}
