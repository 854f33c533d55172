//! What clients saw, and what it took: percentiles, a table, JSON.

use kv_core::{Span, Stats, Time};
use kv_scheduler::EngineStats;
use serde::Serialize;

use crate::arms::{Arm, Mode};
use crate::link::Busy;
use crate::model::StepLog;

/// What one client saw.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    sent_at: Time,
    first_at: Option<Time>,
    last_at: Time,
    tokens: u32,
    longest_gap: Span,
    pauses: u32,
    paused: Span,
    state: ClientState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    Failed,
    Finished,
    Open,
    Refused,
}

impl Client {
    pub(crate) const fn new(sent_at: Time, accepted: bool) -> Self {
        let state = if accepted {
            ClientState::Open
        } else {
            ClientState::Refused
        };
        Self {
            sent_at,
            first_at: None,
            last_at: sent_at,
            tokens: 0,
            longest_gap: Span::ZERO,
            pauses: 0,
            paused: Span::ZERO,
            state,
        }
    }

    /// A token arrives; says how long after the one before it.
    pub(crate) fn take_token(&mut self, now: Time, last: bool) -> Option<Span> {
        let gap = self.first_at.map(|_| now.since(self.last_at));
        self.first_at = self.first_at.or(Some(now));
        self.longest_gap = self.longest_gap.max(gap.unwrap_or(Span::ZERO));
        self.last_at = now;
        self.tokens += 1;
        if last {
            self.state = ClientState::Finished;
        }
        gap
    }

    /// It had been off the GPU, and goes on.
    pub(crate) fn resume(&mut self, pause: Span) {
        self.pauses += 1;
        self.paused = self.paused + pause;
    }

    pub(crate) const fn fail(&mut self) {
        self.state = ClientState::Failed;
    }

    /// The run is over: a gap that is still open counts.
    pub(crate) fn close(&mut self, now: Time) {
        if self.state == ClientState::Open && self.first_at.is_some() {
            self.longest_gap = self.longest_gap.max(now.since(self.last_at));
        }
    }

    fn first_token_after(&self) -> Option<Span> {
        Some(self.first_at?.since(self.sent_at))
    }

    fn meets(&self, slo: &Slo) -> bool {
        let Some(first_at) = self.first_at else {
            return false;
        };
        let decoding = self.last_at.since(first_at).as_nanos();
        let per_token = Span::from_nanos(decoding / u64::from(self.tokens.max(2) - 1));
        self.state == ClientState::Finished
            && first_at.since(self.sent_at) <= slo.first_token
            && per_token <= slo.per_token
            && self.longest_gap <= slo.pause
    }
}

/// What a request must keep to, to count as good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slo {
    /// Longest wait for the first token.
    pub(crate) first_token: Span,
    /// Longest mean time per further token.
    pub(crate) per_token: Span,
    /// Longest time between two tokens.
    pub(crate) pause: Span,
}

/// Values at some ranks; all 0 if there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Ranks {
    /// How many values there are.
    pub(crate) count: usize,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Ranks {
    /// Ranks of values, each multiplied with `unit`.
    fn of(mut values: Vec<u64>, unit: f64) -> Self {
        values.sort_unstable();
        let Some(&max) = values.last() else {
            return Self::default();
        };
        // The smallest value that at least so many percent are not above.
        let at = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1);
            values[rank - 1] as f64 * unit
        };
        Self {
            count: values.len(),
            p50: at(50),
            p95: at(95),
            p99: at(99),
            max: max as f64 * unit,
        }
    }
}

/// A run as it was, before anything is computed from it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) total: Span,
    pub(crate) clients: Vec<Client>,
    /// Times between two tokens, in microseconds, with the index of their client.
    pub(crate) gaps_micros: Vec<(u32, u32)>,
    pub(crate) log: StepLog,
    pub(crate) engine: EngineStats,
    pub(crate) machine: Stats,
    /// How long blocking copies held the engine.
    pub(crate) held: Span,
    /// How long the link moved something.
    pub(crate) busy: Busy,
    pub(crate) passes: u64,
    pub(crate) busiest_waiting: u32,
}

impl Run {
    /// Times between two tokens of such clients, in milliseconds.
    fn gaps(&self, of: impl Fn(&Client) -> bool) -> Ranks {
        let gaps = self.gaps_micros.iter();
        let of_them = gaps.filter(|&&(_, client)| of(&self.clients[client as usize]));
        Ranks::of(of_them.map(|&(micros, _)| micros.into()).collect(), 1e-3)
    }
}

