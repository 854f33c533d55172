//! Sampling against a naive reference, its documented semantics and its distribution.

#![expect(clippy::unwrap_used, reason = "a failed test says where by panicking")]

use std::collections::BTreeMap;

use kv_core::Choice;
use kv_model::sampling::{SampleError, Sampler};
use kv_scheduler::{Sample, Sampled, SamplingParams, TokenId};
use proptest::prelude::*;

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

fn sample(
    sampler: &mut Sampler,
    logits: &[f32],
    params: &SamplingParams,
    prompt: &[TokenId],
    output: &[TokenId],
    choice: u32,
) -> Result<Sampled, SampleError> {
    let choice = Choice::new(choice);
    sampler.sample(
        logits,
        prompt,
        &Sample {
            choice,
            params,
            output,
        },
    )
}

fn draw(logits: &[f32], params: &SamplingParams) -> u32 {
    sample(&mut Sampler::new(), logits, params, &[], &[], 0)
        .unwrap()
        .token
        .0
}

/// The probability of each token, straight from the documentation, in double precision.
fn reference(
    logits: &[f32],
    params: &SamplingParams,
    prompt: &[TokenId],
    output: &[TokenId],
) -> Vec<f64> {
    let mut adjusted = Vec::new();
    for (id, &logit) in (0u32..).zip(logits) {
        let count = output.iter().filter(|token| token.0 == id).count() as f32;
        let mut logit = logit;
        if count > 0.0 || prompt.contains(&TokenId(id)) {
            let penalty = params.repetition_penalty;
            logit = if logit > 0.0 {
                logit / penalty
            } else {
                logit * penalty
            };
        }
        logit -= count * params.frequency_penalty;
        logit -= if count > 0.0 {
            params.presence_penalty
        } else {
            0.0
        };
        for bias in params.logit_bias.iter().filter(|bias| bias.0.0 == id) {
            logit += bias.1;
        }
        adjusted.push(logit);
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| {
        adjusted[b]
            .partial_cmp(&adjusted[a])
            .unwrap()
            .then(a.cmp(&b))
    });
    let max = f64::from(adjusted[order[0]]);
    let mut kept = BTreeMap::new();
    for (rank, &id) in order.iter().enumerate() {
        if params.temperature == 0.0 {
            kept.insert(id, if rank == 0 { 1.0 } else { 0.0 });
            continue;
        }
        let weight = ((f64::from(adjusted[id]) - max) / f64::from(params.temperature)).exp();
        let in_k = params.top_k == 0 || rank < params.top_k as usize;
        kept.insert(
            id,
            if in_k && weight >= f64::from(params.min_p) {
                weight
            } else {
                0.0
            },
        );
    }
    let needed = kept.values().sum::<f64>() * f64::from(params.top_p);
    let mut above = 0.0;
    for id in order {
        let weight = kept[&id];
        if params.top_p < 1.0 && above >= needed {
            kept.insert(id, 0.0);
        }
        above += weight;
    }
    let total: f64 = kept.values().sum();
    kept.values().map(|weight| weight / total).collect()
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let truncation = (0u32..12, 0.05f32..=1.0, 0.0f32..=1.0);
    let penalties = (0.5f32..2.0, -2.0f32..=2.0, -2.0f32..=2.0);
    let bias = proptest::collection::vec((0u32..40, -9.0f32..9.0), 0..3);
    // Each part is off half of the time, so that every path of the sampler is taken.
    let switches = proptest::array::uniform6(any::<bool>());
    (
        0.1f32..2.0,
        truncation,
        penalties,
        bias,
        any::<u64>(),
        switches,
    )
        .prop_map(
            |(
                temperature,
                (top_k, top_p, min_p),
                (repetition, presence, frequency),
                bias,
                seed,
                on,
            )| {
                SamplingParams {
                    temperature,
                    top_k: if on[0] { top_k } else { 0 },
                    top_p: if on[1] { top_p } else { 1.0 },
                    min_p: if on[2] { min_p * min_p * min_p } else { 0.0 },
                    repetition_penalty: if on[3] { repetition } else { 1.0 },
                    presence_penalty: if on[4] { presence } else { 0.0 },
                    frequency_penalty: if on[4] { frequency } else { 0.0 },
                    logit_bias: bias
                        .into_iter()
                        .filter(|_| on[5])
                        .map(|(id, bias)| (TokenId(id), bias))
                        .collect(),
                    seed,
                    logprobs: None,
                }
            },
        )
}

