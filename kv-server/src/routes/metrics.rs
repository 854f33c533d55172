//! `GET /metrics`: everything that is counted, as text.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use kv_telemetry::Format;

use crate::engine_thread::Health;
use crate::state::AppState;

/// Prometheus text, or OpenMetrics for who asks for it. Always 200.
pub(super) async fn handle(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Response {
    let health = match state.engine.health() {
        Health::Healthy => kv_telemetry::Health::Ready,
        Health::Draining => kv_telemetry::Health::Draining,
        Health::Dead
        | Health::Degraded
        | Health::Failing(_)
        | Health::Stuck(_)
        | Health::Wedged => kv_telemetry::Health::Unhealthy,
    };
    state.telemetry.set_health(health);
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok());
    let format = Format::from_accept(accept.unwrap_or_default());
    let text = state.telemetry.encode(format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}
