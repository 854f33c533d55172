//! A Llama forward pass as one would write it on a blackboard: one position after the other, in
//! `f64`, from the tensors of the file. Weights, keys and values are rounded to `bf16`, as is
//! documented; nothing else is.

use std::path::Path;

use half::bf16;
use kv_model::gguf::GgufFile;
use kv_model::llama::ModelConfig;
use kv_scheduler::TokenId;

type Matrix = Vec<Vec<f64>>;

struct Tensors {
    file: GgufFile,
}

fn round(x: f64) -> f64 {
    bf16::from_f32(x as f32).to_f64()
}

impl Tensors {
    fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let tensor = self.file.tensor(name).unwrap();
        let width = tensor.row_values() as usize;
        let mut values = vec![0.0; width * tensor.rows() as usize];
        self.file
            .read_rows(tensor, 0, &mut values, &mut Vec::new())
            .unwrap();
        values.chunks(width).map(<[f32]>::to_vec).collect()
    }

    fn matrix(&self, name: &str) -> Matrix {
        let row = |row: Vec<f32>| row.into_iter().map(|x| round(f64::from(x))).collect();
        self.rows(name).into_iter().map(row).collect()
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        self.rows(name)
            .remove(0)
            .into_iter()
            .map(f64::from)
            .collect()
    }
}

fn multiply(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    matrix
        .iter()
        .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

fn norm(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter()
        .zip(weight)
        .map(|(x, w)| x / (mean + epsilon).sqrt() * w)
        .collect()
}

fn rotate(x: &mut [f64], config: &ModelConfig, position: usize) {
    for head in x.chunks_mut(config.head_dim as usize) {
        for pair in 0..config.rope_dim as usize / 2 {
            let exponent = -2.0 * pair as f64 / f64::from(config.rope_dim);
            let angle = position as f64 * f64::from(config.rope_base).powf(exponent)
                / f64::from(config.rope_factor);
            let (a, b) = (head[2 * pair], head[2 * pair + 1]);
            head[2 * pair] = a * angle.cos() - b * angle.sin();
            head[2 * pair + 1] = a * angle.sin() + b * angle.cos();
        }
    }
}

/// Attention of one position over all cached ones.
fn attend(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], config: &ModelConfig) -> Vec<f64> {
    let dim = config.head_dim as usize;
    let group = (config.heads / config.kv_heads) as usize;
    let mut out = Vec::new();
    for (head, q) in q.chunks(dim).enumerate() {
        let part = head / group * dim..(head / group + 1) * dim;
        let score = |key: &Vec<f64>| {
            let dot: f64 = key[part.clone()].iter().zip(q).map(|(k, q)| k * q).sum();
            (dot / (dim as f64).sqrt()).exp()
        };
        let weights: Vec<_> = keys.iter().map(score).collect();
        let total: f64 = weights.iter().sum();
        out.extend(part.map(|d| {
            values
                .iter()
                .zip(&weights)
                .map(|(v, w)| v[d] * w / total)
                .sum::<f64>()
        }));
    }
    out
}

/// Logits after the last token.
pub(crate) fn reference_logits(path: &Path, tokens: &[TokenId]) -> Vec<f64> {
    let file = GgufFile::open(path).unwrap();
    let config = ModelConfig::from_gguf(&file).unwrap();
    let tensors = Tensors { file };
    let epsilon = f64::from(config.norm_epsilon);
    let embedding = tensors.matrix("token_embd.weight");
    let mut stream: Vec<Vec<f64>> = tokens
        .iter()
        .map(|token| embedding[token.0 as usize].clone())
        .collect();
    for layer in 0..config.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let [q, k, v, o] =
            ["attn_q", "attn_k", "attn_v", "attn_output"].map(|part| tensors.matrix(&name(part)));
        let [gate, up, down] =
            ["ffn_gate", "ffn_up", "ffn_down"].map(|part| tensors.matrix(&name(part)));
        let [before, between] = ["attn_norm", "ffn_norm"].map(|part| tensors.vector(&name(part)));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = norm(x, &before, epsilon);
            let (mut q, mut k) = (multiply(&q, &normed), multiply(&k, &normed));
            rotate(&mut q, &config, position);
            rotate(&mut k, &config, position);
            keys.push(k.into_iter().map(round).collect());
            values.push(multiply(&v, &normed).into_iter().map(round).collect());
            let attended = multiply(&o, &attend(&q, &keys, &values, &config));
            x.iter_mut().zip(attended).for_each(|(x, add)| *x += add);
            let normed = norm(x, &between, epsilon);
            let inner: Vec<_> = multiply(&gate, &normed)
                .into_iter()
                .zip(multiply(&up, &normed))
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            x.iter_mut()
                .zip(multiply(&down, &inner))
                .for_each(|(x, add)| *x += add);
        }
    }
    let last = stream.last().expect("there are tokens");
    let normed = norm(last, &tensors.vector("output_norm.weight"), epsilon);
    let logits = if tensors.file.tensors().contains_key("output.weight") {
        tensors.matrix("output.weight")
    } else {
        embedding
    };
    multiply(&logits, &normed)
}
