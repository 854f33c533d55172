//! What the machine itself costs: no byte is copied here.
//!
//! `cargo bench -p kv-core --bench machine`.

#![expect(clippy::unwrap_used, reason = "a bench that can't run says where")]

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kv_core::{
    Choice, Command, Completion, Fence, GroupId, HostSide, Layout, Lease, Machine, MachineConfig,
    OnGpu, Outcome, RecordState, Redeemed, Stimulus, Time,
};

const BLOCK_TOKENS: u32 = 16;
const BLOCKS: [u32; 3] = [8, 64, 512];

fn machine(blocks: u32) -> Machine {
    let layout = Layout::stacked(2, blocks, BLOCK_TOKENS, 1, 2, 2).unwrap();
    let config = MachineConfig::new(&layout, HostSide::Slots(blocks), 1 << 30);
    let mut machine = Machine::new(config).unwrap();
    machine.handle_slots_ready(blocks);
    machine
}

/// A machine whose blocks are all one group's.
fn full(blocks: u32) -> (Machine, Lease<OnGpu>) {
    let mut machine = machine(blocks);
    let lease = machine.allocate(GroupId::new(1), 1).unwrap();
    machine
        .append(&lease, Choice::new(0), blocks * BLOCK_TOKENS)
        .unwrap();
    (machine, lease)
}

fn done(command: &Command) -> Completion {
    Completion {
        id: command.id(),
        outcome: Outcome::Done,
        fault: None,
        bytes: command.bytes(),
        submitted_at: Time::ZERO,
        completed_at: Time::ZERO,
        digests: Vec::new(),
    }
}

fn transitions(c: &mut Criterion) {
    let mut group = c.benchmark_group("transition");
    let pairs = RecordState::ALL.len() * Stimulus::ALL.len();
    group.throughput(Throughput::Elements(pairs as u64));
    group.bench_function("all pairs", |bench| {
        bench.iter(|| {
            for state in RecordState::ALL {
                for stimulus in Stimulus::ALL {
                    black_box(black_box(state).on(black_box(stimulus)));
                }
            }
        });
    });
    group.finish();
}

fn reservation(c: &mut Criterion) {
    let mut group = c.benchmark_group("swap_out reservation");
    for blocks in BLOCKS {
        group.throughput(Throughput::Elements(blocks.into()));
        group.bench_function(BenchmarkId::from_parameter(blocks), |bench| {
            bench.iter_batched(
                || full(blocks),
                |(mut machine, lease)| {
                    let ticket = machine.swap_out(Time::ZERO, lease, Fence::NONE).unwrap();
                    let command = machine.poll_command().unwrap();
                    (machine, ticket, command)
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn completion(c: &mut Criterion) {
    let mut group = c.benchmark_group("completion of a swap_out");
    for blocks in BLOCKS {
        group.throughput(Throughput::Elements(blocks.into()));
        group.bench_function(BenchmarkId::from_parameter(blocks), |bench| {
            bench.iter_batched(
                || {
                    let (mut machine, lease) = full(blocks);
                    let ticket = machine.swap_out(Time::ZERO, lease, Fence::NONE).unwrap();
                    let command = machine.poll_command().unwrap();
                    (machine, ticket, done(&command))
                },
                |(mut machine, ticket, completion)| {
                    machine.handle_completion(Time::ZERO, completion);
                    let redeemed = machine.redeem(ticket).unwrap();
                    (machine, redeemed)
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

/// Out, back, out again with one dirty block, back, given up.
fn round_trip(c: &mut Criterion) {
    let mut group = c.benchmark_group("out and back");
    for blocks in BLOCKS {
        group.throughput(Throughput::Elements(blocks.into()));
        group.bench_function(BenchmarkId::from_parameter(blocks), |bench| {
            let (mut machine, lease) = full(blocks);
            let mut held = Some(lease);
            bench.iter(|| {
                let lease = held.take().unwrap();
                let ticket = machine.swap_out(Time::ZERO, lease, Fence::NONE).unwrap();
                settle(&mut machine);
                let Ok(Redeemed::Moved(lease)) = machine.redeem(ticket) else {
                    unreachable!("its copy is done")
                };
                let ticket = machine.swap_in(Time::ZERO, lease, Fence::NONE).unwrap();
                settle(&mut machine);
                let Ok(Redeemed::Moved(lease)) = machine.redeem(ticket) else {
                    unreachable!("its copy is done")
                };
                held = Some(lease);
            });
        });
    }
    group.finish();
}

fn settle(machine: &mut Machine) {
    while let Some(command) = machine.poll_command() {
        machine.handle_completion(Time::ZERO, done(&command));
    }
    while let Some(event) = machine.poll_event() {
        black_box(event);
    }
}

/// One token for each of many groups: what a decode step asks of the machine.
fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append a token");
    let groups = 32u32;
    group.throughput(Throughput::Elements(groups.into()));
    group.bench_function("32 groups", |bench| {
        bench.iter_batched(
            || {
                let mut machine = machine(256);
                let leases: Vec<_> = (0..groups)
                    .map(|id| {
                        let lease = machine.allocate(GroupId::new(id.into()), 1).unwrap();
                        machine
                            .append(&lease, Choice::new(0), 40 + id % 16)
                            .unwrap();
                        lease
                    })
                    .collect();
                (machine, leases)
            },
            |(mut machine, leases)| {
                for lease in &leases {
                    black_box(machine.append(lease, Choice::new(0), 1).unwrap());
                }
                (machine, leases)
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(
    benches,
    transitions,
    reservation,
    completion,
    round_trip,
    append
);
criterion_main!(benches);
