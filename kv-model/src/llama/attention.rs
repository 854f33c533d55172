//! Attention of a few tokens of one row over all earlier positions, for one KV head.
//!
//! Scores are products of the same kernel as everything else: 16 positions side by side, each one
//! chain over the head's values. The weighted sum of values is a chain over positions from 0
//! upwards. So nothing depends on how a prompt was cut into chunks.

use std::ops::Range;

use parking_lot::{RwLock, RwLockReadGuard};

use super::forward::{Scratch as ThreadScratch, Step};
use super::kernels::{Isa, LANES, TILE_PANELS_MAX, TILE_TOKENS_MAX, Words};
use super::math::softmax;
use super::plan::{Held, even_pieces};

/// Working memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Keys: by 16 positions a panel over pairs of values.
    keys: Vec<Words>,
    /// Values: by 16 values of the head a panel over pairs of positions.
    values: Vec<Words>,
    /// Queries of a tile: `[head_dim][queries]`.
    queries: Vec<f32>,
    /// `[queries][positions]`
    scores: Vec<f32>,
    /// Of one token: `[positions][heads]`.
    weights: Vec<f32>,
    /// `[queries][head_dim]`
    result: Vec<f32>,
}

/// A block open to this thread.
enum Open<'a> {
    Plain(&'a [u8]),
    Shared(RwLockReadGuard<'a, &'a mut [u8]>),
}

