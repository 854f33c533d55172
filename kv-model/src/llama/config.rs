//! What the file's metadata says about the model.

use kv_core::{Layout, LayoutError};
use kv_scheduler::TokenId;

use crate::ModelError;
use crate::gguf::GgufFile;

const ARCHITECTURES: &str =
    "\"llama\" (Llama 1 to 3, Mistral, SmolLM and others stored under that name)";

/// Bytes of one value in the KV cache: `bf16`.
pub const KV_VALUE_BYTES: u32 = 2;

/// Sizes of a Llama-family model, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of layers.
    pub layers: u32,
    /// Length of the vector that goes through the layers.
    pub hidden: u32,
    /// Length of the vector inside the feed-forward part.
    pub feed_forward: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Values of one head.
    pub head_dim: u32,
    /// How many values of a head are rotated by position.
    pub rope_dim: u32,
    /// Base of the rotation's wave lengths.
    pub rope_base: f32,
    /// Positions are divided by this (linear scaling).
    pub rope_factor: f32,
    /// Added to the mean of squares in RMS norm.
    pub norm_epsilon: f32,
    /// Most positions that the model was made for.
    pub context_length: u32,
    /// Number of tokens; ids are below it.
    pub vocab: u32,
    /// The token that starts a text.
    pub bos: Option<TokenId>,
    /// The tokens that end a text or a turn; may be none.
    pub eos: Vec<TokenId>,
}

impl ModelConfig {
    /// Reads and checks the metadata.
    ///
    /// # Errors
    ///
    /// [`ModelError`] if the architecture can't be run, a key is missing, a number makes no sense
    /// or the model needs what isn't implemented.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let key = "general.architecture";
        let found = file
            .metadata_string(key)?
            .ok_or_else(|| file.missing_metadata(key))?
            .to_owned();
        if found != "llama" {
            let file = file.path().to_owned();
            return Err(ModelError::Architecture {
                file,
                found,
                supported: ARCHITECTURES,
            });
        }
        refuse_variants(file)?;
        let read = Read { file };
        let heads = read.size("llama.attention.head_count", HEADS_MAX)?;
        let hidden = read.size("llama.embedding_length", WIDTH_MAX)?;
        let kv_heads = read.size_or("llama.attention.head_count_kv", HEADS_MAX, heads)?;
        let head_dim = read.size_or("llama.attention.key_length", HEAD_DIM_MAX, hidden / heads)?;
        let value_dim =
            read.size_or("llama.attention.value_length", HEAD_DIM_MAX, hidden / heads)?;
        let config = Self {
            layers: read.size("llama.block_count", LAYERS_MAX)?,
            hidden,
            feed_forward: read.size("llama.feed_forward_length", WIDTH_MAX)?,
            heads,
            kv_heads,
            head_dim,
            rope_dim: read.size_or("llama.rope.dimension_count", HEAD_DIM_MAX, head_dim)?,
            rope_base: read.positive_or("llama.rope.freq_base", 10_000.0)?,
            rope_factor: rope_factor(&read)?,
            norm_epsilon: read.positive_or("llama.attention.layer_norm_rms_epsilon", 1e-5)?,
            context_length: read.size("llama.context_length", u32::MAX)?,
            vocab: vocab(&read)?,
            bos: file
                .metadata_u32("tokenizer.ggml.bos_token_id")?
                .map(TokenId),
            eos: eos(file)?,
        };
        config.check(&read, value_dim)?;
        Ok(config)
    }

    /// Checks what must fit together.
    fn check(&self, read: &Read<'_>, value_dim: u32) -> Result<(), ModelError> {
        let Self {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self;
        let check = |key, value: u32, ok: bool, allowed: String| {
            if ok {
                Ok(())
            } else {
                Err(read.wrong(key, value, allowed))
            }
        };
        let kv_ok = heads.is_multiple_of(kv_heads);
        let allowed = format!("a divisor of the {heads} query heads");
        check("llama.attention.head_count_kv", kv_heads, kv_ok, allowed)?;
        let dim_ok = (2..=HEAD_DIM_MAX).contains(&head_dim) && head_dim.is_multiple_of(2);
        let allowed = format!("an even number from 2 to {HEAD_DIM_MAX}");
        check("llama.attention.key_length", head_dim, dim_ok, allowed)?;
        let allowed = format!("the key length, {head_dim}");
        check(
            "llama.attention.value_length",
            value_dim,
            value_dim == head_dim,
            allowed,
        )?;
        let rope = self.rope_dim;
        let allowed = format!("an even number up to the key length, {head_dim}");
        let rope_ok = rope <= head_dim && rope.is_multiple_of(2);
        check("llama.rope.dimension_count", rope, rope_ok, allowed)?;
        for (key, token) in self
            .bos
            .iter()
            .map(|t| ("tokenizer.ggml.bos_token_id", t))
            .chain(self.eos.iter().map(|t| ("tokenizer.ggml.eos_token_id", t)))
        {
            let allowed = format!("below the vocabulary's size, {}", self.vocab);
            check(key, token.0, token.0 < self.vocab, allowed)?;
        }
        Ok(())
    }

    /// The layout of a KV pool of `blocks` blocks for this model: per layer a row for K and one
    /// for V, each `[block_tokens, kv_heads, head_dim]` of `bf16`.
    ///
    /// # Errors
    ///
    /// As [`Layout::per_layer`].
    pub fn kv_layout(&self, blocks: u32, block_tokens: u32) -> Result<Layout, LayoutError> {
        let Self {
            layers,
            kv_heads,
            head_dim,
            ..
        } = *self;
        Layout::per_layer(
            layers,
            blocks,
            block_tokens,
            kv_heads,
            head_dim,
            KV_VALUE_BYTES,
        )
    }
}

