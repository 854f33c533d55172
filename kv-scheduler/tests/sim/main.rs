//! Deterministic simulation: engine, machine, simulated backend and hash oracle in virtual time.
//!
//! One seed makes one world: its geometry, pools, caps, policies, clients and faults. After every
//! pass the checkers count everything again; when the faults stop, everything must end; and every
//! text must equal the one of a run with ample memory.
//!
//! `KV_SIM_SEED=n` replays one world, `KV_SIM_WORLDS=n` runs that many, `KV_SIM_MINUTES=n` runs
//! for that long; see `cargo xtask sim`.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a simulation stops at the first surprise and says where"
)]

mod executor;
mod plan;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use world::Met;

const DEFAULT_WORLDS: u64 = 1_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is {text}, must be a number")),
    )
}

/// Bounds `KV_SIM_MINUTES`; nothing inside a world sees it.
#[derive(Debug)]
struct WallClock(std::time::Instant);

impl WallClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "only the length of a soak depends on it"
    )]
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn minutes(&self) -> u64 {
        self.0.elapsed().as_secs() / 60
    }
}

/// Runs one world; a failure names its seed.
fn run(seed: u64, met: &mut Met) {
    let world = catch_unwind(AssertUnwindSafe(|| world::run(seed)));
    match world {
        Ok(found) => met.add(&found),
        Err(panic) => {
            eprintln!("world {seed} failed; replay it with KV_SIM_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn i01_to_i14_hold_in_every_world_and_i10_texts_are_those_of_ample_memory() {
    let mut met = Met::default();
    if let Some(seed) = number("KV_SIM_SEED") {
        run(seed, &mut met);
        eprintln!("world {seed}: {met:?}");
        return;
    }
    let minutes = number("KV_SIM_MINUTES");
    let worlds = number("KV_SIM_WORLDS").unwrap_or(DEFAULT_WORLDS);
    let clock = WallClock::start();
    let mut seed = 0;
    loop {
        let over = match minutes {
            Some(minutes) => clock.minutes() >= minutes,
            None => seed >= worlds,
        };
        if over {
            break;
        }
        run(seed, &mut met);
        seed += 1;
    }
    eprintln!("{seed} worlds: {met:?}");
    if seed >= 500 {
        met.assert_complete();
    }
}

#[test]
fn the_same_seed_makes_the_same_world() {
    for seed in [3, 17, 99] {
        assert_eq!(world::run(seed), world::run(seed), "world {seed}");
    }
}
