//! All instruction sets against a chain written out, bit for bit, and against `f64`.

use half::bf16;

use super::*;

/// A tiny generator.
struct Lcg(u32);

impl Lcg {
    fn value(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

/// Inputs of a tile: `x[token][k]`, `w[n][k]` rounded to `bf16`, and both as the kernel wants them.
struct Case {
    x: Vec<Vec<f32>>,
    w: Vec<Vec<f32>>,
    parts: Vec<Vec<f32>>,
    panels: Vec<Vec<Words>>,
}

impl Case {
    fn new(tokens: usize, panels: usize, cuts: &[usize], random: &mut Lcg) -> Self {
        let k: usize = cuts.iter().sum();
        let mut numbers = |count: usize| (0..count).map(|_| random.value()).collect::<Vec<_>>();
        let x: Vec<_> = (0..tokens).map(|_| numbers(k)).collect();
        let round = |x: &f32| bf16::from_f32(*x).to_f32();
        let w: Vec<Vec<_>> = (0..panels * LANES)
            .map(|_| numbers(k).iter().map(round).collect())
            .collect();
        let mut start = 0;
        let mut parts = Vec::new();
        for cut in cuts {
            let range = start..start + cut;
            start += cut;
            parts.push(range.flat_map(|k| x.iter().map(move |x| x[k])).collect());
        }
        let word = |k: usize, n: usize| w[n][k].to_bits() >> 16 | w[n][k + 1].to_bits();
        let panels = (0..panels)
            .map(|p| {
                let words = |pair: usize| {
                    Words(std::array::from_fn(|lane| word(pair * 2, p * LANES + lane)))
                };
                (0..k / 2).map(words).collect()
            })
            .collect();
        Self {
            x,
            w,
            parts,
            panels,
        }
    }

    fn run(&self, isa: Isa) -> Vec<f32> {
        let parts: Vec<_> = self.parts.iter().map(Vec::as_slice).collect();
        let panels: Vec<_> = self.panels.iter().map(Vec::as_slice).collect();
        // Whatever lay there before must not matter.
        let mut out = vec![f32::NAN; self.x.len() * self.w.len()];
        isa.tile(self.x.len(), &parts, &panels, &mut out);
        out
    }
}

#[test]
fn every_shape_is_one_chain_per_output_on_every_instruction_set() {
    let mut random = Lcg(1);
    for tokens in 1..=TILE_TOKENS_MAX {
        for panels in 1..=TILE_PANELS_MAX {
            for cuts in [&[2][..], &[34], &[16, 16, 6], &[64, 2, 0, 30], &[]] {
                let case = Case::new(tokens, panels, cuts, &mut random);
                let k: usize = cuts.iter().sum();
                for isa in Isa::available() {
                    let out = case.run(isa);
                    for (index, found) in out.iter().enumerate() {
                        let (x, w) = (&case.x[index / case.w.len()], &case.w[index % case.w.len()]);
                        let chain = (0..k).fold(0.0f32, |sum, k| w[k].mul_add(x[k], sum));
                        let what = format!("{isa:?}, {tokens} x {panels}, {cuts:?}, {index}");
                        assert_eq!(found.to_bits(), chain.to_bits(), "{what}");
                        let right: f64 = x
                            .iter()
                            .zip(w)
                            .map(|(x, w)| f64::from(*x) * f64::from(*w))
                            .sum();
                        assert!((f64::from(*found) - right).abs() < 1e-5, "{what}: {right}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_transposes() {
    let bytes: [[u8; 64]; LANES] = std::array::from_fn(|i| {
        std::array::from_fn(|j| (i * 7 + j * 3 + i * j % 5).to_le_bytes()[0])
    });
    for isa in Isa::available() {
        let mut columns = [Words::ZERO; LANES];
        isa.transpose(&bytes.each_ref(), &mut columns);
        for (i, row) in bytes.iter().enumerate() {
            for (j, word) in row.as_chunks::<4>().0.iter().enumerate() {
                assert_eq!(
                    columns[j].0[i].to_le_bytes(),
                    *word,
                    "{isa:?}, row {i}, word {j}"
                );
            }
        }
    }
}

#[test]
fn wrong_lengths_are_refused_before_anything_is_read() {
    let refused = |tokens, parts: &[&[f32]], panels: &[&[Words]], out_len: usize| {
        for isa in Isa::available() {
            let call = std::panic::AssertUnwindSafe(|| {
                isa.tile(tokens, parts, panels, &mut vec![0.0; out_len]);
            });
            assert!(std::panic::catch_unwind(call).is_err(), "{isa:?}");
        }
    };
    let panel: &[Words] = &[Words::ZERO; 4];
    let x = [0.0; 56];
    refused(0, &[&x[..8]], &[panel], 0);
    refused(7, &[&x[..56]], &[panel], 7 * 16);
    refused(1, &[&x[..8]], &[], 0);
    refused(1, &[&x[..8]], &[panel; 5], 80);
    refused(1, &[&x[..7]], &[panel], 16);
    refused(1, &[&x[..10]], &[panel], 16);
    refused(1, &[&x[..8]], &[panel, &panel[..3]], 32);
    refused(1, &[&x[..8]], &[panel], 15);
    refused(2, &[&x[..16]], &[panel], 16);
}

#[test]
fn the_portable_one_is_always_there_and_last() {
    let all = Isa::available();
    assert_eq!(all.last().map(|isa| isa.name()), Some("portable"));
    assert_eq!(all[0], Isa::best());
}
