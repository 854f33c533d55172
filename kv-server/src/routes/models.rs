//! `GET /v1/models`: the one model that is served.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::AppState;

/// The list of one.
pub(super) async fn list(State(state): State<Arc<AppState>>) -> Response {
    super::json_answer(json!({ "object": "list", "data": [card(&state)] }).to_string())
}

/// That one by its name.
pub(super) async fn one(
    State(state): State<Arc<AppState>>,
    uri: Uri,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    // A name that is not UTF-8 names nothing.
    let Path(name) = name.map_err(|_| ApiError::no_such_path(uri.path()))?;
    if name == state.limits.model {
        Ok(super::json_answer(card(&state).to_string()))
    } else {
        Err(ApiError::no_such_model(&name, &state.limits.model))
    }
}

fn card(state: &AppState) -> Value {
    json!({
        "id": state.limits.model,
        "object": "model",
        "created": state.created,
        "owned_by": "kv-server",
        "max_model_len": state.sizes.max_seq_len,
    })
}
