//! `cargo xtask pressure`: the same requests against a server with ample memory and against
//! servers that are short of it, over HTTP, and every text compared.
//!
//! Four arms run one after the other on the same machine: `ample` (nothing has to leave), `async`,
//! `sync` and `recompute`. The last three have the same pool of about a third of what the load
//! wants. The run fails if any text differs from the ample arm's, if a request fails, if a block
//! or a slot is still taken when the load is over, or if an arm that should swap did not.

mod arm;
mod client;
mod load;
mod stats;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use self::arm::{Arm, ArmResult, Mode};
use self::load::Load;
use crate::flags::Pressure;
use crate::interrupt::OnSignal;
use crate::server::{self, Profile};
use crate::{interrupt, model, repo};

/// Requests, unless asked otherwise.
const REQUESTS: u32 = 24;

/// Seed of the load, unless asked otherwise.
const SEED: u64 = 1;

/// Most sequences that a server runs at the same time; the load wants memory for so many.
const BATCH: u32 = 32;

/// Runs all arms, prints a table, and writes JSON where asked.
///
/// # Errors
///
/// All that went wrong, after the table.
pub(crate) fn run(flags: &Pressure) -> Result<()> {
    let requests = flags.requests.unwrap_or(REQUESTS);
    ensure!(requests > 0, "--requests is 0, must be at least 1");
    interrupt::forward_to_children(OnSignal::Kill)?;
    let model = match flags.model.as_deref() {
        None => {
            model::run()?;
            model::path().display().to_string()
        }
        Some(model) => model.to_owned(),
    };
    let program = program(flags.server.as_deref())?;
    let seed = flags.seed.unwrap_or(SEED);
    let load = Load::new(requests, seed, model == "oracle");
    println!(
        "pressure: {requests} requests ({} choices, {} cancelled midway), seed {seed}, {}",
        load.choices(),
        load.cancelled(),
        Path::new(&model).file_name().unwrap_or_default().display()
    );
    let setup = Setup {
        program,
        model,
        limit: limit(requests),
        server_args: flags.server_arg.clone(),
    };
    let ample = setup.run(Mode::Ample, load.blocks_at_most(BATCH), &load)?;
    let blocks = load.short_pool(&ample, BATCH)?;
    let mut arms = vec![ample];
    for mode in [Mode::Async, Mode::Sync, Mode::Recompute] {
        arms.push(setup.run(mode, blocks, &load)?);
    }
    report(&arms, flags, seed, &setup.model)
}

/// What all arms have in common.
struct Setup {
    program: PathBuf,
    model: String,
    limit: Duration,
    /// Further flags for the servers that swap.
    server_args: Vec<String>,
}

impl Setup {
    fn run(&self, mode: Mode, gpu_blocks: u32, load: &Load) -> Result<ArmResult> {
        interrupt::check()?;
        println!("pressure: {} with {gpu_blocks} blocks", mode.name());
        let arm = Arm {
            mode,
            gpu_blocks,
            batch: BATCH,
            limit: self.limit,
            further: match mode {
                Mode::Async | Mode::Sync => &self.server_args,
                Mode::Ample | Mode::Recompute => &[],
            },
        };
        let result = arm.run(&self.program, &self.model, load);
        interrupt::check()?;
        result.with_context(|| format!("arm {}", mode.name()))
    }
}

fn program(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) => Ok(path.to_path_buf()),
        None => {
            println!("pressure: building kv-server");
            server::build(Profile::Release)
        }
    }
}

/// Enough for a slow machine, and an end to a server that hangs.
fn limit(requests: u32) -> Duration {
    Duration::from_mins(2) + Duration::from_secs(10) * requests
}

fn report(arms: &[ArmResult], flags: &Pressure, seed: u64, model: &str) -> Result<()> {
    let reference = arms.first().context("the ample arm is the first one")?;
    let rows: Vec<_> = arms
        .iter()
        .map(|arm| summary::Row::new(arm, reference))
        .collect();
    println!("\n{}", summary::table(&rows));
    if let Some(path) = &flags.json {
        let model = Path::new(model)
            .file_name()
            .map(|name| name.display().to_string());
        let json = json!({
            "model": model,
            "requests": reference.answers.len(),
            "seed": seed,
            "commit": repo::commit(),
            "server_args": flags.server_arg,
            "arms": rows.iter().map(summary::Row::json).collect::<Vec<_>>(),
        });
        let text = serde_json::to_string_pretty(&json).context("writing JSON")?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    let faults: Vec<String> = arms
        .iter()
        .zip(&rows)
        .flat_map(|(arm, row)| row.faults(arm, reference))
        .collect();
    if !faults.is_empty() {
        bail!("pressure failed:\n  {}", faults.join("\n  "));
    }
    println!("pressure: all texts are equal, nothing leaked");
    Ok(())
}
