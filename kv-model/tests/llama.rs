//! The CPU model on tiny random models: against a naive reference, and bit for bit against itself.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::needless_range_loop,
    reason = "helpers of tests; sequences are numbered in several lists at once"
)]

#[path = "support/gguf_writer.rs"]
#[expect(dead_code, reason = "each test file uses a part")]
mod gguf_writer;
#[path = "support/llama_reference.rs"]
mod llama_reference;
#[path = "support/llama_world.rs"]
mod llama_world;

use std::num::NonZero;
use std::sync::Arc;

use gguf_writer::{Lcg, Sizes, TYPES, TempFile, Value, tiny_llama};
use kv_core::BlockId;
use kv_core::host::PlainMemory;
use kv_model::ModelError;
use kv_model::llama::{LlamaCpu, LlamaModel};
use kv_scheduler::{BlockCopy, TokenId};
use llama_reference::reference_logits;
use llama_world::{Piece, World, argmax, bits, load, table};

fn model(sizes: Sizes, kind: u32) -> (Arc<LlamaModel>, TempFile) {
    let file = TempFile::new(&tiny_llama(sizes, kind, kind + 77).bytes());
    (load(&file.0), file)
}

fn random_tokens(count: usize, vocab: u32, seed: u32) -> Vec<TokenId> {
    let mut random = Lcg(seed);
    (0..count).map(|_| TokenId(random.below(vocab))).collect()
}

/// Sizes that every type can store: super-blocks need multiples of 256.
const WIDE: Sizes = Sizes {
    layers: 2,
    hidden: 256,
    feed_forward: 512,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    rope_dim: 64,
    vocab: 97,
    tied: false,
};

/// Head length that is no multiple of 16, partial rotation, more heads than a tile has tokens.
const STRANGE: Sizes = Sizes {
    layers: 1,
    hidden: 50,
    feed_forward: 33,
    heads: 14,
    kv_heads: 2,
    head_dim: 6,
    rope_dim: 4,
    vocab: 19,
    tied: true,
};

fn sizes_for(kind: u32) -> Sizes {
    if (10..=14).contains(&kind) {
        WIDE
    } else {
        Sizes::ODD
    }
}

#[test]
fn logits_equal_a_naive_reference_for_every_element_type() {
    let mut cases: Vec<_> = TYPES.iter().map(|t| (t.0, sizes_for(t.1), t.1)).collect();
    cases.push(("F32, strange sizes", STRANGE, 0));
    cases.push(("F32, output of its own", WIDE, 0));
    for (name, sizes, kind) in cases {
        let (model, file) = model(sizes, kind);
        let tokens = random_tokens(37, sizes.vocab, 5);
        let right = reference_logits(&file.0, &tokens);
        let mut world = World::new(&model, 8, 8, 2);
        let blocks = table(3, 5, 8);
        let piece = Piece {
            blocks: &blocks,
            position: 0,
            tokens: &tokens,
            samples: 1,
        };
        let logits = world.logits(&[piece]).remove(0);
        let spread = right.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert!(spread > 0.1, "{name}: the model says something");
        for (token, (&x, &right)) in logits.iter().zip(&right).enumerate() {
            let error = (f64::from(x) - right).abs();
            assert!(
                error < 2e-3 * spread,
                "{name}: token {token}: {x}, must be {right}"
            );
        }
    }
}

/// Runs a prompt in chunks and returns the logits after its last token.
fn chunked(world: &mut World, blocks: &[BlockId], tokens: &[TokenId], chunk: usize) -> Vec<u32> {
    let mut position = 0;
    let mut last = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let piece = Piece {
            blocks,
            position,
            tokens,
            samples: 1,
        };
        last = world.logits(&[piece]).remove(0);
        position += tokens.len();
    }
    bits(&last)
}

#[test]
fn bits_do_not_depend_on_chunks_threads_blocks_or_instruction_set() {
    for (sizes, kind) in [(Sizes::ODD, 0), (Sizes::ODD, 3), (WIDE, 12), (STRANGE, 0)] {
        let (model, _file) = model(sizes, kind);
        let tokens = random_tokens(61, sizes.vocab, 9);
        let right = chunked(
            &mut World::new(&model, 16, 4, 1),
            &table(0, 16, 16),
            &tokens,
            61,
        );
        for chunk in [1, 2, 3, 5, 7, 13, 16, 60] {
            let world = &mut World::new(&model, 16, 4, 2);
            assert_eq!(
                chunked(world, &table(5, 16, 16), &tokens, chunk),
                right,
                "chunk {chunk}"
            );
        }
        for (block_tokens, threads) in [(1, 2), (3, 3), (16, 5), (64, 2)] {
            let world = &mut World::new(&model, 61, block_tokens, threads);
            let blocks = table(1, 61, 61);
            assert_eq!(
                chunked(world, &blocks, &tokens, 17),
                right,
                "block of {block_tokens}"
            );
        }
        for name in LlamaCpu::instruction_sets() {
            let world = &mut World::new(&model, 16, 4, 2);
            assert!(world.executor.use_instruction_set(name));
            assert_eq!(
                chunked(world, &table(0, 16, 16), &tokens, 9),
                right,
                "{name}"
            );
        }
    }
}

