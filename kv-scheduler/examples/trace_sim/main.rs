//! Policies compared over request traces: the real engine and machine in virtual time, over an
//! executor and a link that are cost models.
//!
//! `cargo xtask sim --trace FILE` runs it; `docs/policies.md` says what came out and what the
//! model leaves out. The same flags and the same seed give the same numbers.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool talks through them"
)]

mod arms;
mod cost;
mod flags;
mod link;
mod load;
mod model;
mod report;
#[cfg(test)]
mod tests;
mod world;

use std::error::Error;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use arms::Arm;
use flags::TraceSim;
use load::Load;
use report::Outcome;
use world::{RunError, Setting};

fn main() -> ExitCode {
    match run(&TraceSim::from_env_or_exit()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &TraceSim) -> Result<(), Box<dyn Error>> {
    let (load, setting) = (read_load(flags)?, flags.setting());
    let choices = flags.choices();
    let mut arms = if flags.grid {
        choices.grid()
    } else {
        choices.star()
    };
    if let Some(only) = &flags.only {
        arms.retain(|arm| arm.to_string().contains(only));
    }
    let input: u64 = load
        .jobs
        .iter()
        .map(|job| u64::from(job.input_tokens))
        .sum();
    let output: u64 = load
        .jobs
        .iter()
        .map(|job| u64::from(job.output_tokens))
        .sum();
    println!(
        "{} requests, {input} prompt and {output} answer tokens; virtual time; {} arms",
        load.jobs.len(),
        arms.len()
    );
    let jobs = flags
        .jobs
        .or_else(|| thread::available_parallelism().ok().map(NonZero::get));
    let outcomes = simulate_all(&arms, &load, &setting, jobs.unwrap_or(1))?;
    println!("\n{}", report::table(&outcomes));
    println!(
        "good: first token within {:?}, {:?} per further token, no pause above {:?}",
        setting.slo.first_token.as_duration(),
        setting.slo.per_token.as_duration(),
        setting.slo.pause.as_duration(),
    );
    if let Some(path) = &flags.json {
        let all = serde_json::json!({
            "trace": flags.trace.as_deref().unwrap_or(LONG_OUTPUT),
            "requests": load.jobs.len(),
            "scale": flags.scale.unwrap_or(1.0),
            "seed": flags.seed.unwrap_or(1),
            "step_cost": setting.step,
            "link_cost": setting.link,
            "geometry": setting.geometry,
            "arms": outcomes,
        });
        let mut text = serde_json::to_string_pretty(&all)?;
        text.push('\n');
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// The name of the load that is no file.
const LONG_OUTPUT: &str = "long-output";

fn read_load(flags: &TraceSim) -> Result<Load, Box<dyn Error>> {
    let trace = flags.trace.as_deref().unwrap_or(LONG_OUTPUT);
    let mut load = if trace == LONG_OUTPUT {
        flags.closed_loop().draw(flags.seed.unwrap_or(1))
    } else {
        let named = |error: &dyn Error| format!("{trace}: {error}");
        let text = std::fs::read_to_string(trace).map_err(|error| named(&error))?;
        load::parse(&text).map_err(|error| named(&error))?
    };
    if let Some(limit) = flags.limit {
        load.limit(limit);
    }
    let scale = flags.scale.unwrap_or(1.0);
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(format!("--scale is {scale}, must be above 0").into());
    }
    load.scale(scale);
    Ok(load)
}

/// Simulates all arms, several at a time; the outcomes are in the order of the arms.
fn simulate_all(
    arms: &[Arm],
    load: &Load,
    setting: &Setting,
    jobs: usize,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let next = AtomicUsize::new(0);
    let outcomes: Mutex<Vec<Option<Result<Outcome, RunError>>>> =
        Mutex::new(arms.iter().map(|_| None).collect());
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, arms.len().max(1)) {
            scope.spawn(|| {
                while let Some((index, arm)) = take(&next, arms) {
                    let outcome = simulate_timed(arm, load, setting);
                    let mut outcomes = outcomes.lock().expect("nobody panics with it");
                    outcomes[index] = Some(outcome);
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().expect("nobody panics with it");
    let named = |(arm, outcome): (&Arm, Option<Result<Outcome, RunError>>)| {
        let outcome = outcome.expect("every arm is taken by somebody");
        outcome.map_err(|error| format!("{arm}: {error}").into())
    };
    arms.iter().zip(outcomes).map(named).collect()
}

fn take<'a>(next: &AtomicUsize, arms: &'a [Arm]) -> Option<(usize, &'a Arm)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    Some((index, arms.get(index)?))
}

/// Says on the side how long the engine itself took; real time is no part of the outcome.
#[expect(
    clippy::disallowed_methods,
    reason = "how long the simulation takes is told beside its results"
)]
fn simulate_timed(arm: &Arm, load: &Load, setting: &Setting) -> Result<Outcome, RunError> {
    let started = Instant::now();
    let outcome = world::simulate(arm, load, setting)?;
    let took = started.elapsed();
    let micros = took.as_secs_f64() * 1e6 / outcome.passes.max(1) as f64;
    eprintln!(
        "{arm}: simulated in {:.1} s, {micros:.0} us per pass",
        took.as_secs_f64()
    );
    Ok(outcome)
}
