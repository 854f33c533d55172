//! Weights in the form that the kernel reads, brought in from the file.
//!
//! All matrices are described first, which checks every name and shape, and then filled panel by
//! panel on several threads: at no time is more than a few rows of a tensor in memory as `f32`.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::thread;

use half::bf16;
use parking_lot::Mutex;

use super::config::ModelConfig;
use super::kernels::{LANES, Words};
use crate::ModelError;
use crate::gguf::GgufFile;

/// A matrix that makes `n` values of `k`, as `bf16` in panels of 16 outputs.
#[derive(Debug)]
pub(super) struct Matrix {
    panels: Vec<Words>,
    /// Pairs of `k`, with padding.
    pairs: usize,
    n_panels: usize,
}

impl Matrix {
    /// `k` is padded to a multiple of `k_multiple` (even), `n` to one of 16; padding is zero.
    fn zeros(k: usize, n: usize, k_multiple: usize) -> Self {
        let pairs = k.next_multiple_of(k_multiple) / 2;
        let n_panels = n.div_ceil(LANES);
        Self {
            panels: vec![Words::ZERO; pairs * n_panels],
            pairs,
            n_panels,
        }
    }

    /// Number of panels.
    pub(super) const fn n_panels(&self) -> usize {
        self.n_panels
    }

    /// One panel: [`Words`] by pair of `k`.
    pub(super) fn panel(&self, panel: usize) -> &[Words] {
        &self.panels[panel * self.pairs..][..self.pairs]
    }

    /// Values `k` and up of row `n`, as many as fit into `values`; for the embedding.
    ///
    /// `k` is even.
    pub(super) fn row(&self, n: usize, k: usize, values: &mut [f32]) {
        let words = self.panel(n / LANES).get(k / 2..).unwrap_or_default();
        for (values, words) in values.chunks_mut(2).zip(words) {
            let word = words.0[n % LANES];
            values[0] = f32::from_bits(word << 16);
            if let Some(odd) = values.get_mut(1) {
                *odd = f32::from_bits(word & 0xFFFF_0000);
            }
        }
    }
}

/// Weights of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    /// One per head: a head starts with a panel of its own.
    pub(super) q: Vec<Matrix>,
    pub(super) k: Vec<Matrix>,
    pub(super) v: Vec<Matrix>,
    pub(super) output: Matrix,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

/// All weights.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Matrix,
    /// `None` if the embedding is used.
    pub(super) output: Option<Matrix>,
    pub(super) norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    /// Rotation per position, radians, by pair of a head.
    pub(super) rope: Vec<f64>,
}

impl Weights {
    /// The matrix that makes logits.
    pub(super) fn logits(&self) -> &Matrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// Reads all tensors, on `threads` threads.
    pub(super) fn load(
        file: &GgufFile,
        config: &ModelConfig,
        threads: NonZero<usize>,
    ) -> Result<Self, ModelError> {
        let mut plan = Plan {
            file,
            known: BTreeSet::new(),
            wanted: Vec::new(),
        };
        let mut weights = plan.all(config)?;
        plan.refuse_unknown()?;
        let mut wanted = plan.wanted.into_iter();
        let mut jobs = Vec::new();
        weights.each_matrix(&mut |matrix| {
            let source = wanted.next().expect("every matrix was planned");
            let pairs = matrix.pairs;
            let pieces = matrix.panels.chunks_mut(pairs * PANELS_PER_JOB);
            jobs.extend(pieces.enumerate().map(|(piece, panels)| Job {
                name: source.name.clone(),
                first_row: source.first_row + piece * PANELS_PER_JOB * LANES,
                end_row: source.first_row + source.rows,
                pairs,
                panels,
            }));
        });
        fill(file, jobs, threads)?;
        Ok(weights)
    }

