//! Whole runs: the same numbers every time, and engines that serve everybody.

use std::fmt::Write;

use kv_core::Span;

use crate::arms::{Arm, Mode};
use crate::flags::TraceSim;
use crate::load::{self, Load};
use crate::report::Outcome;
use crate::world::{Setting, simulate};

/// Settings in which a dozen requests are short of memory, with every invariant checked.
fn setting() -> Setting {
    let args = "--blocks 60 --ample-blocks 400 --host-slots 300 --batch 8 --step-tokens 256 \
                --chunk 64 --inflight-bytes 16777216 --audit";
    let args = args.split_whitespace().map(Into::into).collect();
    TraceSim::from_vec(args).unwrap().setting()
}

fn arms() -> Vec<Arm> {
    let args = "--slices off,100ms".split_whitespace().map(Into::into);
    let flags = TraceSim::from_vec(args.collect()).unwrap();
    flags.choices().star()
}

/// Prompt and answer tokens of each request; one arrives every 20 ms.
fn lengths() -> impl Iterator<Item = (u32, u32)> {
    (0..16).map(|index| (40 + 7 * index, 90 + 11 * (index % 5)))
}

fn mooncake() -> String {
    let mut text = String::new();
    for (index, (input, output)) in (0..).zip(lengths()) {
        let at = index * 20;
        writeln!(
            text,
            r#"{{"timestamp": {at}, "input_length": {input}, "output_length": {output}, "hash_ids": [{index}]}}"#
        )
        .unwrap();
    }
    text
}

fn azure() -> String {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    for (index, (input, output)) in (0..).zip(lengths()) {
        let millis = index * 20;
        writeln!(text, "2023-11-16 18:15:46.{millis:03}0000,{input},{output}").unwrap();
    }
    text
}

fn outcomes(load: &Load) -> Vec<Outcome> {
    let run = |arm: &Arm| simulate(arm, load, &setting()).unwrap();
    arms().iter().map(run).collect()
}

#[test]
fn both_formats_of_a_trace_give_the_same_load() {
    let (mooncake, azure) = (load::parse(&mooncake()), load::parse(&azure()));
    assert_eq!(mooncake.unwrap(), azure.unwrap());
}

#[test]
fn the_same_trace_gives_the_same_numbers() {
    let load = load::parse(&mooncake()).unwrap();
    assert_eq!(outcomes(&load), outcomes(&load));
}

#[test]
fn i08_every_arm_serves_every_request_to_its_end() {
    let load = load::parse(&azure()).unwrap();
    let wanted: u64 = lengths().map(|(_, output)| u64::from(output)).sum();
    for outcome in outcomes(&load) {
        let arm = &outcome.arm;
        assert_eq!((outcome.finished, outcome.cut_off), (16, 0), "{arm}");
        assert_eq!(outcome.tokens, wanted, "{arm}");
        let left = outcome.preempted_to_host + outcome.preempted_to_recompute;
        assert_eq!(left > 0, outcome.mode != Mode::Ample, "{arm}");
        assert_eq!(
            outcome.recomputed_tokens > 0,
            outcome.preempted_to_recompute > 0,
            "{arm}"
        );
        assert_eq!(outcome.in_bytes > 0, outcome.preempted_to_host > 0, "{arm}");
    }
}

#[test]
fn blocking_copies_hold_the_engine_and_others_run_beside_it() {
    let load = load::parse(&azure()).unwrap();
    let outcomes = outcomes(&load);
    for mode in [Mode::Async, Mode::Sync] {
        let moves = |outcome: &Outcome| outcome.mode == mode && outcome.preempted_to_host > 0;
        assert!(outcomes.iter().any(moves), "{mode:?}");
    }
    for outcome in outcomes {
        let (held, busy) = (
            outcome.held_seconds > 0.0,
            outcome.link_out_busy_seconds > 0.0,
        );
        let expected = match outcome.mode {
            Mode::Ample | Mode::Recompute => (false, false),
            Mode::Async => (false, outcome.preempted_to_host > 0),
            Mode::Sync => (outcome.preempted_to_host > 0, false),
        };
        assert_eq!((held, busy), expected, "{}", outcome.arm);
    }
}

#[test]
fn what_a_time_limit_cuts_off_is_counted() {
    let load = load::parse(&azure()).unwrap();
    let mut setting = setting();
    setting.time_limit = Span::from_millis(400);
    for arm in arms() {
        let outcome = simulate(&arm, &load, &setting).unwrap();
        assert!(outcome.cut_off > 0 && outcome.total_seconds < 0.5);
        assert_eq!(
            outcome.finished + outcome.cut_off as u64,
            outcome.requests as u64
        );
    }
}
