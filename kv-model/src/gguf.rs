//! Reading GGUF files: metadata, tensor descriptions, and tensor bytes on demand.
//!
//! The file is parsed from its header only; tensor data is read piece by piece when asked for, so
//! that a model never lies in memory twice.
//! Nothing in a file is trusted: every length is checked against what the file can hold before
//! anything is allocated, and every fault names the file, the thing and what is allowed.

mod dequantize;
mod error;
mod parse;
mod types;
mod value;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use error::{GgufError, GgufFault};
pub use types::{TensorInfo, TensorType};
pub use value::MetadataValue;

/// An open GGUF file.
///
/// ```no_run
/// use kv_model::gguf::GgufFile;
///
/// let file = GgufFile::open("model.gguf")?;
/// println!("{:?}", file.metadata_string("general.architecture")?);
/// # Ok::<(), kv_model::gguf::GgufError>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    contents: parse::Contents,
}

/// One accessor per type: absent is `None`, another type is an error.
macro_rules! accessors {
    ($($(#[$doc:meta])* $name:ident -> $type:ty, $expected:literal, $convert:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// [`GgufFault::MetadataType`] if the key is there with another type.
        pub fn $name(&self, key: &str) -> Result<Option<$type>, GgufError> {
            let Some(value) = self.metadata(key) else { return Ok(None) };
            let convert: fn(&MetadataValue) -> Option<$type> = $convert;
            convert(value).map(Some).ok_or_else(|| {
                self.fault(GgufFault::MetadataType {
                    key: key.to_owned(),
                    found: value.type_name(),
                    expected: $expected,
                })
            })
        }
    )*};
}

impl GgufFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    ///
    /// [`GgufError`] names the file and the first thing that is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref().to_owned();
        let (file, contents) = open(&path).map_err(|fault| GgufError {
            file: path.clone(),
            fault: Box::new(fault),
        })?;
        Ok(Self {
            path,
            file,
            contents,
        })
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All metadata, by key.
    #[must_use]
    pub const fn all_metadata(&self) -> &BTreeMap<String, MetadataValue> {
        &self.contents.metadata
    }

    /// One metadata value.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<&MetadataValue> {
        self.contents.metadata.get(key)
    }

    accessors! {
        /// A number that fits into 32 bits without a sign.
        metadata_u32 -> u32, "a number from 0 to 4294967295", MetadataValue::to_u32;
        /// A floating-point number.
        metadata_f32 -> f32, "a floating-point number", MetadataValue::to_f32;
        /// A truth value.
        metadata_bool -> bool, "a truth value", MetadataValue::to_bool;
    }

    /// A text.
    ///
    /// # Errors
    ///
    /// [`GgufFault::MetadataType`] if the key is there with another type.
    pub fn metadata_string(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.borrowed(key, "a text", |value| match value {
            MetadataValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A list of texts.
    ///
    /// # Errors
    ///
    /// [`GgufFault::MetadataType`] if the key is there with another type.
    pub fn metadata_string_array(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.borrowed(key, "a list of texts", |value| match value {
            MetadataValue::Strings(texts) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// A list of whole numbers.
    ///
    /// # Errors
    ///
    /// [`GgufFault::MetadataType`] if the key is there with another type.
    pub fn metadata_i64_array(&self, key: &str) -> Result<Option<&[i64]>, GgufError> {
        self.borrowed(key, "a list of whole numbers", |value| match value {
            MetadataValue::Ints(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    /// A list of floating-point numbers.
    ///
    /// # Errors
    ///
    /// [`GgufFault::MetadataType`] if the key is there with another type.
    pub fn metadata_f32_array(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.borrowed(
            key,
            "a list of floating-point numbers",
            |value| match value {
                MetadataValue::Floats(numbers) => Some(numbers.as_slice()),
                _ => None,
            },
        )
    }

    /// The error that says that a key is missing; for `ok_or_else` behind an accessor.
    #[must_use]
    pub fn missing_metadata(&self, key: &str) -> GgufError {
        self.fault(GgufFault::MissingMetadata {
            key: key.to_owned(),
        })
    }

    /// All tensors, by name.
    #[must_use]
    pub const fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.contents.tensors
    }

    /// One tensor.
    ///
    /// # Errors
    ///
    /// [`GgufFault::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.contents.tensors.get(name).ok_or_else(|| {
            self.fault(GgufFault::MissingTensor {
                name: name.to_owned(),
            })
        })
    }

    /// Reads rows of a tensor and turns them into `f32`, row after row, into `values`; `raw` is
    /// working memory that may be used again.
    ///
    /// The number of rows is `values.len()` divided by the row length.
    ///
    /// # Errors
    ///
    /// [`GgufFault::Io`] if the file can't be read (any more).
    ///
    /// # Panics
    ///
    /// If `values` isn't a whole number of rows, or the rows aren't all in the tensor.
    pub fn read_rows(
        &self,
        tensor: &TensorInfo,
        first_row: u64,
        values: &mut [f32],
        raw: &mut Vec<u8>,
    ) -> Result<(), GgufError> {
        let row_values = usize::try_from(tensor.row_values()).expect("a row fits into memory");
        let rows = (values.len() / row_values) as u64;
        assert_eq!(values.len() % row_values, 0, "values are whole rows");
        assert!(first_row + rows <= tensor.rows(), "rows are in the tensor");
        let row_bytes = tensor.row_bytes();
        let bytes = usize::try_from(rows * row_bytes).expect("rows fit into memory");
        raw.resize(bytes, 0);
        let offset = self.contents.data_start + tensor.offset() + first_row * row_bytes;
        self.file
            .read_exact_at(raw, offset)
            .map_err(|error| self.fault(GgufFault::Io(error)))?;
        dequantize::dequantize(tensor.tensor_type(), raw, values);
        Ok(())
    }

    /// Makes an error about this file.
    pub(crate) fn fault(&self, fault: GgufFault) -> GgufError {
        GgufError {
            file: self.path.clone(),
            fault: Box::new(fault),
        }
    }

    fn borrowed<'a, T: ?Sized>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<&'a T>,
    ) -> Result<Option<&'a T>, GgufError> {
        let Some(value) = self.metadata(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| {
            let found = value.type_name();
            self.fault(GgufFault::MetadataType {
                key: key.to_owned(),
                found,
                expected,
            })
        })
    }
}

fn open(path: &Path) -> Result<(File, parse::Contents), GgufFault> {
    let file = File::open(path).map_err(GgufFault::Io)?;
    let bytes = file.metadata().map_err(GgufFault::Io)?.len();
    let contents = parse::parse(&mut BufReader::new(&file), bytes)?;
    Ok((file, contents))
}
