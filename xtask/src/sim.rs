//! `cargo xtask sim`: many small simulated worlds, each made by one seed.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::flags::Sim;
use crate::{process, repo};

/// How long building and running may take beyond the minutes that were asked for.
const LIMIT: Duration = Duration::from_mins(60);

/// Runs the simulation test of kv-scheduler; its own words name the seed of a world that failed.
///
/// # Errors
///
/// If a world failed or the test could not be built.
pub(crate) fn run(flags: &Sim) -> Result<()> {
    println!("sim: commit {}", repo::commit());
    let mut cargo = command();
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

/// The test program, chosen as the test step of CI builds it, so that nothing is built twice.
fn command() -> Command {
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
            "sim",
        ])
        .args(["--", "--nocapture"]);
    cargo
}
