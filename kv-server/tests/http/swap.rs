//! Clients don't notice that their sequences are moved.

use kv_core::Choice;
use kv_model::oracle::{OracleScript, ScriptEnd};
use kv_model::tokenizer::OracleTokenizer;
use kv_scheduler::TokenId;
use serde_json::{Value, json};

use crate::client::{Client, assemble, within};
use crate::setup::{Fixture, custom};

const TEXT: &str = "/v1/completions";

/// A pool for two of the three requests at their full length.
const SCARCE: [&str; 8] = [
    "--gpu-blocks",
    "12",
    "--block-tokens",
    "4",
    "--kv-swap-host-memory-bytes",
    "256KiB",
    "--kv-swap-max-inflight-bytes",
    "64KiB",
];

fn flags(mode: &'static str) -> Vec<&'static str> {
    [&SCARCE[..], &["--kv-swap-mode", mode]].concat()
}

/// What a client sees of one call: choices, usage, and the events themselves.
async fn call(client: Client, body: Value, n: usize) -> (Vec<crate::client::Choice>, Value) {
    let events = client.stream(TEXT, &body).await.rest().await;
    let usage = events.last().expect("a usage chunk");
    assert_eq!(usage["choices"], json!([]));
    (assemble(&events, n), usage["usage"].clone())
}

/// All calls at the same time.
async fn calls(
    client: Client,
    bodies: &[(Value, usize)],
) -> Vec<(Vec<crate::client::Choice>, Value)> {
    let running: Vec<_> = bodies
        .iter()
        .map(|(body, n)| tokio::spawn(call(client, body.clone(), *n)))
        .collect();
    let mut answers = Vec::new();
    for call in running {
        answers.push(within(call).await.unwrap());
    }
    answers
}

fn bodies() -> Vec<(Value, usize)> {
    (0..8)
        .map(|index: usize| {
            let n = 1 + index % 2;
            let prompt = format!("request {index}{}", "!".repeat(index % 5));
            let body = json!({
                "prompt": prompt, "max_tokens": 12, "n": n,
                "stream_options": { "include_usage": true },
            });
            (body, n)
        })
        .collect()
}

/// The value of a series.
fn series(metrics: &str, name: &str) -> u64 {
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}"))
        .parse()
        .unwrap()
}

/// I16 and I17: metrics say the same as the statistics, and nothing about clients.
async fn metrics_agree(client: &Client, stats: &Value) {
    let answer = client.get("/metrics").await;
    let metrics = std::str::from_utf8(&answer.body).unwrap();
    for (name, pointer) in [
        (
            "kv_swap_started_flights_total{direction=\"out\"}",
            "/out/started",
        ),
        (
            "kv_swap_settled_flights_total{direction=\"in\",outcome=\"done\"}",
            "/in/done",
        ),
        (
            "kv_swap_payload_bytes_total{direction=\"out\"}",
            "/out/bytes",
        ),
        ("kv_recomputed_tokens_total", "/engine/recomputed_tokens"),
        ("kv_generated_tokens_total", "/engine/tokens"),
        ("kv_gpu_blocks{state=\"free\"}", "/gpu_blocks/total"),
        (
            "kv_gpu_blocks{state=\"allocated\"}",
            "/gpu_blocks/allocated",
        ),
        ("kv_host_slots{state=\"parked\"}", "/host_slots/parked"),
        ("kv_queued_requests{queue=\"swapped\"}", "/engine/swapped"),
        ("kv_request_first_token_seconds_count", "/engine/finished"),
        (
            "kv_request_duration_seconds_count{outcome=\"finished\"}",
            "/engine/finished",
        ),
    ] {
        let expected = stats.pointer(pointer).unwrap().as_u64().unwrap();
        assert_eq!(series(metrics, name), expected, "{name}");
    }
    let answers = series(
        metrics,
        "kv_http_responses_total{route=\"completions\",class=\"2xx\"}",
    );
    assert_eq!(answers, 8);
    assert!(series(metrics, "kv_request_pause_seconds_count") > 0);
    assert!(!metrics.contains("request 1"), "a prompt in the metrics");
    assert!(!metrics.contains("cmpl-"), "an id in the metrics");
}