/// Logits of few different values, so that ties happen, or of many.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    let few = proptest::collection::vec((-6i8..6).prop_map(f32::from), 40..90);
    let many = proptest::collection::vec(-12.0f32..12.0, 40..700);
    prop_oneof![few, many]
}

fn history() -> impl Strategy<Value = Vec<TokenId>> {
    // Ids beyond the vocabulary have no logit; they must not disturb.
    proptest::collection::vec((0u32..60).prop_map(TokenId), 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// The frequencies over many positions are those of the reference: nothing outside it is ever
    /// drawn, and what has a fair share is drawn about as often as it should be.
    #[test]
    fn draws_follow_the_naive_reference(
        logits in logits(),
        params in params(),
        prompt in history(),
        output in history(),
    ) {
        let expected = reference(&logits, &params, &prompt, &output);
        let mut counts = vec![0u32; logits.len()];
        let mut sampler = Sampler::new();
        // The choice moves the draw as the position does, and leaves the counts alone.
        for choice in 0..400 {
            let drawn = sample(&mut sampler, &logits, &params, &prompt, &output, choice).unwrap();
            counts[drawn.token.0 as usize] += 1;
        }
        for (id, (&count, &share)) in counts.iter().zip(&expected).enumerate() {
            prop_assert!(count == 0 || share > 0.0, "token {} was cut off", id);
            let deviation = (share * (1.0 - share) / 400.0).sqrt();
            let off = (f64::from(count) / 400.0 - share).abs();
            prop_assert!(off <= 6.0 * deviation + 0.02, "token {}: {} of 400 for {}", id, count, share);
        }
    }

    #[test]
    fn greedy_takes_the_reference_token(
        logits in logits(),
        mut params in params(),
        prompt in history(),
        output in history(),
    ) {
        params.temperature = 0.0;
        let expected = reference(&logits, &params, &prompt, &output);
        let best = expected.iter().position(|&share| share == 1.0).unwrap();
        let drawn = sample(&mut Sampler::new(), &logits, &params, &prompt, &output, 0).unwrap();
        prop_assert_eq!(drawn.token.0 as usize, best);
    }

    /// A pause changes nothing: the result depends on arguments, not on what was sampled before.
    #[test]
    fn i10_earlier_calls_leave_no_trace(
        calls in proptest::collection::vec((logits(), params(), history(), history()), 1..8),
        logprobs in proptest::option::of(0u32..5),
    ) {
        let mut used = Sampler::new();
        for (logits, mut params, prompt, output) in calls {
            params.logprobs = logprobs;
            let again = sample(&mut used, &logits, &params, &prompt, &output, 3);
            let fresh = sample(&mut Sampler::new(), &logits, &params, &prompt, &output, 3);
            prop_assert_eq!(again, fresh);
        }
    }

    #[test]
    fn logprobs_are_those_of_the_model(
        logits in logits(),
        params in params(),
        output in history(),
        top in 0u32..=20,
    ) {
        let params = SamplingParams { logprobs: Some(top), ..params };
        let drawn = sample(&mut Sampler::new(), &logits, &params, &[], &output, 0).unwrap();
        let raw = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        let expected = reference(&logits, &raw, &[], &[]);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        let logprobs = drawn.logprobs.unwrap();
        let close = |logprob: f32, id: usize| (f64::from(logprob) - expected[id].ln()).abs() < 1e-4;
        prop_assert!(close(logprobs.chosen, drawn.token.0 as usize));
        prop_assert_eq!(logprobs.top.len(), top as usize);
        for (&(token, logprob), &id) in logprobs.top.iter().zip(&order) {
            prop_assert_eq!(token.0 as usize, id);
            prop_assert!(close(logprob, id));
        }
    }

    #[test]
    fn odd_numbers_never_panic(
        raw in proptest::collection::vec(any::<u32>(), 0..40),
        params in params(),
        temperature in any::<u32>(),
        bias in any::<u32>(),
        logprobs in proptest::option::of(any::<u32>()),
    ) {
        let logits: Vec<f32> = raw.iter().copied().map(f32::from_bits).collect();
        let mut params = SamplingParams { logprobs, ..params };
        params.logit_bias.push((TokenId(0), f32::from_bits(bias)));
        let mut sampler = Sampler::new();
        drop(sample(&mut sampler, &logits, &params, &[], &[], 0));
        params.temperature = f32::from_bits(temperature);
        drop(sample(&mut sampler, &logits, &params, &[], &[], 0));
    }
}

/// 20,000 draws at as many positions over six tokens; the limit is passed by chance once in a
/// million seeds, and this one is fixed.
#[test]
fn positions_and_choices_draw_evenly() {
    let logits = [1.0, 0.0, 2.0, -1.0, 0.5, 1.5];
    let params = SamplingParams {
        temperature: 0.9,
        seed: 7,
        ..SamplingParams::default()
    };
    let expected = reference(&logits, &params, &[], &[]);
    let mut sampler = Sampler::new();
    let prompt = vec![TokenId(0); 10_000];
    let mut counts = [0u32; 6];
    for position in 0..10_000 {
        for choice in 0..2 {
            let prompt = &prompt[..position];
            let drawn = sample(&mut sampler, &logits, &params, prompt, &[], choice).unwrap();
            counts[drawn.token.0 as usize] += 1;
        }
    }
    let chi_square: f64 = counts
        .iter()
        .zip(&expected)
        .map(|(&count, &share)| (f64::from(count) - share * 20_000.0).powi(2) / (share * 20_000.0))
        .sum();
    assert!(
        chi_square < 35.9,
        "{chi_square} with five degrees of freedom: {counts:?}"
    );
}

#[test]
fn seed_choice_and_position_each_matter() {
    let logits = vec![0.0; 1 << 16];
    let params = SamplingParams {
        temperature: 1.0,
        seed: 1,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new();
    let mut draw = |seed, choice, position| {
        let params = SamplingParams {
            seed,
            ..params.clone()
        };
        let prompt = vec![TokenId(0); position];
        sample(&mut sampler, &logits, &params, &prompt, &[], choice)
            .unwrap()
            .token
    };
    let first = draw(1, 0, 5);
    assert_eq!(first, draw(1, 0, 5));
    assert_ne!(first, draw(2, 0, 5));
    assert_ne!(first, draw(1, 1, 5));
    assert_ne!(first, draw(1, 0, 6));
}

/// After a recompute emitted tokens may be run as if they belonged to the prompt's chunk: only
/// their number counts for the draw.
#[test]
fn the_position_counts_prompt_and_output_alike() {
    let logits = vec![0.0; 1 << 16];
    let params = SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    };
    let history = tokens(&[1, 2, 3, 4]);
    let mut sampler = Sampler::new();
    let all: Vec<_> = (0..=4)
        .map(|split| {
            let (prompt, output) = history.split_at(split);
            sample(&mut sampler, &logits, &params, prompt, output, 0).unwrap()
        })
        .collect();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{all:?}");
}

#[test]
fn repetition_penalty_sees_prompt_and_output_and_minds_the_sign() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new();
    let mut best = |logits: &[f32], prompt: &[u32], output: &[u32]| {
        let (prompt, output) = (tokens(prompt), tokens(output));
        sample(&mut sampler, logits, &params, &prompt, &output, 0)
            .unwrap()
            .token
            .0
    };
    assert_eq!(best(&[3.0, 2.0], &[], &[]), 0);
    assert_eq!(best(&[3.0, 2.0], &[0], &[]), 1, "3 / 2 < 2");
    assert_eq!(best(&[3.0, 2.0], &[], &[0]), 1, "the output counts too");
    assert_eq!(
        best(&[3.0, 1.0], &[0, 0, 0], &[0]),
        0,
        "once, not per occurrence: 3 / 2 > 1"
    );
    assert_eq!(best(&[-1.0, -1.5], &[0], &[]), 1, "-1 * 2 < -1.5");
}

