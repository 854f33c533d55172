//! The tokenizer that a GGUF file describes in its metadata.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kv_scheduler::TokenId;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, Tokenizer as Library};

use super::cut::Cut;
use super::table::TokenTable;
use super::{EncodeError, SpecialTokens, Tokenizer, TokenizerError, byte_level, sentence_piece};
use crate::gguf::GgufFile;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const SCORES: &str = "tokenizer.ggml.scores";

/// `tokenizer.ggml.token_type` of what stands for text that can't be said.
const UNKNOWN: i64 = 2;
/// `tokenizer.ggml.token_type` of a mark for the model.
const CONTROL: i64 = 3;
/// `tokenizer.ggml.token_type` of a piece of text that is never cut.
const USER_DEFINED: i64 = 4;
/// `tokenizer.ggml.token_type` of a byte.
const BYTE: i64 = 6;

/// Marks that end a turn or a text, whatever the file says is its end.
const ENDS: [&str; 8] = [
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<EOT>",
];

/// How a vocabulary is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ByteLevel(Cut),
    SentencePiece {
        /// A space is put before each text, and before what follows a special token.
        prefix_space: bool,
    },
}

impl Kind {
    fn new(file: &GgufFile) -> Result<Self, TokenizerError> {
        let model = file
            .metadata_string(MODEL)?
            .ok_or_else(|| file.missing_metadata(MODEL))?;
        match model {
            "gpt2" => Ok(Self::ByteLevel(cut(file)?)),
            "llama" => {
                let prefix_space = file.metadata_bool(ADD_SPACE)?.unwrap_or(true);
                Ok(Self::SentencePiece { prefix_space })
            }
            _ => Err(TokenizerError::Unsupported {
                file: file.path().to_owned(),
                key: MODEL,
                found: model.to_owned(),
                supported: "gpt2, llama",
            }),
        }
    }

    /// Whether texts start with the start token if the file says nothing about it.
    const fn adds_bos(self) -> bool {
        match self {
            Self::ByteLevel(cut) => cut.adds_bos(),
            Self::SentencePiece { .. } => true,
        }
    }

    fn decode(self, token: &str, token_type: i64) -> Vec<u8> {
        match (token_type, self) {
            (CONTROL | USER_DEFINED | UNKNOWN, _) => token.as_bytes().to_vec(),
            (_, Self::ByteLevel(_)) => byte_level::decode(token).collect(),
            (BYTE, Self::SentencePiece { .. }) => sentence_piece::decode_byte(token),
            (_, Self::SentencePiece { .. }) => sentence_piece::decode(token),
        }
    }
}

/// A tokenizer of one of the kinds that Llama-family models have: byte-level BPE
/// (`tokenizer.ggml.model` = `gpt2`) with some known ways of cutting text, or SentencePiece's BPE
/// with byte fallback (`llama`).
pub struct GgufTokenizer {
    file: PathBuf,
    kind: Kind,
    parsing: Library,
    /// As `parsing`, but special tokens are text; made when first needed.
    literal: OnceLock<Box<Library>>,
    table: TokenTable,
    bos: Option<TokenId>,
    adds_bos: bool,
    eos: Option<TokenId>,
    stop_tokens: Vec<TokenId>,
}

impl fmt::Debug for GgufTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufTokenizer")
            .field("file", &self.file)
            .field("vocab_size", &self.table.len())
            .finish_non_exhaustive()
    }
}

