//! From chat messages to the text that a model continues.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Deserialize;

use crate::gguf::{GgufError, GgufFile};
use crate::tokenizer::Tokenizer;

const TEMPLATE_KEY: &str = "tokenizer.chat_template";
const NAME: &str = "chat";
/// Instructions that a template may take; a message needs some tens of them.
const FUEL: u64 = 10_000_000;

/// ChatML, for models that bring no template.
const CHATML: &str = "\
{% for message in messages %}\
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Role, colon and text, one message a line.
const PLAIN: &str = "\
{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";

/// One message, as the OpenAI API has it; fields that templates don't use are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    #[serde(default)]
    pub content: Option<ChatContent>,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(ChatContent::Text(text.into())),
        }
    }
}

/// What was said, in one of the two forms of the OpenAI API.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(
    untagged,
    expecting = "content must be a text or a list of content parts"
)]
pub enum ChatContent {
    /// A text.
    Text(String),
    /// Parts; their texts are joined with line ends.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ContentPart {
    /// `text`; everything else is refused.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a part of this type.
    #[serde(default)]
    pub text: Option<String>,
}

/// Whether the text ends with the start of the model's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// The model is to answer.
    Add,
    /// The text ends with the last message.
    Omit,
}

/// Why messages can't be made a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// There is nothing to answer.
    #[error("messages is empty, must have at least one message")]
    NoMessages,
    /// A role that chats don't have.
    #[error(
        "messages[{message}].role is {role:?}, must be one of system, developer, user, \
         assistant, tool"
    )]
    Role {
        /// Which message, counted from 0.
        message: usize,
        /// Its role.
        role: String,
    },
    /// A message says nothing.
    #[error("messages[{message}].content is missing")]
    NoContent {
        /// Which message, counted from 0.
        message: usize,
    },
    /// A part that isn't text.
    #[error("messages[{message}].content[{part}].type is {kind:?}, must be \"text\"")]
    PartType {
        /// Which message, counted from 0.
        message: usize,
        /// Which part, counted from 0.
        part: usize,
        /// Its type.
        kind: String,
    },
    /// A text part without text.
    #[error("messages[{message}].content[{part}].text is missing")]
    NoPartText {
        /// Which message, counted from 0.
        message: usize,
        /// Which part, counted from 0.
        part: usize,
    },
    /// The model's template doesn't take these messages, in its own words.
    #[error("the model's chat template refuses the messages: {what}")]
    Refused {
        /// What the template says.
        what: String,
    },
    /// The template failed.
    #[error("the chat template failed: {what}")]
    Failed {
        /// What the template engine says.
        what: String,
    },
}

/// Why a template can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The file says something else than a text where the template should be.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The template isn't one.
    #[error("the chat template can't be parsed: {what}")]
    Syntax {
        /// What the template engine says.
        what: String,
    },
}

/// A chat template, ready to use.
///
/// It sees `messages` (each with `role` and `content`, a text), `add_generation_prompt`,
/// `bos_token` and `eos_token`, may call `raise_exception`, and may use the methods of Python's
/// texts, lists and dictionaries. Blocks are trimmed as Hugging Face's libraries do it.
/// A template comes with a model and is not trusted: what it may compute is bounded.
///
/// The role `developer` is given to the template as `system`, which is what it means to models
/// that were made before it.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("bos_token", &self.bos_token)
            .field("eos_token", &self.eos_token)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template that a file brings, or ChatML if it brings none.
    ///
    /// # Errors
    ///
    /// [`TemplateError`] if there is one that isn't a template.
    pub fn from_gguf(file: &GgufFile, tokenizer: &dyn Tokenizer) -> Result<Self, TemplateError> {
        let source = file.metadata_string(TEMPLATE_KEY)?.unwrap_or(CHATML);
        let name = |token| tokenizer.token_text(token).text;
        let [bos, eos] = [tokenizer.bos(), tokenizer.eos()].map(|token| token.map(name));
        Self::new(source, bos.unwrap_or_default(), eos.unwrap_or_default())
    }

    /// A template from its source, with the names of the tokens that start and end a text.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] says where it is wrong.
    pub fn new(
        source: &str,
        bos_token: impl Into<String>,
        eos_token: impl Into<String>,
    ) -> Result<Self, TemplateError> {
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| TemplateError::Syntax {
                what: error.to_string(),
            })?;
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| TemplateError::Syntax {
                what: error.to_string(),
            })?;
        Ok(Self {
            environment,
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        })
    }

    /// ChatML.
    #[must_use]
    pub fn chatml() -> Self {
        Self::new(CHATML, "", "").expect("the built-in template is one")
    }

    /// Role, colon and text, one message a line: for the hash oracle, which reads anything.
    #[must_use]
    pub fn plain() -> Self {
        Self::new(PLAIN, "", "").expect("the built-in template is one")
    }

    /// Makes a text of the messages.
    ///
    /// The text holds the names of special tokens: it is to be cut with
    /// [`SpecialTokens::Parse`](crate::tokenizer::SpecialTokens::Parse), and nothing is to be
    /// added to it. As with other servers, such names in a message's content are special too.
    ///
    /// # Errors
    ///
    /// [`ChatError`] names the message that is wrong, or says what the template says.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        generation_prompt: GenerationPrompt,
    ) -> Result<String, ChatError> {
        if messages.is_empty() {
            return Err(ChatError::NoMessages);
        }
        let messages: Vec<_> = messages
            .iter()
            .enumerate()
            .map(|(i, m)| said(i, m))
            .collect::<Result<_, _>>()?;
        let context = context! {
            messages,
            add_generation_prompt => generation_prompt == GenerationPrompt::Add,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
        };
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| failed(&error))?;
        template.render(context).map_err(|error| failed(&error))
    }
}

/// A message as templates see it.
fn said(index: usize, message: &ChatMessage) -> Result<Value, ChatError> {
    let role = match message.role.as_str() {
        "developer" => "system",
        role @ ("system" | "user" | "assistant" | "tool") => role,
        _ => {
            return Err(ChatError::Role {
                message: index,
                role: message.role.clone(),
            });
        }
    };
    let content = match &message.content {
        None => return Err(ChatError::NoContent { message: index }),
        Some(ChatContent::Text(text)) => text.clone(),
        Some(ChatContent::Parts(parts)) => {
            let texts = parts
                .iter()
                .enumerate()
                .map(|(part, content)| match content {
                    ContentPart {
                        kind,
                        text: Some(text),
                    } if kind == "text" => Ok(text.as_str()),
                    ContentPart { kind, text: None } if kind == "text" => {
                        Err(ChatError::NoPartText {
                            message: index,
                            part,
                        })
                    }
                    ContentPart { kind, .. } => Err(ChatError::PartType {
                        message: index,
                        part,
                        kind: kind.clone(),
                    }),
                });
            texts.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
    };
    Ok(context! { role, content })
}

/// What a template says with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(what: String) -> Result<(), Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(what)))
}

/// Tells a template's own words from its failures, which may lie several errors deep.
fn failed(error: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(source) = cause {
        if let Some(Raised(what)) = source.downcast_ref() {
            return ChatError::Refused { what: what.clone() };
        }
        cause = source.source();
    }
    ChatError::Failed {
        what: error.to_string(),
    }
}
