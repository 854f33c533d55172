//! S2 for the process's own memory. Alone in its binary, because it looks at the whole process.

#![cfg(target_os = "linux")]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the switches for tests don't reach helper functions in integration tests"
)]

#[path = "scenarios/world.rs"]
#[expect(dead_code, reason = "the scenarios need more of it")]
mod world;

use kv_scheduler::RequestId;
use world::{Setup, World, request};

/// Resident memory, KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.unwrap().parse().unwrap()
}

/// One client leaves while it is parked, one while it waits, one is served to its end.
fn cycle(world: &mut World, number: u64) {
    let [served, parked, waiting] = [1, 2, 3].map(|which| number * 10 + which);
    world.submit(request(served, 1, 64, 64));
    world.submit(request(parked, 1, 32, 32));
    world.submit(request(waiting, 1, 64, 8));
    world.pass_until(|world| world.machine().groups.host_resident == 1);
    world.cancel(RequestId(parked));
    world.cancel(RequestId(waiting));
    world.finish();
    world.assert_empty();
    world.seen.clear();
    world.events.clear();
}

#[test]
fn s02_i11_memory_does_not_grow_with_cancellations() {
    let mut setup = Setup::new(8, 8);
    setup.engine.max_batch_size = 2;
    let mut world = World::new(setup);
    let mut at_100 = 0;
    for number in 0..1_000 {
        cycle(&mut world, number);
        if number == 100 {
            at_100 = resident_kib();
        }
    }
    let growth = resident_kib().saturating_sub(at_100);
    assert!(growth < 2 * 1_024, "{growth} KiB from cycle 100 to 1,000");
    assert_eq!(world.stats().cancelled, 2_000);
}
