//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use humantime::Duration;
use kv_core::Span;
use kv_scheduler::{EngineConfig, VictimPolicy};

use crate::arms::{Choices, Mode};
use crate::cost::StepCost;
use crate::link::LinkCost;
use crate::load::ClosedLoop;
use crate::report::Slo;
use crate::world::{Geometry, Setting};

xflags::xflags! {
    /// Simulates the engine over a trace of requests, in virtual time, for several policies.
    ///
    /// Sizes are tokens, blocks of tokens, or bytes; rates are in GB/s (1e9 bytes); spans are
    /// written as 500ms or 2s. Lists are separated by commas.
    cmd trace-sim {
        /// A trace (Mooncake JSON lines, or Azure 2023 CSV), or `long-output`: a closed loop of
        /// long answers. Default: long-output
        optional --trace trace: String
        /// Only the first so many requests
        optional --limit limit: usize
        /// Requests of a trace arrive so many times as often. Default: 1
        optional --scale scale: f64
        /// Virtual time after which a run is cut off. Default: 2h
        optional --time-limit time_limit: Duration
        /// Seed of the closed loop's lengths. Default: 1
        optional --seed seed: u64
        /// Requests of the closed loop. Default: 200
        optional --requests requests: usize
        /// Requests of the closed loop that are open at the same time. Default: 128
        optional --concurrency concurrency: usize
        /// Mean prompt tokens of the closed loop. Default: 1000
        optional --input-tokens input_tokens: u32
        /// Mean answer tokens of the closed loop. Default: 2500
        optional --output-tokens output_tokens: u32
        /// Most percent by which lengths of the closed loop differ from their mean. Default: 20
        optional --spread-percent spread_percent: u32

        /// Of ample, recompute, sync, async. Default: all four
        optional --modes modes: Modes
        /// Of newest, oldest, cost; like all lists below: the base first. Default: all three
        optional --victims victims: Victims
        /// Tokens of room that are made early. Default: 4,0,16
        optional --lookaheads lookaheads: Numbers
        /// Tokens of room that are there before somebody comes back. Default: 16,0,64
        optional --slacks slacks: Numbers
        /// Thousandths of the blocks that admission leaves free. Default: 0,20,50
        optional --watermarks watermarks: Numbers
        /// Time slices, or `off`. Default: off,500ms,1s,2s
        optional --slices slices: Slices
        /// How often a group is moved for the sake of slices. Default: the engine's own bound
        optional --max-swaps max_swaps: Numbers
        /// Every combination of the lists, instead of one change of the base at a time
        optional --grid
        /// Only arms whose names contain this
        optional --only only: String

        /// GPU blocks. Default: 12000
        optional --blocks blocks: u32
        /// GPU blocks of the ample arm. Default: 56000
        optional --ample-blocks ample_blocks: u32
        /// Tokens per block. Default: 16
        optional --block-tokens block_tokens: u32
        /// Host slots, one block each. Default: 32768
        optional --host-slots host_slots: u32
        /// Most bytes on their way at a time. Default: 1 GiB
        optional --inflight-bytes inflight_bytes: u64
        /// Rate that the machine assumes until it measured a copy, bytes per second. Default: its
        /// own assumption
        optional --assumed-rate assumed_rate: u64
        /// Most sequences that run at the same time. Default: 128
        optional --batch batch: u32
        /// Most tokens of a step. Default: 8192
        optional --step-tokens step_tokens: u32
        /// Most tokens of one prompt in a step. Default: 8192
        optional --chunk chunk: u32

        /// Fixed part of a step. Default: 1200us
        optional --step-fixed step_fixed: Duration
        /// Sampling and handing out, per row. Default: 10us
        optional --row row: Duration
        /// Read once per step, GB. Default: 15
        optional --weights-gb weights_gb: f64
        /// KV bytes of a token. Default: 131072
        optional --kv-token-bytes kv_token_bytes: u32
        /// GPU memory, GB/s. Default: 4300
        optional --hbm-gbs hbm_gbs: f64
        /// Matrix products of a token, GFLOP. Default: 15
        optional --token-gflop token_gflop: f64
        /// What the GPU computes, TFLOP/s. Default: 650
        optional --tflops tflops: f64
        /// One direction of the link, GB/s. Default: 55.4
        optional --link-gbs link_gbs: f64
        /// Both directions together, GB/s. Default: 101.6
        optional --duplex-gbs duplex_gbs: f64
        /// From the end of a copy to the engine hearing of it. Default: 60us
        optional --link-latency link_latency: Duration
        /// Blocking copies to the host, GB/s. Default: 17.4
        optional --pageable-out-gbs pageable_out_gbs: f64
        /// Blocking copies back, GB/s. Default: 9.4
        optional --pageable-in-gbs pageable_in_gbs: f64

        /// A good request's first token comes within. Default: 5s
        optional --slo-first-token slo_first_token: Duration
        /// A good request's mean time per further token. Default: 50ms
        optional --slo-per-token slo_per_token: Duration
        /// A good request's longest pause. Default: 5s
        optional --slo-pause slo_pause: Duration

        /// Write all numbers to this file too
        optional --json file: PathBuf
        /// Arms that are simulated at the same time. Default: one per CPU
        optional --jobs jobs: usize
        /// Check the engine's invariants after every pass
        optional --audit
    }
}