    /// In the order in which [`Plan::all`] asks for them.
    fn each_matrix<'a>(&'a mut self, visit: &mut impl FnMut(&'a mut Matrix)) {
        visit(&mut self.embedding);
        if let Some(output) = &mut self.output {
            visit(output);
        }
        for layer in &mut self.layers {
            for head in layer.q.iter_mut().chain(&mut layer.k).chain(&mut layer.v) {
                visit(head);
            }
            visit(&mut layer.output);
            visit(&mut layer.gate);
            visit(&mut layer.up);
            visit(&mut layer.down);
        }
    }
}

/// Panels that a thread fills at a time; 16 rows each.
const PANELS_PER_JOB: usize = 16;

/// Rows of a tensor that become a matrix.
#[derive(Debug)]
struct Source {
    name: String,
    first_row: usize,
    rows: usize,
}

struct Job<'a> {
    name: String,
    first_row: usize,
    /// One past the last row of the matrix; later ones are padding.
    end_row: usize,
    pairs: usize,
    panels: &'a mut [Words],
}

struct Plan<'a> {
    file: &'a GgufFile,
    known: BTreeSet<String>,
    wanted: Vec<Source>,
}

impl Plan<'_> {
    fn all(&mut self, config: &ModelConfig) -> Result<Weights, ModelError> {
        let hidden = config.hidden as usize;
        let vocab = config.vocab as usize;
        let embedding = self.matrix("token_embd.weight", hidden, vocab, 2)?;
        let output = match self.file.tensors().contains_key("output.weight") {
            true => Some(self.matrix("output.weight", hidden, vocab, 2)?),
            false => None,
        };
        let layers = (0..config.layers)
            .map(|l| self.layer(config, l))
            .collect::<Result<Vec<_>, _>>()?;
        let norm = self.vector("output_norm.weight", hidden)?;
        let rope = self.rope(config)?;
        Ok(Weights {
            embedding,
            output,
            norm,
            layers,
            rope,
        })
    }

    fn layer(&mut self, config: &ModelConfig, layer: u32) -> Result<Layer, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let hidden = config.hidden as usize;
        let ffn = config.feed_forward as usize;
        let head = config.head_dim as usize;
        let (heads, kv_heads) = (config.heads as usize, config.kv_heads as usize);
        Ok(Layer {
            q: self.heads(&name("attn_q"), hidden, heads, head)?,
            k: self.heads(&name("attn_k"), hidden, kv_heads, head)?,
            v: self.heads(&name("attn_v"), hidden, kv_heads, head)?,
            output: self.matrix(&name("attn_output"), heads * head, hidden, 2)?,
            gate: self.matrix(&name("ffn_gate"), hidden, ffn, 2)?,
            up: self.matrix(&name("ffn_up"), hidden, ffn, 2)?,
            // What it reads was written in whole panels.
            down: self.matrix(&name("ffn_down"), ffn, hidden, LANES)?,
            attention_norm: self.vector(&name("attn_norm"), hidden)?,
            ffn_norm: self.vector(&name("ffn_norm"), hidden)?,
        })
    }

    /// Rotation of each pair, radians per position.
    fn rope(&mut self, config: &ModelConfig) -> Result<Vec<f64>, ModelError> {
        let pairs = config.rope_dim as usize / 2;
        let factors = match self.file.tensors().contains_key("rope_freqs.weight") {
            true => self.vector("rope_freqs.weight", pairs)?,
            false => vec![1.0; pairs],
        };
        let angle = |(pair, factor): (u32, f32)| {
            let exponent = f64::from(2 * pair) / f64::from(config.rope_dim);
            let scale = f64::from(factor) * f64::from(config.rope_factor);
            f64::from(config.rope_base).powf(-exponent) / scale
        };
        Ok((0..).zip(factors).map(angle).collect())
    }

    /// Checks name and shape.
    fn shape(&mut self, name: &str, expected: &[u64]) -> Result<(), ModelError> {
        self.known.insert(name.to_owned());
        let found = self.file.tensor(name)?.shape();
        if found != expected {
            return Err(ModelError::Shape {
                file: self.file.path().to_owned(),
                name: name.to_owned(),
                found: found.to_vec(),
                expected: expected.to_vec(),
            });
        }
        Ok(())
    }

    fn matrix(
        &mut self,
        name: &str,
        k: usize,
        n: usize,
        k_multiple: usize,
    ) -> Result<Matrix, ModelError> {
        self.shape(name, &[k as u64, n as u64])?;
        self.wanted.push(Source {
            name: name.to_owned(),
            first_row: 0,
            rows: n,
        });
        Ok(Matrix::zeros(k, n, k_multiple))
    }

    fn heads(
        &mut self,
        name: &str,
        k: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<Vec<Matrix>, ModelError> {
        self.shape(name, &[k as u64, (heads * head_dim) as u64])?;
        let one = |head| {
            let first_row = head * head_dim;
            self.wanted.push(Source {
                name: name.to_owned(),
                first_row,
                rows: head_dim,
            });
            Matrix::zeros(k, head_dim, 2)
        };
        Ok((0..heads).map(one).collect())
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        self.shape(name, &[length as u64])?;
        let mut values = vec![0.0; length];
        self.file
            .read_rows(self.file.tensor(name)?, 0, &mut values, &mut Vec::new())?;
        check_finite(self.file, name, &values)?;
        Ok(values)
    }

    /// A tensor that isn't used would have changed the result.
    fn refuse_unknown(&self) -> Result<(), ModelError> {
        match self
            .file
            .tensors()
            .keys()
            .find(|name| !self.known.contains(*name))
        {
            None => Ok(()),
            Some(name) => Err(ModelError::Unsupported {
                file: self.file.path().to_owned(),
                what: "a tensor".to_owned(),
                value: format!("{name:?}"),
                supported: "models with the tensors of a plain Llama",
            }),
        }
    }
}

