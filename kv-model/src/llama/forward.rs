//! The phases of a step: embedding, layers, logits, samples.
//!
//! Each phase is a number of tasks without order (see [`crew`](super::crew)); a task owns what it
//! writes. Activations lie in columns of tiles:
//!
//! * the residual stream, by chunk of hidden values: `[tokens][chunk]`;
//! * whatever a matrix reads next, by chunk of `k`: for each tile of tokens `[k][tile tokens]`, as
//!   the kernel wants it.
//!
//! Normalised activations are made by every thread for itself: that costs less than making them
//! once and waiting for it.

use std::ops::Range;

use kv_scheduler::{Batch, RowFault, Sampled};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::config::ModelConfig;
use super::kernels::{Isa, LANES, TILE_PANELS_MAX, TILE_TOKENS_MAX, Words};
use super::math::{Squares, rms_scale, silu_mul};
use super::plan::{Held, Plan, even_pieces};
use super::weights::{Layer, Matrix, Weights};
use crate::sampling::Sampler;

/// Activations that one task writes and all tasks of the next phase read.
pub(super) type Column = RwLock<Vec<f32>>;

/// Activations of a step; kept from step to step.
#[derive(Debug)]
pub(super) struct Workspace {
    pub(super) shape: Shape,
    pub(super) residual: Vec<Column>,
    /// Rotated queries by head: `[tokens][head_dim]`.
    pub(super) queries: Vec<Column>,
    /// What attention gives, by KV head.
    pub(super) attended: Vec<Column>,
    pub(super) inner: Vec<Column>,
    pub(super) logits: Vec<Column>,
}

/// How matrices are cut into tasks: panels of each task.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) hidden: Vec<Range<usize>>,
    pub(super) inner: Vec<Range<usize>>,
    pub(super) logits: Vec<Range<usize>>,
}

impl Workspace {
    pub(super) fn new(config: &ModelConfig, threads: usize) -> Self {
        let panels = |n: u32| (n as usize).div_ceil(LANES);
        let shape = Shape {
            hidden: chunks(panels(config.hidden), threads, 8),
            inner: chunks(panels(config.feed_forward), threads, 8),
            logits: chunks(panels(config.vocab), threads, 32),
        };
        let columns = |count| (0..count).map(|_| Column::default()).collect();
        Self {
            residual: columns(shape.hidden.len()),
            queries: columns(config.heads as usize),
            attended: columns(config.kv_heads as usize),
            inner: columns(shape.inner.len()),
            logits: columns(shape.logits.len()),
            shape,
        }
    }

    /// Makes room for a step.
    pub(super) fn fit(&mut self, config: &ModelConfig, tokens: usize, sampled: usize) {
        let head_dim = config.head_dim as usize;
        let group = (config.heads / config.kv_heads) as usize;
        fn fit(columns: &mut [Column], size: impl Fn(usize) -> usize) {
            for (index, column) in columns.iter_mut().enumerate() {
                column.get_mut().resize(size(index), 0.0);
            }
        }
        let shape = &self.shape;
        fit(&mut self.residual, |c| {
            tokens * shape.hidden[c].len() * LANES
        });
        fit(&mut self.queries, |_| tokens * head_dim);
        fit(&mut self.attended, |_| tokens * group * head_dim);
        fit(&mut self.inner, |c| tokens * shape.inner[c].len() * LANES);
        fit(&mut self.logits, |c| {
            sampled * shape.logits[c].len() * LANES
        });
    }
}

impl Workspace {
    /// Logits of one of the sampled rows; says whether there is such a row.
    pub(super) fn copy_logits(
        &self,
        row: usize,
        config: &ModelConfig,
        logits: &mut Vec<f32>,
    ) -> bool {
        logits.clear();
        for (column, panels) in self.logits.iter().zip(&self.shape.logits) {
            let width = panels.len() * LANES;
            match column.read().get(row * width..(row + 1) * width) {
                Some(values) => logits.extend_from_slice(values),
                None => return false,
            }
        }
        logits.truncate(config.vocab as usize);
        true
    }
}

/// Cuts panels into tasks of at most `most`, so that the slowest thread has least to do, and then
/// so that tasks are few.
fn chunks(panels: usize, threads: usize, most: usize) -> Vec<Range<usize>> {
    let rounds = |size: usize| panels.div_ceil(size).div_ceil(threads) * size;
    let size = (1..=most)
        .rev()
        .min_by_key(|&size| rounds(size))
        .expect("most is at least 1");
    even_pieces(panels, size)
}

/// Working memory of one thread; kept from step to step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Normalised activations, and for which phase they were made.
    normed: Vec<f32>,
    normed_for: Option<usize>,
    pub(super) out: Vec<f32>,
    second: Vec<f32>,
    pub(super) attention: super::attention::Scratch,
    logits: Vec<f32>,
    sampler: Sampler,
}