// The macro takes types by a single name.
type Modes = List<ModeName>;
type Numbers = List<u32>;
type Slices = List<Slice>;
type Victims = List<VictimName>;

/// Values separated by commas, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(Vec<T>);

impl<T: FromStr<Err: std::fmt::Display>> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let item = |item: &str| item.parse().map_err(|error| format!("`{item}`: {error}"));
        text.split(',')
            .map(item)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// A mode by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModeName(Mode);

impl FromStr for ModeName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "ample" => Ok(Self(Mode::Ample)),
            "async" => Ok(Self(Mode::Async)),
            "recompute" => Ok(Self(Mode::Recompute)),
            "sync" => Ok(Self(Mode::Sync)),
            _ => Err("is none of ample, async, recompute, sync"),
        }
    }
}

/// A policy by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VictimName(VictimPolicy);

impl FromStr for VictimName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "cost" => Ok(Self(VictimPolicy::Cost)),
            "newest" => Ok(Self(VictimPolicy::Newest)),
            "oldest" => Ok(Self(VictimPolicy::Oldest)),
            _ => Err("is none of cost, newest, oldest"),
        }
    }
}

/// A time slice, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice(Option<Span>);

impl FromStr for Slice {
    type Err = humantime::DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        humantime::parse_duration(text).map(|slice| Self(Some(slice.into())))
    }
}

/// The values of a list, or the default ones.
fn list<T: Clone, U>(list: Option<&List<T>>, name: impl Fn(T) -> U, default: Vec<U>) -> Vec<U> {
    match list {
        Some(List(items)) => items.iter().cloned().map(name).collect(),
        None => default,
    }
}

/// A span, or the default one.
fn span(flag: Option<Duration>, default: Span) -> Span {
    flag.map_or(default, |duration| Span::from(*duration))
}

impl TraceSim {
    /// The closed loop.
    pub(crate) fn closed_loop(&self) -> ClosedLoop {
        ClosedLoop {
            requests: self.requests.unwrap_or(200),
            concurrency: self.concurrency.unwrap_or(128),
            input_tokens: self.input_tokens.unwrap_or(1_000),
            output_tokens: self.output_tokens.unwrap_or(2_500),
            spread_percent: self.spread_percent.unwrap_or(20),
        }
    }

    /// The values to be tried.
    pub(crate) fn choices(&self) -> Choices {
        use VictimPolicy::{Cost, Newest, Oldest};
        let slices = [500, 1_000, 2_000].map(|millis| Some(Span::from_millis(millis)));
        let all_modes = vec![Mode::Ample, Mode::Recompute, Mode::Sync, Mode::Async];
        let own_bound = vec![EngineConfig::default().max_swaps];
        Choices {
            modes: list(self.modes.as_ref(), |mode| mode.0, all_modes),
            victims: list(
                self.victims.as_ref(),
                |name| name.0,
                vec![Newest, Oldest, Cost],
            ),
            lookaheads: list(self.lookaheads.as_ref(), |tokens| tokens, vec![4, 0, 16]),
            slacks: list(self.slacks.as_ref(), |tokens| tokens, vec![16, 0, 64]),
            watermarks: list(self.watermarks.as_ref(), |share| share, vec![0, 20, 50]),
            slices: list(
                self.slices.as_ref(),
                |slice| slice.0,
                [None].into_iter().chain(slices).collect(),
            ),
            max_swaps: list(self.max_swaps.as_ref(), |bound| bound, own_bound),
        }
    }

