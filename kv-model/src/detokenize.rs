//! From token bytes to text that may be sent now.
//!
//! A character's bytes may be spread over several tokens, and a stop string may be spread over
//! several tokens and characters. What could still become one of them is held back; everything
//! else leaves at once.
//! The pieces together are the same however the bytes were cut into tokens.

use std::sync::Arc;

use kv_scheduler::TokenId;

use crate::tokenizer::Tokenizer;

/// A stop string that would end every text before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stop string {index} is empty")]
pub struct EmptyStop {
    /// Which one, counted from 0.
    pub index: usize,
}

/// The stop strings of a request, made ready once for all its choices.
///
/// The one that is complete first ends the text; of several that are complete at the same
/// character the longest does. The text ends before it.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
}

impl StopStrings {
    /// Makes stop strings ready; there may be none.
    ///
    /// # Errors
    ///
    /// [`EmptyStop`] if one has no characters.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>) -> Result<Self, EmptyStop> {
        let patterns = stops
            .into_iter()
            .enumerate()
            .map(|(index, stop)| Pattern::new(stop.as_ref()).ok_or(EmptyStop { index }))
            .collect::<Result<_, _>>()?;
        Ok(Self { patterns })
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }
}

/// One stop string as an automaton: its state is how many of its bytes the text ends with.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// By state, the next shorter state that the text is in too.
    shorter: Vec<usize>,
}

impl Pattern {
    fn new(stop: &str) -> Option<Self> {
        let bytes = stop.as_bytes().to_vec();
        if bytes.is_empty() {
            return None;
        }
        let mut pattern = Self {
            bytes,
            shorter: vec![0; 2],
        };
        for length in 2..=pattern.bytes.len() {
            let state = pattern.next(pattern.shorter[length - 1], pattern.bytes[length - 1]);
            pattern.shorter.push(state);
        }
        Some(pattern)
    }

    /// The state after one more byte; the old one must not be that of a match.
    fn next(&self, mut state: usize, byte: u8) -> usize {
        loop {
            if self.bytes[state] == byte {
                return state + 1;
            }
            if state == 0 {
                return 0;
            }
            state = self.shorter[state];
        }
    }
}

/// Text that may be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// May be empty.
    pub text: String,
    /// The stop string, counted from 0, that has ended the text with this piece.
    pub stop: Option<usize>,
}

/// Makes text of one choice's tokens.
///
/// Bytes that can't be UTF-8 become U+FFFD as soon as that is sure: one for each longest piece
/// that is the beginning of a character, as [`String::from_utf8_lossy`] does it.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    stops: Arc<StopStrings>,
    /// By stop string, the state of its automaton.
    states: Vec<usize>,
    /// The beginning of a character.
    partial: Vec<u8>,
    /// Text that may be the beginning of a stop string.
    held: String,
    is_over: bool,
}

impl Detokenizer {
    /// At the start of a text.
    #[must_use]
    pub fn new(stops: Arc<StopStrings>) -> Self {
        let states = vec![0; stops.patterns.len()];
        Self {
            stops,
            states,
            partial: Vec::new(),
            held: String::new(),
            is_over: false,
        }
    }

    /// Takes a token's bytes. After a stop string, or after [`finish`](Self::finish), nothing
    /// comes any more.
    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        if self.is_over {
            return Piece::default();
        }
        let joined;
        let mut rest = if self.partial.is_empty() {
            bytes
        } else {
            self.partial.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.partial);
            &joined
        };
        loop {
            let error = match str::from_utf8(rest) {
                Ok(text) => return self.take(text),
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            let valid = str::from_utf8(valid).expect("it was found valid just now");
            if let Some(stop) = self.hold(valid) {
                return self.stop(stop);
            }
            let Some(invalid) = error.error_len() else {
                self.partial = after.to_vec();
                return self.take("");
            };
            if let Some(stop) = self.hold("\u{FFFD}") {
                return self.stop(stop);
            }
            rest = &after[invalid..];
        }
    }

    /// Takes a token by its id. Special tokens, and ids that the tokenizer doesn't know, have no
    /// text.
    pub fn push_token(&mut self, tokenizer: &dyn Tokenizer, token: TokenId) -> Piece {
        match tokenizer.token_bytes(token) {
            Some(bytes) if !tokenizer.is_special(token) => self.push(bytes),
            _ => Piece::default(),
        }
    }

    /// No more tokens: gives what was held back. The beginning of a character becomes U+FFFD.
    pub fn finish(&mut self) -> Piece {
        if self.is_over {
            return Piece::default();
        }
        let cut_off = !std::mem::take(&mut self.partial).is_empty();
        if let Some(stop) = cut_off.then(|| self.hold("\u{FFFD}")).flatten() {
            return self.stop(stop);
        }
        self.is_over = true;
        Piece {
            text: std::mem::take(&mut self.held),
            stop: None,
        }
    }

    /// Whether a stop string or [`finish`](Self::finish) has ended the text.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.is_over
    }

    /// Adds text to what is held; returns the stop string that is complete now, having cut it and
    /// what follows it off.
    fn hold(&mut self, text: &str) -> Option<usize> {
        let start = self.held.len();
        self.held.push_str(text);
        if self.states.is_empty() {
            return None;
        }
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            let mut longest = None;
            for (stop, (state, pattern)) in
                self.states.iter_mut().zip(&self.stops.patterns).enumerate()
            {
                *state = pattern.next(*state, byte);
                let length = pattern.bytes.len();
                if *state == length && longest.is_none_or(|(_, longest)| length > longest) {
                    longest = Some((stop, length));
                }
            }
            if let Some((stop, length)) = longest {
                self.held.truncate(start + index + 1 - length);
                return Some(stop);
            }
        }
        None
    }

    /// Adds text and gives all that can't be the beginning of a stop string.
    fn take(&mut self, text: &str) -> Piece {
        if let Some(stop) = self.hold(text) {
            return self.stop(stop);
        }
        let back = self.states.iter().copied().max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - back);
        Piece {
            text: std::mem::replace(&mut self.held, rest),
            stop: None,
        }
    }

    fn stop(&mut self, stop: usize) -> Piece {
        self.is_over = true;
        self.partial.clear();
        Piece {
            text: std::mem::take(&mut self.held),
            stop: Some(stop),
        }
    }
}
