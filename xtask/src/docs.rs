//! `cargo xtask docs`: the API documentation and the links between pages.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{markdown, process, repo};

const LIMIT: Duration = Duration::from_mins(30);

/// Builds the API documentation with warnings as errors, then checks the pages.
///
/// # Errors
///
/// If either has something to complain about.
pub(crate) fn run() -> Result<()> {
    rustdoc()?;
    pages()
}

fn rustdoc() -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(repo::root())
        .env("RUSTDOCFLAGS", "-D warnings")
        .args([
            "doc",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-features",
            "--no-deps",
        ]);
    process::run(&mut cargo, LIMIT)
}

/// Checks that every link between pages leads somewhere, that the summary names every page, and
/// that code which a page takes from a file is in that file.
///
/// # Errors
///
/// All findings at once.
pub(crate) fn pages() -> Result<()> {
    let root = repo::root();
    let pages: Vec<PathBuf> = repo::files()?
        .into_iter()
        .filter(|path| path.extension() == Some(OsStr::new("md")))
        .collect();
    let mut broken = excerpts(&root, &pages)?;
    let mut summarised = BTreeSet::new();
    for page in &pages {
        let text = read(&root.join(page))?;
        for link in markdown::links(&text) {
            if is_elsewhere(&link.target) {
                continue;
            }
            let (path, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
            let target = if path.is_empty() {
                page.clone()
            } else {
                beside(page, path)
            };
            if let Some(fault) = fault(&root, &target, anchor)? {
                broken.push(format!(
                    "{}:{}: {}: {fault}",
                    page.display(),
                    link.line,
                    link.target
                ));
            }
            if page == Path::new("docs/SUMMARY.md") {
                summarised.insert(target);
            }
        }
    }
    for page in pages.iter().filter(|page| page.starts_with("docs")) {
        if !summarised.contains(page) && page != Path::new("docs/SUMMARY.md") {
            broken.push(format!("docs/SUMMARY.md:1: {} is missing", page.display()));
        }
    }
    if !broken.is_empty() {
        bail!("{} findings:\n{}", broken.len(), broken.join("\n"));
    }
    println!("docs: links and excerpts of {} pages are good", pages.len());
    Ok(())
}

/// Code that is not, or no longer, in the file that its page names.
fn excerpts(root: &Path, pages: &[PathBuf]) -> Result<Vec<String>> {
    let mut stale = Vec::new();
    for page in pages {
        for excerpt in markdown::excerpts(&read(&root.join(page))?) {
            let file = fs::read_to_string(root.join(&excerpt.path)).unwrap_or_default();
            if !markdown::is_excerpt(&excerpt.code, &file) {
                let place = format!("{}:{}", page.display(), excerpt.line);
                stale.push(format!("{place}: {} does not have this code", excerpt.path));
            }
        }
    }
    Ok(stale)
}

fn is_elsewhere(target: &str) -> bool {
    ["https://", "http://", "mailto:"]
        .iter()
        .any(|scheme| target.starts_with(scheme))
}

/// `link` as seen from `page`, relative to the root.
fn beside(page: &Path, link: &str) -> PathBuf {
    let mut path = page.parent().map(Path::to_path_buf).unwrap_or_default();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir | Component::Prefix(_) | Component::RootDir => {}
        }
    }
    path
}

fn fault(root: &Path, target: &Path, anchor: &str) -> Result<Option<String>> {
    let path = root.join(target);
    if !path.exists() {
        return Ok(Some(format!("there is no {}", target.display())));
    }
    if anchor.is_empty() || target.extension() != Some(OsStr::new("md")) {
        return Ok(None);
    }
    let known = markdown::anchors(&read(&path)?).contains(anchor);
    Ok((!known).then(|| format!("{} has no heading #{anchor}", target.display())))
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_seen_from_its_page() {
        let from = |page: &str, link: &str| beside(Path::new(page), link);
        assert_eq!(from("docs/a.md", "b.md"), Path::new("docs/b.md"));
        assert_eq!(from("docs/a.md", "../README.md"), Path::new("README.md"));
        assert_eq!(
            from("README.md", "./docs/decisions/1.md"),
            Path::new("docs/decisions/1.md")
        );
    }

    #[test]
    fn a_broken_link_is_a_fault() {
        let root = repo::root();
        let fault = |path: &str, anchor| fault(&root, Path::new(path), anchor).unwrap();
        assert_eq!(
            fault("docs/no-such-page.md", "").unwrap(),
            "there is no docs/no-such-page.md"
        );
        assert!(fault("docs/invariants.md", "no-such-heading").is_some());
        assert_eq!(fault("docs/invariants.md", ""), None);
    }

    #[test]
    fn all_links_between_pages_are_good() {
        pages().unwrap();
    }
}
