//! What bad requests are answered: always the same shape, always before a stream starts.

use bytes::Bytes;
use expect_test::expect;
use http_body_util::Full;
use hyper::Request;
use kv_server::Ended;
use serde_json::json;

use crate::client::{Client, LIMIT, post, within};
use crate::setup::{Fixture, Gate, oracle};

const TEXT: &str = "/v1/completions";

fn request(method: &str, path: &str, kind: &str, body: &[u8]) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("host", "test")
        .header("content-type", kind)
        .body(Full::new(Bytes::copy_from_slice(body)))
        .unwrap()
}

/// One of each kind that is refused on a server with a small pool.
fn bad_requests() -> Vec<Request<Full<Bytes>>> {
    let json = "application/json";
    let long = format!("{{\"prompt\": \"{}\"}}", "x".repeat(3000));
    vec![
        request("GET", "/nothing", json, b""),
        request("GET", TEXT, json, b""),
        request("DELETE", "/health", json, b""),
        request("POST", TEXT, "text/plain", b"hello"),
        request("POST", TEXT, json, b"\xff"),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"n\": 1, \"n\": 2}",
        ),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"temperature\": NaN}",
        ),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"temperature\": -1, \"stream\": true}",
        ),
        // The logits would be infinite.
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"repetition_penalty\": 1e-40}",
        ),
        request("POST", TEXT, json, b"{}"),
        request("POST", TEXT, json, long.as_bytes()),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"model\": \"gpt-4\"}",
        ),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"max_tokens\": 100}",
        ),
        request(
            "POST",
            TEXT,
            json,
            b"{\"prompt\": \"a\", \"max_tokens\": 90, \"stream\": true}",
        ),
        request("POST", "/v1/chat/completions", json, b"{\"messages\": []}"),
        request("GET", "/v1/models/gpt-4", json, b""),
        request("GET", "/v1/models/%ff", json, b""),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_refused_has_an_openai_body() {
    let flags = [
        "--max-seq-len",
        "100",
        "--max-body-bytes",
        "2KiB",
        "--gpu-blocks",
        "5",
    ];
    let server = Fixture::start(&flags).await;
    let requests = bad_requests();
    let mut said = Vec::new();
    for request in requests {
        let answer = server.client.raw(request).await;
        assert_eq!(answer.headers["content-type"], "application/json");
        said.push(answer.refusal());
    }
    expect![[r#"
        404 not_found: there is no /nothing
        405 method_not_allowed: GET is not allowed for /v1/completions
        405 method_not_allowed: DELETE is not allowed for /health
        415 unsupported_media_type: the content type is "text/plain", must be application/json
        400 invalid_request_error: the request body is not UTF-8 from byte 0 on
        400 invalid_request_error [n]: the JSON body has the key "n" twice, at line 1 column 27
        400 invalid_request_error: the request body is not valid JSON: expected value at line 1 column 32
        400 invalid_request_error [temperature]: temperature is -1, must be between 0 and 2
        400 invalid_request_error [repetition_penalty]: repetition_penalty is 0.0000000000000000000000000000000000000001, must be between 0.01 and 100
        400 invalid_request_error [prompt]: prompt is missing, must be a string, a list of tokens below 2305, or a list of 1 to 2048 of these, none of them empty
        413 request_too_large: the request body is longer than 2048 bytes
        404 model_not_found [model]: the model "gpt-4" is not served here, only "oracle"
        400 context_length_exceeded [max_tokens]: 1 prompt tokens and 100 new ones are more than 100 per sequence
        400 kv_capacity_exceeded [max_tokens]: the request needs 6 KV blocks, the pool has 5
        400 invalid_request_error [messages]: messages is [], must be a list of at least one message with a role and a content
        404 model_not_found [model]: the model "gpt-4" is not served here, only "oracle"
        404 not_found: there is no /v1/models/%ff"#]].assert_eq(&said.join("\n"));
    server.end().await;
}

/// S8: what can never fit is refused with both numbers; what fits exactly completes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s08_what_never_fits_is_refused_and_what_fits_exactly_completes() {
    let flags = [
        "--gpu-blocks",
        "49",
        "--kv-swap-mode",
        "async",
        "--kv-swap-host-memory-bytes",
        "4MiB",
    ];
    let flags = [&flags[..], &["--kv-swap-max-inflight-bytes", "1MiB"]].concat();
    let server = Fixture::start(&flags).await;
    let call = |client: Client, prompt: usize, max_tokens: u32, mark: usize| async move {
        let mut prompt = "p".repeat(prompt - 2);
        prompt.push_str(&format!("{mark:02}"));
        let body =
            json!({ "prompt": prompt, "max_tokens": max_tokens, "stream": mark.is_multiple_of(2) });
        client.json(TEXT, &body).await
    };
    let mut running = Vec::new();
    for mark in 0..10 {
        running.push(tokio::spawn(call(server.client, 16, 16, mark)));
    }
    running.push(tokio::spawn(call(server.client, 734, 50, 10)));
    for mark in 0..5 {
        let refused = call(server.client, 1002, 50, mark).await;
        assert_eq!(
            refused.refusal(),
            "400 kv_capacity_exceeded [max_tokens]: \
             the request needs 66 KV blocks, the pool has 49"
        );
    }
    let refused = call(server.client, 751, 50, 11).await;
    assert_eq!(
        refused.refusal(),
        "400 kv_capacity_exceeded [max_tokens]: \
         the request needs 50 KV blocks, the pool has 49"
    );
    for call in running {
        assert_eq!(call.await.unwrap().status, 200);
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_says_when_to_come_back() {
    let flags = ["--max-waiting-requests", "2", "--max-batch-size", "1"];
    let gate = Gate::default();
    let server = Fixture::with(&flags, gate.guard(oracle(&flags))).await;
    let call = |client: Client, prompt: &'static str| {
        tokio::spawn(async move { client.json(TEXT, &json!({ "prompt": prompt })).await })
    };
    let first = call(server.client, "first");
    gate.arrived(1).await;
    let others = ["a", "b", "c", "d"].map(|prompt| call(server.client, prompt));
    gate.open();
    assert_eq!(first.await.unwrap().status, 200);
    let mut refused = 0;
    for other in others {
        let answer = other.await.unwrap();
        if answer.status != 200 {
            refused += 1;
            assert_eq!(answer.headers["retry-after"], "1");
            assert_eq!(
                answer.refusal(),
                "503 queue_full: 2 requests are waiting, at most 2 may"
            );
        }
    }
    assert!(
        refused <= 2,
        "{refused} of 4 refused, although two may wait"
    );
    server.end().await;
}

/// To come back later would not help: the queue never holds so many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_prompts_than_may_wait_are_refused_for_good() {
    let server = Fixture::start(&["--max-waiting-requests", "2"]).await;
    let call = |prompts: &[&str]| json!({ "prompt": prompts, "max_tokens": 1 });
    let answer = server.client.json(TEXT, &call(&["a", "b", "c"])).await;
    assert_eq!(
        answer.refusal(),
        "400 invalid_request_error [prompt]: \
         prompt is a list of 3, must be at most 2, since no more requests may wait here"
    );
    let answer = server.client.json(TEXT, &call(&["a", "b"])).await;
    assert_eq!(answer.status, 200);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_are_accepted_together_or_not_at_all() {
    let flags = ["--gpu-blocks", "4"];
    let server = Fixture::start(&flags).await;
    let body = json!({ "prompt": ["short", "x".repeat(200)], "max_tokens": 8, "stream": true });
    let answer = server.client.json(TEXT, &body).await;
    assert!(
        answer.refusal().starts_with("400 kv_capacity_exceeded"),
        "{}",
        answer.refusal()
    );
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_shuts_down_says_so() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    let client = server.client;
    let running = tokio::spawn(async move { client.json(TEXT, &json!({ "prompt": "a" })).await });
    gate.arrived(1).await;
    let ending = tokio::spawn(server.server.shut_down(LIMIT));
    client.until_unhealthy("the server is shutting down").await;
    let refused = client.raw(post(TEXT, r#"{"prompt": "b"}"#)).await;
    assert_eq!(
        refused.refusal(),
        "503 shutting_down: the server is shutting down"
    );
    assert_eq!(refused.headers["retry-after"], "5");
    gate.open();
    assert_eq!(running.await.unwrap().status, 200);
    assert_eq!(within(ending).await.unwrap(), Ended::Finished);
}
