//! The routes, and what they have in common.

mod chat;
mod completions;
mod health;
mod metrics;
mod models;
mod stats;
mod stream;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use kv_telemetry::Route;

use crate::api::answer::Head;
use crate::api::json::{self, Fields};
use crate::body::{self, Received};
use crate::error::ApiError;
use crate::state::AppState;

/// A body longer than that is read and tokenised beside the tasks that serve connections.
const INLINE_BYTES: usize = 8 << 10;

/// Longest request id that is echoed.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// All routes.
pub(crate) fn router(state: Arc<AppState>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/health", get(health::handle))
        .route("/metrics", get(metrics::handle))
        .route("/admin/stats", get(stats::handle))
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), count))
        .layer(middleware::from_fn(echo_request_id))
        .with_state(state)
}

async fn no_such_path(uri: Uri) -> ApiError {
    ApiError::no_such_path(uri.path())
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), uri.path())
}

/// Answers with the `X-Request-ID` of the request.
async fn echo_request_id(request: Request, next: Next) -> Response {
    const NAME: HeaderName = HeaderName::from_static("x-request-id");
    let id = request
        .headers()
        .get(NAME)
        .filter(|id| id.len() <= REQUEST_ID_BYTES_MAX)
        .cloned();
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(NAME, id);
    }
    response
}

/// Counts answers by route and status.
async fn count(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let route = match request.uri().path() {
        "/v1/chat/completions" => Route::Chat,
        "/v1/completions" => Route::Completions,
        "/health" => Route::Health,
        "/metrics" => Route::Metrics,
        path if path.starts_with("/v1/models") => Route::Models,
        path if path.starts_with("/admin/") => Route::Admin,
        _ => Route::Other,
    };
    let response = next.run(request).await;
    state
        .telemetry
        .count_response(route, response.status().as_u16());
    response
}

/// An answer with a JSON body.
fn json_answer(body: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], body).into_response()
}

/// Receives a body and prepares what it asks for: parsing and tokenising. Long bodies are
/// prepared on a thread of their own, so that other connections are served meanwhile.
async fn prepare<T: Send + 'static>(
    state: &Arc<AppState>,
    request: Request,
    prepare: impl FnOnce(&AppState, &Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    state.check_open()?;
    let body = body::receive(state, request).await?;
    if body.bytes.len() <= INLINE_BYTES {
        return prepare(state, &json::parse(&body.bytes)?);
    }
    let state = Arc::clone(state);
    let work = move || {
        let Received { bytes, .. } = &body;
        prepare(&state, &json::parse(bytes)?)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(panic = error.is_panic(), "a request could not be prepared");
            Err(ApiError::failed())
        }
    }
}

/// Name and date of a call.
fn head(state: &AppState, kind: &str) -> Head {
    Head {
        id: state.call_name(kind),
        created: crate::clock::epoch_s(),
        model: state.limits.model.clone(),
    }
}
