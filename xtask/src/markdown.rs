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

/// A piece of code that a page says is taken from a file: a comment `<!-- from PATH -->` on the
/// line before the fence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Excerpt {
    /// Line of the comment, counted from 1.
    pub(crate) line: usize,
    /// From the root of the repository.
    pub(crate) path: String,
    pub(crate) code: Vec<String>,
}

/// All excerpts of a page.
pub(crate) fn excerpts(page: &str) -> Vec<Excerpt> {
    let mut lines = page.lines().enumerate();
    let mut excerpts = Vec::new();
    while let Some((index, line)) = lines.next() {
        let path = line
            .strip_prefix("<!-- from ")
            .and_then(|rest| rest.strip_suffix(" -->"));
        let Some(path) = path else { continue };
        if lines
            .next()
            .is_some_and(|(_, fence)| fence.starts_with("```"))
        {
            let code = lines.by_ref().map(|(_, line)| line.to_owned());
            let code = code.take_while(|line| !line.starts_with("```")).collect();
            excerpts.push(Excerpt {
                line: index + 1,
                path: path.to_owned(),
                code,
            });
        }
    }
    excerpts
}

/// Whether the lines of `code` stand together in `file`, however far they are indented there.
pub(crate) fn is_excerpt(code: &[String], file: &str) -> bool {
    let trimmed: Vec<&str> = file.lines().map(str::trim).collect();
    let wanted: Vec<&str> = code.iter().map(|line| line.trim()).collect();
    !wanted.is_empty() && trimmed.windows(wanted.len()).any(|window| window == wanted)
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

    #[test]
    fn an_excerpt_is_a_piece_of_its_file() {
        let page = "# x\n\n<!-- from a/b.rs -->\n```rust\nlet a = 1;\n\nlet b = a;\n```\n";
        let found = excerpts(page);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, found[0].path.as_str()), (3, "a/b.rs"));
        assert!(is_excerpt(
            &found[0].code,
            "fn f() {\n    let a = 1;\n\n    let b = a;\n}\n"
        ));
        assert!(!is_excerpt(
            &found[0].code,
            "fn f() {\n    let a = 2;\n\n    let b = a;\n}\n"
        ));
        assert!(!is_excerpt(&[], "fn f() {}\n"));
    }
}
