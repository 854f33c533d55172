//! The wrappers over real backends, and the flags.

use std::sync::Arc;

use kv_core::host::{PlainMemory, SyncBackend};
use kv_core::{
    Backend, BlockId, BlockMove, Command, Completion, DigestWork, Direction, Fence, Layout,
    Outcome, SlotIndex, Span, TicketId, Time,
};
use kv_scheduler::{Batch, ExecuteError, Executor, StepOutput};

use super::*;
use crate::clock::Clock;
use crate::config::{Config, ConfigError, Invocation};

fn backend(plan: FaultPlan) -> FaultyBackend<SyncBackend> {
    let layout = Layout::latent(1, 4, 4, 8, 1).unwrap();
    let memory = Arc::new(PlainMemory::new(layout));
    let clock = Clock::start();
    let inner = SyncBackend::new(memory, Span::from_secs(1), Arc::new(move || clock.now()));
    FaultyBackend::new(inner, plan, clock, Delay::Block)
}

/// Sends a copy of block 0 and slot 0 and looks at what ended.
fn send(
    backend: &mut FaultyBackend<SyncBackend>,
    ticket: u64,
    direction: Direction,
    digest: DigestWork,
) -> Vec<Completion> {
    let moves = vec![BlockMove {
        block: BlockId::new(0),
        slot: SlotIndex::new(0),
    }];
    let ticket = TicketId::for_testing(ticket);
    let command = Command::for_testing(ticket, direction, moves, Fence::NONE, 32, digest);
    backend.submit(Time::ZERO, command).unwrap();
    let mut ended = Vec::new();
    backend.poll(&mut ended);
    ended
}

fn outcomes(ended: &[Completion]) -> Vec<Outcome> {
    ended.iter().map(|completion| completion.outcome).collect()
}

#[test]
fn the_copy_that_was_named_fails_and_no_other() {
    let mut backend = backend(FaultPlan {
        fail_copies: [2].into(),
        ..FaultPlan::default()
    });
    let seen: Vec<_> = (1..=3)
        .map(|ticket| send(&mut backend, ticket, Direction::Out, DigestWork::Skip))
        .map(|ended| outcomes(&ended))
        .collect();
    assert_eq!(seen, [[Outcome::Done], [Outcome::Failed], [Outcome::Done]]);
}

#[test]
fn a_lost_copy_is_unconfirmed_at_the_end() {
    let mut backend = backend(FaultPlan {
        lose_copy: NonZeroU64::new(1),
        ..FaultPlan::default()
    });
    assert_eq!(send(&mut backend, 1, Direction::Out, DigestWork::Skip), []);
    let closed = backend.close(Span::ZERO);
    assert_eq!((closed.unconfirmed, closed.leaked_bytes), (1, 32));
}

#[test]
fn i06_a_repeated_end_comes_twice_and_is_the_same() {
    let mut backend = backend(FaultPlan {
        repeat_completion: NonZeroU64::new(1),
        ..FaultPlan::default()
    });
    let ended = send(&mut backend, 1, Direction::Out, DigestWork::Skip);
    assert_eq!(ended.len(), 2);
    assert_eq!(ended[0], ended[1]);
}

#[test]
fn s18_a_flipped_bit_has_another_digest() {
    let mut backend = backend(FaultPlan {
        flip_host_bit: NonZeroU64::new(1),
        ..FaultPlan::default()
    });
    let out = send(&mut backend, 1, Direction::Out, DigestWork::Compute);
    let digest = DigestWork::Verify(out[0].digests.clone());
    let back_in = send(&mut backend, 2, Direction::In, digest);
    assert_eq!(outcomes(&back_in), [Outcome::Failed]);
}

#[test]
fn a_blocking_copy_blocks_longer() {
    let delay = Duration::from_millis(20);
    let mut backend = backend(FaultPlan {
        copy_delay: delay,
        ..FaultPlan::default()
    });
    let clock = Clock::start();
    let ended = send(&mut backend, 1, Direction::Out, DigestWork::Skip);
    assert!(clock.now().since(Time::ZERO) >= Span::from(delay));
    assert_eq!(outcomes(&ended), [Outcome::Done]);
}

struct Never;

impl Executor for Never {
    fn execute(&mut self, _: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        Ok(StepOutput {
            rows: Vec::new(),
            fence: Fence::NONE,
        })
    }
}

#[test]
fn the_step_that_was_named_fails_and_no_other() {
    let second = NonZeroU64::new(2).unwrap();
    let mut executor = FaultyExecutor::new(Never, second);
    let batch = Batch {
        copies: &[],
        rows: &[],
    };
    let failed = [(); 3].map(|()| executor.execute(&batch).is_err());
    assert_eq!(failed, [false, true, false]);
}

fn load(flags: &[&str]) -> Result<Box<Config>, ConfigError> {
    let args = ["kv-server", "--model", "oracle"];
    let args = args.iter().chain(flags).map(|&arg| arg.to_owned());
    match Config::load(args, [])? {
        Invocation::Serve(config) => Ok(config),
        Invocation::Print(text) => panic!("printed {text}"),
    }
}

#[test]
fn without_the_switch_every_fault_is_refused_by_name() {
    for flag in [
        "--fault-copy-delay-ms",
        "--fault-fail-copy",
        "--fault-lose-copy",
        "--fault-repeat-completion",
        "--fault-flip-host-bit",
        "--fault-step-error",
        "--fault-force-swap-every",
    ] {
        let error = load(&[flag, "1"]).unwrap_err().to_string();
        let start = format!("{flag} is \"1\", must be left out unless --fault-injection");
        assert!(error.starts_with(&start), "{error}");
        let allowed = load(&["--fault-injection", flag, "1"]).unwrap();
        assert_ne!(allowed.faults, Some(FaultPlan::default()), "{flag}");
    }
    assert_eq!(load(&[]).unwrap().faults, None);
}
