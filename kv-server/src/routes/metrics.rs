//! `GET /metrics`: Prometheus text.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use crate::state::AppState;

/// Everything that `kv-telemetry` counts.
pub(super) async fn handle(State(state): State<Arc<AppState>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], state.metrics.encode()).into_response()
}
