//! The two text formats that scrapers ask for.

use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0: with units.
    OpenMetrics,
    /// Prometheus text 0.0.4: what everything reads.
    Prometheus,
}

impl Format {
    /// What a request with that `Accept` header gets: OpenMetrics if it names it, else Prometheus
    /// text.
    #[must_use]
    pub fn from_accept(accept: &str) -> Self {
        let names_it = accept
            .split(',')
            .filter_map(|range| range.split(';').next())
            .any(|kind| {
                kind.trim()
                    .eq_ignore_ascii_case("application/openmetrics-text")
            });
        if names_it {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// Value of the `Content-Type` header.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }

    pub(crate) fn encode(self, registry: &Registry) -> String {
        let mut out = String::new();
        match self {
            Self::OpenMetrics => text::encode(&mut out, registry),
            Self::Prometheus => prometheus_text::encode(&mut out, registry),
        }
        .expect("writing to a string can't fail");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_accept_header_decides() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2";
        assert_eq!(Format::from_accept(prometheus), Format::OpenMetrics);
        assert_eq!(
            Format::from_accept("Application/OpenMetrics-Text"),
            Format::OpenMetrics
        );
        for accept in ["", "*/*", "text/plain", "application/openmetrics-textual"] {
            assert_eq!(Format::from_accept(accept), Format::Prometheus, "{accept}");
        }
    }
}
