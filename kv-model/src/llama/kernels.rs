//! The dense kernel and a transposition, for three instruction sets; the only unsafe code of this
//! crate.
//!
//! Weights are `bf16`, two neighbouring values of `k` in one 32-bit lane, 16 outputs side by side
//! ([`Words`]); activations and sums are `f32`.
//!
//! Every output is one chain of fused multiply-adds over `k`, from 0 upwards, starting from zero.
//! The shape of a tile, the number of tokens and the instruction set decide which outputs are
//! computed side by side, never the order inside an output: the bits of a result depend on its
//! own inputs alone. That is what makes a sequence's tokens the same alone, in a batch, in any
//! chunking, and on every machine.
#![expect(
    unsafe_code,
    reason = "vector loads and stores, and calls behind a run-time check"
)]

use super::portable;

/// Outputs side by side in one panel.
pub(crate) const LANES: usize = 16;
/// Most tokens in one tile.
pub(crate) const TILE_TOKENS_MAX: usize = 6;
/// Most panels in one tile.
pub(crate) const TILE_PANELS_MAX: usize = 4;

/// Weights `k` (low half) and `k + 1` (high half) of 16 outputs, as `bf16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Words(pub(crate) [u32; LANES]);

impl Words {
    pub(crate) const ZERO: Self = Self([0; LANES]);
}

/// An instruction set that this machine has. Made only by [`Isa::best`] and [`Isa::available`],
/// which look: holding one is the proof that its instructions may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The fastest one.
    pub(crate) fn best() -> Self {
        Self::available()[0]
    }

    /// All of this machine, fastest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2 && is_x86_feature_detected!("avx512f") {
                all.push(Self(Kind::Avx512));
            }
            if avx2 {
                all.push(Self(Kind::Avx2));
            }
        }
        all.push(Self(Kind::Portable));
        all
    }

    /// Its name.
    pub(crate) const fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2",
            Kind::Portable => "portable",
        }
    }

    /// Computes a tile: for each token `m` and each output `n` of the panels,
    /// `out[m][n] = sum over k of x[k][m] * w[k][n]`.
    ///
    /// * `parts`: `x` cut along `k`, each part `[k][tokens]` with an even number of `k`.
    /// * `panels`: each as many [`Words`] as the parts have pairs of `k` together.
    /// * `out`: `[tokens][16 * panels.len()]`.
    ///
    /// # Panics
    ///
    /// If the lengths don't fit, or there are more tokens or panels than a tile can have.
    pub(crate) fn tile(
        self,
        tokens: usize,
        parts: &[&[f32]],
        panels: &[&[Words]],
        out: &mut [f32],
    ) {
        assert!(
            (1..=TILE_TOKENS_MAX).contains(&tokens),
            "{tokens} tokens in a tile"
        );
        assert!(
            (1..=TILE_PANELS_MAX).contains(&panels.len()),
            "{} panels",
            panels.len()
        );
        assert_eq!(out.len(), tokens * panels.len() * LANES, "output of a tile");
        let mut pairs = 0;
        for part in parts {
            assert_eq!(
                part.len() % (2 * tokens),
                0,
                "a part is pairs of k for all tokens"
            );
            pairs += part.len() / (2 * tokens);
        }
        for panel in panels {
            assert_eq!(panel.len(), pairs, "a panel is as long as all parts");
        }
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => {
                // SAFETY: the only requirement is that the machine has AVX-512 F; a value of this
                // kind is made by `available` alone, after it looked.
                unsafe { avx512::tile(tokens, parts, panels, out) }
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => {
                // SAFETY: the only requirement is that the machine has AVX2 and FMA; a value of
                // this kind is made by `available` alone, after it looked.
                unsafe { avx2::tile(tokens, parts, panels, out) }
            }
            Kind::Portable => portable::tile(tokens, parts, panels, out),
        }
    }

    /// Transposes 16 rows of 16 words: word `j` of row `i` becomes lane `i` of `columns[j]`.
    pub(crate) fn transpose(self, rows: &[&[u8; 64]; LANES], columns: &mut [Words; LANES]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => {
                // SAFETY: the only requirement is that the machine has AVX-512 F; a value of this
                // kind is made by `available` alone, after it looked.
                unsafe { avx512::transpose(rows, columns) }
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => portable::transpose(rows, columns),
            Kind::Portable => portable::transpose(rows, columns),
        }
    }

    /// Runs `work` compiled for this instruction set, as far as the compiler inlines it: for loops
    /// over lanes that it turns into vector instructions by itself.
    #[inline]
    pub(crate) fn run<R>(self, work: impl FnOnce() -> R) -> R {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => {
                // SAFETY: the only requirement is that the machine has AVX-512 F, AVX2 and FMA; a
                // value of this kind is made by `available` alone, after it looked.
                unsafe { avx512::run(work) }
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => {
                // SAFETY: the only requirement is that the machine has AVX2 and FMA; a value of
                // this kind is made by `available` alone, after it looked.
                unsafe { avx2::run(work) }
            }
            Kind::Portable => work(),
        }
    }
}