/// The same requests with ample memory and with each way to make room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i10_texts_are_the_same_with_and_without_memory() {
    let ample = Fixture::start(&["--block-tokens", "4"]).await;
    let expected = calls(ample.client, &bodies()).await;
    let stats = ample.client.until_idle().await;
    assert_eq!(stats["out"]["started"], 0, "there was room for all");
    ample.end().await;
    for mode in ["async", "sync", "off"] {
        let server = Fixture::start(&flags(mode)).await;
        assert_eq!(calls(server.client, &bodies()).await, expected, "{mode}");
        let stats = server.client.until_idle().await;
        let swapped = stats["out"]["done"].as_u64().unwrap();
        let recomputed = stats["engine"]["recomputed_tokens"].as_u64().unwrap();
        if mode == "off" {
            assert!(swapped == 0 && recomputed > 0, "{stats}");
        } else {
            assert!(
                swapped > 0 && stats["in"]["done"].as_u64().unwrap() > 0,
                "{stats}"
            );
        }
        metrics_agree(&server.client, &stats).await;
        if mode == "sync" {
            assert_eq!(stats["kv_swap"]["host_peak_in_use_bytes"], 0, "i15");
        }
        server.end().await;
    }
}

/// S13: stop strings and characters in pieces, two choices, and swaps all along.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s13_the_stream_does_not_show_the_swap() {
    let toy: [&[u8]; 9] = [
        b"hi", b"\xf0", b"\x9f", b"\x98", b"\x80", b"</", b"en", b"d", b">",
    ];
    let id = |index: usize| TokenId(OracleTokenizer::BYTES + u32::try_from(index).unwrap());
    let script = OracleScript::new(ScriptEnd::Repeat)
        .choice(Choice::new(0), (0..9).map(id))
        .choice(Choice::new(1), [0, 0, 1, 2, 3, 4, 5, 6].map(id));
    let model = |flags: &[&str]| {
        let tokenizer = OracleTokenizer::from_tokens(toy);
        let oracle = kv_model::oracle::OracleConfig {
            script: Some(script.clone()),
            ..tokenizer.oracle_config()
        };
        custom(flags, tokenizer, oracle)
    };
    let bodies: Vec<_> = (0..4)
        .map(|index| {
            let body = json!({
                "prompt": format!("{index} say hi"), "max_tokens": 24, "n": 2,
                "stop": ["</end>"], "stream_options": { "include_usage": true },
            });
            (body, 2)
        })
        .collect();
    let ample = Fixture::with(&["--block-tokens", "4"], model(&["--block-tokens", "4"])).await;
    let expected = calls(ample.client, &bodies).await;
    ample.end().await;
    for (choices, usage) in &expected {
        assert_eq!(choices[0].text, "hi😀");
        assert_eq!(choices[0].finish.as_deref(), Some("stop"));
        assert_eq!(choices[1].text, "hihi😀</en".repeat(3));
        assert_eq!(choices[1].finish.as_deref(), Some("length"));
        assert_eq!(
            usage["completion_tokens"],
            9 + 24,
            "nothing beyond the stop string"
        );
        assert_eq!(usage["prompt_tokens"], 8, "counted once");
    }
    for mode in ["async", "sync"] {
        let flags = [&flags(mode)[..], &["--gpu-blocks", "18"]].concat();
        let flags: Vec<_> = flags.iter().skip(2).copied().collect();
        let server = Fixture::with(&flags, model(&flags)).await;
        assert_eq!(calls(server.client, &bodies).await, expected, "{mode}");
        let stats = server.client.until_idle().await;
        assert!(
            stats["in"]["done"].as_u64().unwrap() > 0,
            "something was moved: {stats}"
        );
        server.end().await;
    }
}

/// "hi" is there before the character after it is whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s13_text_is_sent_as_soon_as_it_is_sure() {
    let toy: [&[u8]; 3] = [b"hi", b"\xf0\x9f", b"\x98\x80"];
    let id = |index: u32| TokenId(OracleTokenizer::BYTES + index);
    let script = OracleScript::new(ScriptEnd::Repeat).choice(Choice::new(0), [0, 1, 2].map(id));
    let tokenizer = OracleTokenizer::from_tokens(toy);
    let oracle = kv_model::oracle::OracleConfig {
        script: Some(script),
        ..tokenizer.oracle_config()
    };
    let gate = crate::setup::Gate::default();
    let server = Fixture::with(&[], gate.guard(custom(&[], tokenizer, oracle))).await;
    gate.allow(1);
    let body = json!({ "prompt": "p", "max_tokens": 3, "stop": ["</end>"] });
    let mut stream = server.client.stream(TEXT, &body).await;
    let first: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    assert_eq!(first["choices"][0]["text"], "hi");
    gate.open();
    let rest = stream.rest().await;
    assert_eq!(assemble(&rest, 1)[0].text, "😀");
    server.end().await;
}
