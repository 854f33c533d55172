//! Why a model can't be used.

use std::path::PathBuf;

use crate::gguf::GgufError;

/// A model file is readable, but the model can't be run from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file itself is unusable.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model has another architecture.
    #[error("{file}: architecture is {found:?}; can be run: {supported}", file = file.display())]
    Architecture {
        /// Which file.
        file: PathBuf,
        /// Its architecture.
        found: String,
        /// What can be run.
        supported: &'static str,
    },
    /// The model needs something that isn't implemented.
    #[error("{file}: {what} is {value}; can be run: {supported}", file = file.display())]
    Unsupported {
        /// Which file.
        file: PathBuf,
        /// A metadata key or a tensor.
        what: String,
        /// Its value.
        value: String,
        /// What can be run.
        supported: &'static str,
    },
    /// A number of the model makes no sense.
    #[error("{file}: {key} is {value}, must be {allowed}", file = file.display())]
    Config {
        /// Which file.
        file: PathBuf,
        /// Which metadata key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// A tensor has another shape than the metadata says.
    #[error("{file}: tensor {name:?} has shape {found:?}, must be {expected:?}", file = file.display())]
    Shape {
        /// Which file.
        file: PathBuf,
        /// Which tensor.
        name: String,
        /// Its shape, fastest dimension first.
        found: Vec<u64>,
        /// The shape it must have.
        expected: Vec<u64>,
    },
    /// A tensor holds a number that isn't one.
    #[error("{file}: tensor {name:?} holds a value that is not finite", file = file.display())]
    NotFinite {
        /// Which file.
        file: PathBuf,
        /// Which tensor.
        name: String,
    },
    /// The KV pool isn't made for this model.
    #[error("the KV pool has {what} {found}, the model needs {expected}")]
    Pool {
        /// Which quantity.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The value it must have.
        expected: u64,
    },
    /// The system gave no thread or no memory.
    #[error("can't start {what}: {source}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}
