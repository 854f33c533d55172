//! Licence expressions, as package metadata has them.

/// Whether somebody who accepts the licences in `allowed` may use what is under `expression`.
///
/// `None` if it can't be read.
pub(super) fn is_allowed(expression: &str, allowed: &[&str]) -> Option<bool> {
    // An old way to write `OR`.
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        words: &words,
        allowed,
    };
    let result = parser.any()?;
    parser.words.is_empty().then_some(result)
}

struct Parser<'a> {
    words: &'a [&'a str],
    allowed: &'a [&'a str],
}

impl<'a> Parser<'a> {
    fn take(&mut self, word: &str) -> bool {
        let found = self.words.first() == Some(&word);
        if found {
            self.words = &self.words[1..];
        }
        found
    }

    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(first)
    }

    fn any(&mut self) -> Option<bool> {
        let mut result = self.all()?;
        while self.take("OR") {
            result |= self.all()?;
        }
        Some(result)
    }

    fn all(&mut self) -> Option<bool> {
        let mut result = self.one()?;
        while self.take("AND") {
            result &= self.one()?;
        }
        Some(result)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let result = self.any()?;
            return self.take(")").then_some(result);
        }
        let mut name = self
            .next()
            .filter(|word| !matches!(*word, ")" | "AND" | "OR" | "WITH"))?;
        let full;
        if self.take("WITH") {
            full = format!("{name} WITH {}", self.next()?);
            name = &full;
        }
        Some(self.allowed.contains(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_they_are_meant() {
        let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"];
        let cases = [
            ("MIT", Some(true)),
            ("GPL-3.0", Some(false)),
            ("MIT OR GPL-3.0", Some(true)),
            ("MIT/GPL-3.0", Some(true)),
            ("MIT AND GPL-3.0", Some(false)),
            ("MIT AND (GPL-3.0 OR Zlib)", Some(true)),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Some(false)),
            ("Apache-2.0", Some(false)),
            ("Apache-2.0 WITH LLVM-exception", Some(true)),
            ("MIT OR", None),
            ("(MIT", None),
            ("MIT Zlib", None),
            ("", None),
        ];
        for (expression, expected) in cases {
            assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
        }
    }
}
