//! Python, which brings the model and a client of the server.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{process, repo};

const LIMIT: Duration = Duration::from_mins(10);

/// The name of a Python 3 that has pip.
///
/// # Errors
///
/// If there is none; the text says how to get one.
pub(crate) fn with_pip() -> Result<String> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    ensure!(
        process::works(Command::new(&python).arg("--version")),
        "`{python}` can't be run. Install Python 3 (on Debian: `apt-get install python3 \
         python3-pip python3-venv`), or set PYTHON to its path, then run this again"
    );
    ensure!(
        process::works(Command::new(&python).args(["-m", "pip", "--version"])),
        "`{python}` has no pip. Install it (on Debian: `apt-get install python3-pip`), then run \
         this again"
    );
    Ok(python)
}

/// The interpreter of a virtual environment of that name with these packages in it.
///
/// It lies in the build folder; one that is complete is used again. `pip_args` go to `pip install`.
///
/// # Errors
///
/// If it can't be made or a package can't be installed; the text says why.
pub(crate) fn environment(name: &str, packages: &[&str], pip_args: &[&str]) -> Result<PathBuf> {
    let folder = repo::target().join(name);
    let python = folder.join("bin").join("python");
    let complete = folder.join("complete");
    if std::fs::read_to_string(&complete).is_ok_and(|list| list == packages.join("\n")) {
        return Ok(python);
    }
    let base = with_pip()?;
    process::run(
        Command::new(&base)
            .args(["-m", "venv", "--clear"])
            .arg(&folder),
        LIMIT,
    )
    .context("no virtual environment could be made (on Debian: `apt-get install python3-venv`)")?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ])
    .args(pip_args)
    .args(packages);
    process::run(&mut pip, LIMIT).with_context(|| {
        format!(
            "pip could not install {}; is the network there?",
            packages.join(", ")
        )
    })?;
    std::fs::write(&complete, packages.join("\n"))
        .with_context(|| format!("writing {}", complete.display()))?;
    Ok(python)
}
