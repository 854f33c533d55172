//! Stored values → `f32`.
//!
//! One small function per type; each gets exactly one block of bytes and of values. The formats
//! are fixed by the files in the world; `tests/llama_gguf.rs` holds results of an
//! independent reader.

use half::{bf16, f16};

use super::TensorType;

/// Turns whole blocks into values.
///
/// # Panics
///
/// If bytes and values aren't the same whole number of blocks.
pub(super) fn dequantize(tensor_type: TensorType, bytes: &[u8], values: &mut [f32]) {
    let blocks = values.len() / tensor_type.block_values();
    assert_eq!(
        values.len() % tensor_type.block_values(),
        0,
        "values are whole blocks"
    );
    assert_eq!(
        bytes.len(),
        blocks * tensor_type.block_bytes(),
        "bytes are as many blocks"
    );
    match tensor_type {
        TensorType::F32 => each(bytes, values, |b: &[u8; 4], v: &mut [f32; 1]| {
            v[0] = f32::from_le_bytes(*b);
        }),
        TensorType::F16 => each(bytes, values, |b: &[u8; 2], v: &mut [f32; 1]| {
            v[0] = f16::from_le_bytes(*b).to_f32();
        }),
        TensorType::Bf16 => each(bytes, values, |b: &[u8; 2], v: &mut [f32; 1]| {
            v[0] = bf16::from_le_bytes(*b).to_f32();
        }),
        TensorType::Q4_0 => each(bytes, values, q4_0),
        TensorType::Q4_1 => each(bytes, values, q4_1),
        TensorType::Q5_0 => each(bytes, values, q5_0),
        TensorType::Q5_1 => each(bytes, values, q5_1),
        TensorType::Q8_0 => each(bytes, values, q8_0),
        TensorType::Q2K => each(bytes, values, q2_k),
        TensorType::Q3K => each(bytes, values, q3_k),
        TensorType::Q4K => each(bytes, values, q4_k),
        TensorType::Q5K => each(bytes, values, q5_k),
        TensorType::Q6K => each(bytes, values, q6_k),
        TensorType::Q8K => each(bytes, values, q8_k),
    }
}

fn each<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    values: &mut [f32],
    one: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    let (byte_blocks, _) = bytes.as_chunks::<BYTES>();
    let (value_blocks, _) = values.as_chunks_mut::<VALUES>();
    for (bytes, values) in byte_blocks.iter().zip(value_blocks) {
        one(bytes, values);
    }
}

/// A half-precision number at the byte `at`.
fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A byte as a number with a sign.
fn signed(byte: u8) -> f32 {
    f32::from(i8::from_le_bytes([byte]))
}

fn q4_0(bytes: &[u8; 18], values: &mut [f32; 32]) {
    let scale = half(bytes, 0);
    for (j, &q) in bytes[2..].iter().enumerate() {
        values[j] = scale * (f32::from(q & 0xF) - 8.0);
        values[j + 16] = scale * (f32::from(q >> 4) - 8.0);
    }
}

fn q4_1(bytes: &[u8; 20], values: &mut [f32; 32]) {
    let (scale, min) = (half(bytes, 0), half(bytes, 2));
    for (j, &q) in bytes[4..].iter().enumerate() {
        values[j] = scale * f32::from(q & 0xF) + min;
        values[j + 16] = scale * f32::from(q >> 4) + min;
    }
}

/// The two values of byte `j` of 5-bit blocks, without scale; `high` holds their fifth bits.
fn five_bits(q: u8, high: u32, j: usize) -> (f32, f32) {
    let bit = |at: usize| if high >> at & 1 == 1 { 16.0 } else { 0.0 };
    (f32::from(q & 0xF) + bit(j), f32::from(q >> 4) + bit(j + 16))
}

fn q5_0(bytes: &[u8; 22], values: &mut [f32; 32]) {
    let (scale, high) = (half(bytes, 0), word(bytes, 2));
    for (j, &q) in bytes[6..].iter().enumerate() {
        let (first, second) = five_bits(q, high, j);
        values[j] = scale * (first - 16.0);
        values[j + 16] = scale * (second - 16.0);
    }
}

fn q5_1(bytes: &[u8; 24], values: &mut [f32; 32]) {
    let (scale, min, high) = (half(bytes, 0), half(bytes, 2), word(bytes, 4));
    for (j, &q) in bytes[8..].iter().enumerate() {
        let (first, second) = five_bits(q, high, j);
        values[j] = scale * first + min;
        values[j + 16] = scale * second + min;
    }
}