impl GgufTokenizer {
    /// Builds the tokenizer of a file.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`] names the key that is missing, of an unknown kind, or inconsistent.
    pub fn new(file: &GgufFile) -> Result<Self, TokenizerError> {
        let kind = Kind::new(file)?;
        let tokens = file
            .metadata_string_array(TOKENS)?
            .ok_or_else(|| file.missing_metadata(TOKENS))?;
        let types = token_types(file, tokens.len())?;
        let bos = token_id(file, BOS, tokens.len())?;
        let eos = token_id(file, EOS, tokens.len())?;
        let eot = token_id(file, EOT, tokens.len())?;
        let named = ids(tokens).filter(|&(id, token)| {
            types[id.0 as usize] == CONTROL && ENDS.contains(&token.as_str())
        });
        let mut stop_tokens: Vec<_> = eos.into_iter().chain(eot).collect();
        stop_tokens.extend(named.map(|(id, _)| id));
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        Ok(Self {
            file: file.path().to_owned(),
            kind,
            parsing: library(file, tokens, &types, kind)?,
            literal: OnceLock::new(),
            table: table(tokens, &types, kind),
            bos,
            adds_bos: bos.is_some()
                && file
                    .metadata_bool(ADD_BOS)?
                    .unwrap_or_else(|| kind.adds_bos()),
            eos,
            stop_tokens,
        })
    }

    /// Writes a `tokenizer.json` that Hugging Face's libraries read.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Library`] if the file can't be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), TokenizerError> {
        let path = path.as_ref();
        self.parsing
            .save(path, false)
            .map_err(|source| TokenizerError::Library {
                file: path.to_owned(),
                action: "saved",
                source,
            })
    }

    /// Says what of the text the library has left out.
    fn incomplete(&self, text: &str) -> EncodeError {
        let mut has_token = [false; 256];
        for token in (0..self.table.len()).map(TokenId) {
            if let Some(&[byte]) = self.table.bytes(token) {
                has_token[usize::from(byte)] = true;
            }
        }
        let missing = text
            .bytes()
            .enumerate()
            .find(|&(_, byte)| !has_token[usize::from(byte)]);
        missing.map_or(
            EncodeError::Incomplete {
                text_bytes: text.len(),
            },
            |(offset, byte)| EncodeError::NoToken { byte, offset },
        )
    }

    fn literal(&self) -> &Library {
        self.literal.get_or_init(|| {
            let mut literal = self.parsing.clone();
            literal.set_encode_special_tokens(true);
            Box::new(literal)
        })
    }
}

impl Tokenizer for GgufTokenizer {
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, EncodeError> {
        let library = match special {
            SpecialTokens::Literal => self.literal(),
            SpecialTokens::Parse => &self.parsing,
        };
        let encoding = library
            .encode_fast(text, false)
            .map_err(EncodeError::Library)?;
        let tokens: Vec<_> = encoding.get_ids().iter().copied().map(TokenId).collect();
        if let Kind::SentencePiece { .. } = self.kind {
            // The prefix is not of the text, so there is no simple way to compare.
            return Ok(tokens);
        }
        // The library leaves out what the vocabulary has no token for.
        let said: usize = tokens
            .iter()
            .filter_map(|&token| self.table.bytes(token))
            .map(<[u8]>::len)
            .sum();
        if said != text.len() {
            return Err(self.incomplete(text));
        }
        Ok(tokens)
    }

    fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.table.bytes(token)
    }

    fn is_special(&self, token: TokenId) -> bool {
        self.table.is_special(token)
    }

    fn vocab_size(&self) -> u32 {
        self.table.len()
    }

    fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    fn stop_tokens(&self) -> &[TokenId] {
        &self.stop_tokens
    }
}

fn ids(tokens: &[String]) -> impl Iterator<Item = (TokenId, &String)> {
    (0..).map(TokenId).zip(tokens)
}

/// The kind of each token; without the key all are ordinary.
fn token_types(file: &GgufFile, tokens: usize) -> Result<Vec<i64>, TokenizerError> {
    let Some(types) = file.metadata_i64_array(TOKEN_TYPE)? else {
        return Ok(vec![1; tokens]);
    };
    if types.len() == tokens {
        return Ok(types.to_vec());
    }
    Err(TokenizerError::Length {
        file: file.path().to_owned(),
        key: TOKEN_TYPE,
        found: types.len(),
        tokens,
    })
}

fn token_id(
    file: &GgufFile,
    key: &'static str,
    tokens: usize,
) -> Result<Option<TokenId>, TokenizerError> {
    match file.metadata_u32(key)? {
        Some(id) if id as usize >= tokens => Err(TokenizerError::Id {
            file: file.path().to_owned(),
            key,
            id,
            tokens,
        }),
        id => Ok(id.map(TokenId)),
    }
}