impl Open<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl Step<'_> {
    /// Task `(span, KV head)`.
    pub(super) fn attend(&self, scratch: &mut ThreadScratch, layer: usize, task: usize) {
        let kv_heads = self.config.kv_heads as usize;
        let (span, kv_head) = (&self.plan.spans[task / kv_heads], task % kv_heads);
        let tokens = span.tokens.clone();
        let row = &self.plan.rows[span.row];
        let positions = self.plan.tokens[tokens.end - 1].position + 1;
        let group = (self.config.heads / self.config.kv_heads) as usize;
        let head_dim = self.config.head_dim as usize;

        let blocks: Vec<_> = row.blocks[..positions.div_ceil(self.block_tokens)]
            .iter()
            .map(|&block| match &self.held[block] {
                Held::Read(bytes) => Open::Plain(bytes),
                Held::Write(lock) => Open::Shared(lock.read()),
            })
            .collect();
        let keys = self.places(&blocks, layer * 2, kv_head, positions);
        let values = self.places(&blocks, layer * 2 + 1, kv_head, positions);
        let own = &mut scratch.attention;
        gather_keys(self.isa, &mut own.keys, &keys);
        self.isa
            .run(|| gather_values(&mut own.values, head_dim, &values));

        let heads = kv_head * group..(kv_head + 1) * group;
        self.scores(own, &mut scratch.out, &tokens, &heads, positions);
        own.result.resize(tokens.len() * group * head_dim, 0.0);
        for (index, token) in tokens.clone().enumerate() {
            let count = self.plan.tokens[token].position + 1;
            let rows = index * group..(index + 1) * group;
            self.weigh(own, &mut scratch.out, rows, count, &values);
        }
        drop(blocks);
        self.store(kv_head, &tokens, group, &own.result);
    }

    /// Where the keys or the values of one head lie, by position.
    fn places<'b>(
        &self,
        blocks: &'b [Open<'_>],
        plane: usize,
        kv_head: usize,
        positions: usize,
    ) -> Vec<&'b [u8]> {
        let bytes = self.config.head_dim as usize * 2;
        let mut places = Vec::with_capacity(blocks.len() * self.block_tokens);
        for block in blocks {
            let block = block.bytes();
            let place = |place| &block[self.kv_offset(plane, place, kv_head)..][..bytes];
            places.extend((0..self.block_tokens).map(place));
        }
        places.truncate(positions);
        places
    }

    /// Scores of all queries; those of later positions are computed but not used.
    fn scores(
        &self,
        own: &mut Scratch,
        out: &mut Vec<f32>,
        tokens: &Range<usize>,
        heads: &Range<usize>,
        positions: usize,
    ) {
        let head_dim = self.config.head_dim as usize;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let group = heads.len();
        let padded = positions.next_multiple_of(LANES);
        let columns: Vec<_> = self.workspace.queries[heads.clone()]
            .iter()
            .map(RwLock::read)
            .collect();
        own.scores.resize(tokens.len() * group * padded, 0.0);
        for tile in even_pieces(tokens.len() * group, TILE_TOKENS_MAX) {
            own.queries.resize(head_dim * tile.len(), 0.0);
            for (m, query) in tile.clone().enumerate() {
                let token = tokens.start + query / group;
                let values = &columns[query % group][token * head_dim..][..head_dim];
                for (&value, query) in values.iter().zip(own.queries.chunks_mut(tile.len())) {
                    query[m] = value * scale;
                }
            }
            let last = tokens.start + (tile.end - 1) / group;
            let panels = self.plan.tokens[last].position / LANES + 1;
            let panel = |p: usize| &own.keys[p * head_dim / 2..][..head_dim / 2];
            for some in even_pieces(panels, TILE_PANELS_MAX) {
                let mut words: [&[Words]; TILE_PANELS_MAX] = [&[]; TILE_PANELS_MAX];
                for (words, p) in words.iter_mut().zip(some.clone()) {
                    *words = panel(p);
                }
                let width = some.len() * LANES;
                out.resize(tile.len() * width, 0.0);
                self.isa
                    .tile(tile.len(), &[&own.queries], &words[..some.len()], out);
                for (query, out) in tile.clone().zip(out.chunks_exact(width)) {
                    own.scores[query * padded + some.start * LANES..][..width].copy_from_slice(out);
                }
            }
        }
    }

    /// Weighted sum of the values of positions `0..count` for the queries of one token; `values` are
    /// those of all positions.
    fn weigh(
        &self,
        own: &mut Scratch,
        out: &mut Vec<f32>,
        rows: Range<usize>,
        count: usize,
        values: &[&[u8]],
    ) {
        let head_dim = self.config.head_dim as usize;
        let padded = values.len().next_multiple_of(LANES);
        let used = count.next_multiple_of(LANES);
        let panel_pairs = values.len().div_ceil(2);
        // The kernel takes pairs of positions. The second one of the last pair may be a position
        // that this token must not see: it is added by hand.
        let even = count / 2 * 2;
        for tile in even_pieces(rows.len(), TILE_TOKENS_MAX) {
            let tile = rows.start + tile.start..rows.start + tile.end;
            own.weights.resize(count * tile.len(), 0.0);
            let mut sums = [0.0; TILE_TOKENS_MAX];
            for (m, query) in tile.clone().enumerate() {
                let scores = &mut own.scores[query * padded..][..used];
                sums[m] = self.isa.run(|| softmax(scores, count));
                for (&score, weights) in scores.iter().zip(own.weights.chunks_mut(tile.len())) {
                    weights[m] = score;
                }
            }
            let weights = &own.weights[..even * tile.len()];
            let last = &own.weights[even * tile.len()..];
            for some in even_pieces(head_dim.div_ceil(LANES), TILE_PANELS_MAX) {
                let mut words: [&[Words]; TILE_PANELS_MAX] = [&[]; TILE_PANELS_MAX];
                for (words, p) in words.iter_mut().zip(some.clone()) {
                    *words = &own.values[p * panel_pairs..][..even / 2];
                }
                let width = some.len() * LANES;
                let first = some.start * LANES;
                out.resize(tile.len() * width, 0.0);
                self.isa
                    .tile(tile.len(), &[weights], &words[..some.len()], out);
                for (m, query) in tile.clone().enumerate() {
                    let used = width.min(head_dim - first);
                    let sums_of = &mut out[m * width..][..used];
                    if let Some(&weight) = last.get(m) {
                        let bytes = &values[count - 1][first * 2..][..used * 2];
                        self.isa.run(|| add_weighted(sums_of, weight, bytes));
                    }
                    let result = &mut own.result[query * head_dim + first..][..used];
                    for (result, sum) in result.iter_mut().zip(sums_of) {
                        *result = *sum / sums[m];
                    }
                }
            }
        }
    }

    /// Puts results where the next matrix reads them: for each tile `[k][tile tokens]`.
    fn store(&self, kv_head: usize, tokens: &Range<usize>, group: usize, result: &[f32]) {
        let k = group * self.config.head_dim as usize;
        let mut column = self.workspace.attended[kv_head].write();
        let tiles = &self.plan.tiles;
        let first = tiles.partition_point(|tile| tile.end <= tokens.start);
        for tile in tiles[first..]
            .iter()
            .take_while(|tile| tile.start < tokens.end)
        {
            let out = &mut column[tile.start * k..tile.end * k];
            for token in tile.start.max(tokens.start)..tile.end.min(tokens.end) {
                let values = &result[(token - tokens.start) * k..][..k];
                for (&value, out) in values.iter().zip(out.chunks_mut(tile.len())) {
                    out[token - tile.start] = value;
                }
            }
        }
    }
}

