//! The text that scrapers see, and the documentation of it.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use expect_test::{expect, expect_file};
use kv_core::{
    CopyFault, Direction, DirectionCounters, Event, GpuBlocks, GroupStates, HostSlots, Outcome,
    Span, Stats,
};
use kv_telemetry::{
    ALL, Def, Ended, EngineSample, Format, Health, Identity, Kind, Route, Telemetry,
};

/// Every number different, so that one in the wrong place shows.
fn stats() -> Stats {
    let counters = |from: u64| DirectionCounters {
        started: from,
        done: from + 1,
        failed: from + 2,
        unknown: from + 3,
        bytes: from + 4,
        ..DirectionCounters::default()
    };
    Stats {
        gpu: GpuBlocks {
            total: 100,
            free: 101,
            allocated: 102,
            evicting: 103,
            restoring: 104,
            lost: 105,
        },
        host: HostSlots {
            total: 200,
            free: 201,
            unready: 202,
            parked: 203,
            filling: 204,
            clean: 205,
            lost: 206,
            peak: 207,
        },
        block_bytes: 1_000,
        groups: GroupStates {
            gpu_resident: 300,
            swap_out_in_flight: 301,
            host_resident: 302,
            swap_in_in_flight: 303,
            cancel_pending: 304,
            failed: 305,
        },
        flights: 400,
        inflight_bytes: 401,
        out: counters(500),
        back_in: counters(600),
        cancelled: 700,
        checksum_failures: 701,
        stale_completions: 702,
        host_backpressure: 703,
        inflight_backpressure: 704,
        clean_blocks_kept: 705,
        clean_copies_reclaimed: 706,
    }
}

fn sample() -> EngineSample {
    EngineSample {
        waiting: 800,
        running: 801,
        swapped: 802,
        recompute_pending: 803,
        accepted: 810,
        rejected: 811,
        finished: 812,
        cancelled: 813,
        failed: 814,
        tokens: 820,
        prefill_tokens: 821,
        recomputed_tokens: 822,
        preempted_swap: 830,
        preempted_recompute: 831,
        resumed: 832,
        stalled_rows: 833,
        steps: 834,
        stuck_passes: 835,
        dropped_events: 836,
        swap_given_up: true,
    }
}

/// A flight that is over.
fn settled(direction: Direction, outcome: Outcome, fault: Option<CopyFault>) -> Event {
    Event::Settled(kv_core::Settled {
        ticket: kv_core::TicketId::for_testing(u64::MAX),
        direction,
        outcome,
        fault,
        cancelled: false,
        bytes: 3 << 20,
        blocks: 3,
        copy_span: Span::from_millis(3),
        notice_span: Span::from_micros(30),
    })
}

fn identity() -> Identity<'static> {
    Identity {
        version: "1.2.3",
        commit: "abc\"d\\",
        mode: "sync",
        configured_mode: "async",
        fallback: "no device",
    }
}

/// Everything that can be said was said once.
fn filled() -> Telemetry {
    let telemetry = Telemetry::new(&identity());
    telemetry.mirror_machine(&stats());
    telemetry.mirror_engine(&sample());
    telemetry.observe_event(&settled(Direction::Out, Outcome::Done, None));
    let broken = Some(CopyFault::DigestMismatch { index: 1 });
    telemetry.observe_event(&settled(Direction::In, Outcome::Failed, broken));
    telemetry.observe_event(&settled(
        Direction::In,
        Outcome::Unknown,
        Some(CopyFault::Device { code: 700 }),
    ));
    telemetry.observe_event(&Event::HostBackpressure);
    telemetry.observe_step(Span::from_millis(12));
    telemetry.observe_host_stall(Span::from_micros(90));
    telemetry.observe_queue_wait(Span::from_millis(40));
    telemetry.observe_first_token(Span::from_millis(150));
    telemetry.observe_inter_token(Span::from_millis(25));
    telemetry.observe_pause(Span::from_secs(4));
    telemetry.observe_end(Ended::Finished, Span::from_secs(9));
    telemetry.observe_end(Ended::Cancelled, Span::from_secs(1));
    telemetry.observe_end(Ended::Failed, Span::from_secs(1_000));
    telemetry.count_response(Route::Chat, 200);
    telemetry.count_response(Route::Completions, 429);
    telemetry.count_response(Route::Other, 503);
    telemetry.count_response(Route::Admin, 101);
    telemetry.set_health(Health::Draining);
    telemetry
}

#[test]
fn exposition_as_openmetrics() {
    let text = filled().encode(Format::OpenMetrics);
    expect_file!["exposition/openmetrics.txt"].assert_eq(&text);
}

#[test]
fn exposition_as_prometheus_text() {
    let text = filled().encode(Format::Prometheus);
    expect_file!["exposition/prometheus.txt"].assert_eq(&text);
}

#[test]
fn every_series_has_help_type_and_unit_and_starts_at_zero() {
    let text = Telemetry::new(&identity()).encode(Format::OpenMetrics);
    for def in ALL {
        let family = def.family();
        let line = |start: &str| text.lines().find(|line| line.starts_with(start));
        assert_eq!(
            line(&format!("# HELP {family} ")),
            Some(format!("# HELP {family} {}.", def.help).as_str())
        );
        let kind = match def.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram(_) => "histogram",
            Kind::Info => "info",
        };
        assert!(
            text.contains(&format!("# TYPE {family} {kind}\n")),
            "type of {family}"
        );
        match def.unit {
            Some(unit) => {
                assert!(
                    text.contains(&format!("# UNIT {family} {unit}\n")),
                    "unit of {family}"
                );
            }
            None => assert_eq!(def.kind, Kind::Info, "{family} has no unit"),
        }
    }
    let families = text
        .lines()
        .filter(|line| line.starts_with("# TYPE "))
        .count();
    assert_eq!(
        families,
        ALL.len(),
        "a series that is not defined, or one that is missing"
    );
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let is_state = line.contains("_info{") || line.contains("state=\"starting\"");
        let expected = if is_state { " 1" } else { " 0" };
        assert!(line.ends_with(expected) || line.ends_with(" 0.0"), "{line}");
    }
}