fn q8_0(bytes: &[u8; 34], values: &mut [f32; 32]) {
    let scale = half(bytes, 0);
    for (value, &q) in values.iter_mut().zip(&bytes[2..]) {
        *value = scale * signed(q);
    }
}

/// 16 scales and minimums of 4 bits, 64 bytes of 2-bit values, two halves.
fn q2_k(bytes: &[u8; 84], values: &mut [f32; 256]) {
    let (scale, min) = (half(bytes, 80), half(bytes, 82));
    // 16 values share a scale; values 32 apart share a byte.
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let scales = bytes[group];
        let (scale, min) = (
            scale * f32::from(scales & 0xF),
            min * f32::from(scales >> 4),
        );
        let first = 16 + group / 8 * 32 + group % 2 * 16;
        let shift = group % 8 / 2 * 2;
        for (value, &q) in values.iter_mut().zip(&bytes[first..]) {
            *value = scale * f32::from(q >> shift & 3) - min;
        }
    }
}

/// 32 bytes of high bits, 64 bytes of 2-bit values, 16 scales of 6 bits, one half.
fn q3_k(bytes: &[u8; 110], values: &mut [f32; 256]) {
    let scale = half(bytes, 108);
    let packed = &bytes[96..108];
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let low = packed[group % 8] >> (group / 8 * 4) & 0xF;
        let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = scale * (f32::from(low | high << 4) - 32.0);
        let first = group % 2 * 16;
        let shift = group % 8 / 2 * 2;
        let bit = group / 2;
        for (l, value) in values.iter_mut().enumerate() {
            let q = bytes[32 + group / 8 * 32 + first + l] >> shift & 3;
            let less = if bytes[first + l] >> bit & 1 == 1 {
                0.0
            } else {
                4.0
            };
            *value = scale * (f32::from(q) - less);
        }
    }
}

/// The 6-bit scale and minimum number `j` of 8, from 12 bytes.
fn scale_and_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (
            low & 0xF | packed[j - 4] >> 6 << 4,
            low >> 4 | packed[j] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(min))
}

/// Two halves, 12 bytes of scales and minimums, 128 bytes of 4-bit values.
fn q4_k(bytes: &[u8; 144], values: &mut [f32; 256]) {
    let (scale, min) = (half(bytes, 0), half(bytes, 2));
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(&bytes[4..16], group);
        let (scale, min) = (scale * s, min * m);
        let first = 16 + group / 2 * 32;
        for (value, &q) in values.iter_mut().zip(&bytes[first..]) {
            *value = scale * f32::from(q >> (group % 2 * 4) & 0xF) - min;
        }
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits before the values.
fn q5_k(bytes: &[u8; 176], values: &mut [f32; 256]) {
    let (scale, min) = (half(bytes, 0), half(bytes, 2));
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(&bytes[4..16], group);
        let (scale, min) = (scale * s, min * m);
        for (l, value) in values.iter_mut().enumerate() {
            let low = bytes[48 + group / 2 * 32 + l] >> (group % 2 * 4) & 0xF;
            let high = bytes[16 + l] >> group & 1;
            *value = scale * f32::from(low | high << 4) - min;
        }
    }
}

/// 128 bytes of low and 64 bytes of high bits, 16 scales, one half.
fn q6_k(bytes: &[u8; 210], values: &mut [f32; 256]) {
    let scale = half(bytes, 208);
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        // 128 values share 64 low and 32 high bytes.
        let (part, quarter) = (group / 4, group % 4);
        for (l, value) in values.iter_mut().enumerate() {
            let low = bytes[part * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 0xF;
            let high = bytes[128 + part * 32 + l] >> (quarter * 2) & 3;
            let scale = scale * signed(bytes[192 + group * 2 + l / 16]);
            *value = scale * (f32::from(low | high << 4) - 32.0);
        }
    }
}

/// One number, 256 signed bytes, sums that aren't needed here.
fn q8_k(bytes: &[u8; 292], values: &mut [f32; 256]) {
    let scale = f32::from_bits(word(bytes, 0));
    for (value, &q) in values.iter_mut().zip(&bytes[4..260]) {
        *value = scale * signed(q);
    }
}
