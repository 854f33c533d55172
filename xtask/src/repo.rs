//! Where things are in this repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .parent()
        .expect("xtask is a folder of the repository")
        .to_path_buf()
}

/// Build outputs, and whatever else may be deleted at any time.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Folders that hold nothing written by hand.
const GENERATED: [&str; 3] = [".git", "models", "target"];

/// All files below the root that are written by hand, as paths relative to the root, sorted: those
/// that git knows or would take; without git, all outside of folders that hold outputs.
///
/// # Errors
///
/// If a folder can't be read.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let mut files = known_to_git().map_or_else(|_| found_on_disk(), Ok)?;
    files.sort();
    Ok(files)
}

fn known_to_git() -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root())
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .stderr(Stdio::null());
    let list = process::output(&mut git, Duration::from_secs(60))?;
    let paths = list
        .split('\0')
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    // What was deleted, but not committed yet, is still in the list.
    Ok(paths.filter(|path| root().join(path).is_file()).collect())
}

fn found_on_disk() -> Result<Vec<PathBuf>> {
    let root = root();
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        let entries = fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("reading {}", path.display()))?;
            let relative = folder.join(entry.file_name());
            if entry.file_type()?.is_file() {
                files.push(relative);
            } else if !GENERATED.iter().any(|name| relative == Path::new(name)) {
                folders.push(relative);
            }
        }
    }
    Ok(files)
}

/// The commit that is checked out, and whether files differ from it.
pub(crate) fn commit() -> String {
    let mut git = Command::new("git");
    git.current_dir(root())
        .args(["describe", "--always", "--dirty", "--abbrev=12"]);
    process::output(&mut git, Duration::from_secs(60)).map_or_else(
        |error| format!("unknown ({error})"),
        |name| name.trim().to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_files() {
        let (known, found) = (files().unwrap(), found_on_disk().unwrap());
        for path in ["Cargo.toml", "xtask/src/repo.rs", ".ci/run"] {
            let path = PathBuf::from(path);
            assert!(
                known.contains(&path) && found.contains(&path),
                "{}",
                path.display()
            );
        }
        assert!(
            !found
                .iter()
                .chain(&known)
                .any(|path| path.starts_with("target"))
        );
    }
}
