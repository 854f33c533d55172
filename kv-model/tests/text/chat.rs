//! Chat templates: the built-in ones, a file's own, and what they refuse.

use kv_model::chat::{
    ChatContent, ChatError, ChatMessage, ChatTemplate, ContentPart, GenerationPrompt,
};
use kv_model::tokenizer::OracleTokenizer;

use crate::fixture::{Value, gguf};

fn conversation() -> [ChatMessage; 3] {
    [
        ChatMessage::new("system", "Be brief."),
        ChatMessage::new("user", "Hi {{ 1 + 1 }} 😀"),
        ChatMessage::new("assistant", ""),
    ]
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<String, ChatError> {
    ChatTemplate::new(source, "<s>", "</s>")
        .unwrap()
        .render(messages, GenerationPrompt::Add)
}

#[test]
fn built_in_templates_render() {
    let chatml = ChatTemplate::chatml();
    let text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ 1 + 1 }} 😀\
                <|im_end|>\n<|im_start|>assistant\n<|im_end|>\n";
    assert_eq!(
        chatml
            .render(&conversation(), GenerationPrompt::Omit)
            .unwrap(),
        text
    );
    let with_prompt = format!("{text}<|im_start|>assistant\n");
    assert_eq!(
        chatml
            .render(&conversation(), GenerationPrompt::Add)
            .unwrap(),
        with_prompt
    );
    let plain = ChatTemplate::plain()
        .render(&conversation(), GenerationPrompt::Add)
        .unwrap();
    assert_eq!(
        plain,
        "system: Be brief.\nuser: Hi {{ 1 + 1 }} 😀\nassistant: \nassistant:"
    );
}

#[test]
fn a_files_template_is_used_and_chatml_stands_in() {
    let tokenizer = OracleTokenizer::new(0);
    let own = gguf(&[(
        "tokenizer.chat_template",
        Value::text("{{ messages|length }}{{ eos_token }}"),
    )]);
    let template = ChatTemplate::from_gguf(&own, &tokenizer).unwrap();
    assert_eq!(
        template
            .render(&conversation(), GenerationPrompt::Add)
            .unwrap(),
        "3<end>"
    );
    let none = gguf(&[]);
    let template = ChatTemplate::from_gguf(&none, &tokenizer).unwrap();
    let rendered = template
        .render(&conversation(), GenerationPrompt::Omit)
        .unwrap();
    assert!(rendered.starts_with("<|im_start|>system\nBe brief."));
    let broken = gguf(&[("tokenizer.chat_template", Value::text("{% for %}"))]);
    let error = ChatTemplate::from_gguf(&broken, &tokenizer).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the chat template can't be parsed"),
        "{error}"
    );
    let number = gguf(&[("tokenizer.chat_template", Value::Uint(3))]);
    let error = ChatTemplate::from_gguf(&number, &tokenizer).unwrap_err();
    assert!(
        error.to_string().contains("tokenizer.chat_template"),
        "{error}"
    );
}

/// What templates of well-known models use: namespaces, Python methods, slices, trimmed blocks.
#[test]
fn templates_written_for_python_render() {
    let source = "{{- bos_token }}
{%- set ns = namespace(system='none') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- endif %}
{% if tools is defined and tools %}never{% endif %}
[{{ ns.system.upper() }}]
{% for message in messages %}
    {% if message['role'].startswith('assist') %}
        {%- continue %}
    {% endif %}
{{ loop.index0 }}:{{ message.content | trim }}
{% endfor %}
{{- 'go' if add_generation_prompt else 'stay' }}";
    let mut messages = conversation();
    messages[0] = ChatMessage::new("system", "  Be brief. ");
    assert_eq!(
        render(source, &messages).unwrap(),
        "<s>[BE BRIEF.]\n0:Hi {{ 1 + 1 }} 😀\ngo"
    );
}

#[test]
fn parts_are_joined_and_other_kinds_are_refused() {
    let part = |kind: &str, text: Option<&str>| ContentPart {
        kind: kind.to_owned(),
        text: text.map(str::to_owned),
    };
    let message = |parts| ChatMessage {
        role: "user".to_owned(),
        content: Some(ChatContent::Parts(parts)),
    };
    let source = "{{ messages[0].content }}";
    let joined = message(vec![part("text", Some("a")), part("text", Some("b"))]);
    assert_eq!(render(source, &[joined]).unwrap(), "a\nb");
    assert_eq!(render(source, &[message(Vec::new())]).unwrap(), "");
    let image = message(vec![part("text", Some("a")), part("image_url", None)]);
    let error = render(source, &[image]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "messages[0].content[1].type is \"image_url\", must be \"text\""
    );
    let error = render(source, &[message(vec![part("text", None)])]).unwrap_err();
    assert_eq!(
        error,
        ChatError::NoPartText {
            message: 0,
            part: 0
        }
    );
}

#[test]
fn wrong_messages_are_named() {
    let source = "{{ messages[0].role }}";
    assert_eq!(render(source, &[]), Err(ChatError::NoMessages));
    let messages = [
        ChatMessage::new("user", "a"),
        ChatMessage::new("robot", "b"),
    ];
    let error = render(source, &messages).unwrap_err();
    assert_eq!(
        error,
        ChatError::Role {
            message: 1,
            role: "robot".to_owned()
        }
    );
    let silent = ChatMessage {
        role: "user".to_owned(),
        content: None,
    };
    assert_eq!(
        render(source, &[silent]),
        Err(ChatError::NoContent { message: 0 })
    );
    let developer = [ChatMessage::new("developer", "a")];
    assert_eq!(render(source, &developer).unwrap(), "system");
}

#[test]
fn a_templates_own_refusal_is_told_from_its_failure() {
    let messages = [ChatMessage::new("user", "a")];
    let raised = "{% if true %}{{ raise_exception('roles must alternate') }}{% endif %}";
    let what = "roles must alternate".to_owned();
    assert_eq!(render(raised, &messages), Err(ChatError::Refused { what }));
    let in_macro = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
    assert_eq!(
        render(in_macro, &messages),
        Err(ChatError::Refused {
            what: "no".to_owned()
        })
    );
    let failed = render("{{ nothing.here.at_all }}", &messages).unwrap_err();
    assert!(matches!(failed, ChatError::Failed { .. }), "{failed}");
}

/// A template without end ends, and one that calls itself does too.
#[test]
fn a_hostile_template_is_bounded() {
    let messages = [ChatMessage::new("user", "a")];
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
                   {% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(
        render(endless, &messages),
        Err(ChatError::Failed { .. })
    ));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(matches!(
        render(recursive, &messages),
        Err(ChatError::Failed { .. })
    ));
}

#[test]
fn a_long_conversation_renders() {
    let long = "x".repeat(1 << 20);
    let messages: Vec<_> = (0..2000).map(|_| ChatMessage::new("user", "y")).collect();
    let text = ChatTemplate::chatml()
        .render(&messages, GenerationPrompt::Add)
        .unwrap();
    assert_eq!(text.matches("<|im_start|>").count(), 2001);
    let messages = [ChatMessage::new("user", long)];
    let text = ChatTemplate::chatml()
        .render(&messages, GenerationPrompt::Add)
        .unwrap();
    assert!(text.len() > 1 << 20);
}
