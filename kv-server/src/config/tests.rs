//! Order of the layers, and the answer to each wrong value.

use expect_test::expect;

use super::*;

fn load(args: &[&str], environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let args = std::iter::once("kv-server")
        .chain(args.iter().copied())
        .map(str::to_owned);
    let environment = environment
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    match Config::load(args, environment)? {
        Invocation::Serve(config) => Ok(*config),
        Invocation::Print(text) => panic!("printed {text}"),
    }
}

fn refusal(args: &[&str], environment: &[(&str, &str)]) -> String {
    load(args, environment)
        .expect_err("must be refused")
        .to_string()
}

/// A file that goes away with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-server-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = load(&["--model", "oracle"], &[]).unwrap();
    assert_eq!(config.model, ModelChoice::Oracle);
    assert_eq!((config.host.as_str(), config.port), ("127.0.0.1", 8000));
    assert_eq!(config.block_tokens, 16);
    assert_eq!(config.engine.max_batch_size, 32);
    assert_eq!(config.engine.max_tokens_per_step, 2048);
    assert_eq!(config.engine.max_n, 16);
    assert_eq!(config.engine.max_retries, 2);
    assert_eq!(config.engine.victim, VictimPolicy::Newest);
    assert_eq!(config.swap.mode, SwapMode::Sync);
    assert_eq!(config.swap.host_bytes, 512 << 20);
    assert_eq!(config.swap.inflight_bytes_max, 256 << 20);
    assert_eq!(config.swap.checksum, Checksum::Off);
    assert_eq!(config.swap.fallback, Fallback::Sync);
    assert_eq!(config.shutdown_grace, Duration::from_secs(30));
    assert_eq!(config.max_seq_len, None);
}

#[test]
fn flags_beat_the_environment_beats_the_file_beats_the_defaults() {
    let file = File::new(
        "order.toml",
        "model = \"oracle\"\ngpu_blocks = 11\nblock-tokens = 11\nmax_batch_size = 11\n\
         kv_swap_checksum = true\nkv_swap_host_memory_bytes = \"2GiB\"\n",
    );
    let flags = [
        "--config",
        file.path(),
        "--gpu-blocks",
        "33",
        "--kv-swap-mode=async",
    ];
    let environment = [
        ("KV_SERVER_GPU_BLOCKS", "22"),
        ("KV_SERVER_BLOCK_TOKENS", "22"),
    ];
    let config = load(&flags, &environment).unwrap();
    assert_eq!(config.gpu_blocks, 33, "the flag wins");
    assert_eq!(config.block_tokens, 22, "the environment beats the file");
    assert_eq!(
        config.engine.max_batch_size, 11,
        "the file beats the default"
    );
    assert_eq!(config.engine.max_n, 16, "the default stays");
    assert_eq!(config.swap.checksum, Checksum::On);
    assert_eq!(config.swap.host_bytes, 2 << 30);
    assert_eq!(config.swap.mode, SwapMode::Async);
    let off = [&flags[..], &["--kv-swap-checksum=false"]].concat();
    assert_eq!(load(&off, &[]).unwrap().swap.checksum, Checksum::Off);
    let named = load(&[], &[("KV_SERVER_CONFIG", file.path())]).unwrap();
    assert_eq!(named.gpu_blocks, 11, "the environment can name the file");
}

#[test]
fn sizes_and_times_have_units() {
    let read = |size| {
        let args = ["--model", "oracle", "--kv-swap-host-memory-bytes", size];
        load(&args, &[]).unwrap().swap.host_bytes
    };
    assert_eq!(read("536870912"), 512 << 20);
    assert_eq!(read("1GiB"), 1 << 30);
    assert_eq!(read("1 GB"), 1_000_000_000);
    let read = |time| {
        load(&["--model", "oracle", "--shutdown-grace", time], &[])
            .unwrap()
            .shutdown_grace
    };
    assert_eq!(read("2"), Duration::from_secs(2));
    assert_eq!(read("2s"), Duration::from_secs(2));
    assert_eq!(read("1500ms"), Duration::from_millis(1500));
}

