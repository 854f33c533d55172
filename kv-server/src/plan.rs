//! From understood parameters to a plan for the engine, and back to whole answers.

use std::sync::Arc;

use kv_model::detokenize::StopStrings;

use crate::api::params::{EndTokens, Params};
use crate::engine_thread::{Finish, TokenReport};
use crate::error::ApiError;
use crate::generation::{Generation, Plan, PlannedPrompt};
use crate::state::{Sizes, draw};
use crate::text::Text;

/// How many tokens can follow a prompt.
///
/// # Errors
///
/// 400 if there is room for none.
pub(crate) fn rest(param: &str, prompt_tokens: usize, sizes: &Sizes) -> Result<u32, ApiError> {
    let max = sizes.max_seq_len;
    let prompt = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    match max.checked_sub(prompt) {
        None | Some(0) => Err(ApiError::context_length(
            param,
            format!(
                "the prompt has {prompt_tokens} tokens, but prompt and answer together may have \
                 {max}"
            ),
        )),
        Some(rest) => Ok(rest),
    }
}

/// How many tokens surely fit into the KV pool behind a prompt, for each of `n` choices; at
/// least 1, since whether even that fits is the engine's to say.
pub(crate) fn fitting(prompt_tokens: usize, n: u32, sizes: &Sizes) -> u32 {
    let tokens = u64::from(sizes.gpu_blocks / n) * u64::from(sizes.block_tokens);
    let rest = tokens.saturating_sub(prompt_tokens as u64).max(1);
    u32::try_from(rest).unwrap_or(u32::MAX)
}

/// Puts a plan together. Without a seed of the client's, one is drawn.
pub(crate) fn plan(
    params: Params,
    prompts: Vec<PlannedPrompt>,
    logprobs: Option<u32>,
    text: &Text,
) -> Plan {
    let Params {
        n,
        stops,
        mut stop_tokens,
        end_tokens,
        priority,
        seed,
        mut sampling,
        ..
    } = params;
    if end_tokens == EndTokens::Heeded {
        stop_tokens.extend_from_slice(text.end_tokens());
    }
    sampling.seed = seed.unwrap_or_else(draw);
    sampling.logprobs = logprobs;
    let stops =
        StopStrings::new(stops).expect("empty stop strings were refused when they were read");
    Plan {
        prompts,
        n,
        stops: Arc::new(stops),
        stop_tokens,
        sampling,
        priority,
    }
}

/// One whole choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Collected {
    pub(crate) text: String,
    pub(crate) tokens: u64,
    pub(crate) reports: Vec<TokenReport>,
    pub(crate) finish: Option<Finish>,
}

/// Waits until every choice has ended.
///
/// # Errors
///
/// The first failure; the rest of the call is cancelled then.
pub(crate) async fn collect(
    mut generation: Generation,
    choices: u32,
) -> Result<Vec<Collected>, ApiError> {
    let mut collected = vec![Collected::default(); choices as usize];
    while let Some(piece) = generation.next().await {
        let piece = piece?;
        let choice = &mut collected[piece.index as usize];
        choice.text.push_str(&piece.text);
        choice.tokens += 1;
        choice.reports.extend(piece.reports);
        choice.finish = piece.finish;
    }
    Ok(collected)
}
