//! As much Markdown as is needed to check the links between pages.

use std::collections::BTreeSet;

/// A link of a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Line of the page, counted from 1.
    pub(crate) line: usize,
    /// What stands between the parentheses.
    pub(crate) target: String,
}

/// The lines of a page outside fenced code, with inline code blanked out.
///
/// What is fenced is an empty line here, so that line numbers stay right.
fn prose(page: &str) -> Vec<String> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            lines.push(String::new());
            continue;
        }
        lines.push(if fenced {
            String::new()
        } else {
            without_code(line)
        });
    }
    lines
}

fn without_code(line: &str) -> String {
    let mut inside = false;
    let mut text = String::new();
    for letter in line.chars() {
        if letter == '`' {
            inside = !inside;
        } else if !inside {
            text.push(letter);
        }
    }
    text
}

/// All inline links and images of a page, `[text](target)`, outside code.
pub(crate) fn links(page: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (index, line) in prose(page).iter().enumerate() {
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, further)) = after.split_once(')') else {
                break;
            };
            links.push(Link {
                line: index + 1,
                target: target.trim().to_owned(),
            });
            rest = further;
        }
    }
    links
}

/// The anchors that a page offers: one per heading, as code hosts make them.
pub(crate) fn anchors(page: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut anchors = BTreeSet::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && line.starts_with('#') {
            anchors.insert(anchor(line.trim_start_matches('#').trim()));
        }
    }
    anchors
}

fn anchor(heading: &str) -> String {
    heading
        .chars()
        .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'))
        .map(|letter| {
            if letter == ' ' {
                '-'
            } else {
                letter.to_ascii_lowercase()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code_only() {
        let page = "[a](b.md) and ![c](d.png)\n`[no](no)`\n```\n[no](no)\n```\n[e]( f#g )\n";
        let link = |line, target: &str| Link {
            line,
            target: target.into(),
        };
        assert_eq!(
            links(page),
            [link(1, "b.md"), link(1, "d.png"), link(6, "f#g")]
        );
    }

    #[test]
    fn anchors_follow_the_headings() {
        let page = "# One `two`, Three\n```\n# no\n```\n## I04: no-one\n";
        let found: Vec<_> = anchors(page).into_iter().collect();
        assert_eq!(found, ["i04-no-one", "one-two-three"]);
    }
}
