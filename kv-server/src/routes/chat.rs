//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::stream::{Session, Style};
use crate::api::answer::{ChatAnswer, ChatChoice, ChatLogprobs, Head, Usage};
use crate::api::chat::Chat;
use crate::api::json::Fields;
use crate::api::params::Delivery;
use crate::error::ApiError;
use crate::generation::{Generation, Plan, PlannedPrompt};
use crate::plan;
use crate::state::AppState;

/// A call that was understood.
struct Call {
    plan: Plan,
    delivery: Delivery,
}

/// Answers a call, whole or as a stream.
pub(super) async fn handle(
    State(state): State<Arc<AppState>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Call { plan, delivery } = super::prepare(&state, request, read).await?;
    let (prompt_tokens, choices) = (plan.prompt_tokens(), plan.choices());
    let logprobs = plan.sampling.logprobs.is_some();
    let generation = Generation::start(&state, plan).await?;
    let head = super::head(&state, "chatcmpl");
    match delivery {
        Delivery::Stream(reports) => {
            let session = Session::new(
                generation,
                head,
                Style::Chat,
                reports,
                prompt_tokens,
                choices,
            );
            Ok(session.answer())
        }
        Delivery::Whole => {
            let collected = plan::collect(generation, choices).await?;
            Ok(super::json_answer(whole(
                &head,
                collected,
                logprobs,
                prompt_tokens,
            )))
        }
    }
}

fn read(state: &AppState, fields: &Fields) -> Result<Call, ApiError> {
    let Chat {
        params,
        messages,
        logprobs,
    } = Chat::read(fields, &state.limits)?;
    let tokens = state.text.encode_chat(&messages)?;
    let rest = plan::rest("messages", tokens.len(), &state.sizes)?;
    let fitting = plan::fitting(tokens.len(), params.n, &state.sizes);
    let max_tokens = params.max_tokens.unwrap_or_else(|| rest.min(fitting));
    let delivery = params.delivery;
    let planned = vec![PlannedPrompt { tokens, max_tokens }];
    Ok(Call {
        plan: plan::plan(params, planned, logprobs, &state.text),
        delivery,
    })
}

/// The answer as one object.
fn whole(
    head: &Head,
    collected: Vec<plan::Collected>,
    logprobs: bool,
    prompt_tokens: u64,
) -> String {
    let completion_tokens = collected.iter().map(|choice| choice.tokens).sum();
    let choices: Vec<_> = (0..)
        .zip(collected)
        .map(|(index, choice)| ChatChoice {
            index,
            message: ChatAnswer {
                role: "assistant",
                content: choice.text,
            },
            logprobs: logprobs.then(|| ChatLogprobs::of(choice.reports)),
            finish_reason: choice.finish,
        })
        .collect();
    head.chat(
        &choices,
        Usage {
            prompt_tokens,
            completion_tokens,
        },
    )
}
