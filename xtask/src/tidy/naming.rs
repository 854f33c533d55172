//! Rules about the names of tests: every invariant and every scenario has one.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Finding, Source, line_of, policy, strip};

/// Checks that every id is guarded by a test, and that the pages name only tests that exist.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let tests: BTreeSet<String> = sources
        .iter()
        .filter(|source| source.is("rs"))
        .flat_map(tests_of)
        .collect();
    let mut findings = missing(&tests);
    findings.extend(invariants_page(sources));
    for source in sources.iter().filter(|source| source.is("md")) {
        findings.extend(dead_names(source, &tests));
    }
    findings
}

fn missing(tests: &BTreeSet<String>) -> Vec<Finding> {
    let guarded = |kind: char, id: u32| tests.iter().any(|test| guards(test, kind, id));
    let mut findings = Vec::new();
    for id in policy::INVARIANTS {
        if !guarded('i', id) {
            let what = format!("no test is named `i{id:02}_...`");
            findings.push(Finding::new(policy::INVARIANTS_PAGE, 1, what));
        }
    }
    for &id in policy::SCENARIOS {
        if !guarded('s', id) {
            let what = format!("no test is named `s{id:02}_...`");
            findings.push(Finding::new("docs/testing.md", 1, what));
        }
    }
    findings
}

/// Whether the name of a test says that it guards the id: `i04_...`, `i01_to_i09_...`, or several
/// ids in one name.
fn guards(test: &str, kind: char, id: u32) -> bool {
    let number = |kind: char, word: &str| -> Option<u32> {
        word.strip_prefix(kind)
            .filter(|digits| digits.len() == 2)?
            .parse()
            .ok()
    };
    let words: Vec<&str> = test.split('_').collect();
    let begins_with_id = words
        .first()
        .is_some_and(|word| number('i', word).is_some() || number('s', word).is_some());
    let named = words.iter().any(|word| number(kind, word) == Some(id));
    let in_range = words.windows(3).any(|window| {
        let ends = number(kind, window[0]).zip(number(kind, window[2]));
        window[1] == "to" && ends.is_some_and(|(first, last)| (first..=last).contains(&id))
    });
    begins_with_id && (named || in_range)
}

/// The page of the invariants has a heading for each id.
fn invariants_page(sources: &[Source]) -> Vec<Finding> {
    let page = policy::INVARIANTS_PAGE;
    let Some(source) = sources.iter().find(|source| source.path == Path::new(page)) else {
        return vec![Finding::new(page, 1, "is missing")];
    };
    policy::INVARIANTS
        .map(|id| format!("## I{id:02} "))
        .filter(|heading| !source.text.lines().any(|line| line.starts_with(heading)))
        .map(|heading| Finding::new(page, 1, format!("has no heading `{}`", heading.trim())))
        .collect()
}

/// Names in backticks that look like a test of an invariant or a scenario, but aren't one.
fn dead_names(source: &Source, tests: &BTreeSet<String>) -> Vec<Finding> {
    let names = source
        .text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| is_id_name(name));
    names
        .filter(|name| !tests.contains(*name))
        .map(|name| {
            let line = line_of(&source.text, |line| line.contains(name));
            Finding::new(
                &source.path,
                line,
                format!("names the test `{name}`, which isn't there"),
            )
        })
        .collect()
}

/// `i04_no_two_owners` and the like.
fn is_id_name(name: &str) -> bool {
    let Some((id, rest)) = name.split_once('_') else {
        return false;
    };
    let word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let mut letters = id.chars();
    let kind = matches!(letters.next(), Some('i' | 's'));
    kind && id.len() == 3 && letters.all(|c| c.is_ascii_digit()) && !rest.is_empty() && word(rest)
}

/// The names of all functions that carry an attribute which makes them a test.
fn tests_of(source: &Source) -> Vec<String> {
    let code = strip::code(&source.text);
    let mut tests = Vec::new();
    let mut marked = false;
    for line in code.lines().map(str::trim) {
        if line.starts_with("#[") {
            marked |= line.contains("test]") || line.contains("test(");
        }
        if let Some(name) = function_name(line) {
            if marked {
                tests.push(name.to_owned());
            }
            marked = false;
        }
    }
    tests
}

fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_item = before.is_empty() || before.ends_with(' ');
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    (is_item && end > 0).then(|| &after[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source {
            path: path.into(),
            text: text.into(),
        }
    }

    #[test]
    fn only_tests_count() {
        let text = "fn i01_no() {}\n#[test]\nfn i02_yes() {}\n/// #[test]\nfn i03_no() {}\n\
                    #[tokio::test]\nasync fn i04_yes() {}\n#[cfg(test)]\nmod tests {}\n\
                    #[test]\n#[should_panic]\nfn i05_yes() {}\n";
        assert_eq!(
            tests_of(&source("a.rs", text)),
            ["i02_yes", "i04_yes", "i05_yes"]
        );
    }

    #[test]
    fn an_unguarded_id_is_found() {
        let tests = policy::INVARIANTS
            .filter(|id| *id != 4)
            .map(|id| format!("i{id:02}_x"));
        let scenarios = policy::SCENARIOS.iter().map(|id| format!("s{id:02}_x"));
        let tests: BTreeSet<String> = tests.chain(scenarios).collect();
        let found: Vec<_> = missing(&tests)
            .into_iter()
            .map(|finding| finding.what)
            .collect();
        assert_eq!(found, ["no test is named `i04_...`"]);
    }

    #[test]
    fn a_name_can_guard_several_ids() {
        let guarded = |test| {
            (1..=17)
                .filter(|&id| guards(test, 'i', id))
                .collect::<Vec<_>>()
        };
        assert_eq!(guarded("i04_x"), [4]);
        assert_eq!(guarded("i02_to_i05_x_and_i10_y"), [2, 3, 4, 5, 10]);
        assert_eq!(guarded("x_i04"), [0; 0]);
        assert_eq!(guarded("s04_x"), [0; 0]);
        assert_eq!(guarded("s04_i08_x"), [8]);
    }

    #[test]
    fn a_page_names_only_tests_that_exist() {
        let tests = BTreeSet::from(["i01_real".to_owned()]);
        let page = source("docs/a.md", "`i01_real`, `i01`, `is_here`\n`s07_gone`\n");
        let found: Vec<_> = dead_names(&page, &tests)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["docs/a.md:2: names the test `s07_gone`, which isn't there"]
        );
    }
}
