//! `cargo xtask sim`: the engine in worlds that one seed makes, for as long as wanted.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::flags::Sim;
use crate::{process, repo};

/// How long building and running may take beyond the minutes that were asked for.
const LIMIT: Duration = Duration::from_mins(60);

/// Swap cycles of a soak.
const SOAK_CYCLES: u64 = 1_000_000;

/// Runs worlds, or one of the other kinds that the flags name. What fails names its seed.
///
/// # Errors
///
/// If something failed, or could not be built.
pub(crate) fn run(flags: &Sim) -> Result<()> {
    ensure!(
        u8::from(flags.self_test) + u8::from(flags.soak) + u8::from(flags.trace.is_some()) <= 1,
        "--self-test, --soak and --trace exclude each other"
    );
    println!("sim: commit {}", repo::commit());
    if flags.self_test {
        return process::run(&mut test("self_test"), LIMIT);
    }
    if flags.soak {
        println!("sim: {SOAK_CYCLES} swap cycles");
        return process::run(
            test("soak").env("KV_SOAK_CYCLES", SOAK_CYCLES.to_string()),
            LIMIT,
        );
    }
    if let Some(trace) = &flags.trace {
        return process::run(example().arg("--trace").arg(trace).args(&flags.args), LIMIT);
    }
    worlds(flags)
}

fn worlds(flags: &Sim) -> Result<()> {
    let mut cargo = test("sim");
    let mut limit = LIMIT;
    if let Some(seed) = flags.seed {
        println!("sim: replaying seed {seed}");
        cargo.env("KV_SIM_SEED", seed.to_string());
    }
    if let Some(worlds) = flags.worlds {
        cargo.env("KV_SIM_WORLDS", worlds.to_string());
    }
    if let Some(minutes) = flags.minutes {
        cargo.env("KV_SIM_MINUTES", minutes.to_string());
        limit += Duration::from_mins(minutes);
    }
    process::run(&mut cargo, limit)
}

/// A test program, chosen as the test step of CI builds it, so that nothing is built twice.
fn test(name: &str) -> Command {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(repo::root())
        .args([
            "test",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-features",
            "--test",
            name,
        ])
        .args(["--", "--nocapture"]);
    cargo
}

/// The program that compares policies over request traces.
fn example() -> Command {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(repo::root())
        .args([
            "run",
            "--quiet",
            "--locked",
            "--release",
            "--package",
            "kv-scheduler",
        ])
        .args(["--example", "trace_sim", "--"]);
    cargo
}
