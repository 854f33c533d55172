//! Every metric of the system: what it is called, what it means, and its text.
//!
//! [`Telemetry`] is shared by whoever counts and whoever answers `/metrics`. Writers mirror plain
//! numbers ([`kv_core::Stats`], [`EngineSample`]) and report events and spans; each update is a
//! few atomic operations, or a short lock for a histogram. Nothing here knows a request, a token
//! or a text.
//!
//! ```
//! use kv_core::{Span, Stats};
//! use kv_telemetry::{Format, Identity, Telemetry};
//!
//! let telemetry = Telemetry::new(&Identity::default());
//! telemetry.mirror_machine(&Stats { flights: 2, ..Stats::default() });
//! telemetry.observe_step(Span::from_millis(7));
//! let text = telemetry.encode(Format::from_accept(""));
//! assert!(text.contains("kv_swap_unsettled_flights 2\n"));
//! ```

#![forbid(unsafe_code)]

mod defs;
mod engine;
mod machine;
mod request;
mod series;
mod telemetry;
mod text;

pub use defs::{ALL, Def, Kind, Label};
pub use engine::EngineSample;
pub use request::{Ended, Health, Route};
pub use telemetry::{Identity, Telemetry};
pub use text::Format;
