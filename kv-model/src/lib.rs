//! Model execution over the paged KV cache.

pub mod chat;
pub mod detokenize;
mod error;
pub mod gguf;
pub mod llama;
pub mod oracle;
pub mod sampling;
pub mod tokenizer;

pub use error::ModelError;
