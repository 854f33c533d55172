//! `GET /health`: whether this server can serve, and if not, why.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::engine_thread::Health;
use crate::state::AppState;

/// Reads what the engine thread publishes; never waits for the engine.
pub(super) async fn handle(State(state): State<Arc<AppState>>) -> Response {
    let reason = match state.engine.health() {
        Health::Healthy => {
            return super::json_answer(r#"{"status":"healthy","reason":null}"#.to_owned());
        }
        Health::Dead => "the engine has stopped".to_owned(),
        Health::Degraded => "too much memory is lost, nothing is swapped any more".to_owned(),
        Health::Draining => "the server is shutting down".to_owned(),
        Health::Failing(turns) => {
            format!("in {turns} steps in a row requests failed and no token came")
        }
        Health::Stuck(span) => {
            format!(
                "the engine has been in one step for {} s",
                span.as_duration().as_secs()
            )
        }
        Health::Wedged => "the engine has work but nothing to wait for".to_owned(),
    };
    let body = serde_json::json!({ "status": "unhealthy", "reason": reason });
    let mut response = super::json_answer(body.to_string());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response.into_response()
}