/// What a sequence computes alone: logits after each of the tokens that follow its prompt.
fn alone(model: &Arc<LlamaModel>, prompt: &[TokenId], steps: usize) -> Vec<Vec<u32>> {
    let mut world = World::new(model, 32, 4, 1);
    let blocks = table(0, 32, 32);
    let mut position = 0;
    let mut tokens = prompt.to_vec();
    let mut all = Vec::new();
    for _ in 0..=steps {
        let piece = Piece {
            blocks: &blocks,
            position,
            tokens: &tokens,
            samples: 1,
        };
        let logits = world.logits(&[piece]).remove(0);
        position += tokens.len();
        tokens = vec![argmax(&logits)];
        all.push(bits(&logits));
    }
    all
}

#[test]
fn i10_bits_do_not_depend_on_the_company_in_a_batch() {
    const STEPS: usize = 6;
    for (sizes, kind) in [(Sizes::ODD, 0), (Sizes::ODD, 8), (WIDE, 14), (STRANGE, 0)] {
        let (model, _file) = model(sizes, kind);
        for company in [2, 3, 5, 8, 16] {
            let prompts: Vec<_> = (0..company)
                .map(|s| random_tokens(1 + s * 5 % 23, sizes.vocab, s as u32 + 1))
                .collect();
            let right: Vec<_> = prompts
                .iter()
                .map(|prompt| alone(&model, prompt, STEPS))
                .collect();
            let mut world = World::new(&model, 16 * 16, 4, 2);
            let tables: Vec<Vec<_>> = (0..company as u32)
                .map(|s| (0..16).map(|b| BlockId::new(b * 16 + s)).collect())
                .collect();
            let mut position = vec![0; company];
            let mut tokens = prompts;
            for step in 0..=STEPS {
                let pieces: Vec<_> = (0..company)
                    .map(|s| Piece {
                        blocks: &tables[s],
                        position: position[s],
                        tokens: &tokens[s],
                        samples: 1,
                    })
                    .collect();
                let logits = world.logits(&pieces);
                for s in 0..company {
                    assert_eq!(
                        bits(&logits[s]),
                        right[s][step],
                        "{s} of {company}, step {step}"
                    );
                    position[s] += tokens[s].len();
                    tokens[s] = vec![argmax(&logits[s])];
                }
            }
        }
    }
}

#[test]
fn i10_bits_do_not_depend_on_a_stay_elsewhere() {
    const STEPS: usize = 5;
    let (model, _file) = model(Sizes::ODD, 3);
    let prompt = random_tokens(14, 67, 8);
    let right = alone(&model, &prompt, STEPS);
    let mut world = World::new(&model, 24, 4, 2);
    let memory = Arc::clone(&world.memory);
    let mut blocks: Vec<_> = (0..6).map(BlockId::new).collect();
    let (mut position, mut tokens) = (0, prompt);
    for (step, right) in right.iter().enumerate() {
        let piece = Piece {
            blocks: &blocks,
            position,
            tokens: &tokens,
            samples: 1,
        };
        let logits = world.logits(&[piece]).remove(0);
        assert_eq!(bits(&logits), *right, "step {step}");
        position += tokens.len();
        tokens = vec![argmax(&logits)];
        // To other blocks, and nothing stays behind.
        let first = [6, 12, 18, 0][step % 4];
        let next: Vec<_> = (first..first + 6).map(BlockId::new).collect();
        for (from, to) in blocks.iter().zip(&next) {
            let mut from = memory.write(*from).unwrap();
            memory
                .write(*to)
                .unwrap()
                .bytes_mut()
                .copy_from_slice(from.bytes());
            from.bytes_mut().fill(0xFF);
        }
        blocks = next;
    }
}

