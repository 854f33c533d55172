//! `cargo xtask ptx`: turns the CUDA kernels into text that the driver compiles on the user's
//! machine.
//!
//! The text is committed, so that nobody needs a CUDA toolkit to build or to run. It is made with
//! a compiler from Python packages, pinned, and is the same byte for byte on any machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use xxhash_rust::xxh3::xxh3_64;

use crate::{process, python, repo};

const LIMIT: Duration = Duration::from_mins(5);

const CRATE: &str = "kv-transfer-cuda";

/// The kernels of the crate, and those of its tests. Each text lies beside its source.
const SOURCES: &[&str] = &["kernels/copy.cu", "tests/gpu/kernels.cu"];

/// The compiler and what it needs.
const PACKAGES: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Ampere and later load it.
const ARCHITECTURE: &str = "-arch=compute_80";

/// What the compiler writes as the version of the language, and the oldest version that has all
/// that the kernels use: drivers refuse a text of a newer version than their own.
const VERSIONS: [&str; 2] = [".version 9.0", ".version 7.7"];

/// Makes the text from the source.
///
/// # Errors
///
/// If the compiler can't be brought, or refuses the source.
pub(crate) fn run() -> Result<()> {
    let nvcc = nvcc()?;
    for source in SOURCES {
        make(&nvcc, source).with_context(|| format!("{CRATE}/{source}"))?;
    }
    Ok(())
}

/// Makes one text beside its source.
fn make(nvcc: &Path, name: &str) -> Result<()> {
    let source = repo::root().join(CRATE).join(name);
    let hash = xxh3_64(&fs::read(&source)?);
    let compiled = compile(nvcc, &source)?;
    let [written, wanted] = VERSIONS;
    ensure!(
        compiled.matches(written).count() == 1,
        "the compiler's output does not say `{written}` once"
    );
    let text = format!(
        "// Made by `cargo xtask ptx`; not to be edited.\n// source={name} xxh3={hash:016x}\n//\n{}",
        compiled.replace(written, wanted)
    );
    let path = source.with_extension("ptx");
    let same = fs::read_to_string(&path).is_ok_and(|before| before == text);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    assemble(nvcc, &path)?;
    println!(
        "ptx: {} {}",
        path.display(),
        if same {
            "is as it was"
        } else {
            "was made anew"
        }
    );
    Ok(())
}

/// Shows that the text needs nothing newer than the version it names, by making code of it.
fn assemble(nvcc: &Path, text: &Path) -> Result<()> {
    let mut command = Command::new(nvcc.with_file_name("ptxas"));
    command
        .args(["--gpu-name", "sm_80", "-o"])
        .arg(repo::target().join("nvcc").join("checked.cubin"))
        .arg(text);
    process::run(&mut command, LIMIT)
}

fn nvcc() -> Result<PathBuf> {
    // The packages name dependencies that compiling to text does not need.
    let python = python::environment("nvcc", PACKAGES, &["--no-deps"])?;
    let mut ask = Command::new(python);
    ask.args([
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
    ]);
    let packages = process::output(&mut ask, LIMIT)?;
    let nvcc = Path::new(packages.trim()).join("nvidia/cu13/bin/nvcc");
    ensure!(nvcc.exists(), "the compiler is not at {}", nvcc.display());
    Ok(nvcc)
}

fn compile(nvcc: &Path, source: &Path) -> Result<String> {
    let output = repo::target().join("nvcc").join("made.ptx");
    let mut command = Command::new(nvcc);
    command
        .args(["-ptx", ARCHITECTURE, "-o"])
        .arg(&output)
        .arg(source);
    process::run(&mut command, LIMIT)?;
    fs::read_to_string(&output).with_context(|| format!("reading {}", output.display()))
}