/// Each with one thing wrong; the first lacks the model.
const WRONG: &[&[&str]] = &[
    &[],
    &["--port", "70000"],
    &["--host", ""],
    &["--gpu-blocks", "0"],
    &["--gpu-blocks", "-1"],
    &["--gpu-blocks", "many"],
    &["--block-tokens", "0"],
    &["--max-batch-size", "0"],
    &["--max-tokens-per-step", "0"],
    &["--max-seq-len", "0"],
    &["--prefill-chunk", "0"],
    &["--max-waiting-requests", "-1"],
    &["--max-n", "0"],
    &["--kv-swap-mode", "fast"],
    &["--kv-swap-host-memory-bytes", "0"],
    &["--kv-swap-host-memory-bytes", "2 apples"],
    &["--kv-swap-max-inflight-bytes", "0"],
    &["--kv-swap-max-inflight-bytes", "1GiB"],
    &["--kv-swap-checksum=maybe"],
    &["--kv-swap-max-retries", "-2"],
    &["--no-kv-swap-sync-fallback=1"],
    &["--victim", "random"],
    &["--shutdown-grace", "soon"],
    &["--threads", "0"],
    &["--max-body-bytes", "12"],
    &["--log", "=,="],
    &["--oracle-layers", "0"],
    &["--oracle-token-bytes", "1"],
    &["--host-link-bandwidth", "0"],
    &["--host-link-delay-ms", "-3"],
    &["--gpu-blokcs", "3"],
    &["surplus"],
    &["--gpu-blocks"],
];

