//! Rules about single files.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Finding, Source, line_of, policy, strip};

/// Checks every file, and the account of `unsafe` against the files.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = sources.iter().flat_map(check_one).collect();
    findings.extend(ledger(sources));
    findings
}

fn check_one(source: &Source) -> Vec<Finding> {
    let mut findings = foreign_names(source);
    if source.is("rs") {
        let code = strip::code(&source.text);
        findings.extend(shape(source));
        findings.extend(unfinished(source, &code));
        findings.extend(unsafe_code(source, &code));
        findings.extend(purity(source, &code));
    }
    findings
}

fn shape(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let misuse = policy::MISUSE
        .iter()
        .any(|folder| source.path.starts_with(folder));
    if !misuse && !source.text.starts_with("//!") {
        findings.push(Finding::new(
            &source.path,
            1,
            "begins without a `//!` header",
        ));
    }
    let lines = source.text.lines().count();
    if lines > policy::LINES_MAX {
        let what = format!(
            "has {lines} lines, at most {} are allowed",
            policy::LINES_MAX
        );
        findings.push(Finding::new(&source.path, policy::LINES_MAX, what));
    }
    findings
}

fn unfinished(source: &Source, code: &str) -> Vec<Finding> {
    find_lines(
        source,
        code,
        policy::UNFINISHED,
        |line, word| line.contains(word),
        |word| format!("`{word}` stands for something that isn't there"),
    )
}

/// `unsafe` outside its places, and crate roots that don't forbid it.
fn unsafe_code(source: &Source, code: &str) -> Vec<Finding> {
    let below = |path: &Path| {
        policy::UNSAFE_PLACES
            .iter()
            .any(|place| path.starts_with(place))
    };
    let mut findings = Vec::new();
    if !below(&source.path) {
        let what = |_: &str| "has `unsafe`, which may not be here".to_owned();
        let found = find_lines(source, code, &["unsafe"], strip::has_word, what);
        // One is enough: the answer is about the file.
        findings.extend(found.into_iter().next());
    }
    let Some(krate) = crate_of_root(&source.path) else {
        return findings;
    };
    let may = policy::UNSAFE_PLACES
        .iter()
        .any(|place| Path::new(place).starts_with(krate));
    if !may && !code.contains("#![forbid(unsafe_code)]") {
        let what = "is a crate root without `#![forbid(unsafe_code)]`";
        findings.push(Finding::new(&source.path, 1, what));
    }
    findings
}

/// The folder of the crate of which this file is the root.
fn crate_of_root(path: &Path) -> Option<&Path> {
    let folder = path.parent()?;
    let is_root = folder.file_name()? == "src"
        && path
            .file_name()
            .is_some_and(|name| name == "lib.rs" || name == "main.rs");
    folder.parent().filter(|_| is_root)
}

fn purity(source: &Source, code: &str) -> Vec<Finding> {
    let below = |folders: &[&str]| folders.iter().any(|folder| source.path.starts_with(folder));
    if !below(policy::PURE) || below(policy::IMPURE) {
        return Vec::new();
    }
    find_lines(
        source,
        code,
        policy::IMPURE_WORDS,
        strip::has_word,
        |word| format!("is pure code, but names `{word}`"),
    )
}

/// Paths of one machine, and hosts of registries, in any text file.
fn foreign_names(source: &Source) -> Vec<Finding> {
    // Cargo writes the name of its registry into the lock file.
    if source.path == Path::new("Cargo.lock") {
        return Vec::new();
    }
    let words = [policy::MACHINE_PATHS, policy::REGISTRY_HOSTS].concat();
    find_lines(
        source,
        &source.text,
        &words,
        |line, word| line.contains(word),
        |word| format!("names a place of one machine or a registry's host: {word}"),
    )
}

/// One finding per line of `text` in which a word is found.
fn find_lines(
    source: &Source,
    text: &str,
    words: &[&str],
    found: impl Fn(&str, &str) -> bool,
    what: impl Fn(&str) -> String,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for word in words.iter().filter(|word| found(line, word)) {
            findings.push(Finding::new(&source.path, index + 1, what(word)));
        }
    }
    findings
}

