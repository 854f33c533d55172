//! The one thing that is shared: all series, and their text.

use kv_core::{Event, Span, Stats};
use prometheus_client::registry::Registry;

use crate::defs;
use crate::engine::{EngineSample, EngineSeries};
use crate::machine::MachineSeries;
use crate::request::{Ended, Health, RequestSeries, Route, ServerSeries};
use crate::series::info;
use crate::text::Format;

/// What does not change while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Version of the program.
    pub version: &'a str,
    /// Commit that it was built from, or empty.
    pub commit: &'a str,
    /// How groups are swapped: `sync`, `async` or `off`.
    pub mode: &'a str,
    /// What was asked for.
    pub configured_mode: &'a str,
    /// Why that is not the same, in a word or two, or empty.
    pub fallback: &'a str,
}

impl Default for Identity<'_> {
    /// This crate's version, and no swapping.
    fn default() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: "",
            mode: "off",
            configured_mode: "off",
            fallback: "",
        }
    }
}

/// All series. Share it behind an `Arc`; all updates take `&self`.
///
/// One thread mirrors the machine and the engine; spans, responses and the health may come from
/// any thread.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    server: ServerSeries,
    machine: MachineSeries,
    engine: EngineSeries,
    requests: RequestSeries,
}

impl Telemetry {
    /// Registers every series; all start at 0.
    #[must_use]
    pub fn new(identity: &Identity<'_>) -> Self {
        let mut registry = Registry::default();
        info(
            &mut registry,
            &defs::BUILD,
            [identity.version, identity.commit],
        );
        let mode = [identity.mode, identity.configured_mode, identity.fallback];
        info(&mut registry, &defs::SWAP_MODE, mode);
        let server = ServerSeries::new(&mut registry);
        server.health(Health::Starting);
        Self {
            server,
            machine: MachineSeries::new(&mut registry),
            engine: EngineSeries::new(&mut registry),
            requests: RequestSeries::new(&mut registry),
            registry,
        }
    }

    /// Mirrors the machine's numbers. A counter that is smaller than before changes nothing.
    pub fn mirror_machine(&self, stats: &Stats) {
        self.machine.mirror(stats);
    }

    /// Mirrors the engine's numbers. A counter that is smaller than before changes nothing.
    pub fn mirror_engine(&self, sample: &EngineSample) {
        self.engine.mirror(sample);
    }

    /// Takes one of the machine's events.
    pub fn observe_event(&self, event: &Event) {
        self.machine.observe(event);
    }

    /// One step took that long.
    pub fn observe_step(&self, span: Span) {
        self.engine.observe_step(span);
    }

    /// In one step the engine's thread was held up that long by swapping.
    pub fn observe_host_stall(&self, span: Span) {
        self.engine.observe_host_stall(span);
    }

    /// A request waited that long for its place on the GPU.
    pub fn observe_queue_wait(&self, span: Span) {
        self.requests.queue_wait(span);
    }

    /// A request waited that long for its first token.
    pub fn observe_first_token(&self, span: Span) {
        self.requests.first_token(span);
    }

    /// That long passed between two tokens of one choice.
    pub fn observe_inter_token(&self, span: Span) {
        self.requests.inter_token(span);
    }

    /// A group was away that long.
    pub fn observe_pause(&self, span: Span) {
        self.requests.pause(span);
    }

    /// A request ended that long after it was accepted.
    pub fn observe_end(&self, how: Ended, span: Span) {
        self.requests.ended(how, span);
    }

    /// An answer was begun.
    pub fn count_response(&self, route: Route, status: u16) {
        self.server.response(route, status);
    }

    /// The server is in that state now.
    pub fn set_health(&self, health: Health) {
        self.server.health(health);
    }

    /// All series as text.
    #[must_use]
    pub fn encode(&self, format: Format) -> String {
        format.encode(&self.registry)
    }
}