#[test]
fn wrong_values_are_named_with_what_is_allowed() {
    let said: Vec<_> = WRONG
        .iter()
        .map(|args| {
            let model: &[&str] = if args.is_empty() {
                &[]
            } else {
                &["--model", "oracle"]
            };
            let said = refusal(&[model, args].concat(), &[]);
            said.split("\n\n").next().unwrap().to_owned()
        })
        .collect();
    expect![[r#"
        --model is "" (the default), must be a path of a GGUF file, or `oracle`
        --port is "70000", must be a port number from 0 to 65535
        --host is "", must be an IP address or a host name
        --gpu-blocks is "0", must be a whole number from 1 to 4294967295
        --gpu-blocks is "-1", must be a whole number from 1 to 4294967295
        --gpu-blocks is "many", must be a whole number from 1 to 4294967295
        --block-tokens is "0", must be a whole number from 1 to 4096
        --max-batch-size is "0", must be a whole number from 1 to 4294967295
        --max-tokens-per-step is "0", must be a whole number from 1 to 4294967295
        --max-seq-len is "0", must be a whole number from 1 to 4294967295
        --prefill-chunk is "0", must be a whole number from 1 to 4294967295
        --max-waiting-requests is "-1", must be a whole number from 0 to 4294967295
        --max-n is "0", must be a whole number from 1 to 1024
        --kv-swap-mode is "fast", must be one of off, sync, async
        --kv-swap-host-memory-bytes is "0", must be a size above 0, such as `512MiB`, `2GiB` or plain bytes
        --kv-swap-host-memory-bytes is "2 apples", must be a size above 0, such as `512MiB`, `2GiB` or plain bytes
        --kv-swap-max-inflight-bytes is "0", must be a size above 0, such as `512MiB`, `2GiB` or plain bytes
        --kv-swap-max-inflight-bytes is "1GiB", must be at most --kv-swap-host-memory-bytes, which is 512MiB
        --kv-swap-checksum is "maybe", must be true or false
        --kv-swap-max-retries is "-2", must be a whole number from 0 to 4294967295
        --no-kv-swap-sync-fallback is "1", must be true or false
        --victim is "random", must be one of newest, oldest, cost
        --shutdown-grace is "soon", must be a time of at most 24 hours, such as `30s`, `1500ms` or `30` (seconds)
        --threads is "0", must be a whole number from 1 to 1024
        --max-body-bytes is "12", must be a size from 1KiB to 1GiB, such as `4MiB`
        --log is "=,=", must be a filter such as `info` or `warn,kv_server=debug`
        --oracle-layers is "0", must be a whole number from 1 to 1024
        --oracle-token-bytes is "1", must be a whole number from 8 to 1048576
        --host-link-bandwidth is "0", must be bytes per second above 0, such as `100MiB`
        --host-link-delay-ms is "-3", must be a whole number of milliseconds from 0 to 600000
        unexpected argument '--gpu-blokcs' found
        unexpected argument 'surplus' found
        a value is required for '--gpu-blocks <N>' but none was supplied"#]].assert_eq(&said.join("\n"));
}

#[test]
fn wrong_values_name_the_layer_they_come_from() {
    let typo = File::new(
        "typo.toml",
        "model = \"oracle\"\nkv_swap_modus = \"async\"\n",
    );
    let wrong = File::new("wrong.toml", "model = \"oracle\"\ngpu-blocks = 0\n");
    let nested = File::new("nested.toml", "model = \"oracle\"\n[victim]\nnewest = 1\n");
    let broken = File::new("broken.toml", "model = oracle\n");
    let mut said = vec![
        refusal(&["--model", "oracle"], &[("KV_SERVER_PORT", "http")]),
        refusal(&["--model", "oracle"], &[("KV_SERVER_PROT", "80")]),
    ];
    for file in [&typo, &wrong, &nested, &broken] {
        said.push(refusal(&["--config", file.path()], &[]).replace(file.path(), "FILE"));
    }
    said.push(refusal(&["--config", "/nowhere/kv.toml"], &[]));
    expect![[r#"
        --port is "http" (from KV_SERVER_PORT), must be a port number from 0 to 65535
        "prot" is not a setting (from KV_SERVER_PROT); known are model, host, port, gpu-blocks, block-tokens, max-batch-size, max-tokens-per-step, max-seq-len, prefill-chunk, max-waiting-requests, max-n, kv-swap-mode, kv-swap-host-memory-bytes, kv-swap-max-inflight-bytes, kv-swap-checksum, kv-swap-max-retries, kv-swap-deadline-ms, kv-swap-max-lost-permille, no-kv-swap-sync-fallback, victim, lookahead-tokens, resume-slack-tokens, watermark-permille, slice-ms, max-swaps, priority-aging-ms, shutdown-grace, threads, max-body-bytes, log, oracle-layers, oracle-token-bytes, host-link-bandwidth, host-link-delay-ms, fault-injection, fault-copy-delay-ms, fault-fail-copy, fault-lose-copy, fault-repeat-completion, fault-flip-host-bit, fault-step-error, fault-force-swap-every
        "kv_swap_modus" is not a setting (from FILE); similar are kv-swap-mode, kv-swap-host-memory-bytes, kv-swap-max-inflight-bytes, kv-swap-checksum, kv-swap-max-retries, kv-swap-deadline-ms, kv-swap-max-lost-permille, no-kv-swap-sync-fallback, fault-force-swap-every
        --gpu-blocks is "0" (from FILE), must be a whole number from 1 to 4294967295
        --victim is "table" (from FILE), must be a string, a number or a boolean
        --config "FILE" is not valid TOML: TOML parse error at line 1, column 9
          |
        1 | model = oracle
          |         ^^^^^^
        string values must be quoted, expected literal string
        --config "/nowhere/kv.toml" can't be read"#]].assert_eq(&said.join("\n"));
}

#[test]
fn help_is_printed_and_not_an_error() {
    let args = ["kv-server", "--help"].map(str::to_owned);
    let Ok(Invocation::Print(text)) = Config::load(args, []) else {
        panic!("help")
    };
    for setting in SETTINGS {
        assert!(
            text.contains(&format!("--{}", setting.name)),
            "{} is missing",
            setting.name
        );
    }
}