const LAYERS_MAX: u32 = 1024;
const HEADS_MAX: u32 = 1024;
const HEAD_DIM_MAX: u32 = 1024;
const WIDTH_MAX: u32 = 1 << 20;

/// Refuses whatever changes the computation and isn't implemented.
fn refuse_variants(file: &GgufFile) -> Result<(), ModelError> {
    let refuse = |what: &str, value: String, supported| {
        let (file, what) = (file.path().to_owned(), what.to_owned());
        Err(ModelError::Unsupported {
            file,
            what,
            value,
            supported,
        })
    };
    for (key, supported) in [
        ("llama.expert_count", "models without experts"),
        (
            "llama.attention.sliding_window",
            "attention over all positions",
        ),
        ("split.count", "models in one file"),
    ] {
        let plain = if key == "split.count" { 1 } else { 0 };
        if let Some(count) = file.metadata_u32(key)?.filter(|&count| count > plain) {
            return refuse(key, count.to_string(), supported);
        }
    }
    if file.metadata_bool("llama.attention.causal")? == Some(false) {
        return refuse(
            "llama.attention.causal",
            "false".to_owned(),
            "causal attention",
        );
    }
    for key in [
        "llama.logit_scale",
        "llama.residual_scale",
        "llama.embedding_scale",
    ] {
        if let Some(scale) = file.metadata_f32(key)?.filter(|&scale| scale != 1.0) {
            return refuse(key, scale.to_string(), "models without scales");
        }
    }
    Ok(())
}

/// Factor of linear position scaling; other kinds of scaling are refused.
fn rope_factor(read: &Read<'_>) -> Result<f32, ModelError> {
    let key = "llama.rope.scaling.type";
    let old = read.positive_or("llama.rope.scale_linear", 1.0)?;
    match read.file.metadata_string(key)? {
        None => Ok(old),
        Some("none") => Ok(1.0),
        Some("linear") => read.positive_or("llama.rope.scaling.factor", old),
        Some(other) => Err(ModelError::Unsupported {
            file: read.file.path().to_owned(),
            what: key.to_owned(),
            value: other.to_owned(),
            supported: "\"none\" and \"linear\", and factors in the tensor \"rope_freqs.weight\"",
        }),
    }
}

/// The vocabulary's size is that of the embedding; the metadata must agree if it speaks of it.
fn vocab(read: &Read<'_>) -> Result<u32, ModelError> {
    let embedding = read.file.tensor("token_embd.weight")?;
    let key = "llama.vocab_size";
    let rows = embedding.rows();
    let vocab =
        u32::try_from(rows).map_err(|_| read.wrong(key, rows, format!("at most {}", u32::MAX)))?;
    match read.file.metadata_u32(key)? {
        Some(said) if said != vocab => {
            Err(read.wrong(key, said, format!("{vocab}, the rows of token_embd.weight")))
        }
        _ => Ok(vocab),
    }
}

fn eos(file: &GgufFile) -> Result<Vec<TokenId>, ModelError> {
    let mut tokens = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(token) = file
            .metadata_u32(key)?
            .map(TokenId)
            .filter(|t| !tokens.contains(t))
        {
            tokens.push(token);
        }
    }
    Ok(tokens)
}

struct Read<'a> {
    file: &'a GgufFile,
}

impl Read<'_> {
    fn wrong(
        &self,
        key: &'static str,
        value: impl std::fmt::Display,
        allowed: String,
    ) -> ModelError {
        let file = self.file.path().to_owned();
        ModelError::Config {
            file,
            key,
            value: value.to_string(),
            allowed,
        }
    }

    fn size(&self, key: &'static str, max: u32) -> Result<u32, ModelError> {
        let value = self.file.metadata_u32(key)?;
        self.checked(
            key,
            value.ok_or_else(|| self.file.missing_metadata(key))?,
            max,
        )
    }

    fn size_or(&self, key: &'static str, max: u32, default: u32) -> Result<u32, ModelError> {
        self.checked(key, self.file.metadata_u32(key)?.unwrap_or(default), max)
    }

    fn checked(&self, key: &'static str, value: u32, max: u32) -> Result<u32, ModelError> {
        if (1..=max).contains(&value) {
            return Ok(value);
        }
        Err(self.wrong(key, value, format!("from 1 to {max}")))
    }

    fn positive_or(&self, key: &'static str, default: f32) -> Result<f32, ModelError> {
        let value = self.file.metadata_f32(key)?.unwrap_or(default);
        if value > 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(self.wrong(key, value, "above 0 and finite".to_owned()))
    }
}
