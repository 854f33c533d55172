//! What clients feel: waits, tokens, pauses, answers.

use kv_core::Span;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::defs;
use crate::series::{Number, Series};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself.
    Finished,
    /// The client, or the shutdown, broke it off.
    Cancelled,
    /// It could not be served.
    Failed,
}

/// Where a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/models`
    Models,
    /// `/health` and whatever else asks how the server is.
    Health,
    /// `/metrics`
    Metrics,
    /// `/admin/...`
    Admin,
    /// Anything else.
    Other,
}

/// What state the server is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Not all is set up.
    Starting,
    /// It serves.
    Ready,
    /// It finishes what it has.
    Draining,
    /// It serves no more and should be started again.
    Unhealthy,
}

#[derive(Debug)]
pub(crate) struct RequestSeries {
    queue_seconds: Series<Histogram>,
    first_token_seconds: Series<Histogram>,
    inter_token_seconds: Series<Histogram>,
    pause_seconds: Series<Histogram>,
    duration_seconds: Series<Histogram>,
}

impl RequestSeries {
    /// Registers in the order of [`defs::ALL`].
    pub(crate) fn new(registry: &mut Registry) -> Self {
        Self {
            queue_seconds: Series::histogram(registry, &defs::QUEUE_SECONDS),
            first_token_seconds: Series::histogram(registry, &defs::FIRST_TOKEN_SECONDS),
            inter_token_seconds: Series::histogram(registry, &defs::INTER_TOKEN_SECONDS),
            pause_seconds: Series::histogram(registry, &defs::PAUSE_SECONDS),
            duration_seconds: Series::histogram(registry, &defs::REQUEST_SECONDS),
        }
    }

    pub(crate) fn queue_wait(&self, span: Span) {
        self.queue_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }

    pub(crate) fn first_token(&self, span: Span) {
        self.first_token_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }

    pub(crate) fn inter_token(&self, span: Span) {
        self.inter_token_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }

    pub(crate) fn pause(&self, span: Span) {
        self.pause_seconds
            .at(0)
            .observe(span.as_duration().as_secs_f64());
    }

    pub(crate) fn ended(&self, how: Ended, span: Span) {
        let place = match how {
            Ended::Finished => 0,
            Ended::Cancelled => 1,
            Ended::Failed => 2,
        };
        self.duration_seconds
            .at(place)
            .observe(span.as_duration().as_secs_f64());
    }
}

/// The server's own series.
#[derive(Debug)]
pub(crate) struct ServerSeries {
    health: Series<Number>,
    responses: Series<Counter>,
}

impl ServerSeries {
    /// Registers in the order of [`defs::ALL`].
    pub(crate) fn new(registry: &mut Registry) -> Self {
        Self {
            health: Series::gauge(registry, &defs::HEALTH),
            responses: Series::counter(registry, &defs::HTTP_RESPONSES),
        }
    }

    pub(crate) fn health(&self, health: Health) {
        let states = [
            Health::Starting,
            Health::Ready,
            Health::Draining,
            Health::Unhealthy,
        ];
        self.health
            .set(states.map(|state| u64::from(state == health)));
    }

    pub(crate) fn response(&self, route: Route, status: u16) {
        let route = match route {
            Route::Chat => 0,
            Route::Completions => 1,
            Route::Models => 2,
            Route::Health => 3,
            Route::Metrics => 4,
            Route::Admin => 5,
            Route::Other => 6,
        };
        let class = match status {
            200..300 => 0,
            400..500 => 1,
            500..600 => 2,
            _ => 3,
        };
        self.responses.at(route * 4 + class).inc();
    }
}
