//! Families with a fixed set of lines, in a fixed order, without a lock.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::defs::{Def, Kind};

/// A gauge of whole numbers.
pub(crate) type Number = Gauge<u64, AtomicU64>;

/// One metric per combination of label values, in the order of [`Def::labels`], the last label
/// changing fastest. A definition without labels has one.
#[derive(Clone, Debug)]
pub(crate) struct Series<M> {
    lines: Vec<Line<M>>,
}

#[derive(Clone, Debug)]
struct Line<M> {
    labels: Vec<(&'static str, &'static str)>,
    metric: M,
}

impl<M: Clone + EncodeMetric + fmt::Debug + Send + Sync + 'static> Series<M> {
    /// Registers the definition.
    fn register(registry: &mut Registry, def: &Def, make: impl Fn() -> M) -> Self {
        let mut combinations = vec![Vec::new()];
        for label in def.labels {
            combinations = combinations
                .into_iter()
                .flat_map(|so_far: Vec<_>| {
                    label.values.iter().map(move |&value| {
                        let mut labels = so_far.clone();
                        labels.push((label.name, value));
                        labels
                    })
                })
                .collect();
        }
        let lines = combinations
            .into_iter()
            .map(|labels| Line {
                labels,
                metric: make(),
            })
            .collect();
        let series = Self { lines };
        register(registry, def, series.clone());
        series
    }

    /// One line, by its place.
    pub(crate) fn at(&self, place: usize) -> &M {
        &self.lines[place].metric
    }
}

impl<M: EncodeMetric> EncodeMetric for Series<M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for line in &self.lines {
            line.metric.encode(encoder.encode_family(&line.labels)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        self.lines[0].metric.metric_type()
    }
}

impl Series<Counter> {
    pub(crate) fn counter(registry: &mut Registry, def: &Def) -> Self {
        assert_eq!(def.kind, Kind::Counter, "{}", def.base);
        Self::register(registry, def, Counter::default)
    }

    /// Raises each line to the value of its place. A smaller value changes nothing, so that a
    /// counter never goes down (I17).
    pub(crate) fn raise<const N: usize>(&self, to: [u64; N]) {
        assert_eq!(N, self.lines.len(), "values and lines");
        for (line, to) in self.lines.iter().zip(to) {
            // One thread mirrors, so nobody raises it in between.
            let behind = to.saturating_sub(line.metric.get());
            line.metric.inc_by(behind);
        }
    }
}

impl Series<Number> {
    pub(crate) fn gauge(registry: &mut Registry, def: &Def) -> Self {
        assert_eq!(def.kind, Kind::Gauge, "{}", def.base);
        Self::register(registry, def, Number::default)
    }

    /// Sets each line to the value of its place.
    pub(crate) fn set<const N: usize>(&self, to: [u64; N]) {
        assert_eq!(N, self.lines.len(), "values and lines");
        for (line, to) in self.lines.iter().zip(to) {
            line.metric.set(to);
        }
    }
}

impl Series<Histogram> {
    pub(crate) fn histogram(registry: &mut Registry, def: &Def) -> Self {
        let Kind::Histogram(buckets) = def.kind else {
            unreachable!("{} is no histogram", def.base);
        };
        Self::register(registry, def, || Histogram::new(buckets.iter().copied()))
    }
}

/// Registers an info with the values of its labels.
pub(crate) fn info<const N: usize>(registry: &mut Registry, def: &Def, values: [&str; N]) {
    assert_eq!(def.kind, Kind::Info, "{}", def.base);
    assert_eq!(N, def.labels.len(), "values and labels");
    let labels: Vec<(&'static str, String)> = def
        .labels
        .iter()
        .map(|label| label.name)
        .zip(values.map(str::to_owned))
        .collect();
    register(registry, def, Info::new(labels));
}

fn register(registry: &mut Registry, def: &Def, metric: impl prometheus_client::registry::Metric) {
    match def.unit {
        Some(unit) => {
            let unit = match unit {
                "bytes" => Unit::Bytes,
                "seconds" => Unit::Seconds,
                other => Unit::Other(other.to_owned()),
            };
            registry.register_with_unit(def.base, def.help, unit, metric);
        }
        None => registry.register(def.base, def.help, metric),
    }
}
