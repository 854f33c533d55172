//! Writes GGUF files for tests: tiny models with random weights in every element type, and broken
//! files.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use half::{bf16, f16};

/// A file that is removed when the test is over.
pub(crate) struct TempFile(pub(crate) PathBuf);

impl TempFile {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kv-model-test-{}-{number}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).expect("the temporary directory is writable");
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // A file that stays behind does no harm.
        drop(std::fs::remove_file(&self.0));
    }
}

/// A tiny generator: the tests' numbers must stay the same for ever.
pub(crate) struct Lcg(pub(crate) u32);

impl Lcg {
    pub(crate) fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 24) as u8
    }

    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        let bytes = [self.byte(), self.byte(), self.byte(), self.byte()];
        u32::from_le_bytes(bytes) % limit
    }

    /// Between -1 and 1.
    pub(crate) fn signed(&mut self) -> f32 {
        self.below(20_001) as f32 / 10_000.0 - 1.0
    }
}

/// Element types: name, number in the format, values per block, bytes per block, places of halves.
pub(crate) const TYPES: [(&str, u32, usize, usize, &[usize]); 13] = [
    ("F32", 0, 1, 4, &[]),
    ("F16", 1, 1, 2, &[]),
    ("BF16", 30, 1, 2, &[]),
    ("Q4_0", 2, 32, 18, &[0]),
    ("Q4_1", 3, 32, 20, &[0, 2]),
    ("Q5_0", 6, 32, 22, &[0]),
    ("Q5_1", 7, 32, 24, &[0, 2]),
    ("Q8_0", 8, 32, 34, &[0]),
    ("Q2_K", 10, 256, 84, &[80, 82]),
    ("Q3_K", 11, 256, 110, &[108]),
    ("Q4_K", 12, 256, 144, &[0, 2]),
    ("Q5_K", 13, 256, 176, &[0, 2]),
    ("Q6_K", 14, 256, 210, &[208]),
];