/// Picks the function for a number of tokens and panels that are known when it is compiled.
#[cfg(target_arch = "x86_64")]
macro_rules! for_shape {
    ($tokens:expr, $panels:expr, $call:ident($($argument:expr),*)) => {
        for_shape!(@ ($tokens, $panels), $call, ($($argument),*);
            1 1, 1 2, 1 3, 1 4, 2 1, 2 2, 2 3, 2 4, 3 1, 3 2, 3 3, 3 4,
            4 1, 4 2, 4 3, 4 4, 5 1, 5 2, 5 3, 5 4, 6 1, 6 2, 6 3, 6 4)
    };
    (@ $shape:expr, $call:ident, $arguments:tt; $($t:literal $p:literal),*) => {
        match $shape {
            $(($t, $p) => for_shape!(@@ $call, $t, $p, $arguments),)*
            _ => unreachable!("the shape of a tile was checked"),
        }
    };
    (@@ $call:ident, $t:literal, $p:literal, ($($argument:expr),*)) => {
        $call::<$t, $p>($($argument),*)
    };
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use core::arch::x86_64::{
        __m512, __m512i, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_load_si512,
        _mm512_loadu_si512, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_store_si512,
        _mm512_storeu_ps, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
        _mm512_unpacklo_epi64,
    };

    use super::{LANES, Words};

    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) fn tile(tokens: usize, parts: &[&[f32]], panels: &[&[Words]], out: &mut [f32]) {
        for_shape!(tokens, panels.len(), shaped(parts, panels, out));
    }

    /// At most 24 sums, 4 weights and 1 activation in 32 registers.
    #[target_feature(enable = "avx512f,avx2,fma")]
    fn shaped<const T: usize, const P: usize>(
        parts: &[&[f32]],
        panels: &[&[Words]],
        out: &mut [f32],
    ) {
        let mut sums = [[_mm512_setzero_ps(); P]; T];
        let high = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
        let mut at = 0;
        for part in parts {
            let (pairs, _) = part.as_chunks::<T>().0.as_chunks::<2>();
            let mut rest: [&[Words]; P] = [&[]; P];
            for p in 0..P {
                rest[p] = &panels[p][at..at + pairs.len()];
            }
            at += pairs.len();
            for (i, [even, odd]) in pairs.iter().enumerate() {
                let mut words = [_mm512_setzero_si512(); P];
                for p in 0..P {
                    words[p] = load(&rest[p][i]);
                }
                for (x, sums) in even.iter().zip(&mut sums) {
                    let x = _mm512_set1_ps(*x);
                    for p in 0..P {
                        let w = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words[p]));
                        sums[p] = _mm512_fmadd_ps(w, x, sums[p]);
                    }
                }
                for (x, sums) in odd.iter().zip(&mut sums) {
                    let x = _mm512_set1_ps(*x);
                    for p in 0..P {
                        let w = _mm512_castsi512_ps(_mm512_and_si512(words[p], high));
                        sums[p] = _mm512_fmadd_ps(w, x, sums[p]);
                    }
                }
            }
        }
        let (out, _) = out.as_chunks_mut::<LANES>();
        for (out, sum) in out.iter_mut().zip(sums.as_flattened()) {
            store(out, *sum);
        }
    }

    /// Pairs of rows by words, pairs of those by double words, then quarters.
    #[target_feature(enable = "avx512f")]
    pub(super) fn transpose(rows: &[&[u8; 64]; LANES], columns: &mut [Words; LANES]) {
        let mut words = [_mm512_setzero_si512(); LANES];
        for (pair, rows) in words
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(rows.as_chunks::<2>().0)
        {
            let (a, b) = (load_bytes(rows[0]), load_bytes(rows[1]));
            *pair = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
        }
        // Quarter `q` of `words[4 g + c]` becomes column `4 q + c` of rows `4 g` to `4 g + 3`.
        for four in words.as_chunks_mut::<4>().0 {
            let [a, b, c, d] = *four;
            *four = [
                _mm512_unpacklo_epi64(a, c),
                _mm512_unpackhi_epi64(a, c),
                _mm512_unpacklo_epi64(b, d),
                _mm512_unpackhi_epi64(b, d),
            ];
        }
        for c in 0..4 {
            let (a, b) = (words[c], words[4 + c]);
            let even = _mm512_shuffle_i32x4::<0x88>(a, b);
            let odd = _mm512_shuffle_i32x4::<0xDD>(a, b);
            let (a, b) = (words[8 + c], words[12 + c]);
            let even_below = _mm512_shuffle_i32x4::<0x88>(a, b);
            let odd_below = _mm512_shuffle_i32x4::<0xDD>(a, b);
            store_words(
                &mut columns[c],
                _mm512_shuffle_i32x4::<0x88>(even, even_below),
            );
            store_words(
                &mut columns[4 + c],
                _mm512_shuffle_i32x4::<0x88>(odd, odd_below),
            );
            store_words(
                &mut columns[8 + c],
                _mm512_shuffle_i32x4::<0xDD>(even, even_below),
            );
            store_words(
                &mut columns[12 + c],
                _mm512_shuffle_i32x4::<0xDD>(odd, odd_below),
            );
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load_bytes(bytes: &[u8; 64]) -> __m512i {
        // SAFETY: `bytes` is 64 readable bytes; this instruction asks for no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store_words(to: &mut Words, values: __m512i) {
        // SAFETY: `to` is 64 writable bytes, and its type is aligned to 64 bytes.
        unsafe { _mm512_store_si512((&raw mut to.0).cast(), values) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(words: &Words) -> __m512i {
        // SAFETY: `words` is 64 readable bytes, and its type is aligned to 64 bytes.
        unsafe { _mm512_load_si512((&raw const words.0).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(to: &mut [f32; LANES], values: __m512) {
        // SAFETY: `to` is 64 writable bytes; this instruction asks for no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use core::arch::x86_64::{
        __m256, __m256i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_load_si256,
        _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    };

    use super::{LANES, Words};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    /// Panel after panel: more don't fit into 16 registers.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn tile(tokens: usize, parts: &[&[f32]], panels: &[&[Words]], out: &mut [f32]) {
        for (p, panel) in panels.iter().enumerate() {
            let (out, _) = out.as_chunks_mut::<LANES>();
            for_shape!(tokens, 1, shaped(parts, panel, &mut out[p..], panels.len()));
        }
    }

    /// At most 12 sums, 2 weights and 1 activation in 16 registers. Writes every `stride`-th
    /// vector of `out`.
    #[target_feature(enable = "avx2,fma")]
    fn shaped<const T: usize, const P: usize>(
        parts: &[&[f32]],
        panel: &[Words],
        out: &mut [[f32; LANES]],
        stride: usize,
    ) {
        let mut sums = [[_mm256_setzero_ps(); 2]; T];
        let high = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
        let mut at = 0;
        for part in parts {
            let (pairs, _) = part.as_chunks::<T>().0.as_chunks::<2>();
            let words = &panel[at..at + pairs.len()];
            at += pairs.len();
            for ([even, odd], words) in pairs.iter().zip(words) {
                let words = load(words);
                for (x, sums) in even.iter().zip(&mut sums) {
                    let x = _mm256_set1_ps(*x);
                    for p in 0..2 {
                        let w = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[p]));
                        sums[p] = _mm256_fmadd_ps(w, x, sums[p]);
                    }
                }
                for (x, sums) in odd.iter().zip(&mut sums) {
                    let x = _mm256_set1_ps(*x);
                    for p in 0..2 {
                        let w = _mm256_castsi256_ps(_mm256_and_si256(words[p], high));
                        sums[p] = _mm256_fmadd_ps(w, x, sums[p]);
                    }
                }
            }
        }
        for (out, sums) in out.iter_mut().step_by(stride).zip(sums) {
            store(out, sums);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(words: &Words) -> [__m256i; 2] {
        let first: *const __m256i = (&raw const words.0).cast();
        // SAFETY: `words` is 64 readable bytes, of which this reads the first 32, and its type is
        // aligned to 64 bytes.
        let low = unsafe { _mm256_load_si256(first) };
        // The second half is inside the same `Words`, and as well aligned.
        let second: *const __m256i = words.0[8..].as_ptr().cast();
        // SAFETY: `second` points to the last 32 bytes of `words`, 32 bytes after a multiple of 64.
        let high = unsafe { _mm256_load_si256(second) };
        [low, high]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store(to: &mut [f32; LANES], values: [__m256; 2]) {
        let (low, high) = to.split_at_mut(8);
        // SAFETY: `low` is 32 writable bytes; this instruction asks for no alignment.
        unsafe { _mm256_storeu_ps(low.as_mut_ptr(), values[0]) }
        // SAFETY: `high` is 32 writable bytes; this instruction asks for no alignment.
        unsafe { _mm256_storeu_ps(high.as_mut_ptr(), values[1]) }
    }
}

#[cfg(test)]
mod tests;
