//! Answers that are sent as they come: server-sent events, one JSON object each, `[DONE]` last.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;

use crate::api::answer::{ChatDelta, ChatLogprobs, Delta, Head, TextChoice, TextLogprobs, Usage};
use crate::api::params::UsageReports;
use crate::engine_thread::Piece;
use crate::error::ApiError;
use crate::generation::Generation;

/// A comment is sent after that long without a token, so that nobody on the way takes the
/// connection for dead while a request waits or is paused.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The end of every stream.
const DONE: &str = "[DONE]";

/// In whose words tokens are told.
#[derive(Debug)]
pub(super) enum Style {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`, with the echoed prompt of each choice and the length of its text so
    /// far, in characters.
    Text {
        /// What each choice's text starts with; empty without `echo`.
        echo: Vec<String>,
        /// Characters sent so far, by choice.
        offsets: Vec<usize>,
    },
}

/// Where tokens come from.
pub(super) trait Pieces: Send + 'static {
    /// The next token, an error, or `None` after the last one.
    fn next(&mut self) -> impl Future<Output = Option<Result<Piece, ApiError>>> + Send;
}

impl Pieces for Generation {
    async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        Self::next(self).await
    }
}

/// A stream under way.
#[derive(Debug)]
pub(super) struct Session<P> {
    pieces: P,
    head: Head,
    style: Style,
    reports: UsageReports,
    usage: Usage,
    frames: VecDeque<String>,
    over: bool,
}

impl<P: Pieces> Session<P> {
    pub(super) fn new(
        pieces: P,
        head: Head,
        style: Style,
        reports: UsageReports,
        prompt_tokens: u64,
        choices: u32,
    ) -> Self {
        let usage = Usage {
            prompt_tokens,
            completion_tokens: 0,
        };
        let frames = VecDeque::new();
        let mut session = Self {
            pieces,
            head,
            style,
            reports,
            usage,
            frames,
            over: false,
        };
        session.begin(choices);
        session
    }

    /// What is sent before the first token.
    fn begin(&mut self, choices: u32) {
        let usage = self.usage();
        match &mut self.style {
            Style::Chat => {
                for index in 0..choices {
                    let delta = Delta {
                        role: Some("assistant"),
                        content: Some(String::new()),
                    };
                    let delta = ChatDelta {
                        index,
                        delta,
                        logprobs: None,
                        finish_reason: None,
                    };
                    self.frames.push_back(self.head.chat_chunk(&[delta], usage));
                }
            }
            Style::Text { echo, offsets } => {
                offsets.resize(choices as usize, 0);
                for (index, text) in (0..choices).zip(std::mem::take(echo)) {
                    offsets[index as usize] = text.chars().count();
                    let choice = TextChoice {
                        index,
                        text,
                        logprobs: None,
                        finish_reason: None,
                    };
                    self.frames
                        .push_back(self.head.completion_chunk(&[choice], usage));
                }
            }
        }
    }

    /// The usage field of a chunk with choices.
    const fn usage(&self) -> Option<Option<Usage>> {
        if self.reports.in_every_chunk {
            Some(Some(self.usage))
        } else if self.reports.at_the_end {
            Some(None)
        } else {
            None
        }
    }

    /// The payload of the next event; `None` after the last one.
    async fn frame(&mut self) -> Option<String> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some(frame);
            }
            if self.over {
                return None;
            }
            match self.pieces.next().await {
                Some(Ok(piece)) => self.piece(piece),
                Some(Err(error)) => {
                    self.frames.push_back(error.body());
                    self.end();
                }
                None => {
                    if self.reports.at_the_end {
                        let usage = Some(Some(self.usage));
                        self.frames.push_back(match self.style {
                            Style::Chat => self.head.chat_chunk(&[], usage),
                            Style::Text { .. } => self.head.completion_chunk(&[], usage),
                        });
                    }
                    self.end();
                }
            }
        }
    }

    fn end(&mut self) {
        self.frames.push_back(DONE.to_owned());
        self.over = true;
    }

    /// Turns a token into chunks; a token whose text is held back is only counted.
    fn piece(&mut self, piece: Piece) {
        self.usage.completion_tokens += 1;
        let Piece {
            index,
            text,
            reports,
            finish,
        } = piece;
        let usage = self.usage();
        match &mut self.style {
            Style::Chat => {
                if !text.is_empty() || !reports.is_empty() {
                    let logprobs = (!reports.is_empty()).then(|| ChatLogprobs::of(reports));
                    let delta = Delta {
                        role: None,
                        content: Some(text),
                    };
                    let delta = ChatDelta {
                        index,
                        delta,
                        logprobs,
                        finish_reason: None,
                    };
                    self.frames.push_back(self.head.chat_chunk(&[delta], usage));
                }
                if finish.is_some() {
                    let delta = Delta::default();
                    let delta = ChatDelta {
                        index,
                        delta,
                        logprobs: None,
                        finish_reason: finish,
                    };
                    self.frames.push_back(self.head.chat_chunk(&[delta], usage));
                }
            }
            Style::Text { offsets, .. } => {
                if text.is_empty() && reports.is_empty() && finish.is_none() {
                    return;
                }
                let offset = &mut offsets[index as usize];
                let logprobs = (!reports.is_empty()).then(|| {
                    let mut logprobs = TextLogprobs::default();
                    logprobs.extend(&reports, *offset);
                    logprobs
                });
                *offset += text.chars().count();
                let choice = TextChoice {
                    index,
                    text,
                    logprobs,
                    finish_reason: finish,
                };
                self.frames
                    .push_back(self.head.completion_chunk(&[choice], usage));
            }
        }
    }

    /// The events of this stream.
    fn events(self) -> impl Stream<Item = Result<Event, Infallible>> + Send {
        unfold(self, |mut session| async move {
            let frame = session.frame().await?;
            Some((Ok(Event::default().data(frame)), session))
        })
    }

    /// The answer: headers now, events as they come.
    pub(super) fn answer(self) -> Response {
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("waiting");
        Sse::new(self.events())
            .keep_alive(keep_alive)
            .into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::engine_thread::Finish;

    struct Scripted(mpsc::Receiver<Result<Piece, ApiError>>);

    impl Pieces for Scripted {
        async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
            self.0.recv().await
        }
    }

    fn session(
        reports: UsageReports,
    ) -> (mpsc::Sender<Result<Piece, ApiError>>, Session<Scripted>) {
        let (sender, receiver) = mpsc::channel(10);
        let head = Head {
            id: "x".to_owned(),
            created: 1,
            model: "m".to_owned(),
        };
        let session = Session::new(Scripted(receiver), head, Style::Chat, reports, 3, 1);
        (sender, session)
    }

    fn piece(text: &str, finish: Option<Finish>) -> Piece {
        Piece {
            index: 0,
            text: text.to_owned(),
            reports: Vec::new(),
            finish,
        }
    }

    async fn frame(body: &mut axum::body::Body) -> String {
        let frame = body.frame().await.unwrap().unwrap();
        String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
    }

    /// S13: virtual time, so that a pause of 30 s costs nothing.
    #[tokio::test(start_paused = true)]
    async fn s13_a_comment_comes_at_least_every_ten_seconds() {
        let (sender, session) = session(UsageReports::default());
        let mut body = session.answer().into_body();
        assert!(frame(&mut body).await.starts_with("data: {"), "the role");
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) {
            let comment = timeout(Duration::from_secs(10), frame(&mut body)).await;
            assert_eq!(comment.expect("within ten seconds"), ": waiting\n\n");
        }
        sender
            .send(Ok(piece("late", Some(Finish::Stop))))
            .await
            .unwrap();
        drop(sender);
        assert!(frame(&mut body).await.contains("\"content\":\"late\""));
        assert!(
            frame(&mut body)
                .await
                .contains("\"finish_reason\":\"stop\"")
        );
        assert_eq!(frame(&mut body).await, "data: [DONE]\n\n");
        assert!(body.frame().await.is_none());
    }

    #[tokio::test]
    async fn tokens_without_text_are_counted_and_not_sent() {
        let reports = UsageReports {
            at_the_end: true,
            in_every_chunk: false,
        };
        let (sender, mut session) = session(reports);
        for piece in [
            piece("", None),
            piece("", None),
            piece("😀", Some(Finish::Length)),
        ] {
            sender.send(Ok(piece)).await.unwrap();
        }
        drop(sender);
        let mut frames = Vec::new();
        while let Some(frame) = session.frame().await {
            frames.push(frame);
        }
        assert_eq!(
            frames.len(),
            5,
            "role, text, finish, usage, end: {frames:?}"
        );
        assert!(frames[3].contains("\"completion_tokens\":3"));
    }

    #[tokio::test]
    async fn an_error_ends_the_stream_with_its_own_frame() {
        let (sender, mut session) = session(UsageReports::default());
        sender.send(Err(ApiError::failed())).await.unwrap();
        let mut frames = Vec::new();
        while let Some(frame) = session.frame().await {
            frames.push(frame);
        }
        assert!(frames[1].starts_with("{\"error\":{"), "{frames:?}");
        assert_eq!(frames[2..], ["[DONE]"]);
    }
}