/// `sums += weight * values`
#[inline(always)]
fn add_weighted(sums: &mut [f32], weight: f32, values: &[u8]) {
    for (sum, bytes) in sums.iter_mut().zip(values.as_chunks::<2>().0) {
        *sum = bf16(*bytes).mul_add(weight, *sum);
    }
}

#[inline(always)]
fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Transposes keys: lane `l` of panel `p` is position `16 p + l`; lanes without a position are
/// zero.
fn gather_keys(isa: Isa, panels: &mut Vec<Words>, keys: &[&[u8]]) {
    const NOTHING: &[u8; 64] = &[0; 64];
    let (whole, rest) = keys[0].as_chunks::<64>();
    let pairs = whole.len() * LANES + rest.len() / 4;
    panels.resize(keys.len().div_ceil(LANES) * pairs, Words::ZERO);
    for (panel, keys) in panels.chunks_exact_mut(pairs).zip(keys.chunks(LANES)) {
        let mut rows: [&[u8]; LANES] = [&[]; LANES];
        rows[..keys.len()].copy_from_slice(keys);
        let (columns, columns_rest) = panel.as_chunks_mut::<LANES>();
        for (part, columns) in columns.iter_mut().enumerate() {
            let rows = rows.map(|row| row.as_chunks().0.get(part).unwrap_or(NOTHING));
            isa.transpose(&rows, columns);
        }
        let first = columns.len() * 64;
        for (word, column) in columns_rest.iter_mut().enumerate() {
            let at = first + word * 4..first + word * 4 + 4;
            let word = |row: &[u8]| match row.get(at.clone()) {
                Some(&[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
                _ => 0,
            };
            column.0 = rows.map(word);
        }
    }
}

/// Interleaves the values of neighbouring positions; a position that isn't there is zero.
#[inline(always)]
fn gather_values(words: &mut Vec<Words>, head_dim: usize, values: &[&[u8]]) {
    let pairs = values.len().div_ceil(2);
    let panels = head_dim.div_ceil(LANES);
    words.resize(panels * pairs, Words::ZERO);
    for (pair, values) in values.chunks(2).enumerate() {
        let even = values[0];
        let odd: &[u8] = values.get(1).copied().unwrap_or_default();
        for panel in 0..panels {
            let (even, odd) = (lanes(even, panel), lanes(odd, panel));
            let words = &mut words[panel * pairs + pair].0;
            for (word, (even, odd)) in words.iter_mut().zip(even.iter().zip(odd)) {
                *word = u32::from(*even) | u32::from(odd) << 16;
            }
        }
    }
}

/// The 16 numbers of a panel; what isn't there is zero.
#[inline(always)]
fn lanes(bytes: &[u8], panel: usize) -> [u16; LANES] {
    let bytes = bytes.get(panel * LANES * 2..).unwrap_or_default();
    if let Some(whole) = bytes.first_chunk::<{ LANES * 2 }>() {
        return std::array::from_fn(|l| u16::from_le_bytes([whole[l * 2], whole[l * 2 + 1]]));
    }
    let mut numbers = [0; LANES];
    for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *number = u16::from_le_bytes(*bytes);
    }
    numbers
}
