//! GGUF files with nothing but metadata, written where the test runs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use kv_model::gguf::GgufFile;

/// A metadata value.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Bool(bool),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    Text(String),
    Texts(Vec<String>),
    Uint(u32),
}

impl Value {
    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(crate) fn texts<S: ToString>(texts: impl IntoIterator<Item = S>) -> Self {
        Self::Texts(texts.into_iter().map(|text| text.to_string()).collect())
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        let mut word = |word: u32| bytes.extend(word.to_le_bytes());
        match self {
            Self::Bool(value) => {
                word(7);
                bytes.push(u8::from(*value));
            }
            Self::Floats(values) => {
                word(9);
                word(6);
                length(bytes, values.len());
                values
                    .iter()
                    .for_each(|value| bytes.extend(value.to_le_bytes()));
            }
            Self::Ints(values) => {
                word(9);
                word(5);
                length(bytes, values.len());
                values
                    .iter()
                    .for_each(|value| bytes.extend(value.to_le_bytes()));
            }
            Self::Text(value) => {
                word(8);
                text(bytes, value);
            }
            Self::Texts(values) => {
                word(9);
                word(8);
                length(bytes, values.len());
                values.iter().for_each(|value| text(bytes, value));
            }
            Self::Uint(value) => {
                word(4);
                word(*value);
            }
        }
    }
}

fn length(bytes: &mut Vec<u8>, length: usize) {
    bytes.extend((length as u64).to_le_bytes());
}

fn text(bytes: &mut Vec<u8>, value: &str) {
    length(bytes, value.len());
    bytes.extend(value.as_bytes());
}

/// A path in the folder that Cargo keeps for integration tests, not yet used by anybody.
pub(crate) fn fresh_path(extension: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("text-{}-{number}.{extension}", std::process::id());
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A file with this metadata and no tensor. It is gone from the folder when this returns.
pub(crate) fn gguf(metadata: &[(&str, Value)]) -> GgufFile {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    length(&mut bytes, 0);
    length(&mut bytes, metadata.len());
    for (key, value) in metadata {
        text(&mut bytes, key);
        value.write(&mut bytes);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    let path = fresh_path("gguf");
    std::fs::write(&path, bytes).unwrap();
    let file = GgufFile::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}
