//! Faults on purpose: texts as without them or the documented error, and nothing left over.

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::client::{Client, LIMIT, within};
use crate::setup::{Fixture, oracle};

const TEXT: &str = "/v1/completions";

/// One request that is swapped out every two tokens: copy 1 is out, copy 2 is in, and so on.
const FORCED: [&str; 7] = [
    "--block-tokens",
    "4",
    "--gpu-blocks",
    "64",
    "--fault-injection",
    "--fault-force-swap-every",
    "2",
];

async fn start(mode: &str, further: &[&str]) -> Fixture {
    let flags = [&FORCED[..], &["--kv-swap-mode", mode], further].concat();
    Fixture::with(&flags, oracle(&flags)).await
}

async fn ask(client: &Client) -> Value {
    let body = json!({ "prompt": "tell me", "max_tokens": 12 });
    client.json(TEXT, &body).await.ok()["choices"].take()
}

/// What a server without faults answers.
async fn reference() -> Value {
    let flags = ["--block-tokens", "4"];
    let server = Fixture::with(&flags, oracle(&flags)).await;
    let choices = ask(&server.client).await;
    server.end().await;
    choices
}

/// Waits until nobody is served; every block and slot must be free or lost.
async fn idle(client: &Client) -> Value {
    let whole = |pool: &Value| {
        let part = |name: &str| pool[name].as_u64().unwrap();
        part("free") + part("lost") == part("total")
    };
    client
        .until(|stats| {
            stats["engine"]["running"] == 0
                && stats["flights"] == 0
                && whole(&stats["gpu_blocks"])
                && whole(&stats["host_slots"])
        })
        .await
}

/// Plays one fault in both modes; `check` sees the mode and the statistics.
async fn play(further: &[&str], check: impl Fn(&str, &Value)) {
    let expected = reference().await;
    for mode in ["async", "sync"] {
        let server = start(mode, further).await;
        assert_eq!(ask(&server.client).await, expected, "{mode} {further:?}");
        let stats = idle(&server.client).await;
        check(mode, &stats);
        // What comes afterwards is served as well.
        assert_eq!(ask(&server.client).await, expected, "{mode} {further:?}");
        within(server.server.shut_down(LIMIT)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i10_a_swap_every_two_tokens_is_not_seen() {
    play(&[], |mode, stats| {
        assert!(stats["out"]["done"].as_u64() >= Some(5), "{mode} {stats}");
        assert_eq!(stats["out"]["done"], stats["in"]["done"], "{mode} {stats}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s10_a_late_end_of_a_copy_is_only_late() {
    play(&["--fault-copy-delay-ms", "5"], |mode, stats| {
        assert!(stats["in"]["done"].as_u64() >= Some(5), "{mode} {stats}");
        for way in ["out", "in"] {
            let late_ms = stats[way]["notice_ms_sum"].as_f64();
            // Where copies block, the engine's clock stands still meanwhile.
            assert!(
                mode == "sync" || late_ms >= Some(25.0),
                "{mode} {way} {stats}"
            );
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i07_a_copy_out_that_fails_leaves_the_group_where_it_was() {
    play(&["--fault-fail-copy", "1"], |mode, stats| {
        assert_eq!(stats["out"]["failed"], 1, "{mode} {stats}");
        assert_eq!(stats["engine"]["recomputed_tokens"], 0, "{mode} {stats}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s09_copies_in_that_fail_are_tried_again_and_then_computed() {
    play(&["--fault-fail-copy", "2,3"], |mode, stats| {
        assert_eq!(stats["in"]["failed"], 2, "{mode} {stats}");
        assert_eq!(stats["engine"]["recomputed_tokens"], 0, "{mode} {stats}");
    })
    .await;
    play(&["--fault-fail-copy", "2,3,4"], |mode, stats| {
        assert_eq!(stats["in"]["failed"], 3, "{mode} {stats}");
        assert!(stats["engine"]["recomputed_tokens"].as_u64() > Some(0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i05_a_copy_that_never_ends_costs_its_memory_and_nothing_else() {
    for copy in ["1", "2"] {
        let flags = ["--fault-lose-copy", copy, "--kv-swap-deadline-ms", "200"];
        play(&flags, |mode, stats| {
            let unknown = |way: &str| stats[way]["unknown"].as_u64().unwrap();
            assert!(unknown("out") + unknown("in") > 0, "{mode} {stats}");
            assert!(stats["gpu_blocks"]["lost"].as_u64() > Some(0), "{mode}");
            assert!(stats["engine"]["recomputed_tokens"].as_u64() > Some(0));
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i06_an_end_that_is_told_twice_counts_once() {
    for copy in ["1", "2"] {
        play(&["--fault-repeat-completion", copy], |mode, stats| {
            assert_eq!(stats["stale_completions"], 1, "{mode} {stats}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s18_a_flipped_bit_is_seen_by_its_digest_and_by_nothing_else() {
    let flags = ["--fault-flip-host-bit", "1", "--kv-swap-checksum"];
    play(&flags, |mode, stats| {
        assert_eq!(stats["checksum_failures"], 1, "{mode} {stats}");
        assert!(stats["engine"]["recomputed_tokens"].as_u64() > Some(0));
    })
    .await;
    let expected = reference().await;
    for mode in ["async", "sync"] {
        let server = start(mode, &flags[..2]).await;
        assert_ne!(ask(&server.client).await, expected, "{mode}: the control");
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_is_an_error_for_those_in_it() {
    let expected = reference().await;
    for mode in ["async", "sync"] {
        let server = start(mode, &["--fault-step-error", "3"]).await;
        let body = json!({ "prompt": "tell me", "max_tokens": 12 });
        let answer = server.client.json(TEXT, &body).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{mode}");
        assert!(answer.json()["error"]["message"].is_string());
        assert_eq!(ask(&server.client).await, expected, "{mode}");
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_much_lost_memory_ends_swapping_and_not_the_service() {
    let expected = reference().await;
    let flags = [
        "--fault-lose-copy",
        "1",
        "--kv-swap-deadline-ms",
        "200",
        "--kv-swap-max-lost-permille",
        "0",
    ];
    for mode in ["async", "sync"] {
        let server = start(mode, &flags).await;
        assert_eq!(ask(&server.client).await, expected, "{mode}");
        let reason = "too much memory is lost, nothing is swapped any more";
        server.client.until_unhealthy(reason).await;
        let before = idle(&server.client).await;
        assert_eq!(before["engine"]["swap_given_up"], true, "{mode}");
        assert_eq!(
            ask(&server.client).await,
            expected,
            "{mode}: it still serves"
        );
        let after = idle(&server.client).await;
        assert_eq!(after["out"]["started"], before["out"]["started"], "{mode}");
        let metrics = server.client.get("/metrics").await;
        let metrics = std::str::from_utf8(&metrics.body).unwrap();
        assert!(metrics.contains("kv_swap_given_up_engines 1"), "{mode}");
        within(server.server.shut_down(LIMIT)).await;
    }
}
