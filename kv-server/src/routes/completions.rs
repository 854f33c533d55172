//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::stream::{Session, Style};
use crate::api::answer::{Head, TextChoice, TextLogprobs, Usage};
use crate::api::completion::{Completion, Echo, Prompt};
use crate::api::json::Fields;
use crate::api::params::Delivery;
use crate::engine_thread::TokenReport;
use crate::error::ApiError;
use crate::generation::{Generation, Plan, PlannedPrompt};
use crate::plan;
use crate::state::{AppState, Sizes};

/// Tokens of an answer if the client doesn't say.
const MAX_TOKENS: u32 = 16;

/// A call that was understood.
struct Call {
    plan: Plan,
    delivery: Delivery,
    /// What each choice's text starts with; empty without `echo`.
    echo: Vec<String>,
}

/// Answers a call, whole or as a stream.
pub(super) async fn handle(
    State(state): State<Arc<AppState>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Call {
        plan,
        delivery,
        echo,
    } = super::prepare(&state, request, read).await?;
    let (prompt_tokens, choices) = (plan.prompt_tokens(), plan.choices());
    let logprobs = plan.sampling.logprobs.is_some();
    let generation = Generation::start(&state, plan).await?;
    let head = super::head(&state, "cmpl");
    match delivery {
        Delivery::Stream(reports) => {
            let style = Style::Text {
                echo,
                offsets: Vec::new(),
            };
            let session = Session::new(generation, head, style, reports, prompt_tokens, choices);
            Ok(session.answer())
        }
        Delivery::Whole => {
            let collected = plan::collect(generation, choices).await?;
            Ok(super::json_answer(whole(
                &head,
                collected,
                &echo,
                logprobs,
                prompt_tokens,
            )))
        }
    }
}

fn read(state: &AppState, fields: &Fields) -> Result<Call, ApiError> {
    let Completion {
        params,
        prompts,
        echo,
        logprobs,
    } = Completion::read(fields, &state.limits)?;
    check_count(prompts.len(), &state.sizes)?;
    let mut texts = Vec::new();
    let mut planned = Vec::new();
    for prompt in prompts {
        let tokens = match prompt {
            Prompt::Text(text) => {
                let tokens = state.text.encode(&text)?;
                if echo == Echo::Prompt {
                    texts.push(text);
                }
                tokens
            }
            Prompt::Tokens(tokens) => {
                if echo == Echo::Prompt {
                    texts.push(state.text.decode(&tokens));
                }
                tokens
            }
        };
        let rest = plan::rest("prompt", tokens.len(), &state.sizes)?;
        let max_tokens = params.max_tokens.unwrap_or_else(|| rest.min(MAX_TOKENS));
        planned.push(PlannedPrompt { tokens, max_tokens });
    }
    let n = params.n as usize;
    let echo = texts
        .into_iter()
        .flat_map(|text| std::iter::repeat_n(text, n))
        .collect();
    let delivery = params.delivery;
    Ok(Call {
        plan: plan::plan(params, planned, logprobs, &state.text),
        delivery,
        echo,
    })
}

/// Refuses more prompts than may wait: they come at once, so that even an idle server could only
/// ever say that its queue is full, and to come back would not help.
fn check_count(prompts: usize, sizes: &Sizes) -> Result<(), ApiError> {
    match sizes.max_waiting {
        0 => Ok(()),
        max if prompts <= max as usize => Ok(()),
        max => {
            let given = format!("a list of {prompts}");
            let allowed = format!("at most {max}, since no more requests may wait here");
            Err(ApiError::value("prompt", &given, &allowed))
        }
    }
}

/// The answer as one object.
fn whole(
    head: &Head,
    collected: Vec<plan::Collected>,
    echo: &[String],
    logprobs: bool,
    prompt_tokens: u64,
) -> String {
    let completion_tokens = collected.iter().map(|choice| choice.tokens).sum();
    let choices: Vec<_> = (0..)
        .zip(collected)
        .map(|(index, choice)| {
            let before = echo.get(index as usize).map_or("", String::as_str);
            let offset = before.chars().count();
            let logprobs = logprobs.then(|| text_logprobs(&choice.reports, offset));
            let text = format!("{before}{}", choice.text);
            TextChoice {
                index,
                text,
                logprobs,
                finish_reason: choice.finish,
            }
        })
        .collect();
    head.completion(
        &choices,
        Usage {
            prompt_tokens,
            completion_tokens,
        },
    )
}

fn text_logprobs(reports: &[TokenReport], offset: usize) -> TextLogprobs {
    let mut logprobs = TextLogprobs::default();
    logprobs.extend(reports, offset);
    logprobs
}