#[test]
fn scaled_rotation_equals_the_reference() {
    let mut file = tiny_llama(Sizes::ODD, 0, 4);
    file.set(
        "llama.rope.scaling.type",
        Value::String("linear".to_owned()),
    );
    file.set("llama.rope.scaling.factor", Value::F32(3.5));
    let file = TempFile::new(&file.bytes());
    let tokens = random_tokens(20, 67, 6);
    let right = reference_logits(&file.0, &tokens);
    let mut world = World::new(&load(&file.0), 8, 4, 2);
    let blocks = table(0, 8, 8);
    let piece = Piece {
        blocks: &blocks,
        position: 0,
        tokens: &tokens,
        samples: 1,
    };
    let logits = world.logits(&[piece]).remove(0);
    let spread = right.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (&x, &right) in logits.iter().zip(&right) {
        assert!(
            (f64::from(x) - right).abs() < 2e-3 * spread,
            "{x}, must be {right}"
        );
    }
}

#[test]
fn a_prompt_is_shared_and_copied_where_choices_part() {
    let (model, _file) = model(Sizes::ODD, 0);
    let prompt = random_tokens(10, 67, 3);
    let (left, right) = (TokenId(5), TokenId(6));
    let together = |last: TokenId| {
        let mut world = World::new(&model, 8, 4, 1);
        let blocks = table(0, 8, 8);
        let tokens: Vec<_> = prompt.iter().copied().chain([last]).collect();
        bits(
            &world.logits(&[Piece {
                blocks: &blocks,
                position: 0,
                tokens: &tokens,
                samples: 1,
            }])[0],
        )
    };
    let mut world = World::new(&model, 8, 4, 2);
    let shared: Vec<_> = [0, 1, 2].map(BlockId::new).to_vec();
    let prefill = Piece {
        blocks: &shared,
        position: 0,
        tokens: &prompt,
        samples: 3,
    };
    let sampled = world.step(&[], &[prefill]).unwrap().remove(0).unwrap();
    assert_eq!(sampled.len(), 3);
    // Position 10 is in the third block, which both choices would write.
    let own: Vec<_> = [0, 1, 7].map(BlockId::new).to_vec();
    let copy = BlockCopy {
        from: BlockId::new(2),
        to: BlockId::new(7),
    };
    let pieces = [
        Piece {
            blocks: &shared,
            position: 10,
            tokens: &[left],
            samples: 1,
        },
        Piece {
            blocks: &own,
            position: 10,
            tokens: &[right],
            samples: 1,
        },
    ];
    for row in world.step(&[copy], &pieces).unwrap() {
        row.unwrap();
    }
    assert_eq!(
        bits(&world.executor.last_logits(0).unwrap()),
        together(left)
    );
    assert_eq!(
        bits(&world.executor.last_logits(1).unwrap()),
        together(right)
    );
    assert_eq!(world.executor.last_logits(2), None);
}

#[test]
fn only_the_named_positions_are_written() {
    let (model, _file) = model(Sizes::ODD, 0);
    let mut world = World::new(&model, 4, 4, 2);
    let blocks = [BlockId::new(2), BlockId::new(0)];
    let tokens = random_tokens(2, 67, 1);
    // Positions 0 to 4, so that 5 and 6 have something to read.
    let first = random_tokens(5, 67, 2);
    world.logits(&[Piece {
        blocks: &blocks,
        position: 0,
        tokens: &first,
        samples: 0,
    }]);
    let before: Vec<_> = (0..4).map(|b| snapshot(&world.memory, b)).collect();
    world.logits(&[Piece {
        blocks: &blocks,
        position: 5,
        tokens: &tokens,
        samples: 0,
    }]);
    let row_bytes = 4 * 32 * 2;
    for block in 0..4u32 {
        for (offset, (old, new)) in before[block as usize]
            .iter()
            .zip(snapshot(&world.memory, block))
            .enumerate()
        {
            let place = offset % row_bytes / (32 * 2);
            if !(block == 0 && (1..=2).contains(&place)) {
                assert_eq!(*old, new, "block {block}, byte {offset}");
            }
        }
    }
    assert_ne!(before[0], snapshot(&world.memory, 0));
}

fn snapshot(memory: &PlainMemory, block: u32) -> Vec<u8> {
    memory.read(BlockId::new(block)).unwrap().bytes().to_vec()
}

