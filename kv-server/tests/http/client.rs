//! A small HTTP client: one connection per request, so that dropping an answer is leaving.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything here takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Bounds a wait.
pub(crate) async fn within<T>(what: impl Future<Output = T>) -> T {
    timeout(LIMIT, what).await.expect("nothing hangs")
}

/// Where to send requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) address: SocketAddr,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    /// The JSON of a success.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{:?}", self.body);
        self.json()
    }

    /// Status and message, for snapshots.
    pub(crate) fn refusal(&self) -> String {
        let json = self.json();
        let error = &json["error"];
        let param = error["param"]
            .as_str()
            .map(|p| format!(" [{p}]"))
            .unwrap_or_default();
        let (code, message) = (error["code"].as_str(), error["message"].as_str());
        format!(
            "{} {}{param}: {}",
            self.status.as_u16(),
            code.unwrap(),
            message.unwrap()
        )
    }
}

impl Client {
    /// Sends a request on a connection of its own and waits for the head of the answer.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        within(async {
            let stream = TcpStream::connect(self.address).await.expect("it listens");
            let io = TokioIo::new(stream);
            let (mut sender, connection) = http1::handshake(io).await.expect("HTTP");
            // It ends with the answer or with the sender; its errors show there.
            tokio::spawn(connection);
            sender.send_request(request).await.expect("an answer")
        })
        .await
    }

    pub(crate) async fn raw(&self, request: Request<Full<Bytes>>) -> Answer {
        let (head, body) = self.send(request).await.into_parts();
        let body = within(body.collect())
            .await
            .expect("a whole body")
            .to_bytes();
        Answer {
            status: head.status,
            headers: head.headers,
            body,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.raw(
            Request::get(path)
                .header("host", "test")
                .body(Full::default())
                .unwrap(),
        )
        .await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.raw(post(path, body)).await
    }

    pub(crate) async fn json(&self, path: &str, body: &Value) -> Answer {
        self.post(path, body.to_string()).await
    }

    /// Starts a stream.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Stream {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.send(post(path, body.to_string())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Stream {
            body: response.into_body(),
            buffer: String::new(),
        }
    }

    /// Waits until the server's own numbers are as wanted.
    pub(crate) async fn until(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        within(async {
            loop {
                let stats = self.get("/admin/stats").await.ok();
                if wanted(&stats) {
                    return stats;
                }
            }
        })
        .await
    }

    /// Waits until the server says that it is unhealthy, for that reason.
    pub(crate) async fn until_unhealthy(&self, reason: &str) {
        within(async {
            loop {
                let health = self.get("/health").await;
                if health.status == StatusCode::SERVICE_UNAVAILABLE {
                    assert_eq!(health.json()["reason"], reason);
                    break;
                }
            }
        })
        .await;
    }

    /// Waits until nobody is served, and checks that nothing is held.
    pub(crate) async fn until_idle(&self) -> Value {
        let stats = self
            .until(|stats| {
                let engine = &stats["engine"];
                let gauges = ["waiting", "running", "swapped", "recompute_pending"];
                gauges.iter().all(|&name| engine[name] == 0) && stats["flights"] == 0
            })
            .await;
        assert_eq!(
            stats["gpu_blocks"]["free"], stats["gpu_blocks"]["total"],
            "i11 {stats}"
        );
        assert_eq!(
            stats["host_slots"]["free"], stats["host_slots"]["total"],
            "i11 {stats}"
        );
        stats
    }
}

pub(crate) fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", "test")
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .unwrap()
}

/// Server-sent events as they come.
#[derive(Debug)]
pub(crate) struct Stream {
    body: Incoming,
    buffer: String,
}

impl Stream {
    /// The payload of the next event; comments are skipped.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let event: String = self.buffer.drain(..end + 2).collect();
                match event.trim_end().strip_prefix("data: ") {
                    Some(data) => return Some(data.to_owned()),
                    None => assert!(event.starts_with(':'), "{event:?}"),
                }
                continue;
            }
            let frame = within(self.body.frame()).await?.expect("no broken stream");
            if let Ok(data) = frame.into_data() {
                self.buffer
                    .push_str(std::str::from_utf8(&data).expect("whole characters"));
            }
        }
    }

    /// All events up to `[DONE]`, which must be the last one.
    pub(crate) async fn rest(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                assert_eq!(self.next().await, None, "nothing follows [DONE]");
                return events;
            }
            events.push(serde_json::from_str(&data).expect("JSON"));
        }
        panic!("the stream ended without [DONE] after {events:?}");
    }
}

/// What a stream says about one choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) finish: Option<String>,
}

/// Puts the choices of a stream together, checking what must hold for each.
pub(crate) fn assemble(events: &[Value], n: usize) -> Vec<Choice> {
    let mut choices = vec![Choice::default(); n];
    for choice in events
        .iter()
        .flat_map(|event| event["choices"].as_array().expect("choices"))
    {
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        let state = &mut choices[index];
        assert_eq!(state.finish, None, "nothing follows a finish");
        let text = choice
            .get("text")
            .unwrap_or_else(|| &choice["delta"]["content"]);
        state.text.push_str(text.as_str().unwrap_or_default());
        state.finish = choice["finish_reason"].as_str().map(str::to_owned);
    }
    assert!(
        choices.iter().all(|choice| choice.finish.is_some()),
        "{choices:?}"
    );
    choices
}