    /// What all arms share.
    pub(crate) fn setting(&self) -> Setting {
        let batch = self.batch.unwrap_or(128);
        Setting {
            step: self.step_cost(),
            link: self.link_cost(),
            geometry: Geometry {
                blocks: self.blocks.unwrap_or(12_000),
                ample_blocks: self.ample_blocks.unwrap_or(56_000),
                block_tokens: self.block_tokens.unwrap_or(16),
                host_slots: self.host_slots.unwrap_or(32_768),
                inflight_bytes_max: self.inflight_bytes.unwrap_or(1 << 30),
                assumed_bytes_per_second: self.assumed_rate,
            },
            engine: EngineConfig {
                max_batch_size: batch,
                max_tokens_per_step: self.step_tokens.unwrap_or(8_192),
                prefill_chunk: self.chunk.unwrap_or(8_192),
                max_seq_len: u32::MAX,
                ..EngineConfig::default()
            },
            slo: Slo {
                first_token: span(self.slo_first_token, Span::from_secs(5)),
                per_token: span(self.slo_per_token, Span::from_millis(50)),
                pause: span(self.slo_pause, Span::from_secs(5)),
            },
            time_limit: span(self.time_limit, Span::from_secs(7_200)),
            audit: self.audit,
        }
    }

    fn step_cost(&self) -> StepCost {
        let default = StepCost::default();
        let scaled = |flag: Option<f64>, unit: f64, default| flag.map_or(default, |f| f * unit);
        let fixed = self.step_fixed.map(|fixed| fixed.as_secs_f64());
        let row = self.row.map(|row| row.as_secs_f64());
        StepCost {
            row_seconds: row.unwrap_or(default.row_seconds),
            fixed_seconds: fixed.unwrap_or(default.fixed_seconds),
            weight_bytes: scaled(self.weights_gb, 1e9, default.weight_bytes),
            kv_bytes_per_token: self.kv_token_bytes.unwrap_or(default.kv_bytes_per_token),
            hbm_bytes_per_second: scaled(self.hbm_gbs, 1e9, default.hbm_bytes_per_second),
            flops_per_token: scaled(self.token_gflop, 1e9, default.flops_per_token),
            flops_per_second: scaled(self.tflops, 1e12, default.flops_per_second),
            ..default
        }
    }

    fn link_cost(&self) -> LinkCost {
        let default = LinkCost::default();
        let rate = |flag: Option<f64>, default| flag.map_or(default, |gbs| gbs * 1e9);
        let latency = self.link_latency.map(|latency| latency.as_secs_f64());
        LinkCost {
            bytes_per_second: rate(self.link_gbs, default.bytes_per_second),
            duplex_bytes_per_second: rate(self.duplex_gbs, default.duplex_bytes_per_second),
            latency_seconds: latency.unwrap_or(default.latency_seconds),
            pageable_out_bytes_per_second: rate(
                self.pageable_out_gbs,
                default.pageable_out_bytes_per_second,
            ),
            pageable_in_bytes_per_second: rate(
                self.pageable_in_gbs,
                default.pageable_in_bytes_per_second,
            ),
            ..default
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_errors_name_the_item() {
        let slices: List<Slice> = "off,500ms".parse().unwrap();
        let half = Slice(Some(Span::from_millis(500)));
        assert_eq!(slices, List(vec![Slice(None), half]));
        let error = "newest,youngest".parse::<List<VictimName>>().unwrap_err();
        assert_eq!(error, "`youngest`: is none of cost, newest, oldest");
        assert!("".parse::<List<u32>>().is_err());
    }

    #[test]
    fn flags_reach_the_models() {
        let args = ["--link-gbs", "20", "--slices", "1s", "--step-fixed", "1ms"];
        let flags = TraceSim::from_vec(args.map(Into::into).into()).unwrap();
        let setting = flags.setting();
        assert_eq!(setting.link.bytes_per_second, 20e9);
        assert_eq!(setting.step.fixed_seconds, 1e-3);
        assert_eq!(flags.choices().slices, [Some(Span::from_secs(1))]);
        assert_eq!(flags.choices().lookaheads, [4, 0, 16]);
    }
}