/// Everything that is told about one arm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) arm: String,
    pub(crate) mode: Mode,
    pub(crate) total_seconds: f64,
    pub(crate) tokens: u64,
    pub(crate) tokens_per_second: f64,
    pub(crate) requests: usize,
    pub(crate) finished: u64,
    pub(crate) refused: u64,
    pub(crate) failed: u64,
    /// Accepted, and not over when the time limit was reached.
    pub(crate) cut_off: usize,
    /// Requests within the SLO.
    pub(crate) good_requests: usize,
    pub(crate) good_requests_per_second: f64,
    pub(crate) first_token_seconds: Ranks,
    pub(crate) between_tokens_millis: Ranks,
    /// The same of requests that never had to leave the GPU.
    pub(crate) between_tokens_of_never_paused_millis: Ranks,
    pub(crate) never_paused: usize,
    /// Longest time between two tokens, per request.
    pub(crate) longest_pause_seconds: Ranks,
    /// How often a request had to leave, per request that did.
    pub(crate) pauses_per_paused_request: Ranks,
    /// Time off the GPU, all requests together.
    pub(crate) paused_seconds: f64,
    pub(crate) preempted_to_host: u64,
    pub(crate) preempted_to_recompute: u64,
    pub(crate) out_bytes: u64,
    pub(crate) in_bytes: u64,
    pub(crate) clean_blocks_kept: u64,
    pub(crate) recomputed_tokens: u64,
    pub(crate) stalled_rows: u64,
    pub(crate) steps: u64,
    pub(crate) step_millis: Ranks,
    pub(crate) decode_rows_per_step: f64,
    /// Share of the time in which no step ran.
    pub(crate) no_step_share: f64,
    /// Time that steps took longer because of copies beside them.
    pub(crate) slowed_seconds: f64,
    /// Time that blocking copies held the engine.
    pub(crate) held_seconds: f64,
    pub(crate) link_out_busy_seconds: f64,
    pub(crate) link_in_busy_seconds: f64,
    pub(crate) busiest_waiting: u32,
    pub(crate) host_slots_peak: u32,
    pub(crate) host_backpressure: u64,
    pub(crate) inflight_backpressure: u64,
    pub(crate) passes: u64,
}

impl Outcome {
    pub(crate) fn new(arm: &Arm, slo: &Slo, run: &Run) -> Self {
        let seconds = |span: Span| span.as_duration().as_secs_f64();
        let total_seconds = seconds(run.total);
        let per_second = |count: f64| count / total_seconds.max(1e-9);
        let clients = &run.clients;
        let never_paused = |client: &Client| client.pauses == 0;
        let state = |wanted| {
            clients
                .iter()
                .filter(|client| client.state == wanted)
                .count()
        };
        let spans =
            |spans: Vec<Span>| Ranks::of(spans.into_iter().map(Span::as_nanos).collect(), 1e-9);
        let good_requests = clients.iter().filter(|client| client.meets(slo)).count();
        let started = || clients.iter().filter(|client| client.first_at.is_some());
        Self {
            arm: arm.to_string(),
            mode: arm.mode,
            total_seconds,
            tokens: run.engine.tokens,
            tokens_per_second: per_second(run.engine.tokens as f64),
            requests: clients.len(),
            finished: run.engine.finished,
            refused: run.engine.rejected,
            failed: run.engine.failed,
            cut_off: state(ClientState::Open),
            good_requests,
            good_requests_per_second: per_second(good_requests as f64),
            first_token_seconds: spans(
                clients
                    .iter()
                    .filter_map(Client::first_token_after)
                    .collect(),
            ),
            between_tokens_millis: run.gaps(|_| true),
            between_tokens_of_never_paused_millis: run.gaps(never_paused),
            never_paused: started().filter(|client| never_paused(client)).count(),
            longest_pause_seconds: spans(started().map(|client| client.longest_gap).collect()),
            pauses_per_paused_request: Ranks::of(
                clients
                    .iter()
                    .map(|client| client.pauses.into())
                    .filter(|&pauses| pauses > 0)
                    .collect(),
                1.0,
            ),
            paused_seconds: clients.iter().map(|client| seconds(client.paused)).sum(),
            preempted_to_host: run.engine.preempted_swap,
            preempted_to_recompute: run.engine.preempted_recompute,
            out_bytes: run.machine.out.bytes,
            in_bytes: run.machine.back_in.bytes,
            clean_blocks_kept: run.machine.clean_blocks_kept,
            recomputed_tokens: run.engine.recomputed_tokens,
            stalled_rows: run.engine.stalled_rows,
            steps: run.engine.steps,
            decode_rows_per_step: run.log.decode_rows as f64 / run.engine.steps.max(1) as f64,
            no_step_share: 1.0 - per_second(seconds(run.log.span)),
            step_millis: Ranks::of(run.log.micros.iter().map(|&m| m.into()).collect(), 1e-3),
            slowed_seconds: seconds(run.log.slowed),
            held_seconds: seconds(run.held),
            link_out_busy_seconds: seconds(run.busy.out),
            link_in_busy_seconds: seconds(run.busy.back_in),
            busiest_waiting: run.busiest_waiting,
            host_slots_peak: run.machine.host.peak,
            host_backpressure: run.machine.host_backpressure,
            inflight_backpressure: run.machine.inflight_backpressure,
            passes: run.passes,
        }
    }

