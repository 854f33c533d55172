//! The CPU model on the real default model.
//!
//! The file is `models/SmolLM2-135M-Instruct.Q4_1.gguf` (`cargo xtask model` brings it) or what
//! `KV_MODEL` names. Without it these tests say that they were left out; with
//! `KV_REQUIRE_MODEL=1`, as in CI, they fail.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "helpers of tests"
)]

#[path = "support/llama_world.rs"]
mod llama_world;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use kv_core::BlockId;
use kv_model::llama::{LlamaCpu, LlamaModel};
use kv_scheduler::TokenId;
use llama_world::{Piece, World, argmax, bits, load, table};

/// `<|im_start|>system … <|im_end|>`, the question, and the start of the answer, as the model's
/// chat template and tokenizer make them.
const QUESTION: [u32; 37] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
    198,
];
/// "The capital of France is Paris." and the end of the turn.
const ANSWER: [u32; 8] = [504, 3575, 282, 4649, 314, 7042, 30, 2];

fn model() -> Option<Arc<LlamaModel>> {
    static MODEL: OnceLock<Option<Arc<LlamaModel>>> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let default = concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
            );
            let named = std::env::var_os("KV_MODEL");
            let path = named
                .clone()
                .map_or_else(|| PathBuf::from(default), PathBuf::from);
            if path.exists() || named.is_some() {
                return Some(load(&path));
            }
            if std::env::var("KV_REQUIRE_MODEL").is_ok_and(|value| value == "1") {
                panic!("there is no {}: run `cargo xtask model`", path.display());
            }
            eprintln!("left out: there is no {}", path.display());
            None
        })
        .clone()
}

fn question() -> Vec<TokenId> {
    QUESTION.map(TokenId).to_vec()
}

/// Logits after the prompt and after each of the greedy tokens that follow.
fn alone(
    model: &Arc<LlamaModel>,
    prompt: &[TokenId],
    chunk: usize,
    steps: usize,
) -> (Vec<Vec<u32>>, Vec<TokenId>) {
    let mut world = World::new(model, 16, 16, 2);
    let blocks = table(2, 16, 16);
    let mut position = 0;
    let (mut all, mut answer) = (Vec::new(), Vec::new());
    for tokens in prompt.chunks(chunk) {
        let samples = usize::from(position + tokens.len() == prompt.len());
        let logits = world.logits(&[Piece {
            blocks: &blocks,
            position,
            tokens,
            samples,
        }]);
        position += tokens.len();
        if let [logits] = logits.as_slice() {
            answer.push(argmax(logits));
            all.push(bits(logits));
        }
    }
    for step in 0..steps {
        let tokens = [answer[step]];
        let piece = Piece {
            blocks: &blocks,
            position,
            tokens: &tokens,
            samples: 1,
        };
        let logits = world.logits(&[piece]).remove(0);
        position += 1;
        answer.push(argmax(&logits));
        all.push(bits(&logits));
    }
    (all, answer)
}

#[test]
fn the_capital_of_france_is_paris() {
    let Some(model) = model() else { return };
    let config = model.config();
    assert_eq!(
        (config.layers, config.kv_heads, config.head_dim),
        (30, 3, 64)
    );
    assert_eq!(
        (config.bos, config.eos.as_slice()),
        (Some(TokenId(1)), &[TokenId(2)][..])
    );
    let (_, answer) = alone(&model, &question(), 512, ANSWER.len() - 1);
    assert_eq!(answer, ANSWER.map(TokenId));
}

#[test]
fn bits_do_not_depend_on_chunks_threads_or_instruction_set() {
    let Some(model) = model() else { return };
    // Not the portable one: it is checked on tiny models, and slow without vectors.
    let vectors = LlamaCpu::instruction_sets()
        .into_iter()
        .filter(|&name| name != "portable");
    let (right, _) = alone(&model, &question(), 37, 2);
    for chunk in [1, 13, 16] {
        let (logits, _) = alone(&model, &question(), chunk, 2);
        assert!(logits == right, "chunks of {chunk}");
    }
    for (name, threads) in vectors.zip([3, 1]) {
        let mut world = World::new(&model, 40, 1, threads);
        assert!(world.executor.use_instruction_set(name));
        let blocks = table(0, 37, 40);
        let prompt = question();
        let piece = Piece {
            blocks: &blocks,
            position: 0,
            tokens: &prompt,
            samples: 1,
        };
        assert!(
            bits(&world.logits(&[piece])[0]) == right[0],
            "{name} on {threads} threads"
        );
    }
}

#[test]
fn i10_bits_do_not_depend_on_the_company_in_a_batch() {
    const STEPS: usize = 2;
    let Some(model) = model() else { return };
    // Prompts of different lengths: the question without its first tokens.
    let prompts: Vec<_> = (0..16).map(|s| question().split_off(s * 2)).collect();
    let right: Vec<_> = prompts
        .iter()
        .map(|prompt| alone(&model, prompt, 512, STEPS))
        .collect();
    for company in [2, 3, 5, 8, 16] {
        let mut world = World::new(&model, 4 * 16, 16, 2);
        let tables: Vec<Vec<_>> = (0..company as u32)
            .map(|s| (0..4).map(|b| BlockId::new(b * 16 + s)).collect())
            .collect();
        let mut position = vec![0; company];
        for step in 0..=STEPS {
            let next: Vec<_> = (0..company)
                .map(|s| match step {
                    0 => prompts[s].clone(),
                    _ => vec![right[s].1[step - 1]],
                })
                .collect();
            let pieces: Vec<_> = (0..company)
                .map(|s| Piece {
                    blocks: &tables[s],
                    position: position[s],
                    tokens: &next[s],
                    samples: 1,
                })
                .collect();
            let logits = world.logits(&pieces);
            for s in 0..company {
                assert!(
                    bits(&logits[s]) == right[s].0[step],
                    "{s} of {company}, step {step}"
                );
                position[s] += next[s].len();
            }
        }
    }
}
