//! A client that streams one chat answer, notes when each piece came, and may leave midway.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use ureq::Agent;

use super::load::Request;
use crate::clock;

/// Longest silence of a server: it sends a comment at least every ten seconds.
const SILENCE: Duration = Duration::from_secs(60);

/// Token counts, as the server reported them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: u32,
    pub(super) completion: u32,
}

/// What came for one choice.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice {
    pub(super) text: String,
    pub(super) finish: Option<String>,
    /// When each piece of text came.
    pub(super) times: Vec<Instant>,
}

/// What came for one request.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) sent: Instant,
    pub(super) choices: Vec<Choice>,
    /// None if the client left.
    pub(super) usage: Option<Usage>,
}

impl Answer {
    /// Pieces of text, over all choices.
    pub(super) fn pieces(&self) -> usize {
        self.choices.iter().map(|choice| choice.times.len()).sum()
    }

    /// Tokens that reached the client: counted by the server, or by the pieces if we left.
    pub(super) fn tokens(&self) -> u64 {
        self.usage
            .map_or_else(|| self.pieces() as u64, |usage| usage.completion.into())
    }
}

/// Speaks to one server. Clones share nothing but settings.
#[derive(Clone, Debug)]
pub(super) struct Client {
    agent: Agent,
    base: String,
}

impl Client {
    /// No call of it takes longer than `limit`.
    pub(super) fn new(base: &str, limit: Duration) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(limit))
            .timeout_per_read(Some(SILENCE))
            .max_idle_connections(0)
            .no_delay(true)
            .build();
        Self {
            agent: Agent::new_with_config(config),
            base: base.to_owned(),
        }
    }

    /// A JSON page.
    pub(super) fn json(&self, path: &str) -> Result<Value> {
        let text = self.text(path)?;
        serde_json::from_str(&text).with_context(|| format!("the body of {path}"))
    }

    /// A page.
    pub(super) fn text(&self, path: &str) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let mut response = self
            .agent
            .get(&url)
            .call()
            .with_context(|| path.to_owned())?;
        let text = response
            .body_mut()
            .read_to_string()
            .with_context(|| path.to_owned())?;
        ensure!(
            response.status() == 200,
            "{path} answered {}: {text}",
            response.status()
        );
        Ok(text)
    }

    /// Sends the request and reads until its end, or until the client is to leave.
    pub(super) fn chat(&self, request: &Request) -> Result<Answer> {
        let url = format!("{}/v1/chat/completions", self.base);
        let sent = clock::now();
        let mut response = self
            .agent
            .post(&url)
            .header("Content-Type", "application/json")
            .send(request.body().to_string())
            .context("sending")?;
        if response.status() != 200 {
            let text = response
                .body_mut()
                .read_to_string()
                .context("reading an error")?;
            bail!("status {}: {text}", response.status());
        }
        let choices = vec![Choice::default(); request.n as usize];
        let mut stream = Stream {
            answer: Answer {
                sent,
                choices,
                usage: None,
            },
            done: false,
        };
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.context("reading the stream")?;
            if let Some(data) = line.strip_prefix("data:") {
                stream.event(data.trim())?;
            }
            let pieces = stream.answer.pieces();
            if request
                .cancel_after
                .is_some_and(|after| pieces >= after as usize)
            {
                // The connection closes with its reader.
                stream.answer.usage = None;
                return Ok(stream.answer);
            }
        }
        stream.finish()
    }
}

/// A stream of server-sent events, as far as it was read.
struct Stream {
    answer: Answer,
    done: bool,
}