#[test]
fn a_block_in_foreign_hands_fails_the_step_and_ends_it() {
    let (model, _file) = model(Sizes::ODD, 0);
    let mut world = World::new(&model, 4, 4, 2);
    let memory = Arc::clone(&world.memory);
    let blocks = [BlockId::new(1), BlockId::new(3)];
    let tokens = random_tokens(6, 67, 1);
    world.logits(&[Piece {
        blocks: &blocks,
        position: 0,
        tokens: &tokens,
        samples: 1,
    }]);
    let next = [TokenId(1)];
    let piece = [Piece {
        blocks: &blocks,
        position: 6,
        tokens: &next,
        samples: 1,
    }];

    // A reader of a block that is only read is no conflict.
    let reader = memory.read(BlockId::new(1)).unwrap();
    world.logits(&piece);
    drop(reader);
    for block in [1, 3] {
        let writer = memory.write(BlockId::new(block)).unwrap();
        let error = world.step(&[], &piece).unwrap_err();
        assert!(error.what.contains(&format!("BlockId({block})")), "{error}");
        drop(writer);
    }
    let reader = memory.read(BlockId::new(3)).unwrap();
    world.step(&[], &piece).unwrap_err();
    let copy = BlockCopy {
        from: BlockId::new(1),
        to: BlockId::new(3),
    };
    world.step(&[copy], &[]).unwrap_err();
    drop(reader);
    // All of those steps are over, and nothing is still held.
    let fence = memory.begin_step();
    let before = kv_core::Fence::of_step(fence.step() - 1);
    assert!(memory.wait_step(before, kv_core::Span::from_millis(0)));
    memory.end_step(fence);
    world.logits(&piece);
}

#[test]
fn a_wrong_row_fails_alone() {
    let (model, _file) = model(Sizes::ODD, 0);
    let mut world = World::new(&model, 8, 4, 2);
    let good_blocks = [BlockId::new(0)];
    let good_tokens = random_tokens(3, 67, 1);
    let good = Piece {
        blocks: &good_blocks,
        position: 0,
        tokens: &good_tokens,
        samples: 1,
    };
    let right = bits(&world.logits(std::slice::from_ref(&good))[0]);
    let other = [BlockId::new(1)];
    let foreign = [TokenId(67)];
    for (bad, says) in [
        (
            Piece {
                blocks: &other,
                position: 0,
                tokens: &[],
                samples: 1,
            },
            "no tokens",
        ),
        (
            Piece {
                blocks: &other,
                position: 0,
                tokens: &foreign,
                samples: 1,
            },
            "vocabulary of 67",
        ),
        (
            Piece {
                blocks: &other,
                position: 4,
                tokens: &good_tokens,
                samples: 1,
            },
            "end at 4",
        ),
        (
            Piece {
                blocks: &other,
                position: 511,
                tokens: &good_tokens,
                samples: 1,
            },
            "of 512",
        ),
    ] {
        let rows = world.step(&[], &[bad, good.clone()]).unwrap();
        let fault = rows[0].as_ref().unwrap_err();
        assert!(fault.what.contains(says), "{fault}");
        assert_eq!(rows[1].as_ref().unwrap().len(), 1);
        assert_eq!(bits(&world.executor.last_logits(0).unwrap()), right);
    }
}

#[test]
fn a_wrong_batch_fails_as_a_whole() {
    let (model, _file) = model(Sizes::ODD, 0);
    let mut world = World::new(&model, 8, 4, 2);
    let blocks = [BlockId::new(0)];
    let tokens = random_tokens(3, 67, 1);
    let good = Piece {
        blocks: &blocks,
        position: 0,
        tokens: &tokens,
        samples: 1,
    };
    let outside = [BlockId::new(8)];
    let bad = Piece {
        blocks: &outside,
        position: 0,
        tokens: &tokens,
        samples: 1,
    };
    assert!(
        world
            .step(&[], &[bad])
            .unwrap_err()
            .what
            .contains("BlockId(8)")
    );
    let twice = [good.clone(), good.clone()];
    assert!(
        world
            .step(&[], &twice)
            .unwrap_err()
            .what
            .contains("two rows")
    );
    let copy = BlockCopy {
        from: BlockId::new(0),
        to: BlockId::new(9),
    };
    assert!(
        world
            .step(&[copy], &[])
            .unwrap_err()
            .what
            .contains("BlockId(9)")
    );
    assert!(world.step(&[], &[]).unwrap().is_empty());
}

#[test]
fn a_pool_for_another_model_is_refused() {
    let (model, _file) = model(Sizes::ODD, 0);
    for layout in [
        kv_core::Layout::per_layer(3, 4, 4, 1, 32, 2),
        kv_core::Layout::per_layer(2, 4, 4, 1, 32, 4),
        kv_core::Layout::stacked(2, 4, 4, 1, 32, 2),
    ] {
        let memory = Arc::new(PlainMemory::new(layout.unwrap()));
        let result = LlamaCpu::new(Arc::clone(&model), memory, NonZero::new(1).unwrap());
        assert!(matches!(result, Err(ModelError::Pool { .. })), "{result:?}");
    }
}
