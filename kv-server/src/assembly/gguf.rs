//! A model from a GGUF file, run on the CPU.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::thread::available_parallelism;

use kv_core::host::PlainMemory;
use kv_model::chat::ChatTemplate;
use kv_model::gguf::GgufFile;
use kv_model::llama::{LlamaCpu, LlamaModel};
use kv_model::tokenizer::GgufTokenizer;

use super::Model;
use crate::config::Config;
use crate::text::Text;

/// Loads weights, tokenizer and chat template.
pub(super) fn load(
    path: &Path,
    config: &Config,
) -> Result<Model, Box<dyn std::error::Error + Send + Sync>> {
    let file = GgufFile::open(path)?;
    let threads = match config.threads {
        Some(threads) => NonZeroUsize::try_from(usize::try_from(threads)?)?,
        None => available_parallelism()?,
    };
    let tokenizer = GgufTokenizer::new(&file)?;
    let template = ChatTemplate::from_gguf(&file, &tokenizer)?;
    let model = LlamaModel::load(&file, threads)?;
    let layout = model
        .config()
        .kv_layout(config.gpu_blocks, config.block_tokens)?;
    let context = model.config().context_length;
    super::room::for_pool(&layout)?;
    let memory = Arc::new(PlainMemory::new(layout));
    let executor = LlamaCpu::new(Arc::new(model), Arc::clone(&memory), threads)?;
    let name = path
        .file_stem()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned();
    tracing::info!(
        model = name,
        threads,
        instructions = executor.instruction_set(),
        "the model is loaded"
    );
    Ok(Model {
        name,
        executor: Box::new(executor),
        memory,
        text: Text::new(Arc::new(tokenizer), template),
        context,
    })
}