fn table(tokens: &[String], types: &[i64], kind: Kind) -> TokenTable {
    let mut table = TokenTable::default();
    for (token, &token_type) in tokens.iter().zip(types) {
        table.push(
            kind.decode(token, token_type),
            [CONTROL, UNKNOWN].contains(&token_type),
        );
    }
    table
}

fn library(
    file: &GgufFile,
    tokens: &[String],
    types: &[i64],
    kind: Kind,
) -> Result<Library, TokenizerError> {
    let failed = |source| TokenizerError::Library {
        file: file.path().to_owned(),
        action: "built from the vocabulary",
        source,
    };
    let mut vocab = Vocab::default();
    for (id, token) in ids(tokens) {
        // Should a token be there twice, its first id counts.
        vocab.entry(token.clone()).or_insert(id.0);
    }
    let mut library = match kind {
        Kind::ByteLevel(cut) => {
            let builder = BPE::builder().vocab_and_merges(vocab, merges(file)?);
            let model = builder
                .ignore_merges(cut.takes_whole_words())
                .build()
                .map_err(failed)?;
            let mut library = Library::new(model);
            library.with_pre_tokenizer(Some(cut.steps().map_err(failed)?));
            library.with_decoder(Some(ByteLevel::default()));
            library
        }
        Kind::SentencePiece { prefix_space } => {
            let scores = scores(file, tokens.len())?;
            if let Some(byte) = sentence_piece::missing_byte(&vocab) {
                return Err(TokenizerError::MissingByte {
                    file: file.path().to_owned(),
                    byte,
                });
            }
            let model = sentence_piece::model(vocab, tokens, scores).map_err(failed)?;
            let mut library = Library::new(model);
            let normalizer = sentence_piece::normalizer(prefix_space).map_err(failed)?;
            library.with_normalizer(Some(normalizer)).map_err(failed)?;
            library.with_decoder(Some(sentence_piece::decoder(prefix_space).map_err(failed)?));
            library
        }
    };
    let added = tokens
        .iter()
        .zip(types)
        .filter(|&(_, token_type)| [CONTROL, USER_DEFINED].contains(token_type))
        .map(|(token, &token_type)| {
            AddedToken::from(token.clone(), token_type == CONTROL).normalized(false)
        });
    library.add_tokens(added).map_err(failed)?;
    Ok(library)
}

fn scores(file: &GgufFile, tokens: usize) -> Result<&[f32], TokenizerError> {
    let scores = file
        .metadata_f32_array(SCORES)?
        .ok_or_else(|| file.missing_metadata(SCORES))?;
    if scores.len() == tokens {
        return Ok(scores);
    }
    Err(TokenizerError::Length {
        file: file.path().to_owned(),
        key: SCORES,
        found: scores.len(),
        tokens,
    })
}

fn cut(file: &GgufFile) -> Result<Cut, TokenizerError> {
    let name = file
        .metadata_string(PRE)?
        .ok_or_else(|| file.missing_metadata(PRE))?;
    Cut::by_name(name).ok_or_else(|| TokenizerError::Unsupported {
        file: file.path().to_owned(),
        key: PRE,
        found: name.to_owned(),
        supported: Cut::NAMES,
    })
}

fn merges(file: &GgufFile) -> Result<Merges, TokenizerError> {
    let merges = file
        .metadata_string_array(MERGES)?
        .ok_or_else(|| file.missing_metadata(MERGES))?;
    let split = |(index, merge): (usize, &String)| {
        merge
            .split_once(' ')
            .filter(|(left, right)| {
                ![left, right]
                    .iter()
                    .any(|s| s.is_empty() || s.contains(' '))
            })
            .map(|(left, right)| (left.to_owned(), right.to_owned()))
            .ok_or_else(|| TokenizerError::Merge {
                file: file.path().to_owned(),
                index,
            })
    };
    merges.iter().enumerate().map(split).collect()
}