impl Scratch {
    /// Forgets what belongs to an earlier step.
    pub(super) const fn forget(&mut self) {
        self.normed_for = None;
    }
}

/// Where a row's samples go.
pub(super) type SampleSlot = Mutex<Option<Result<Vec<Sampled>, RowFault>>>;

/// One step, seen by all its threads.
pub(super) struct Step<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) weights: &'a Weights,
    pub(super) isa: Isa,
    pub(super) batch: &'a Batch<'a>,
    pub(super) plan: &'a Plan,
    pub(super) held: &'a [Held<'a>],
    pub(super) block_tokens: usize,
    pub(super) workspace: &'a Workspace,
    /// Cosine and sine by token and rotated pair.
    pub(super) rope: &'a [(f32, f32)],
    /// Tiles of the sampled rows.
    pub(super) sampled_tiles: Vec<Range<usize>>,
    pub(super) results: Vec<SampleSlot>,
}

const PHASES_PER_LAYER: usize = 5;

impl Step<'_> {
    /// Number of tasks of each phase.
    pub(super) fn phases(&self) -> Vec<usize> {
        let Workspace { shape, .. } = self.workspace;
        let heads = self.config.heads as usize;
        let kv_heads = self.config.kv_heads as usize;
        let mut phases = vec![shape.hidden.len()];
        for _ in 0..self.config.layers {
            phases.extend([
                heads + 2 * kv_heads,
                self.plan.spans.len() * kv_heads,
                shape.hidden.len(),
                shape.inner.len(),
                shape.hidden.len(),
            ]);
        }
        if !self.plan.sampled.is_empty() {
            phases.extend([shape.logits.len(), self.plan.sampled.len()]);
        }
        phases
    }

    /// Runs one task of one phase.
    pub(super) fn task(&self, scratch: &mut Scratch, phase: usize, task: usize) {
        let Some(in_layers) = phase.checked_sub(1) else {
            return self.embed(task);
        };
        let number = in_layers / PHASES_PER_LAYER;
        let Some(layer) = self.weights.layers.get(number) else {
            return match in_layers - self.weights.layers.len() * PHASES_PER_LAYER {
                0 => self.logits(scratch, phase, task),
                _ => self.sample(scratch, task),
            };
        };
        match in_layers % PHASES_PER_LAYER {
            0 => {
                self.normalise(scratch, phase, &layer.attention_norm, None);
                self.heads(scratch, layer, number, task);
            }
            1 => self.attend(scratch, number, task),
            2 => self.add_to_residual(scratch, &layer.output, &self.workspace.attended, task),
            3 => {
                self.normalise(scratch, phase, &layer.ffn_norm, None);
                self.gate_and_up(scratch, layer, task);
            }
            _ => self.add_to_residual(scratch, &layer.down, &self.workspace.inner, task),
        }
    }

    fn embed(&self, task: usize) {
        let panels = self.workspace.shape.hidden[task].clone();
        let width = panels.len() * LANES;
        let mut column = self.workspace.residual[task].write();
        for (token, values) in self.plan.tokens.iter().zip(column.chunks_exact_mut(width)) {
            values.fill(0.0);
            self.weights
                .embedding
                .row(token.id, panels.start * LANES, values);
        }
    }

    /// RMS norm of all tokens, or of some, once per phase and thread:
    /// for each tile `[hidden][tile tokens]`.
    fn normalise(&self, scratch: &mut Scratch, phase: usize, norm: &[f32], only: Option<&[usize]>) {
        if scratch.normed_for == Some(phase) {
            return;
        }
        scratch.normed_for = Some(phase);
        let columns: Vec<_> = self.workspace.residual.iter().map(RwLock::read).collect();
        let tiles = if only.is_some() {
            &self.sampled_tiles
        } else {
            &self.plan.tiles
        };
        let hidden = norm.len();
        let k = hidden.next_multiple_of(2);
        let count: usize = tiles.iter().map(Range::len).sum();
        scratch.normed.resize(count * k, 0.0);
        let normed = &mut scratch.normed;
        self.isa.run(|| {
            for tile in tiles {
                let out = &mut normed[tile.start * k..tile.end * k];
                for (m, index) in tile.clone().enumerate() {
                    let token = only.map_or(index, |only| only[index]);
                    self.normalise_one(&columns, token, norm, out, m, tile.len());
                }
            }
        });
    }

    #[inline(always)]
    fn normalise_one(
        &self,
        columns: &[RwLockReadGuard<'_, Vec<f32>>],
        token: usize,
        norm: &[f32],
        out: &mut [f32],
        m: usize,
        stride: usize,
    ) {
        let values = |column: usize| {
            let width = self.workspace.shape.hidden[column].len() * LANES;
            &columns[column][token * width..][..width]
        };
        // Padding is zero and adds nothing.
        let mut squares = Squares::ZERO;
        for column in 0..columns.len() {
            squares.add(values(column));
        }
        let scale = rms_scale(
            &squares,
            self.config.hidden as f32,
            self.config.norm_epsilon,
        );
        let mut k = 0;
        for column in 0..columns.len() {
            for (&x, &norm) in values(column).iter().zip(&norm[k..]) {
                out[k * stride + m] = x * scale * norm;
                k += 1;
            }
        }
        if k % 2 == 1 {
            out[k * stride + m] = 0.0;
        }
    }

    /// Calls `each(tile, out)` with the product for every tile of tokens; `out` is
    /// `[tile tokens][16 * panels]`.
    pub(super) fn multiply<'x>(
        &self,
        tiles: &[Range<usize>],
        x: impl Fn(&Range<usize>, &mut Vec<&'x [f32]>),
        matrix: &Matrix,
        panels: &Range<usize>,
        out: &mut Vec<f32>,
        mut each: impl FnMut(&Range<usize>, Range<usize>, &mut [f32]),
    ) {
        let mut parts = Vec::new();
        for group in even_pieces(panels.len(), TILE_PANELS_MAX) {
            let mut words: [&[Words]; TILE_PANELS_MAX] = [&[]; TILE_PANELS_MAX];
            for (words, panel) in words.iter_mut().zip(group.clone()) {
                *words = matrix.panel(panels.start + panel);
            }
            for tile in tiles {
                parts.clear();
                x(tile, &mut parts);
                out.resize(tile.len() * group.len() * LANES, 0.0);
                self.isa
                    .tile(tile.len(), &parts, &words[..group.len()], out);
                each(tile, group.start * LANES..group.end * LANES, out);
            }
        }
    }

    /// One head of Q, K or V: rotated by position, and for K and V written to the cache.
    fn heads(&self, scratch: &mut Scratch, layer: &Layer, number: usize, task: usize) {
        let heads = self.config.heads as usize;
        let kv_heads = self.config.kv_heads as usize;
        let head_dim = self.config.head_dim as usize;
        let Scratch {
            normed,
            out,
            second,
            ..
        } = scratch;
        let k = (self.config.hidden as usize).next_multiple_of(2);
        let (matrix, head) = if task < heads {
            (&layer.q[task], task)
        } else if task < heads + kv_heads {
            (&layer.k[task - heads], task - heads)
        } else {
            (&layer.v[task - heads - kv_heads], task - heads - kv_heads)
        };
        // [tokens][head_dim]
        second.resize(self.plan.tokens.len() * head_dim, 0.0);
        let x = |tile: &Range<usize>, parts: &mut Vec<_>| {
            parts.push(&normed[tile.start * k..tile.end * k]);
        };
        let panels = 0..matrix.n_panels();
        self.multiply(
            &self.plan.tiles,
            x,
            matrix,
            &panels,
            out,
            |tile, columns, out| {
                let used = columns.start..columns.end.min(head_dim);
                for (token, out) in tile.clone().zip(out.chunks_exact(columns.len())) {
                    second[token * head_dim..][used.clone()].copy_from_slice(&out[..used.len()]);
                }
            },
        );
        if task < heads + kv_heads {
            self.isa.run(|| self.rotate(second));
        }
        if task < heads {
            self.workspace.queries[head].write().copy_from_slice(second);
        } else {
            let plane = number * 2 + usize::from(task >= heads + kv_heads);
            self.isa.run(|| self.write_kv(plane, head, second));
        }
    }

    /// Rotates neighbouring pairs by position.
    #[inline(always)]
    fn rotate(&self, values: &mut [f32]) {
        let pairs = self.config.rope_dim as usize / 2;
        let head_dim = self.config.head_dim as usize;
        for (values, angles) in values
            .chunks_exact_mut(head_dim)
            .zip(self.rope.chunks_exact(pairs))
        {
            for (pair, &(cos, sin)) in values.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                let [a, b] = *pair;
                *pair = [a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos)];
            }
        }
    }

    /// Offset of the values of one head of one token in a block, bytes.
    pub(super) fn kv_offset(&self, plane: usize, place: usize, head: usize) -> usize {
        let kv_heads = self.config.kv_heads as usize;
        let head_dim = self.config.head_dim as usize;
        ((plane * self.block_tokens + place) * kv_heads + head) * head_dim * 2
    }

    #[inline(always)]
    fn write_kv(&self, plane: usize, head: usize, values: &[f32]) {
        let head_dim = self.config.head_dim as usize;
        for (token, values) in self.plan.tokens.iter().zip(values.chunks_exact(head_dim)) {
            let Held::Write(block) = &self.held[token.block] else {
                unreachable!("the block of a token that is run was locked for writing");
            };
            let mut block = block.write();
            let bytes = &mut block[self.kv_offset(plane, token.place, head)..][..head_dim * 2];
            for (bytes, &value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *bytes = half::bf16::from_f32(value).to_le_bytes();
            }
        }
    }

    /// `residual += matrix * input` for one chunk of the residual.
    fn add_to_residual(
        &self,
        scratch: &mut Scratch,
        matrix: &Matrix,
        input: &[Column],
        task: usize,
    ) {
        let panels = &self.workspace.shape.hidden[task];
        let width = panels.len() * LANES;
        let columns: Vec<_> = input.iter().map(RwLock::read).collect();
        let tokens = self.plan.tokens.len();
        let mut residual = self.workspace.residual[task].write();
        let x = |tile: &Range<usize>, parts: &mut Vec<_>| {
            for column in &columns {
                let k = column.len() / tokens;
                parts.push(&column[tile.start * k..tile.end * k]);
            }
        };
        self.multiply(
            &self.plan.tiles,
            x,
            matrix,
            panels,
            &mut scratch.out,
            |tile, range, out| {
                for (token, out) in tile.clone().zip(out.chunks_exact(range.len())) {
                    let residual = &mut residual[token * width..][range.clone()];
                    for (residual, out) in residual.iter_mut().zip(out) {
                        *residual += *out;
                    }
                }
            },
        );
    }

    /// `inner = silu(gate) * up` for one chunk of the feed-forward part.
    fn gate_and_up(&self, scratch: &mut Scratch, layer: &Layer, task: usize) {
        let panels = &self.workspace.shape.inner[task];
        let width = panels.len() * LANES;
        let k = (self.config.hidden as usize).next_multiple_of(2);
        let Scratch {
            normed,
            out,
            second,
            ..
        } = scratch;
        let x = |tile: &Range<usize>, parts: &mut Vec<_>| {
            parts.push(&normed[tile.start * k..tile.end * k]);
        };
        let mut inner = self.workspace.inner[task].write();
        for group in even_pieces(panels.len(), TILE_PANELS_MAX) {
            let group = panels.start + group.start..panels.start + group.end;
            let first = (group.start - panels.start) * LANES;
            for tile in &self.plan.tiles {
                let tile = std::slice::from_ref(tile);
                self.multiply(tile, x, &layer.up, &group, second, |_, _, _| {});
                self.multiply(tile, x, &layer.gate, &group, out, |tile, range, gate| {
                    self.isa.run(|| silu_mul(gate, second));
                    // [k][tile tokens]
                    let inner = &mut inner[tile.start * width + first * tile.len()..];
                    for (m, gate) in gate.chunks_exact(range.len()).enumerate() {
                        for (&value, inner) in gate.iter().zip(inner.chunks_mut(tile.len())) {
                            inner[m] = value;
                        }
                    }
                });
            }
        }
    }

    fn logits(&self, scratch: &mut Scratch, phase: usize, task: usize) {
        let last: Vec<_> = self
            .plan
            .sampled
            .iter()
            .map(|&row| self.plan.rows[row].tokens.end - 1)
            .collect();
        self.normalise(scratch, phase, &self.weights.norm, Some(&last));
        let panels = &self.workspace.shape.logits[task];
        let width = panels.len() * LANES;
        let k = (self.config.hidden as usize).next_multiple_of(2);
        let Scratch { normed, out, .. } = scratch;
        let x = |tile: &Range<usize>, parts: &mut Vec<_>| {
            parts.push(&normed[tile.start * k..tile.end * k]);
        };
        let mut logits = self.workspace.logits[task].write();
        let matrix = self.weights.logits();
        self.multiply(
            &self.sampled_tiles,
            x,
            matrix,
            panels,
            out,
            |tile, range, out| {
                for (row, out) in tile.clone().zip(out.chunks_exact(range.len())) {
                    logits[row * width..][range.clone()].copy_from_slice(out);
                }
            },
        );
    }

    fn sample(&self, scratch: &mut Scratch, task: usize) {
        let Scratch {
            logits, sampler, ..
        } = scratch;
        let there = self.workspace.copy_logits(task, self.config, logits);
        assert!(there, "every sampled row has logits");
        let row = &self.batch.rows[self.plan.rows[self.plan.sampled[task]].index];
        let result = row
            .samples
            .iter()
            .map(|sample| sampler.sample(logits, row.prompt, sample))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| RowFault {
                what: error.to_string(),
            });
        *self.results[task].lock() = Some(result);
    }
}

/// Tiles of `count` rows.
pub(super) fn tiles(count: usize) -> Vec<Range<usize>> {
    even_pieces(count, TILE_TOKENS_MAX)
}