fn check_finite(file: &GgufFile, name: &str, values: &[f32]) -> Result<(), ModelError> {
    if values.iter().all(|value| value.is_finite()) {
        return Ok(());
    }
    Err(ModelError::NotFinite {
        file: file.path().to_owned(),
        name: name.to_owned(),
    })
}

/// Does all jobs on `threads` threads; the first error ends them.
fn fill(file: &GgufFile, jobs: Vec<Job<'_>>, threads: NonZero<usize>) -> Result<(), ModelError> {
    let queue = Mutex::new(jobs.into_iter());
    let failed = Mutex::new(None);
    let work = || {
        let (mut raw, mut values) = (Vec::new(), Vec::new());
        while let Some(job) = next(&queue, &failed) {
            if let Err(error) = job.run(file, &mut raw, &mut values) {
                failed.lock().get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.get() {
            // Without helpers the caller does all jobs.
            let helper = thread::Builder::new().name("llama-load".to_owned());
            if helper.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    failed.into_inner().map_or(Ok(()), Err)
}

fn next<'a>(
    queue: &Mutex<std::vec::IntoIter<Job<'a>>>,
    failed: &Mutex<Option<ModelError>>,
) -> Option<Job<'a>> {
    if failed.lock().is_some() {
        return None;
    }
    queue.lock().next()
}

impl Job<'_> {
    fn run(
        self,
        file: &GgufFile,
        raw: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let tensor = file.tensor(&self.name)?;
        let k = usize::try_from(tensor.row_values()).expect("the shape was checked");
        for (panel, words) in self.panels.chunks_mut(self.pairs).enumerate() {
            let first = self.first_row + panel * LANES;
            let rows = LANES.min(self.end_row.saturating_sub(first));
            values.resize(rows * k, 0.0);
            file.read_rows(tensor, first as u64, values, raw)?;
            check_finite(file, &self.name, values)?;
            for (lane, row) in values.chunks_exact(k).enumerate() {
                pack(row, lane, words);
            }
        }
        Ok(())
    }
}

/// Writes a row into its lane of a panel, rounded to nearest, ties to even.
fn pack(row: &[f32], lane: usize, panel: &mut [Words]) {
    let bits = |value: f32| u32::from(bf16::from_f32(value).to_bits());
    for (pair, words) in row.chunks(2).zip(panel) {
        let odd = pair.get(1).map_or(0, |&value| bits(value));
        words.0[lane] = bits(pair[0]) | odd << 16;
    }
}
