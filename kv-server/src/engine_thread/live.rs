//! A live request on the engine thread: its tokens become text here, right after each step, so
//! that a stop string ends a choice before another token is computed for it.

use std::sync::Arc;

use kv_core::Choice;
use kv_model::detokenize::{Detokenizer, StopStrings};
use kv_scheduler::{FinishReason, Sampled, TokenId};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::text::Text;

/// Why a choice ended, in the words of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    /// `max_tokens` were generated.
    Length,
    /// A stop token or a stop string came.
    Stop,
}

/// One token with its probability, as bytes of text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenReport {
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
    /// The most probable tokens, best first.
    pub(crate) top: Vec<(Vec<u8>, f32)>,
}

/// What a token added to a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    /// Which choice of the call, counted over all its prompts.
    pub(crate) index: u32,
    /// Text that can be shown now; may be empty.
    pub(crate) text: String,
    /// The tokens behind the text, if the client wants to see them.
    pub(crate) reports: Vec<TokenReport>,
    /// Present in the last piece of a choice.
    pub(crate) finish: Option<Finish>,
}

/// What the engine thread tells a handler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Update {
    /// The engine died or gave everything up.
    Abandoned,
    /// This request of the call failed as a whole.
    Failed,
    /// A token. Every one of them is told, also without text.
    Piece(Piece),
}

/// How the text of a request is made.
#[derive(Clone, Debug)]
pub(crate) struct TextRules {
    pub(crate) text: Arc<Text>,
    pub(crate) stops: Arc<StopStrings>,
}

/// Where the updates of a request go, and how its text is made.
#[derive(Debug)]
pub(super) struct Live {
    rules: TextRules,
    updates: mpsc::Sender<Update>,
    first_index: u32,
    choices: Vec<ChoiceText>,
    open: usize,
}

/// What the engine must be told after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing.
    Continue,
    /// Nobody listens any more: cancel the request.
    Gone,
    /// A stop string was found: end this choice.
    StopChoice,
}

impl Live {
    pub(super) fn new(
        rules: TextRules,
        updates: mpsc::Sender<Update>,
        first_index: u32,
        n: u32,
    ) -> Self {
        let choices: Vec<_> = (0..n).map(|_| ChoiceText::new(&rules)).collect();
        Self {
            rules,
            updates,
            first_index,
            open: choices.len(),
            choices,
        }
    }

    /// Whether every choice has ended.
    pub(super) const fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Sends something that is not a token. A handler that is gone needs no news.
    pub(super) fn tell(&self, update: Update) -> Result<(), mpsc::error::TrySendError<Update>> {
        self.updates.try_send(update)
    }

    /// Takes a token of a choice.
    pub(super) fn token(
        &mut self,
        choice: Choice,
        sampled: &Sampled,
        finish: Option<FinishReason>,
    ) -> Verdict {
        let Some(state) = self.choices.get_mut(choice.value() as usize) else {
            return Verdict::Continue;
        };
        if state.over {
            return Verdict::Continue;
        }
        let (text, reports, ended) = state.push(&self.rules.text, sampled, finish);
        if ended.is_some() {
            self.open -= 1;
        }
        let index = self.first_index + choice.value();
        let piece = Piece {
            index,
            text,
            reports,
            finish: ended,
        };
        if let Err(error) = self.updates.try_send(Update::Piece(piece)) {
            // The channel has room for every token of the call, so a full one is a mistake of
            // ours; its request is given up and the client told.
            let full = matches!(error, mpsc::error::TrySendError::Full(_));
            debug_assert!(!full, "the channel has room for every token");
            if full {
                tracing::error!("the channel of a request is full, the request is given up");
            }
            return Verdict::Gone;
        }
        match (ended, finish) {
            (Some(_), None) => Verdict::StopChoice,
            _ => Verdict::Continue,
        }
    }
}

/// The text of one choice.
#[derive(Debug)]
struct ChoiceText {
    detokenizer: Detokenizer,
    /// Bytes of all tokens, and of the text that was shown.
    received: usize,
    shown: usize,
    /// Tokens whose text is held back, each with the place at which its text starts.
    held: Vec<(usize, TokenReport)>,
    over: bool,
}

impl ChoiceText {
    fn new(rules: &TextRules) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(&rules.stops)),
            received: 0,
            shown: 0,
            held: Vec::new(),
            over: false,
        }
    }

    /// Takes a token: text to show, tokens to show, and whether this was the end.
    fn push(
        &mut self,
        text: &Text,
        sampled: &Sampled,
        finish: Option<FinishReason>,
    ) -> (String, Vec<TokenReport>, Option<Finish>) {
        let mut shown = String::new();
        let mut ended = finish.map(Finish::from);
        let mut stopped = false;
        // A stop token is the mark of the end and not part of the text.
        if finish != Some(FinishReason::Stop) {
            if let Some(report) = report(text, sampled) {
                self.held.push((self.received, report));
            }
            let piece = text.push(&mut self.detokenizer, sampled.token);
            self.received += text.shown_bytes(sampled.token);
            shown = piece.text;
            stopped = piece.stop.is_some();
        }
        if ended.is_some() && !stopped {
            let last = self.detokenizer.finish();
            shown.push_str(&last.text);
            stopped = last.stop.is_some();
        }
        if stopped {
            ended = Some(Finish::Stop);
        }
        self.over = ended.is_some();
        self.shown += shown.len();
        let tokens = if self.over && !stopped {
            self.held.len()
        } else {
            self.held
                .iter()
                .take_while(|(start, _)| *start < self.shown)
                .count()
        };
        let reports = self
            .held
            .drain(..tokens)
            .map(|(_, report)| report)
            .collect();
        (shown, reports, ended)
    }
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Length => Self::Length,
            FinishReason::Stop => Self::Stop,
        }
    }
}

fn report(text: &Text, sampled: &Sampled) -> Option<TokenReport> {
    let logprobs = sampled.logprobs.as_ref()?;
    let alternative = |&(token, logprob): &(TokenId, f32)| (text.token_bytes(token), logprob);
    let top = logprobs.top.iter().map(alternative).collect();
    Some(TokenReport {
        bytes: text.token_bytes(sampled.token),
        logprob: logprobs.chosen,
        top,
    })
}