/// The page that accounts for `unsafe` names exactly the files that have some.
fn ledger(sources: &[Source]) -> Vec<Finding> {
    let page = policy::UNSAFE_LEDGER;
    let Some(ledger) = sources.iter().find(|source| source.path == Path::new(page)) else {
        return vec![Finding::new(page, 1, "is missing")];
    };
    let headings = ledger
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("## "));
    let named: BTreeSet<&str> = headings
        .map(str::trim)
        .filter(|name| is_source(name))
        .collect();
    let mut findings = Vec::new();
    for source in sources.iter().filter(|source| source.is("rs")) {
        let code = strip::code(&source.text);
        let name = source.path.to_string_lossy();
        let place = code
            .lines()
            .position(|line| strip::has_word(line, "unsafe"));
        match (place, named.contains(&*name)) {
            (Some(index), false) => {
                let what = format!("has `unsafe`, but no section in {page}");
                findings.push(Finding::new(&source.path, index + 1, what));
            }
            (None, true) => {
                let line = line_of(&ledger.text, |line| line.contains(&*name));
                let what = format!("accounts for {name}, which has no `unsafe`");
                findings.push(Finding::new(page, line, what));
            }
            (Some(_), true) | (None, false) => {}
        }
    }
    let exists = |name: &str| sources.iter().any(|source| source.path == Path::new(name));
    for name in named.into_iter().filter(|name| !exists(name)) {
        let line = line_of(&ledger.text, |line| line.contains(name));
        findings.push(Finding::new(
            page,
            line,
            format!("accounts for {name}, which isn't there"),
        ));
    }
    findings
}

fn is_source(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|end| end == "rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(path: &str, text: &str) -> Vec<String> {
        let source = Source {
            path: path.into(),
            text: text.into(),
        };
        check_one(&source)
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn a_clean_file_has_no_findings() {
        let text = "//! Not unsafe, no Instant.\n#![forbid(unsafe_code)]\n";
        assert!(check_text("kv-core/src/lib.rs", text).is_empty());
    }

    #[test]
    fn each_planted_fault_is_found() {
        let ignored = format!("//! x\n{}]\nfn f() {{}}\n", policy::UNFINISHED[0]);
        let path = format!("//! see {}x\n", policy::MACHINE_PATHS[0]);
        let cases = [
            (
                "xtask/src/a.rs",
                "fn f() {}\n".to_owned(),
                "xtask/src/a.rs:1: begins without",
            ),
            (
                "xtask/src/a.rs",
                "//! x\n".repeat(901),
                "xtask/src/a.rs:900: has 901 lines",
            ),
            ("xtask/src/a.rs", ignored, "xtask/src/a.rs:2: `#[ignore"),
            (
                "xtask/src/a.rs",
                "//! x\nunsafe {}\n".to_owned(),
                "xtask/src/a.rs:2: has `unsafe`",
            ),
            (
                "xtask/src/main.rs",
                "//! x\n".to_owned(),
                "xtask/src/main.rs:1: is a crate root",
            ),
            (
                "kv-core/src/a.rs",
                "//! x\nInstant::now()\n".to_owned(),
                "kv-core/src/a.rs:2: is pure",
            ),
            ("docs/a.md", path, "docs/a.md:1: names a place"),
        ];
        for (file, text, expected) in cases {
            let found = check_text(file, &text);
            assert!(
                found.len() == 1 && found[0].starts_with(expected),
                "{expected}: {found:?}"
            );
        }
    }

    #[test]
    fn the_ledger_names_exactly_the_files_with_unsafe() {
        let source = |path: &str, text: &str| Source {
            path: path.into(),
            text: text.into(),
        };
        let sources = [
            source("a.rs", "//! x\nunsafe {}\n"),
            source("b.rs", "//! x\nunsafe {}\n"),
            source("c.rs", "//! unsafe\n"),
            source(
                policy::UNSAFE_LEDGER,
                "# x\n\n## a.rs\n\n## c.rs\n\n## d.rs\n",
            ),
        ];
        let found: Vec<_> = ledger(&sources).iter().map(ToString::to_string).collect();
        let expected = [
            "b.rs:2: has `unsafe`, but no section in docs/unsafe.md",
            "docs/unsafe.md:5: accounts for c.rs, which has no `unsafe`",
            "docs/unsafe.md:7: accounts for d.rs, which isn't there",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_stands_behind_a_feature_may_read_the_clock() {
        assert!(check_text("kv-core/src/host/worker.rs", "//! x\nInstant::now()\n").is_empty());
        assert!(check_text("kv-core/src/testing.rs", "//! x\nstd::thread::spawn()\n").is_empty());
        assert_eq!(
            check_text("kv-core/src/hosted.rs", "//! x\nstd::thread::spawn()\n").len(),
            1
        );
    }
}
