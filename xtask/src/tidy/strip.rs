//! Rust source without comments and without the insides of strings.
//!
//! Enough of a lexer to tell code from text about code; line numbers stay as they are.

/// The code of `source`: comments are gone, string and character literals are empty.
pub(super) fn code(source: &str) -> String {
    let mut rest = source;
    let mut code = String::with_capacity(source.len());
    while let Some(letter) = rest.chars().next() {
        let skipped = skipped(rest, code.chars().next_back());
        if skipped > 0 {
            let (text, further) = rest.split_at(skipped);
            // A separator, so that what stood on both sides doesn't grow together.
            code.push(' ');
            code.extend(text.chars().filter(|&letter| letter == '\n'));
            rest = further;
        } else {
            code.push(letter);
            rest = &rest[letter.len_utf8()..];
        }
    }
    code
}

/// How many bytes at the start of `rest` are a comment or a literal; 0 if it is code.
fn skipped(rest: &str, before: Option<char>) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    if rest.starts_with('"') {
        return quoted(rest);
    }
    if rest.starts_with('\'') {
        return character(rest);
    }
    let part_of_a_name = before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    if part_of_a_name {
        return 0;
    }
    ["br", "cr", "r"]
        .iter()
        .filter_map(|prefix| raw_string(rest, prefix))
        .next()
        .unwrap_or(0)
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0usize;
    let mut at = 0;
    while at < rest.len() {
        let tail = &rest.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of a string that begins with a quotation mark.
fn quoted(rest: &str) -> usize {
    let mut escaped = false;
    for (at, letter) in rest.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Length of a character literal; 0 if it is a lifetime.
fn character(rest: &str) -> usize {
    let mut letters = rest.char_indices().skip(1);
    match letters.next() {
        Some((_, '\\')) => {
            letters.next();
            letters
                .find(|&(_, letter)| letter == '\'')
                .map_or(rest.len(), |(at, _)| at + 1)
        }
        Some(_) => letters
            .next()
            .filter(|&(_, letter)| letter == '\'')
            .map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}

fn raw_string(rest: &str, prefix: &str) -> Option<usize> {
    let after = rest.strip_prefix(prefix)?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let start = rest.len() - body.len();
    Some(
        body.find(&end)
            .map_or(rest.len(), |at| start + at + end.len()),
    )
}

/// Whether `code` has `word` where no letter, digit or underscore touches it.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    let touches = |letter: char| letter.is_alphanumeric() || letter == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(touches)
            && !code[at + word.len()..].chars().next().is_some_and(touches)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_not_code() {
        let source = "a /* b /* c */ d */ e // f\n\"g \\\" h\" 'i' '\\'' '\\u{6a}' k\n";
        let words: Vec<_> = code(source).split_whitespace().map(str::to_owned).collect();
        assert_eq!(words, ["a", "e", "k"]);
    }

    #[test]
    fn lifetimes_and_raw_strings_are_told_apart() {
        let source = "fn f<'a>(x: &'a str) { r#\"unsafe \" \"# ; br\"unsafe\"; bar\"x\" }";
        let code = code(source);
        assert!(!has_word(&code, "unsafe"), "{code}");
        assert!(code.contains("<'a>(x: &'a str)"), "{code}");
    }

    #[test]
    fn line_numbers_stay() {
        let source = "1\n/* 2\n3 */ here\n\"5\n6\" there\n";
        let code = code(source);
        let place = |word| code.lines().position(|line| line.contains(word));
        assert_eq!(place("here"), Some(2));
        assert_eq!(place("there"), Some(4));
    }

    #[test]
    fn a_word_stands_alone() {
        assert!(has_word("x(unsafe{", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
        assert!(!has_word("operand", "rand"));
    }
}
