//! Clients that leave, executors that fail, servers that end.

use kv_server::Ended;
use serde_json::{Value, json};

use crate::client::{Client, LIMIT, assemble, within};
use crate::setup::{Fault, Fixture, Gate, NO_GRACE, faulty, oracle};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn long(prompt: &str) -> Value {
    json!({ "prompt": prompt, "max_tokens": 1000, "n": 2 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_a_stream_cancels_its_request() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    gate.allow(3);
    let mut stream = server.client.stream(TEXT, &long("a")).await;
    stream.next().await.expect("a first token");
    drop(stream);
    gate.open();
    let stats = server
        .client
        .until(|stats| stats["engine"]["cancelled"] == 1)
        .await;
    assert!(
        stats["engine"]["tokens"].as_u64().unwrap() < 2000,
        "it did not run to its end"
    );
    server.end().await;
}

/// No token has to be sent to notice it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_a_silent_stream_cancels_its_request() {
    let flags = ["--max-batch-size", "1"];
    let gate = Gate::default();
    let server = Fixture::with(&flags, gate.guard(oracle(&flags))).await;
    gate.allow(2);
    let running = json!({ "prompt": "first", "max_tokens": 4000 });
    let mut running = server.client.stream(TEXT, &running).await;
    running.next().await.expect("a first token");
    gate.arrived(3).await;
    let address = server.client;
    let waiting = tokio::spawn(async move {
        address
            .stream(TEXT, &json!({ "prompt": "second", "max_tokens": 4000 }))
            .await
    });
    // The engine takes it between two steps.
    while !waiting.is_finished() {
        gate.allow(1);
        tokio::task::yield_now().await;
    }
    drop(waiting.await.unwrap());
    let cancelled = server.client.until(|stats| {
        gate.allow(1);
        stats["engine"]["cancelled"] == 1
    });
    let stats = cancelled.await;
    assert_eq!(
        stats["engine"]["running"], 1,
        "the first one goes on: {stats}"
    );
    drop(running);
    gate.open();
    server
        .client
        .until(|stats| stats["engine"]["cancelled"] == 2)
        .await;
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_while_it_waits_cancels_its_request() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    let client = server.client;
    let waiting = tokio::spawn(async move { client.json(CHAT, &chat("b")).await });
    gate.allow(2);
    client.until(|stats| stats["engine"]["steps"] == 2).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    gate.open();
    client
        .until(|stats| stats["engine"]["cancelled"] == 1)
        .await;
    server.end().await;
}

fn chat(content: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 2000 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_answered_while_a_step_takes_for_ever() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    let client = server.client;
    let running = tokio::spawn(async move { client.json(TEXT, &json!({ "prompt": "a" })).await });
    for _ in 0..50 {
        assert_eq!(client.get("/health").await.status, 200);
        client.get("/admin/stats").await.ok();
        assert_eq!(client.get("/metrics").await.status, 200);
    }
    gate.open();
    assert_eq!(running.await.unwrap().status, 200);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_requests_finish_before_the_end() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    gate.allow(2);
    let body = json!({ "prompt": "finish me", "max_tokens": 30 });
    let mut stream = server.client.stream(TEXT, &body).await;
    stream.next().await.expect("a first token");
    let ending = tokio::spawn(server.server.shut_down(LIMIT));
    gate.open();
    let events = stream.rest().await;
    assert_eq!(assemble(&events, 1)[0].finish.as_deref(), Some("length"));
    assert_eq!(within(ending).await.unwrap(), Ended::Finished);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_grace_every_client_is_told() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    let client = server.client;
    gate.allow(2);
    let mut stream = client.stream(CHAT, &chat("stream")).await;
    stream.next().await.expect("a role");
    let whole = tokio::spawn(async move { client.json(TEXT, &long("whole")).await });
    gate.arrived(3).await;
    let ending = tokio::spawn(server.server.shut_down(NO_GRACE));
    client.until_unhealthy("the server is shutting down").await;
    // The step that is running must end before anything else can happen.
    while !ending.is_finished() {
        gate.allow(1);
        tokio::task::yield_now().await;
    }
    let whole = within(whole).await.unwrap();
    assert_eq!(
        whole.refusal(),
        "503 shutting_down: the server is shutting down"
    );
    let events = stream.rest().await;
    assert_eq!(events.last().unwrap()["error"]["code"], "shutting_down");
    assert_eq!(ending.await.unwrap(), Ended::GaveUp);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_step_fails_its_requests_and_no_others() {
    let server = Fixture::with(&[], faulty(oracle(&[]), 5, Fault::Error)).await;
    let failed = server.client.json(TEXT, &long("a")).await;
    assert_eq!(
        failed.refusal(),
        "500 internal_error: the request failed inside the server; the other requests go on"
    );
    let good = server
        .client
        .json(TEXT, &json!({ "prompt": "b" }))
        .await
        .ok();
    assert_eq!(good["usage"]["completion_tokens"], 16);
    assert_eq!(server.client.get("/health").await.status, 200);
    server.end().await;

    let server = Fixture::with(&[], faulty(oracle(&[]), 5, Fault::Error)).await;
    let events = server.client.stream(TEXT, &long("a")).await.rest().await;
    assert_eq!(events.last().unwrap()["error"]["code"], "internal_error");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_executor_that_only_fails_makes_the_server_unhealthy() {
    let server = Fixture::with(&[], faulty(oracle(&[]), 0, Fault::Errors(3))).await;
    let client = server.client;
    for _ in 0..3 {
        assert_eq!(client.get("/health").await.status, 200);
        let failed = client.json(TEXT, &json!({ "prompt": "a" })).await;
        assert!(failed.refusal().starts_with("500 internal_error"));
        client.until_idle().await;
    }
    client
        .until_unhealthy("in 3 steps in a row requests failed and no token came")
        .await;
    let good = client.json(TEXT, &json!({ "prompt": "b" })).await.ok();
    assert_eq!(good["usage"]["completion_tokens"], 16);
    assert_eq!(
        client.get("/health").await.status,
        200,
        "a token proves that it works"
    );
    server.end().await;
}

/// A server that is dropped leaves no thread behind and no client waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_server_tells_its_clients() {
    let gate = Gate::default();
    let server = Fixture::with(&[], gate.guard(oracle(&[]))).await;
    let client = server.client;
    let waiting = tokio::spawn(async move { client.json(TEXT, &long("a")).await });
    gate.arrived(1).await;
    drop(server);
    gate.allow(1);
    let told = within(waiting).await.unwrap();
    assert_eq!(
        told.refusal(),
        "503 shutting_down: the server is shutting down"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_engine_is_told_to_everybody() {
    let server = Fixture::with(&[], faulty(oracle(&[]), 5, Fault::Panic)).await;
    let client = server.client;
    let whole = tokio::spawn(async move { client.json(TEXT, &long("whole")).await });
    let events = match client
        .send(crate::client::post(TEXT, long("stream").to_string()))
        .await
    {
        response if response.status() == 200 => 200,
        response => response.status().as_u16(),
    };
    assert!(events == 200 || events == 500, "{events}");
    assert!(
        within(whole)
            .await
            .unwrap()
            .refusal()
            .starts_with("500 engine_dead")
    );
    let health = client.get("/health").await;
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["reason"], "the engine has stopped");
    let refused = client.json(TEXT, &long("late")).await;
    assert!(
        refused.refusal().starts_with("500 engine_dead"),
        "{}",
        refused.refusal()
    );
    assert_eq!(client.get("/metrics").await.status, 200);
    within(server.server.shut_down(LIMIT)).await;
}

/// S12 in small: everybody leaves at once, nothing is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s12_everybody_leaves_at_once() {
    let flags = ["--gpu-blocks", "40", "--kv-swap-mode", "async"];
    let flags = [&flags[..], &["--kv-swap-host-memory-bytes", "1MiB"]].concat();
    let flags = [&flags[..], &["--kv-swap-max-inflight-bytes", "1MiB"]].concat();
    let server = Fixture::start(&flags).await;
    let mut streams = Vec::new();
    for index in 0..40 {
        let body = json!({ "prompt": format!("client {index}"), "max_tokens": 300 });
        streams.push(server.client.stream(TEXT, &body).await);
    }
    streams[0].next().await.expect("a token");
    drop(streams);
    let stats = server.client.until_idle().await;
    let engine = &stats["engine"];
    let count = |name: &str| engine[name].as_u64().unwrap();
    assert_eq!(count("finished") + count("cancelled"), 40, "{engine}");
    assert!(count("cancelled") > 0);
    server.end().await;
}

/// Many clients at once, more than may wait: each gets a text or a clear refusal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_is_answered_one_by_one() {
    let flags = ["--max-waiting-requests", "100", "--gpu-blocks", "200"];
    let server = Fixture::start(&flags).await;
    let call = |client: Client, index: usize| async move {
        let body = json!({ "prompt": format!("client {index}"), "max_tokens": 4 });
        let answer = client.json(TEXT, &body).await;
        match answer.status.as_u16() {
            200 => answer.json()["usage"]["completion_tokens"] == 4,
            503 => {
                assert!(
                    answer.refusal().starts_with("503 queue_full"),
                    "{}",
                    answer.refusal()
                );
                false
            }
            status => panic!("{status}"),
        }
    };
    let calls: Vec<_> = (0..1000)
        .map(|index| tokio::spawn(call(server.client, index)))
        .collect();
    let mut served = 0;
    for call in calls {
        served += u32::from(within(call).await.unwrap());
    }
    assert!(
        served >= 100,
        "{served} of 1000 served, although 100 may wait"
    );
    server.end().await;
}