#[test]
fn presence_and_frequency_see_only_the_output() {
    let presence = SamplingParams {
        presence_penalty: 1.5,
        ..SamplingParams::default()
    };
    let frequency = SamplingParams {
        frequency_penalty: 0.5,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new();
    let mut best = |params: &SamplingParams, prompt: &[u32], output: &[u32]| {
        let (prompt, output) = (tokens(prompt), tokens(output));
        sample(&mut sampler, &[2.0, 1.0], params, &prompt, &output, 0)
            .unwrap()
            .token
            .0
    };
    assert_eq!(best(&presence, &[0], &[]), 0);
    assert_eq!(best(&presence, &[], &[0]), 1);
    assert_eq!(best(&frequency, &[0, 0, 0, 0], &[]), 0);
    assert_eq!(
        best(&frequency, &[], &[0, 0]),
        0,
        "2 - 2 * 0.5 ties with 1: the lower id"
    );
    assert_eq!(best(&frequency, &[], &[0, 0, 0]), 1, "2 - 3 * 0.5 < 1");
}

#[test]
fn bias_forces_and_bans() {
    let logits = [5.0, 4.0, 3.0];
    let biased = |bias| SamplingParams {
        logit_bias: bias,
        ..SamplingParams::default()
    };
    assert_eq!(draw(&logits, &biased(vec![(TokenId(2), 100.0)])), 2);
    assert_eq!(draw(&logits, &biased(vec![(TokenId(0), -100.0)])), 1);
    let outside = biased(vec![(TokenId(3), 1.0)]);
    let error = sample(&mut Sampler::new(), &logits, &outside, &[], &[], 0).unwrap_err();
    assert_eq!(error, SampleError::Bias { vocab: 3 });
}

#[test]
fn ties_go_to_the_lowest_id() {
    let logits = [0.0, 7.0, 7.0, -0.0];
    assert_eq!(draw(&logits, &SamplingParams::default()), 1);
    for seed in 0..50 {
        let params = SamplingParams {
            temperature: 1.0,
            top_k: 1,
            seed,
            ..Default::default()
        };
        assert_eq!(draw(&logits, &params), 1);
        assert_eq!(
            draw(&[-0.0, 0.0], &params),
            0,
            "zeros of both signs are equal"
        );
    }
}

#[test]
fn unusable_logits_are_errors() {
    let params = SamplingParams {
        temperature: 1.0,
        logprobs: Some(3),
        ..Default::default()
    };
    let fails = |logits: &[f32]| sample(&mut Sampler::new(), logits, &params, &[], &[], 0);
    assert_eq!(fails(&[]), Err(SampleError::Empty));
    assert_eq!(fails(&[1.0, f32::NAN]), Err(SampleError::NotFinite));
    assert_eq!(fails(&[1.0, f32::INFINITY]), Err(SampleError::NotFinite));
    assert_eq!(
        fails(&[f32::NEG_INFINITY; 2]),
        Err(SampleError::NothingLeft)
    );
    let negative = SamplingParams {
        temperature: -1.0,
        ..SamplingParams::default()
    };
    let error = sample(&mut Sampler::new(), &[1.0], &negative, &[], &[], 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "temperature is -1, must be between 0 and 2"
    );
}

#[test]
fn excluded_tokens_are_neither_drawn_nor_reported() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
    for seed in 0..100 {
        let params = SamplingParams {
            temperature: 2.0,
            seed,
            logprobs: Some(4),
            ..Default::default()
        };
        let drawn = sample(&mut Sampler::new(), &logits, &params, &[], &[], 0).unwrap();
        assert!([1, 3].contains(&drawn.token.0));
        let half = 0.5f32.ln();
        assert_eq!(
            drawn.logprobs.unwrap().top,
            [(TokenId(1), half), (TokenId(3), half)]
        );
    }
}

#[test]
fn the_smallest_temperature_is_greedy() {
    let temperature = f32::from_bits(1);
    for top_p in [1.0, 0.9] {
        let params = SamplingParams {
            temperature,
            top_p,
            ..SamplingParams::default()
        };
        assert_eq!(draw(&[1.0, 1.5, -3.0], &params), 1);
    }
}
