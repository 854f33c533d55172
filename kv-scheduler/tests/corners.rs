//! Corner cases of a group's way that a review found: stopped while leaving, slices of unequals.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of a test stop at the first surprise"
)]

use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::testing::{SimBackend, SimConfig, SimControl};
use kv_core::{Choice, HostSide, Layout, Machine, MachineConfig, Outcome, Span, Time};
use kv_model::oracle::{Oracle, OracleConfig};
use kv_scheduler::{Engine, EngineConfig, Output, Request, RequestId, SamplingParams, TokenId};

fn engine(blocks: u32, settings: EngineConfig) -> (Engine<Oracle, SimBackend>, SimControl) {
    let layout = Layout::per_layer(2, blocks, 16, 1, 4, 2).unwrap();
    let config = MachineConfig::new(&layout, HostSide::Slots(64), 1 << 20);
    let memory = Arc::new(PlainMemory::new(layout));
    let oracle = Oracle::new(Arc::clone(&memory), OracleConfig::default()).unwrap();
    let backend = SimBackend::new(memory, SimConfig::new(64));
    let control = backend.control();
    let machine = Machine::new(config).unwrap();
    (
        Engine::new(settings, machine, oracle, backend).unwrap(),
        control,
    )
}

fn request(id: u64, prompt: u32, n: u32, max_tokens: u32, priority: i32) -> Request {
    let first = u32::try_from(id).unwrap() * 1_000;
    Request {
        id: RequestId(id),
        prompt: (first..first + prompt).map(TokenId).collect(),
        n,
        max_tokens,
        stop_tokens: Vec::new(),
        sampling: SamplingParams::default(),
        priority,
    }
}

#[test]
fn i02_a_choice_that_stops_while_its_group_fails_to_leave_holds_nothing() {
    let (mut engine, control) = engine(64, EngineConfig::default());
    let mut outputs = Vec::new();
    engine
        .submit(Time::ZERO, request(1, 32, 2, 200, 0))
        .unwrap();
    for _ in 0..10 {
        engine.step(Time::ZERO, &mut outputs);
    }
    assert_eq!(engine.stats().1.gpu.allocated, 2 + 2);
    assert!(engine.force_swap(Time::ZERO, RequestId(1)));
    engine.step(Time::ZERO, &mut outputs);
    engine.stop(Time::ZERO, RequestId(1), Choice::new(1));
    for copy in control.pending() {
        control
            .complete(copy.id, Time::ZERO, Outcome::Failed)
            .unwrap();
    }
    engine.step(Time::ZERO, &mut outputs);
    engine.audit().unwrap();
    assert_eq!(engine.stats().0.running, 1);
    assert_eq!(engine.stats().1.gpu.allocated, 2 + 1);
}

#[test]
fn a_slice_does_not_end_for_somebody_less_urgent() {
    let settings = EngineConfig {
        slice: Some(Span::from_millis(50)),
        priority_aging: Span::from_secs(1_000),
        watermark_permille: 0,
        ..EngineConfig::default()
    };
    let (mut engine, control) = engine(12, settings);
    let mut outputs = Vec::new();
    let mut now = Time::ZERO;
    for id in [1, 2] {
        engine.submit(now, request(id, 32, 1, 64, -1)).unwrap();
    }
    for pass in 0..60 {
        engine.step(now, &mut outputs);
        engine.audit().unwrap();
        now = now + Span::from_millis(10);
        for copy in control.pending() {
            control.complete(copy.id, now, Outcome::Done).unwrap();
        }
        if pass == 2 {
            engine.submit(now, request(3, 96, 1, 64, 0)).unwrap();
        }
    }
    let of_third = |output: &Output| matches!(output, Output::Token { request, .. } if *request == RequestId(3));
    let third = outputs.iter().filter(|output| of_third(output)).count();
    assert_eq!((engine.stats().1.out.started, third), (0, 0));
}
