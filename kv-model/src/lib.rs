//! Model execution over the paged KV cache.

mod error;
pub mod gguf;
pub mod llama;
pub mod oracle;
pub mod sampling;

pub use error::ModelError;
