//! What good requests are answered, whole and as streams.

use serde_json::{Value, json};

use crate::client::{Client, assemble};
use crate::setup::Fixture;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(max_tokens: u32, n: u32) -> Value {
    let messages = json!([{ "role": "user", "content": "Say something." }]);
    json!({ "messages": messages, "max_tokens": max_tokens, "n": n })
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else {
        panic!("an object")
    };
    body.as_object_mut().unwrap().extend(more);
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_the_same_whole_and_as_a_stream() {
    let server = Fixture::start(&[]).await;
    let body = chat(12, 2);
    let whole = server.client.json(CHAT, &body).await.ok();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "oracle");
    assert!(
        whole["created"].as_u64().unwrap() > 1_700_000_000,
        "seconds since 1970"
    );
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 24, "12 tokens of each choice");
    assert_eq!(
        usage["prompt_tokens"],
        "user: Say something.\nassistant:".len(),
        "counted once"
    );
    assert_eq!(
        usage["total_tokens"],
        24 + usage["prompt_tokens"].as_u64().unwrap()
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);

    let body = with(body, json!({ "stream_options": { "include_usage": true } }));
    let events = server.client.stream(CHAT, &body).await.rest().await;
    for (index, event) in events.iter().take(2).enumerate() {
        let choice = &event["choices"][0];
        assert_eq!(choice["index"], index);
        assert_eq!(
            choice["delta"],
            json!({ "role": "assistant", "content": "" })
        );
    }
    assert!(
        events
            .iter()
            .all(|event| event["object"] == "chat.completion.chunk")
    );
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], *usage);
    assert!(others.iter().all(|event| event["usage"].is_null()));
    let choices = assemble(&events, 2);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(
            whole["choices"][index]["message"]["content"],
            choice.text.as_str()
        );
        assert_eq!(whole["choices"][index]["finish_reason"], "length");
        assert_eq!(choice.finish.as_deref(), Some("length"));
    }
    assert_ne!(choices[0].text, choices[1].text);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_of_all_forms_run_in_one_call() {
    let server = Fixture::start(&[]).await;
    let one = async |prompt: Value| {
        let answer = server
            .client
            .json(TEXT, &json!({ "prompt": prompt, "n": 2 }))
            .await
            .ok();
        assert_eq!(
            answer["usage"]["completion_tokens"],
            2 * 16,
            "16 tokens by default"
        );
        [0, 1].map(|index| answer["choices"][index]["text"].clone())
    };
    let a = one(json!("first")).await;
    let b = one(json!([98, 99])).await;
    assert_eq!(b, one(json!("bc")).await, "a byte is a token");
    for prompt in [
        json!(["first", "bc"]),
        json!([[102, 105, 114, 115, 116], [98, 99]]),
    ] {
        let body = json!({ "prompt": prompt, "n": 2 });
        let whole = server.client.json(TEXT, &body).await.ok();
        assert_eq!(whole["object"], "text_completion");
        assert_eq!(whole["usage"]["prompt_tokens"], 7);
        let events = server.client.stream(TEXT, &body).await.rest().await;
        let streamed = assemble(&events, 4);
        for (index, text) in a.iter().chain(&b).enumerate() {
            assert_eq!(whole["choices"][index]["index"], index);
            assert_eq!(&whole["choices"][index]["text"], text);
            assert_eq!(streamed[index].text.as_str(), text.as_str().unwrap());
        }
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echo_starts_with_the_prompt() {
    let server = Fixture::start(&[]).await;
    let body = json!({ "prompt": ["né", "b"], "n": 2, "max_tokens": 3 });
    let plain = server.client.json(TEXT, &body).await.ok();
    let body = with(body, json!({ "echo": true }));
    let echoed = server.client.json(TEXT, &body).await.ok();
    let streamed = assemble(&server.client.stream(TEXT, &body).await.rest().await, 4);
    for (index, prompt) in ["né", "né", "b", "b"].into_iter().enumerate() {
        let text = plain["choices"][index]["text"].as_str().unwrap();
        let expected = format!("{prompt}{text}");
        assert_eq!(echoed["choices"][index]["text"], expected.as_str());
        assert_eq!(streamed[index].text, expected);
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_a_choice_and_is_not_shown() {
    let server = Fixture::start(&[]).await;
    let body = json!({ "prompt": "stop me", "max_tokens": 20 });
    let whole = server.client.json(TEXT, &body).await.ok();
    let text = whole["choices"][0]["text"].as_str().unwrap();
    // From inside a word to inside the next one.
    let middle = text.match_indices(' ').nth(8).unwrap().0;
    let stop = &text[middle - 2..middle + 3];
    let expected = &text[..text.find(stop).unwrap()];
    for stop in [json!(stop), json!(["no such text", stop, "x!", "y!", "z!"])] {
        let body = with(body.clone(), json!({ "stop": stop }));
        let stopped = server.client.json(TEXT, &body).await.ok();
        assert_eq!(stopped["choices"][0]["text"], expected);
        assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
        let tokens = stopped["usage"]["completion_tokens"].as_u64().unwrap();
        assert!(
            tokens < 12,
            "nothing is computed beyond the stop string: {tokens} tokens"
        );
        let streamed = assemble(&server.client.stream(TEXT, &body).await.rest().await, 1);
        assert_eq!(streamed[0].text, expected);
        assert_eq!(streamed[0].finish.as_deref(), Some("stop"));
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_come_in_the_style_of_the_endpoint() {
    let server = Fixture::start(&[]).await;
    let body = json!({ "prompt": "p", "max_tokens": 5, "logprobs": 2 });
    let whole = server.client.json(TEXT, &body).await.ok();
    let choice = &whole["choices"][0];
    let logprobs = &choice["logprobs"];
    let tokens: Vec<_> = logprobs["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_str().unwrap())
        .collect();
    assert_eq!(tokens.concat(), choice["text"].as_str().unwrap());
    assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), 5);
    assert_eq!(logprobs["top_logprobs"][4].as_object().unwrap().len(), 2);
    let offset = logprobs["text_offset"][3].as_u64().unwrap();
    assert_eq!(
        usize::try_from(offset).unwrap(),
        tokens[..3].concat().chars().count()
    );
    let events = server.client.stream(TEXT, &body).await.rest().await;
    let streamed: Vec<_> = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array())
        .flatten()
        .collect();
    assert_eq!(
        streamed,
        logprobs["text_offset"]
            .as_array()
            .unwrap()
            .iter()
            .collect::<Vec<_>>()
    );

    let body = with(chat(5, 1), json!({ "logprobs": true, "top_logprobs": 1 }));
    let whole = server.client.json(CHAT, &body).await.ok();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(content.len(), 5);
    assert!(
        content
            .iter()
            .all(|token| token["logprob"].as_f64().unwrap() <= 0.0)
    );
    assert!(
        content
            .iter()
            .all(|token| token["top_logprobs"].as_array().unwrap().len() == 1)
    );
    let plain = server.client.json(CHAT, &chat(5, 1)).await.ok();
    assert!(plain["choices"][0]["logprobs"].is_null());
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_can_come_with_every_chunk() {
    let server = Fixture::start(&[]).await;
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let body = with(chat(4, 1), json!({ "stream_options": options }));
    let events = server.client.stream(CHAT, &body).await.rest().await;
    let counts: Vec<_> = events
        .iter()
        .map(|e| e["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(counts.first(), Some(&0));
    assert_eq!(counts.last(), Some(&4));
    assert!(counts.is_sorted(), "{counts:?}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_without_a_limit_ends_with_the_context_or_the_pool() {
    for (flags, expected) in [
        (["--max-seq-len", "64", "--gpu-blocks", "100"], 64),
        (["--max-seq-len", "1000", "--gpu-blocks", "6"], 6 * 16),
    ] {
        let server = Fixture::start(&flags).await;
        let body = json!({ "messages": [{ "role": "user", "content": "go" }] });
        let whole = server.client.json(CHAT, &body).await.ok();
        assert_eq!(whole["usage"]["total_tokens"], expected);
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_the_ids_and_the_numbers_can_be_asked_for() {
    let server = Fixture::start(&["--max-seq-len", "99"]).await;
    let Client { address } = server.client;
    let models = server.client.get("/v1/models").await.ok();
    assert_eq!(models["data"][0]["id"], "oracle");
    assert_eq!(models["data"][0]["max_model_len"], 99);
    assert_eq!(
        server.client.get("/v1/models/oracle").await.ok()["object"],
        "model"
    );
    assert_eq!(server.client.get("/health").await.ok()["status"], "healthy");
    let stats = server.client.get("/admin/stats").await.ok();
    assert_eq!(stats["kv_swap"].as_object().unwrap().len(), 22);
    assert_eq!(stats["kv_swap"]["mode"], "sync");
    assert_eq!(
        stats["kv_swap"]["host_capacity_bytes"], 0,
        "i15: sync mode has no pool"
    );
    let request = hyper::Request::get("/health")
        .header("host", address.to_string())
        .header("x-request-id", "my-id-1")
        .body(http_body_util::Full::default())
        .unwrap();
    assert_eq!(
        server.client.raw(request).await.headers["x-request-id"],
        "my-id-1"
    );
    server.end().await;
}
