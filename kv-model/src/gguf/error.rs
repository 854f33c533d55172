//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// A GGUF file can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {fault}", file = file.display())]
pub struct GgufError {
    /// Which file.
    pub file: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Box<GgufFault>,
}

/// What is wrong with a GGUF file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// The general alignment is not one that can be used.
    #[error("general.alignment is {alignment}, must be a multiple of 8 up to 1048576")]
    Alignment {
        /// Its value.
        alignment: u64,
    },
    /// The file is written in big-endian order.
    #[error("the file is in big-endian order; only little-endian files can be read")]
    BigEndian,
    /// A number in the header is larger than what the file can hold.
    #[error("{what} is {value}, but only {allowed} can be in the rest of the file")]
    Count {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The most that is possible.
        allowed: u64,
    },
    /// Two metadata keys or two tensors have the same name.
    #[error("{what} {name:?} is there twice")]
    Duplicate {
        /// Metadata or tensor.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The file can't be opened or read.
    #[error("can't read: {0}")]
    Io(#[source] std::io::Error),
    /// The file doesn't start like a GGUF file.
    #[error("not a GGUF file: it starts with {found:02x?}, must start with \"GGUF\"")]
    Magic {
        /// Its first bytes.
        found: [u8; 4],
    },
    /// A metadata value has another type than it must have.
    #[error("metadata {key:?} is {found}, must be {expected}")]
    MetadataType {
        /// Which.
        key: String,
        /// The type it has.
        found: &'static str,
        /// The type it must have.
        expected: &'static str,
    },
    /// A metadata key that must be there isn't.
    #[error("metadata {key:?} is missing")]
    MissingMetadata {
        /// Which.
        key: String,
    },
    /// A tensor that must be there isn't.
    #[error("tensor {name:?} is missing")]
    MissingTensor {
        /// Which.
        name: String,
    },
    /// The shape of a tensor is not possible.
    #[error("tensor {name:?} has shape {shape:?}: {why}")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape, fastest dimension first.
        shape: Vec<u64>,
        /// Why it can't be.
        why: &'static str,
    },
    /// A tensor's bytes don't lie where they may.
    #[error(
        "tensor {name:?} takes {bytes} bytes from byte {offset} of {data_bytes} data bytes; it \
         must lie inside and start at a multiple of {alignment}"
    )]
    TensorPlace {
        /// Which tensor.
        name: String,
        /// Where it starts in the data part.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Length of the data part.
        data_bytes: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor has an element type that can't be read.
    #[error("tensor {name:?} has element type {number}; can be read: {supported}", supported = super::TensorType::NAMES)]
    TensorType {
        /// Which tensor.
        name: String,
        /// The number of its type in the format.
        number: u32,
    },
    /// The file ends inside something.
    #[error("the file ends inside {what}")]
    Truncated {
        /// What.
        what: &'static str,
    },
    /// A text is not UTF-8.
    #[error("{what} is not UTF-8")]
    Utf8 {
        /// Which text.
        what: &'static str,
    },
    /// A metadata value has a type that can't be read.
    #[error(
        "metadata {key:?} has value type {number}; lists of lists and types above 12 can't be read"
    )]
    ValueType {
        /// Which.
        key: String,
        /// The number of its type in the format.
        number: u32,
    },
    /// The format version is not one that can be read.
    #[error("GGUF version is {version}, must be 2 or 3")]
    Version {
        /// Its version.
        version: u32,
    },
}
