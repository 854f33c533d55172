//! Request bodies: received within limits of size, time and total memory.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::state::AppState;

/// A body must be complete after that time.
const BODY_LIMIT: Duration = Duration::from_secs(30);

/// What is sent beyond the limit is read and dropped that long, so that the client sees the
/// answer and not a broken connection.
const REST_LIMIT: Duration = Duration::from_secs(2);

/// A body in memory; it counts against the total until it is dropped.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Receives a JSON body.
///
/// # Errors
///
/// 400, 408, 413, 415 or 503.
pub(crate) async fn receive(state: &AppState, request: Request) -> Result<Received, ApiError> {
    check_type(request.headers())?;
    let limit = state.sizes.body_bytes_max;
    let mut body = request.into_body();
    let end = Instant::now() + BODY_LIMIT;
    let received = timeout_at(end, collect(&mut body, limit, &state.bodies)).await;
    match received {
        Ok(Ok(received)) => Ok(received),
        Ok(Err(error)) => {
            // Whether the rest came in time changes nothing about the answer.
            drop(timeout_at(Instant::now() + REST_LIMIT, discard(&mut body)).await);
            Err(error)
        }
        Err(_) => Err(ApiError::body_timeout(BODY_LIMIT.as_secs())),
    }
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let value = String::from_utf8_lossy(value.as_bytes());
    let essence = value
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    if essence == "application/json" || essence.ends_with("+json") {
        Ok(())
    } else {
        Err(ApiError::content_type(&value))
    }
}

async fn collect(
    body: &mut Body,
    limit: usize,
    memory: &Arc<Semaphore>,
) -> Result<Received, ApiError> {
    let mut received = Received {
        bytes: Vec::new(),
        permit: None,
    };
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::invalid("the request body broke off"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if received.bytes.len() + data.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let permit = Arc::clone(memory)
            .try_acquire_many_owned(count)
            .map_err(|_| ApiError::too_many_bodies())?;
        match &mut received.permit {
            Some(all) => all.merge(permit),
            none => *none = Some(permit),
        }
        received.bytes.extend_from_slice(&data);
    }
    Ok(received)
}

async fn discard(body: &mut Body) {
    while let Some(Ok(_)) = body.frame().await {}
}
