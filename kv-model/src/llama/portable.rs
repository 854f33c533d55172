//! What [`kernels`](super::kernels) does, without vector instructions: the fallback, and what the
//! others must equal.

use super::kernels::{LANES, Words};

/// See [`Isa::tile`](super::kernels::Isa::tile), which checks the lengths.
pub(super) fn tile(tokens: usize, parts: &[&[f32]], panels: &[&[Words]], out: &mut [f32]) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    for (m, out) in out.chunks_exact_mut(panels.len()).enumerate() {
        for (panel, out) in panels.iter().zip(out) {
            let mut sums = [0.0f32; LANES];
            let xs = parts.iter().flat_map(|part| part.chunks_exact(2 * tokens));
            for (x, words) in xs.zip(*panel) {
                for (sum, word) in sums.iter_mut().zip(words.0) {
                    *sum = f32::from_bits(word << 16).mul_add(x[m], *sum);
                    *sum = f32::from_bits(word & 0xFFFF_0000).mul_add(x[tokens + m], *sum);
                }
            }
            *out = sums;
        }
    }
}

/// See [`Isa::transpose`](super::kernels::Isa::transpose).
pub(super) fn transpose(rows: &[&[u8; 64]; LANES], columns: &mut [Words; LANES]) {
    for (lane, row) in rows.iter().enumerate() {
        for (column, bytes) in columns.iter_mut().zip(row.as_chunks::<4>().0) {
            column.0[lane] = u32::from_le_bytes(*bytes);
        }
    }
}
