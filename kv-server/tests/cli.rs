//! The program itself: what it prints, and the code with which it exits.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-server"));
    command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs to the end; only for what ends by itself.
fn output(args: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = program(args).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Starts a server; its first line has the address.
fn start(args: &[&str]) -> (Child, String) {
    let mut child = program(args).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.trim_end().to_owned())
}

/// Sends a signal and returns the exit code and the log.
fn end(mut child: Child, signal: &str) -> (Option<i32>, String) {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args([signal, &id])
            .status()
            .unwrap()
            .success()
    );
    let mut log = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .unwrap();
    (child.wait().unwrap().code(), log)
}

#[test]
fn a_wrong_value_ends_with_code_2() {
    for (args, said) in [
        (
            &["--gpu-blocks", "0"][..],
            "--gpu-blocks is \"0\", must be a whole number from 1",
        ),
        (
            &[
                "--kv-swap-host-memory-bytes",
                "1",
                "--kv-swap-max-inflight-bytes",
                "1",
            ],
            "--kv-swap-host-memory-bytes is 1, must be at least one block, which is 4096 bytes",
        ),
        (
            &["--kv-swap-max-inflight-bytes", "4095"],
            "--kv-swap-max-inflight-bytes is 4095, must be at least one block, which is 4096 bytes",
        ),
        (
            &["--max-tokens-per-step", "8"],
            "--max-tokens-per-step is 8, must be at least --max-batch-size, which is 32",
        ),
        (
            &["--max-seq-len", "5000"],
            "--max-seq-len is 5000, must be between 2 and",
        ),
        (
            &["--model", "/nowhere/model.gguf"],
            "--model \"/nowhere/model.gguf\" can't be served: ",
        ),
        (
            &["--gpu-blocks", "4294967295"],
            "--gpu-blocks is 4294967295, must be at most ",
        ),
        (
            &[
                "--kv-swap-host-memory-bytes",
                "512TiB",
                "--kv-swap-mode",
                "async",
            ],
            "--kv-swap-host-memory-bytes is 562949953421312, must be at most the machine's memory",
        ),
        (&["--nonsense"], "unexpected argument '--nonsense' found"),
    ] {
        let model: &[&str] = if args[0] == "--model" {
            &[]
        } else {
            &["--model", "oracle"]
        };
        let (code, log) = output(&[model, &["--port", "0"], args].concat());
        assert_eq!(code, Some(2), "{args:?}: {log}");
        assert!(log.starts_with("kv-server: "), "{log}");
        assert!(log.contains(said), "{args:?}: {log}");
        assert_eq!(log.matches("panicked").count(), 0, "{log}");
        assert!(log.matches("os error").count() <= 1, "said once: {log}");
    }
}

#[test]
fn a_port_in_use_is_a_clear_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, log) = output(&["--model", "oracle", "--port", &port]);
    assert_eq!(code, Some(1), "{log}");
    let said = format!("kv-server: can't listen on --host 127.0.0.1 --port {port}: ");
    assert!(log.starts_with(&said), "{log}");
}

#[test]
fn a_signal_ends_an_idle_server_with_code_0() {
    for signal in ["-TERM", "-INT"] {
        let (child, line) = start(&["--model", "oracle", "--port", "0"]);
        assert!(line.starts_with("listening on http://127.0.0.1:"), "{line}");
        let (code, log) = end(child, signal);
        assert_eq!(code, Some(0), "{log}");
        assert!(
            log.contains("no GPU is used: the GPU pool is plain memory"),
            "{log}"
        );
        assert!(log.contains("every request was finished"), "{log}");
    }
}

/// Sends one body; the connection ends with the answer.
fn post(address: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Not even at the most talkative level.
#[test]
fn i16_nothing_that_a_client_says_is_logged() {
    let args = ["--model", "oracle", "--port", "0", "--log", "trace"];
    let (child, line) = start(&args);
    let address = line.strip_prefix("listening on http://").unwrap();
    let body = r#"{"prompt": "xyzzy-prompt", "stop": "xyzzy-stop", "user": "xyzzy-user"}"#;
    let answer = post(address, body);
    assert!(answer.starts_with("HTTP/1.0 200 OK"), "{answer}");
    for wrong in [
        r#"{"prompt": "xyzzy-broken"#,
        r#"{"prompt": "xyzzy-long", "max_tokens": 9999}"#,
    ] {
        assert!(post(address, wrong).starts_with("HTTP/1.0 400"));
    }
    let (_, json) = answer.split_once("\r\n\r\n").unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    let text = json["choices"][0]["text"].as_str().unwrap();
    let id = json["id"].as_str().unwrap();
    let (code, log) = end(child, "-TERM");
    assert_eq!(code, Some(0));
    assert!(log.contains("INFO"), "the log is on");
    for said in ["xyzzy", text.trim(), id] {
        assert!(!log.contains(said), "{said} is in the log");
    }
}
