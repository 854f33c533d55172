//! The checkers of the simulation, checked: each known fault, planted alone, must be caught.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a simulation stops at the first surprise and says where"
)]

#[path = "sim/executor.rs"]
mod executor;
#[path = "sim/plan.rs"]
mod plan;
#[path = "sim/world.rs"]
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_core::PlantedFault;

/// Worlds that may pass before a fault has to be caught.
const WORLDS: u64 = 3_000;

/// The first seed whose world fails, and how.
fn first_failure() -> Option<(u64, String)> {
    (0..WORLDS).find_map(|seed| {
        let panic = catch_unwind(AssertUnwindSafe(|| world::run(seed))).err()?;
        let what = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_default();
        Some((seed, what))
    })
}

// One test: the planted fault is the whole process's.
#[test]
fn every_planted_fault_is_caught_and_none_is_seen_without_one() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut survived = Vec::new();
    for fault in PlantedFault::ALL {
        fault.plant();
        match first_failure() {
            Some((seed, what)) => {
                let line = what.lines().next().unwrap_or_default();
                eprintln!("{fault:?}: caught at seed {seed}: {line}");
            }
            None => survived.push(fault),
        }
    }
    PlantedFault::uproot();
    let healthy = first_failure();
    let mut met = world::Met::default();
    for seed in 0..WORLDS {
        met.add(&world::run(seed));
    }
    met.assert_complete();
    let _default_hook = std::panic::take_hook();
    assert_eq!(survived, [], "faults that the checkers don't see");
    assert_eq!(healthy, None, "a fault that nobody planted");
}
