//! `cargo xtask ci`: everything that CI does, in order, and nothing that only CI does.
//!
//! The order is cheapest first. Steps share builds: clippy and rustdoc the checked dependencies,
//! all others one build of the workspace with all features in the test profile.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::flags::{Ci, Pressure, Sim};
use crate::server::{self, Profile, Server};
use crate::{clock, docs, model, pressure, process, python, repo, sim, tidy};

/// Most time for one step; a cold build is inside it.
const LIMIT: Duration = Duration::from_mins(30);

/// Most time for the client test, without its build.
const CLIENT_LIMIT: Duration = Duration::from_mins(5);

/// Worlds of the simulation step.
const WORLDS: u64 = 20_000;

type Step = (&'static str, fn() -> Result<()>);

const STEPS: &[Step] = &[
    ("format", format),
    ("tidy", tidy::run),
    ("clippy", clippy),
    ("clippy, kv-core without std", clippy_core),
    ("model", model::run),
    ("tests", tests),
    ("documentation tests", doc_tests),
    ("simulation", simulation),
    ("openai client", openai),
    ("pressure", pressure),
    ("documentation", docs::run),
];

/// Runs all steps, or the one that was asked for.
///
/// # Errors
///
/// The first step that failed, by name.
pub(crate) fn run(flags: &Ci) -> Result<()> {
    let chosen: Vec<&Step> = match &flags.only {
        None => STEPS.iter().collect(),
        Some(only) => STEPS.iter().filter(|(name, _)| name == only).collect(),
    };
    if chosen.is_empty() {
        let names: Vec<_> = STEPS.iter().map(|(name, _)| *name).collect();
        bail!("--only is no step; the steps are: {}", names.join("; "));
    }
    let start = clock::now();
    let mut durations = Vec::new();
    for (index, (name, run)) in chosen.iter().enumerate() {
        println!("\nci: step {} of {}: {name}", index + 1, chosen.len());
        let step_start = clock::now();
        run().with_context(|| format!("ci: step `{name}` failed"))?;
        durations.push(step_start.elapsed());
    }
    println!();
    for ((name, _), duration) in chosen.iter().zip(&durations) {
        println!("{:>8.1} s  {name}", duration.as_secs_f64());
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
        self_test: false,
        soak: false,
        trace: None,
        args: Vec::new(),
    })
}

/// The client that most people use, against the oracle.
fn openai() -> Result<()> {
    let python = python::environment("openai-client", &["openai>=2,<3"], &[])?;
    let program = server::build(Profile::Test)?;
    let args = ["--model", "oracle", "--kv-swap-mode", "async"].map(str::to_owned);
    let server = Server::start(&program, &args)?;
    let mut client = Command::new(python);
    client
        .arg(
            repo::root()
                .join("kv-server")
                .join("tests")
                .join("openai_client.py"),
        )
        .arg(server.base());
    process::run(&mut client, CLIENT_LIMIT).map_err(|error| error.context(server.log()))?;
    server.stop(CLIENT_LIMIT)
}

/// Short, on the oracle: whether texts are equal, not how fast anything is.
fn pressure() -> Result<()> {
    pressure::run(&Pressure {
        model: Some("oracle".to_owned()),
        requests: Some(40),
        json: None,
        seed: None,
        server: Some(server::build(Profile::Test)?),
        server_arg: Vec::new(),
    })
}
