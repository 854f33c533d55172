//! `cargo xtask gpu build`: the tests that need a GPU, as programs to carry to one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{process, repo};

const LIMIT: Duration = Duration::from_mins(30);

/// Builds tests and benchmark of kv-transfer-cuda, and says where they are.
///
/// They need the driver and nothing else where they run. The tests fail there without a GPU.
///
/// # Errors
///
/// If they can't be built.
pub(crate) fn build() -> Result<()> {
    let folder = repo::target().join("gpu");
    let mut tests = cargo(&folder);
    tests
        .args([
            "test",
            "--quiet",
            "--locked",
            "--no-run",
            "--all-features",
            "--test",
            "gpu",
        ])
        .args(["--message-format", "json-render-diagnostics"]);
    let messages = process::output(&mut tests, LIMIT)?;
    let built = executable(&messages, "gpu").context("cargo built no test program")?;
    let carried = folder.join("gpu-tests");
    fs::copy(&built, &carried).with_context(|| format!("copying {}", built.display()))?;
    println!("gpu: {}", carried.display());
    let mut bench = cargo(&folder);
    bench
        .args([
            "build",
            "--quiet",
            "--locked",
            "--release",
            "--all-features",
        ])
        .args(["--bin", "kv-transfer-cuda-bench"])
        .args(["--message-format", "json-render-diagnostics"]);
    let messages = process::output(&mut bench, LIMIT)?;
    match executable(&messages, "kv-transfer-cuda-bench") {
        Some(built) => println!("gpu: {}", built.display()),
        None => bail!("cargo built no benchmark"),
    }
    Ok(())
}

/// In a folder of its own, since the flag makes everything be built again.
fn cargo(folder: &Path) -> Command {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(repo::root().join("kv-transfer-cuda"))
        .env("CARGO_TARGET_DIR", folder)
        .env("CARGO_ENCODED_RUSTFLAGS", "--cfg\u{1f}kv_gpu");
    cargo
}

/// Where cargo says it has put the program of that name.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_the_messages() {
        let messages = concat!(
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"x\"},\"executable\":\"/x\"}\n",
            "not json\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gpu\"},\"executable\":null}\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gpu\"},\"executable\":\"/g\"}\n",
        );
        assert_eq!(executable(messages, "gpu"), Some(PathBuf::from("/g")));
        assert_eq!(executable(messages, "y"), None);
    }
}