    /// One row of the table, as its columns.
    fn columns(&self) -> [String; 16] {
        let three = |ranks: &Ranks, digits: usize| {
            let Ranks { p50, p95, p99, .. } = ranks;
            format!("{p50:.digits$} / {p95:.digits$} / {p99:.digits$}")
        };
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        let good = 100.0 * self.good_requests as f64 / self.requests.max(1) as f64;
        let cut = if self.cut_off > 0 { "+" } else { "" };
        [
            self.arm.clone(),
            format!("{:.1}{cut}", self.total_seconds),
            format!("{:.0}", self.tokens_per_second),
            format!("{:.2} ({good:.0} %)", self.good_requests_per_second),
            three(&self.first_token_seconds, 2),
            three(&self.between_tokens_millis, 1),
            match &self.between_tokens_of_never_paused_millis {
                Ranks { count: 0, .. } => format!("– ({})", self.never_paused),
                ranks => format!("{:.1} ({})", ranks.p99, self.never_paused),
            },
            three(&self.longest_pause_seconds, 2),
            format!(
                "{} + {}",
                self.preempted_to_host, self.preempted_to_recompute
            ),
            format!("{:.0}", self.pauses_per_paused_request.max),
            format!(
                "{:.1} / {:.1}",
                gigabytes(self.out_bytes),
                gigabytes(self.in_bytes)
            ),
            self.recomputed_tokens.to_string(),
            self.stalled_rows.to_string(),
            format!("{:.1}", self.decode_rows_per_step),
            format!("{:.1} / {:.1}", self.step_millis.p50, self.step_millis.p99),
            format!("{:.1}", 100.0 * self.no_step_share),
        ]
    }
}

const HEADER: [&str; 16] = [
    "arm",
    "total s",
    "tokens/s",
    "good requests/s",
    "first token s, p50 / p95 / p99",
    "between tokens ms, p50 / p95 / p99",
    "p99 of never paused (n)",
    "longest pause s, p50 / p95 / p99",
    "left: host + recompute",
    "most of one",
    "GB out / in",
    "tokens computed again",
    "stalled rows",
    "rows a step",
    "step ms, p50 / p99",
    "no step %",
];

/// All arms as a Markdown table.
pub(crate) fn table(outcomes: &[Outcome]) -> String {
    let mut rows = vec![HEADER.map(str::to_owned)];
    rows.extend(outcomes.iter().map(Outcome::columns));
    let width = |column: usize| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or(0)
    };
    let widths: [usize; 16] = std::array::from_fn(width);
    let line = |cells: &[String; 16]| {
        let cells = cells.iter().zip(widths);
        let padded: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        format!("| {} |\n", padded.join(" | "))
    };
    let rule = widths.map(|width| "-".repeat(width));
    let mut text = line(&rows[0]);
    text.push_str(&line(&rule));
    for row in &rows[1..] {
        text.push_str(&line(row));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::ZERO + Span::from_millis(millis)
    }

    const SLO: Slo = Slo {
        first_token: Span::from_millis(100),
        per_token: Span::from_millis(50),
        pause: Span::from_millis(60),
    };

    #[test]
    fn ranks_are_values_that_occurred() {
        let ranks = Ranks::of((1..=200).rev().collect(), 0.5);
        assert_eq!((ranks.count, ranks.p50, ranks.p95), (200, 50.0, 95.0));
        assert_eq!((ranks.p99, ranks.max), (99.0, 100.0));
        assert_eq!(Ranks::of(vec![7], 1.0).p50, 7.0);
        assert_eq!(Ranks::of(Vec::new(), 1.0), Ranks::default());
    }

    #[test]
    fn a_client_is_good_if_it_keeps_to_all_three() {
        let client = |times: &[u64]| {
            let mut client = Client::new(at(10), true);
            for (index, &time) in times.iter().enumerate() {
                client.take_token(at(time), index + 1 == times.len());
            }
            client
        };
        let good = client(&[110, 150, 200]);
        assert!(good.meets(&SLO));
        assert_eq!(good.first_token_after(), Some(Span::from_millis(100)));
        assert_eq!(good.longest_gap, Span::from_millis(50));
        assert!(client(&[110]).meets(&SLO), "a single token");
        assert!(!client(&[111, 112, 113]).meets(&SLO), "first token");
        assert!(!client(&[50, 105, 155]).meets(&SLO), "mean");
        assert!(!client(&[50, 111, 112, 113]).meets(&SLO), "pause");
        let mut open = Client::new(at(0), true);
        assert!(!open.meets(&SLO), "no token");
        open.take_token(at(10), false);
        open.close(at(500));
        assert_eq!(open.longest_gap, Span::from_millis(490));
        assert!(!open.meets(&SLO), "not finished");
    }

    #[test]
    fn the_table_has_as_many_columns_in_every_row() {
        let text = table(&[]);
        let pipes = |line: &str| line.matches('|').count();
        assert!(text.lines().all(|line| pipes(line) == 17), "{text}");
    }
}