/// Bytes of `values` random weights of about the size of `scale`.
pub(crate) fn random_tensor(kind: u32, values: usize, scale: f32, random: &mut Lcg) -> Vec<u8> {
    let &(_, _, block_values, block_bytes, halves) = TYPES
        .iter()
        .find(|entry| entry.1 == kind)
        .expect("the type is in the list");
    let mut bytes = Vec::with_capacity(values / block_values * block_bytes);
    for _ in 0..values / block_values {
        let value = random.signed() * scale;
        match kind {
            0 => bytes.extend(value.to_le_bytes()),
            1 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            30 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => {
                let first = bytes.len();
                bytes.extend((0..block_bytes).map(|_| random.byte()));
                // The stored integers reach this far.
                let reach = match kind {
                    2 | 3 => 8.0,
                    6 | 7 => 16.0,
                    8 => 127.0,
                    10 => 30.0,
                    11 => 100.0,
                    12 => 500.0,
                    13 => 1000.0,
                    _ => 3000.0,
                };
                for &at in halves {
                    let half = f16::from_f32((0.5 + random.signed() / 4.0) * scale / reach);
                    bytes[first + at..first + at + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
        }
    }
    bytes
}

#[derive(Clone)]
pub(crate) enum Value {
    Bool(bool),
    F32(f32),
    I32s(Vec<i32>),
    Raw(u32, Vec<u8>),
    String(String),
    Strings(Vec<String>),
    U32(u32),
    U64(u64),
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Clone, Default)]
pub(crate) struct File {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl File {
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(old, _)| old != key);
        self.metadata.push((key.to_owned(), value));
    }

    pub(crate) fn tensor(&mut self, name: &str, shape: &[u64], kind: u32, bytes: Vec<u8>) {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.tensors.push(Tensor {
            name,
            shape,
            kind,
            bytes,
        });
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            value.write(&mut out);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor
                .shape
                .iter()
                .for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.bytes.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

impl Value {
    fn write(&self, out: &mut Vec<u8>) {
        let mut tag = |number: u32| out.extend(number.to_le_bytes());
        match self {
            Self::Bool(truth) => {
                tag(7);
                out.push(u8::from(*truth));
            }
            Self::F32(number) => {
                tag(6);
                out.extend(number.to_le_bytes());
            }
            Self::I32s(numbers) => {
                tag(9);
                tag(5);
                out.extend((numbers.len() as u64).to_le_bytes());
                numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
            Self::Raw(number, bytes) => {
                tag(*number);
                out.extend(bytes);
            }
            Self::String(text) => {
                tag(8);
                string(out, text);
            }
            Self::Strings(texts) => {
                tag(9);
                tag(8);
                out.extend((texts.len() as u64).to_le_bytes());
                texts.iter().for_each(|text| string(out, text));
            }
            Self::U32(number) => {
                tag(4);
                out.extend(number.to_le_bytes());
            }
            Self::U64(number) => {
                tag(10);
                out.extend(number.to_le_bytes());
            }
        }
    }
}

/// Sizes of a tiny model.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) feed_forward: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) rope_dim: u32,
    pub(crate) vocab: u32,
    pub(crate) tied: bool,
}

impl Sizes {
    /// Odd in every way: 3 heads on 1, 96 hidden.
    pub(crate) const ODD: Self = Self {
        layers: 2,
        hidden: 96,
        feed_forward: 160,
        heads: 3,
        kv_heads: 1,
        head_dim: 32,
        rope_dim: 32,
        vocab: 67,
        tied: true,
    };
}

/// A model with random weights of one element type; norms are F32.
pub(crate) fn tiny_llama(sizes: Sizes, kind: u32, seed: u32) -> File {
    let mut random = Lcg(seed);
    let mut file = File::default();
    file.set("general.architecture", Value::String("llama".to_owned()));
    for (key, value) in [
        ("llama.block_count", sizes.layers),
        ("llama.context_length", 512),
        ("llama.embedding_length", sizes.hidden),
        ("llama.feed_forward_length", sizes.feed_forward),
        ("llama.attention.head_count", sizes.heads),
        ("llama.attention.head_count_kv", sizes.kv_heads),
        ("llama.attention.key_length", sizes.head_dim),
        ("llama.attention.value_length", sizes.head_dim),
        ("llama.rope.dimension_count", sizes.rope_dim),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
    ] {
        file.set(key, Value::U32(value));
    }
    file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    file.set("llama.rope.freq_base", Value::F32(10_000.0));
    let Sizes {
        hidden,
        feed_forward,
        heads,
        kv_heads,
        head_dim,
        vocab,
        ..
    } = sizes;
    let mut matrix = |file: &mut File, name: &str, k: u32, n: u32| {
        let scale = 1.7 / (k as f32).sqrt();
        let bytes = random_tensor(kind, (k * n) as usize, scale, &mut random);
        file.tensor(name, &[k.into(), n.into()], kind, bytes);
    };
    matrix(&mut file, "token_embd.weight", hidden, vocab);
    if !sizes.tied {
        matrix(&mut file, "output.weight", hidden, vocab);
    }
    let mut norms = vec!["output_norm.weight".to_owned()];
    for layer in 0..sizes.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        matrix(&mut file, &name("attn_q"), hidden, heads * head_dim);
        matrix(&mut file, &name("attn_k"), hidden, kv_heads * head_dim);
        matrix(&mut file, &name("attn_v"), hidden, kv_heads * head_dim);
        matrix(&mut file, &name("attn_output"), heads * head_dim, hidden);
        matrix(&mut file, &name("ffn_gate"), hidden, feed_forward);
        matrix(&mut file, &name("ffn_up"), hidden, feed_forward);
        matrix(&mut file, &name("ffn_down"), feed_forward, hidden);
        norms.extend([name("attn_norm"), name("ffn_norm")]);
    }
    for name in norms {
        let bytes = (0..hidden)
            .flat_map(|_| (1.0 + random.signed() / 2.0).to_le_bytes())
            .collect();
        file.tensor(&name, &[hidden.into()], 0, bytes);
    }
    file
}