#[test]
fn definitions_are_well_formed() {
    let mut names = BTreeSet::new();
    for def in ALL {
        assert!(
            names.insert(def.series()),
            "{} is defined twice",
            def.series()
        );
        assert!(def.base.starts_with("kv_"), "{}", def.base);
        let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        assert!(is_name(&def.series()), "{}", def.series());
        assert!(
            !def.help.is_empty() && !def.help.ends_with('.'),
            "{}",
            def.help
        );
        assert!(
            def.labels.iter().all(|label| is_name(label.name)),
            "{}",
            def.base
        );
        if let Kind::Histogram(buckets) = def.kind {
            assert!(
                buckets.is_sorted_by(|a, b| a < b),
                "buckets of {}",
                def.base
            );
        }
    }
}

#[test]
fn i16_nothing_depends_on_what_clients_send() {
    let (one, many) = (filled(), filled());
    for status in 0..1_000 {
        many.count_response(Route::Chat, status);
    }
    let lines = |telemetry: &Telemetry| -> Vec<String> {
        let text = telemetry.encode(Format::Prometheus);
        let name = |line: &str| line.rsplit_once(' ').map(|(name, _)| name.to_owned());
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(name)
            .collect()
    };
    assert_eq!(lines(&one), lines(&many));
}

#[test]
fn i17_counters_never_go_down_and_gauges_return_to_zero() {
    let telemetry = filled();
    let before = telemetry.encode(Format::Prometheus);
    telemetry.mirror_machine(&Stats::default());
    telemetry.mirror_engine(&EngineSample::default());
    let after = telemetry.encode(Format::Prometheus);
    for def in ALL {
        let values = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let is_ours =
                |line: &&str| line.split(['{', ' ']).next() == Some(def.series().as_str());
            lines.filter(is_ours).map(str::to_owned).collect()
        };
        let (old, new) = (values(&before), values(&after));
        match def.kind {
            Kind::Counter => assert_eq!(old, new, "{}", def.series()),
            Kind::Gauge if def.base != "kv_server_health" => {
                assert!(!new.is_empty());
                assert!(new.iter().all(|line| line.ends_with(" 0")), "{new:?}");
            }
            Kind::Gauge | Kind::Histogram(_) | Kind::Info => {}
        }
    }
}

#[test]
fn a_copy_of_the_same_numbers_changes_nothing() {
    let telemetry = filled();
    let before = telemetry.encode(Format::OpenMetrics);
    telemetry.mirror_machine(&stats());
    telemetry.mirror_engine(&sample());
    assert_eq!(telemetry.encode(Format::OpenMetrics), before);
}

/// The row of a definition in the table of `docs/operations.md`.
fn row(def: &Def) -> String {
    let mut row = format!("| `{}` | ", def.series());
    row.push_str(match def.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram(_) => "histogram",
        Kind::Info => "info",
    });
    let labels: Vec<_> = def
        .labels
        .iter()
        .map(|label| match label.values {
            [] => format!("`{}`", label.name),
            values => format!("`{}`: {}", label.name, values.join(", ")),
        })
        .collect();
    write!(row, " | {} | {} |", labels.join("; "), def.help).expect("strings grow");
    row
}

#[test]
fn every_series_is_in_the_operators_manual() {
    let manual = include_str!("../../docs/operations.md");
    let rows: Vec<_> = manual
        .lines()
        .filter(|line| line.starts_with("| `kv_"))
        .collect();
    let expected: Vec<_> = ALL.iter().map(row).collect();
    assert_eq!(
        rows,
        expected,
        "the table should be:\n{}\n",
        expected.join("\n")
    );
}

#[test]
fn the_operators_manual_speaks_of_no_other_series() {
    let manual = include_str!("../../docs/operations.md");
    let known: BTreeSet<_> = ALL.iter().map(Def::series).collect();
    let is_part_of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut spoken_of = 0;
    for name in manual
        .split(|c| !is_part_of_a_name(c))
        .filter(|word| word.starts_with("kv_"))
    {
        let series = name.strip_suffix("_bucket").unwrap_or(name);
        // `kv_host_` stands for all that begin so.
        let is_known = known.contains(series)
            || (name.ends_with('_') && known.iter().any(|known| known.starts_with(name)));
        assert!(is_known, "{name} is in the manual but nowhere else");
        spoken_of += 1;
    }
    assert!(spoken_of > ALL.len());
}

#[test]
fn formats_say_what_they_are() {
    expect!["application/openmetrics-text; version=1.0.0; charset=utf-8"]
        .assert_eq(Format::OpenMetrics.content_type());
    expect!["text/plain; version=0.0.4; charset=utf-8"]
        .assert_eq(Format::Prometheus.content_type());
    assert!(filled().encode(Format::OpenMetrics).ends_with("# EOF\n"));
    assert!(!filled().encode(Format::Prometheus).contains("# EOF"));
}
