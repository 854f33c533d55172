//! `cargo xtask ci`: everything that CI does, in order, and nothing that only CI does.
//!
//! The order is cheapest first. Steps share builds: clippy and rustdoc the checked dependencies,
//! all others one build of the workspace with all features in the test profile.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::flags::Sim;
use crate::{clock, docs, model, process, repo, sim, tidy};

/// Most time for one step; a cold build is inside it.
const LIMIT: Duration = Duration::from_mins(30);

/// Worlds of the simulation step.
const WORLDS: u64 = 2_000;

struct Step {
    name: &'static str,
    run: fn() -> Result<()>,
}

const STEPS: &[Step] = &[
    Step {
        name: "format",
        run: format,
    },
    Step {
        name: "tidy",
        run: tidy::run,
    },
    Step {
        name: "clippy",
        run: clippy,
    },
    Step {
        name: "clippy, kv-core without std",
        run: clippy_core,
    },
    Step {
        name: "model",
        run: model::run,
    },
    Step {
        name: "tests",
        run: tests,
    },
    Step {
        name: "documentation tests",
        run: doc_tests,
    },
    Step {
        name: "simulation",
        run: simulation,
    },
    Step {
        name: "documentation",
        run: docs::run,
    },
];

/// Runs all steps.
///
/// # Errors
///
/// The first step that failed, by name.
pub(crate) fn run() -> Result<()> {
    let start = clock::now();
    let mut durations = Vec::new();
    for (index, step) in STEPS.iter().enumerate() {
        println!("\nci: step {} of {}: {}", index + 1, STEPS.len(), step.name);
        let step_start = clock::now();
        (step.run)().with_context(|| format!("ci: step `{}` failed", step.name))?;
        durations.push(step_start.elapsed());
    }
    println!("\nci: all steps passed");
    for (step, duration) in STEPS.iter().zip(&durations) {
        println!("{:>8.1} s  {}", duration.as_secs_f64(), step.name);
    }
    println!("{:>8.1} s  total", start.elapsed().as_secs_f64());
    println!("steps: {} passed, 0 failed", durations.len());
    Ok(())
}

/// Cargo, at the root.
fn cargo(args: &[&str]) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(repo::root()).args(args);
    cargo
}

fn format() -> Result<()> {
    process::run(&mut cargo(&["fmt", "--all", "--check"]), LIMIT)
}

fn clippy() -> Result<()> {
    let args = [
        "clippy",
        "--quiet",
        "--locked",
        "--workspace",
        "--all-targets",
        "--all-features",
    ];
    process::run(cargo(&args).args(["--", "-D", "warnings"]), LIMIT)
}

/// Without its features kv-core is `no_std`; the compiler checks that here.
fn clippy_core() -> Result<()> {
    let args = [
        "clippy",
        "--quiet",
        "--locked",
        "--package",
        "kv-core",
        "--no-default-features",
    ];
    process::run(cargo(&args).args(["--", "-D", "warnings"]), LIMIT)
}

/// The test runner that is there: nextest, which shows what hangs, or cargo's own.
fn tests() -> Result<()> {
    let nextest = process::works(&mut cargo(&["nextest", "--version"]));
    let mut command = if nextest {
        cargo(&["nextest", "run", "--no-fail-fast"])
    } else {
        println!("ci: cargo-nextest is not installed, `cargo test` runs the tests");
        cargo(&["test", "--no-fail-fast", "--all-targets"])
    };
    command.args(["--locked", "--workspace", "--all-features"]);
    // Tests on the real model run, or fail: they don't pass for lack of the model.
    command.env("KV_REQUIRE_MODEL", "1");
    process::run(&mut command, LIMIT)
}

fn doc_tests() -> Result<()> {
    let args = [
        "test",
        "--quiet",
        "--locked",
        "--workspace",
        "--all-features",
        "--doc",
    ];
    process::run(&mut cargo(&args), LIMIT)
}

fn simulation() -> Result<()> {
    sim::run(&Sim {
        seed: None,
        worlds: Some(WORLDS),
        minutes: None,
    })
}
