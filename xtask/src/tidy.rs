//! `cargo xtask tidy`: the rules of this repository that the compiler does not check.
//!
//! Every rule looks at the whole repository and reports all that it finds, so that one run shows
//! everything there is to mend. What the rules allow stands in [`policy`].

mod crates;
mod licence;
mod naming;
mod policy;
mod sources;
mod strip;

use std::fmt;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::repo;

/// Something that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Relative to the root.
    path: PathBuf,
    /// Counted from 1.
    line: usize,
    what: String,
}

impl Finding {
    fn new(path: impl Into<PathBuf>, line: usize, what: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            line,
            what: what.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.what)
    }
}

/// A text file of the repository.
#[derive(Debug)]
struct Source {
    /// Relative to the root.
    path: PathBuf,
    text: String,
}

impl Source {
    fn is(&self, extension: &str) -> bool {
        self.path
            .extension()
            .is_some_and(|found| found == extension)
    }
}

/// Checks everything.
///
/// # Errors
///
/// All findings, one a line, as `file:line: what`.
pub(crate) fn run() -> Result<()> {
    let sources = load()?;
    let mut findings = Vec::new();
    findings.extend(crates::check(&sources)?);
    findings.extend(sources::check(&sources));
    findings.extend(naming::check(&sources));
    findings.sort();
    findings.dedup();
    if !findings.is_empty() {
        let lines: Vec<_> = findings.iter().map(ToString::to_string).collect();
        bail!("{} findings:\n{}", lines.len(), lines.join("\n"));
    }
    println!("tidy: {} files are in order", sources.len());
    Ok(())
}

/// All text files; a file that is not UTF-8 is not text.
fn load() -> Result<Vec<Source>> {
    let root = repo::root();
    let mut sources = Vec::new();
    for path in repo::files()? {
        let bytes = fs::read(root.join(&path)).with_context(|| path.display().to_string())?;
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push(Source { path, text });
        }
    }
    Ok(sources)
}

/// The line, counted from 1, of the first line that `matches`; the first line if none does.
fn line_of(text: &str, matches: impl Fn(&str) -> bool) -> usize {
    text.lines().position(matches).map_or(1, |index| index + 1)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_repository_is_tidy() {
        super::run().unwrap();
    }
}