impl Stream {
    fn event(&mut self, data: &str) -> Result<()> {
        ensure!(!self.done, "something came after [DONE]: {data}");
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).with_context(|| format!("event {data}"))?;
        if let Some(error) = event.get("error") {
            bail!("error in the stream: {error}");
        }
        for part in event["choices"]
            .as_array()
            .context("an event has choices")?
        {
            self.part(part)?;
        }
        if let Some(usage) = event.get("usage").filter(|usage| !usage.is_null()) {
            ensure!(self.answer.usage.is_none(), "usage came twice");
            let count = |name: &str| {
                let number = usage[name]
                    .as_u64()
                    .and_then(|number| u32::try_from(number).ok());
                number.with_context(|| format!("usage has a {name}"))
            };
            let (prompt, completion) = (count("prompt_tokens")?, count("completion_tokens")?);
            self.answer.usage = Some(Usage { prompt, completion });
        }
        Ok(())
    }

    fn part(&mut self, part: &Value) -> Result<()> {
        let index = part["index"]
            .as_u64()
            .and_then(|index| usize::try_from(index).ok());
        let choice = index
            .and_then(|index| self.answer.choices.get_mut(index))
            .with_context(|| format!("an unknown choice: {part}"))?;
        ensure!(
            choice.finish.is_none(),
            "something came after the end of a choice: {part}"
        );
        if let Some(text) = part["delta"]["content"]
            .as_str()
            .filter(|text| !text.is_empty())
        {
            choice.text.push_str(text);
            choice.times.push(clock::now());
        }
        if let Some(finish) = part["finish_reason"].as_str() {
            choice.finish = Some(finish.to_owned());
        }
        Ok(())
    }

    fn finish(self) -> Result<Answer> {
        ensure!(self.done, "the stream ended without [DONE]");
        ensure!(
            self.answer.usage.is_some(),
            "the stream ended without usage"
        );
        if self
            .answer
            .choices
            .iter()
            .any(|choice| choice.finish.is_none())
        {
            return Err(anyhow!("a choice has no finish reason"));
        }
        Ok(self.answer)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn read(events: &[&str]) -> Result<Answer> {
        let choices = vec![Choice::default(); 2];
        let answer = Answer {
            sent: clock::now(),
            choices,
            usage: None,
        };
        let mut stream = Stream {
            answer,
            done: false,
        };
        events.iter().try_for_each(|event| stream.event(event))?;
        stream.finish()
    }

    const A: &str = r#"{"choices": [{"index": 0, "delta": {"content": "a"}}]}"#;
    const END_0: &str = r#"{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}"#;
    const END_1: &str = r#"{"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}]}"#;
    const USAGE: &str = r#"{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}"#;

    #[test]
    fn a_whole_stream_is_an_answer() {
        let answer = read(&[A, A, END_0, END_1, USAGE, "[DONE]"]).unwrap();
        assert_eq!(answer.choices[0].text, "aa");
        assert_eq!(answer.choices[0].finish.as_deref(), Some("stop"));
        assert_eq!(answer.choices[1].text, "");
        assert_eq!((answer.pieces(), answer.tokens()), (2, 2));
    }

    #[test]
    fn anything_less_or_more_is_a_failure() {
        let broken: &[(&[&str], &str)] = &[
            (&[A, END_0, END_1, USAGE], "without [DONE]"),
            (&[A, END_0, END_1, "[DONE]"], "without usage"),
            (&[A, END_0, USAGE, "[DONE]"], "no finish reason"),
            (&[END_0, A], "after the end of a choice"),
            (&[END_0, END_0], "after the end of a choice"),
            (&[USAGE, USAGE], "usage came twice"),
            (&["[DONE]", A], "after [DONE]"),
            (&[r#"{"error": {"message": "no"}}"#], "error in the stream"),
            (&[r#"{"choices": [{"index": 2}]}"#], "unknown choice"),
        ];
        for (events, expected) in broken {
            let error = read(events).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    /// A server for one connection: takes the request, then says `reply`, piece by piece, and
    /// waits until the client has closed the connection.
    fn serve_once(reply: Vec<String>) -> (String, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            let mut request = BufReader::new(connection.try_clone().unwrap());
            let mut body_bytes = 0;
            loop {
                let mut line = String::new();
                request.read_line(&mut line).unwrap();
                if let Some(length) = line.to_lowercase().strip_prefix("content-length:") {
                    body_bytes = length.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            request.read_exact(&mut vec![0; body_bytes]).unwrap();
            for piece in reply {
                connection.write_all(piece.as_bytes()).unwrap();
            }
            // Both a closed and a reset connection end this.
            drop(request.read_to_end(&mut Vec::new()));
        });
        (base, server)
    }

    fn stream_of(events: &[&str]) -> Vec<String> {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
                    Transfer-Encoding: chunked\r\n\r\n";
        let mut reply = vec![head.to_owned()];
        for event in events {
            let text = format!("data: {event}\n\n");
            reply.push(format!("{:x}\r\n{text}\r\n", text.len()));
        }
        reply
    }

    fn ask(reply: Vec<String>, cancel_after: Option<u32>) -> Result<Answer> {
        let (base, server) = serve_once(reply);
        let mut request = super::super::load::Load::new(1, 1, true).requests.remove(0);
        request.cancel_after = cancel_after;
        let answer = Client::new(&base, Duration::from_secs(60)).chat(&request);
        server.join().unwrap();
        answer
    }

    #[test]
    fn a_stream_is_read_to_its_end() {
        let mut reply = stream_of(&[A, END_0, END_1, USAGE, "[DONE]"]);
        reply.push("0\r\n\r\n".to_owned());
        let answer = ask(reply, None).unwrap();
        assert_eq!(
            answer.usage,
            Some(Usage {
                prompt: 3,
                completion: 2
            })
        );
    }

    #[test]
    fn a_client_that_leaves_closes_the_connection() {
        // The stream doesn't end: only the closed connection lets the server's thread end.
        let answer = ask(stream_of(&[A, A, A]), Some(2)).unwrap();
        assert_eq!(
            (answer.choices[0].text.as_str(), answer.usage),
            ("aa", None)
        );
    }

    #[test]
    fn an_error_status_is_told_with_its_body() {
        let reply = "HTTP/1.1 400 Bad Request\r\nContent-Length: 5\r\n\r\nwrong";
        let error = ask(vec![reply.to_owned()], None).unwrap_err().to_string();
        assert!(error.contains("400") && error.contains("wrong"), "{error}");
    }
}
