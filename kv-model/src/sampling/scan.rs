//! Passes over a whole vocabulary, written so that the compiler makes vector code of them.

use super::SampleError;

/// Elements that one turn of a pass takes together.
const LANES: usize = 16;
/// Elements between two looks at the maximum, or of one partial sum.
pub(super) const CHUNK: usize = 256;

/// Index and value of the highest logit, the lowest index if several are equal.
///
/// # Errors
///
/// There are no finite logits, or one is NaN or positive infinity.
pub(super) fn highest(logits: &[f32]) -> Result<(usize, f32), SampleError> {
    let mut max = f32::NEG_INFINITY;
    let mut at = 0;
    let mut sound = true;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        let (chunk_max, chunk_sound) = chunk_highest(chunk);
        sound &= chunk_sound;
        if chunk_max > max {
            (max, at) = (chunk_max, index * CHUNK);
        }
    }
    if !sound {
        return Err(SampleError::NotFinite);
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingLeft);
    }
    let inside = logits[at..].iter().position(|&logit| logit == max);
    Ok((at + inside.expect("the chunk has its own maximum"), max))
}

/// The maximum of a chunk, and whether it has neither NaN nor positive infinity.
fn chunk_highest(chunk: &[f32]) -> (f32, bool) {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut sound = [true; LANES];
    let (turns, rest) = chunk.as_chunks::<LANES>();
    for turn in turns {
        for lane in 0..LANES {
            max[lane] = if turn[lane] > max[lane] {
                turn[lane]
            } else {
                max[lane]
            };
            sound[lane] &= turn[lane] < f32::INFINITY;
        }
    }
    let mut all = (f32::NEG_INFINITY, sound.iter().all(|&lane| lane));
    for &logit in max.iter().chain(rest) {
        all.0 = if logit > all.0 { logit } else { all.0 };
        all.1 &= logit < f32::INFINITY;
    }
    all
}

/// The sum of `exp(logit - max)` over all logits.
pub(super) fn sum_exp(logits: &[f32], max: f32) -> f64 {
    let mut weights = [0.0; CHUNK];
    logits
        .chunks(CHUNK)
        .map(|chunk| {
            let weights = &mut weights[..chunk.len()];
            for (weight, &logit) in weights.iter_mut().zip(chunk) {
                *weight = exp(logit - max);
            }
            sum(weights)
        })
        .sum()
}

/// The sum, with a fixed order of additions.
pub(super) fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (turns, rest) = values.as_chunks::<LANES>();
    for turn in turns {
        for (lane, &value) in lanes.iter_mut().zip(turn) {
            *lane += f64::from(value);
        }
    }
    let rest: f64 = rest.iter().copied().map(f64::from).sum();
    lanes.iter().sum::<f64>() + rest
}

/// The sum of the weights whose logits are at least `floor`.
pub(super) fn sum_above(logits: &[f32], weights: &[f32], floor: f32) -> f64 {
    let mut kept = [0.0; CHUNK];
    logits
        .chunks(CHUNK)
        .zip(weights.chunks(CHUNK))
        .map(|(logits, weights)| {
            let kept = &mut kept[..logits.len()];
            for ((kept, &logit), &weight) in kept.iter_mut().zip(logits).zip(weights) {
                *kept = if logit >= floor { weight } else { 0.0 };
            }
            sum(kept)
        })
        .sum()
}

/// `e` to the power of `x`, for `x` up to 0, within 2 units in the last place; 0 where the result
/// would not be a normal number (below about -87.3) and for NaN.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    // The integer nearest to x / ln 2, found by adding a number so large that it rounds.
    const ROUNDER: f32 = 12_582_912.0;
    // ln 2 in two pieces, the first of so few bits that its multiples are exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -87.336_54;
    let inside = if x > LOWEST { x } else { LOWEST };
    let shifted = inside * std::f32::consts::LOG2_E + ROUNDER;
    let power = shifted - ROUNDER;
    let rest = inside - power * LN_2_HIGH - power * LN_2_LOW;
    // Minimax polynomial of (exp(r) - 1 - r) / r^2 on half an octave to both sides.
    let tail = 1.987_569_2e-4f32;
    let tail = tail * rest + 1.398_199_9e-3;
    let tail = tail * rest + 8.333_452e-3;
    let tail = tail * rest + 4.166_579_6e-2;
    let tail = tail * rest + 0.166_666_65;
    let tail = tail * rest + 0.5;
    let mantissa = tail * rest * rest + rest + 1.0;
    // The rounder's low bits hold the power; 2^power is made by placing it in the exponent.
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUNDER.to_bits())
        .wrapping_add(127)
        << 23;
    let value = mantissa * f32::from_bits(exponent);
    if x > LOWEST { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exp_is_as_exact_as_promised() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::NAN), 0.0);
        assert_eq!(exp(-88.0), 0.0);
        for step in 0..870_000u32 {
            let x = -(step as f32) / 10_000.0;
            let exact = f64::from(x).exp();
            let ulp = exact * f64::from(f32::EPSILON);
            let off = (f64::from(exp(x)) - exact).abs();
            assert!(off <= 2.0 * ulp, "exp({x}) is {off} off");
        }
    }

    proptest! {
        #[test]
        fn highest_is_the_first_maximum(
            logits in proptest::collection::vec(-8i8..8, 1..1200),
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|&logit| logit == max).unwrap();
            prop_assert_eq!(highest(&logits), Ok((first, max)));
        }

        #[test]
        fn highest_finds_what_is_unsound(
            length in 1usize..1200,
            at in any::<prop::sample::Index>(),
            infinite in any::<bool>(),
        ) {
            let mut logits = vec![0.5; length];
            logits[at.index(length)] = if infinite { f32::INFINITY } else { f32::NAN };
            prop_assert_eq!(highest(&logits), Err(SampleError::NotFinite));
        }

        #[test]
        fn sums_agree_with_naive_ones(
            logits in proptest::collection::vec(-20.0f32..0.0, 1..1200),
            floor in -20.0f32..0.0,
        ) {
            let naive: f64 = logits.iter().map(|&x| f64::from(exp(x - 1.5))).sum();
            let sum_exp = sum_exp(&logits, 1.5);
            prop_assert!((sum_exp - naive).abs() <= naive * 1e-12);
            let weights: Vec<f32> = logits.iter().map(|&x| exp(x)).collect();
            let above = logits.iter().zip(&weights).filter(|&(&logit, _)| logit >= floor);
            let naive: f64 = above.map(|(_, &weight)| f64::from(weight)).sum();
            let sum_above = sum_above(&logits, &weights, floor);
            prop_assert!((sum_above - naive).abs() <= naive * 1e-12);
        }
    }
}
