//! The hash oracle: health gives one text whatever the batching, damage always another one.

#![expect(clippy::unwrap_used, reason = "a failed test says where by panicking")]

use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::{BlockId, Choice, Layout, RowGroup, Span};
use kv_model::oracle::{Oracle, OracleConfig, OracleError, OracleScript, ScriptEnd};
use kv_scheduler::{
    Batch, BatchRow, BlockCopy, ExecuteError, Executor, RequestId, Sample, Sampled, SamplingParams,
    TokenId,
};
use proptest::prelude::*;

/// Damage goes unseen once in as many cases as there are tokens.
const VOCAB: u32 = u32::MAX;
const BLOCKS: u32 = 64;

fn layout(kind: usize, block_tokens: u32) -> Layout {
    match kind {
        0 => Layout::stacked(3, BLOCKS, block_tokens, 2, 4, 2),
        1 => Layout::per_layer(2, BLOCKS, block_tokens, 1, 5, 1),
        2 => Layout::latent(2, BLOCKS, block_tokens, 9, 2),
        _ => {
            let tokens = u64::from(block_tokens);
            let groups = [3 * tokens, 16 * tokens].map(|row_bytes| RowGroup {
                region: u32::from(row_bytes == 16 * tokens),
                base: 0,
                block_stride: row_bytes,
                rows: 1,
                row_stride: row_bytes,
                row_bytes,
            });
            let blocks = u64::from(BLOCKS);
            Layout::new(
                block_tokens,
                BLOCKS,
                &[3 * tokens * blocks, 16 * tokens * blocks],
                &groups,
            )
        }
    }
    .unwrap()
}

/// One choice of a request with blocks of its own.
#[derive(Clone, Debug)]
struct Sequence {
    request: u64,
    choice: Choice,
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
    blocks: Vec<BlockId>,
    /// Positions whose KV is in memory.
    filled: usize,
}

impl Sequence {
    fn new(request: u64, prompt: &[u32], blocks: impl IntoIterator<Item = u32>) -> Self {
        Self {
            request,
            choice: Choice::new(0),
            prompt: prompt.iter().copied().map(TokenId).collect(),
            output: Vec::new(),
            blocks: blocks.into_iter().map(BlockId::new).collect(),
            filled: 0,
        }
    }

    fn history(&self) -> Vec<TokenId> {
        self.prompt.iter().chain(&self.output).copied().collect()
    }

    /// How many tokens there are to run before the next one can be sampled.
    fn pending(&self) -> usize {
        self.prompt.len() + self.output.len() - self.filled
    }
}

struct World {
    memory: Arc<PlainMemory>,
    oracle: Oracle,
    params: SamplingParams,
}

impl World {
    fn new(layout: Layout, config: OracleConfig) -> Self {
        let memory = Arc::new(PlainMemory::new(layout));
        let oracle = Oracle::new(Arc::clone(&memory), config).unwrap();
        Self {
            memory,
            oracle,
            params: SamplingParams::default(),
        }
    }

    fn plain(layout: Layout) -> Self {
        Self::new(
            layout,
            OracleConfig {
                vocab: VOCAB,
                ..OracleConfig::default()
            },
        )
    }

    /// Runs up to `chunk` tokens of each sequence in one step.
    fn step(&mut self, sequences: &mut [&mut Sequence], chunk: usize) {
        let histories: Vec<_> = sequences
            .iter()
            .map(|sequence| sequence.history())
            .collect();
        let rows: Vec<_> = sequences
            .iter()
            .zip(&histories)
            .map(|(sequence, history)| {
                let count = sequence.pending().min(chunk);
                let sample = Sample {
                    choice: sequence.choice,
                    params: &self.params,
                    output: &sequence.output,
                };
                BatchRow {
                    request: RequestId(sequence.request),
                    choice: sequence.choice,
                    blocks: &sequence.blocks,
                    position: u32::try_from(sequence.filled).unwrap(),
                    tokens: &history[sequence.filled..sequence.filled + count],
                    prompt: &sequence.prompt,
                    samples: Vec::from_iter((count == sequence.pending()).then_some(sample)),
                }
            })
            .collect();
        let output = self
            .oracle
            .execute(&Batch {
                copies: &[],
                rows: &rows,
            })
            .unwrap();
        assert!(
            self.memory.wait_step(output.fence, Span::from_secs(0)),
            "the step is over"
        );
        let counts: Vec<_> = rows.iter().map(|row| row.tokens.len()).collect();
        drop(rows);
        for ((sequence, count), sampled) in sequences.iter_mut().zip(counts).zip(output.rows) {
            sequence.filled += count;
            sequence
                .output
                .extend(sampled.unwrap().iter().map(|sampled| sampled.token));
        }
    }

    /// Runs one step; returns the tokens of each row.
    fn sample(&mut self, copies: &[BlockCopy], rows: &[BatchRow<'_>]) -> Vec<Vec<TokenId>> {
        let output = self.oracle.execute(&Batch { copies, rows }).unwrap();
        let tokens = |row: Vec<Sampled>| row.into_iter().map(|sampled| sampled.token).collect();
        output
            .rows
            .into_iter()
            .map(|row| tokens(row.unwrap()))
            .collect()
    }

    /// Runs one sequence until it has `count` tokens.
    fn run(&mut self, sequence: &mut Sequence, count: usize, chunk: usize) {
        while sequence.output.len() < count {
            self.step(&mut [&mut *sequence], chunk);
        }
    }
}

fn alone(layout: Layout, prompt: &[u32], count: usize) -> Vec<TokenId> {
    let mut world = World::plain(layout);
    let mut sequence = Sequence::new(0, prompt, 0..BLOCKS);
    world.run(&mut sequence, count, usize::MAX);
    sequence.output
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Company, chunks and places in memory don't matter.
    #[test]
    fn i10_alone_in_a_batch_and_in_chunks_is_the_same(
        kind in 0usize..4,
        block_tokens in 1u32..9,
        prompts in proptest::collection::vec(proptest::collection::vec(0u32..1000, 1..20), 1..4),
        chunk in 1usize..8,
        places in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let layout = layout(kind, block_tokens);
        let mut world = World::plain(layout.clone());
        let mut places = places.into_iter();
        let mut sequences: Vec<_> = (0u64..)
            .zip(&prompts)
            .map(|(request, prompt)| {
                let needed = (prompt.len() + 8).div_ceil(block_tokens as usize);
                Sequence::new(request, prompt, places.by_ref().take(needed).collect::<Vec<_>>())
            })
            .filter(|sequence| {
                sequence.blocks.len() * block_tokens as usize >= sequence.prompt.len() + 8
            })
            .collect();
        while sequences.iter().any(|sequence| sequence.output.len() < 8) {
            let mut running: Vec<_> =
                sequences.iter_mut().filter(|sequence| sequence.output.len() < 8).collect();
            world.step(&mut running, chunk);
        }
        for (sequence, prompt) in sequences.iter().zip(&prompts) {
            prop_assert_eq!(&sequence.output, &alone(layout.clone(), prompt, 8));
        }
    }

    /// Recomputing from the tokens in other blocks brings the same bytes and the same next token.
    #[test]
    fn i10_recomputation_reproduces_the_text(
        kind in 0usize..4,
        prompt in proptest::collection::vec(0u32..1000, 1..20),
        before in 1usize..9,
        chunk in 1usize..8,
    ) {
        let layout = layout(kind, 4);
        let mut world = World::plain(layout.clone());
        let mut sequence = Sequence::new(0, &prompt, 0..8);
        world.run(&mut sequence, before, usize::MAX);
        sequence.blocks = (8..16).rev().map(BlockId::new).collect();
        sequence.filled = 0;
        world.run(&mut sequence, 10, chunk);
        prop_assert_eq!(sequence.output, alone(layout, &prompt, 10));
    }

    #[test]
    fn i09_one_changed_byte_changes_the_next_token(
        kind in 0usize..4,
        block_tokens in 1u32..9,
        prompt in proptest::collection::vec(0u32..1000, 1..20),
        before in 1usize..5,
        at in any::<prop::sample::Index>(),
        change in 1u8..,
    ) {
        let layout = layout(kind, block_tokens);
        let mut world = World::plain(layout.clone());
        let mut sequence = Sequence::new(0, &prompt, 0..BLOCKS);
        world.run(&mut sequence, before, usize::MAX);
        damage(&world.memory, &sequence, at, |byte| byte ^ change);
        world.run(&mut sequence, before + 1, usize::MAX);
        prop_assert_ne!(sequence.output.last().copied(), alone(layout, &prompt, before + 1).last().copied());
    }

    #[test]
    fn i09_swapped_blocks_change_the_next_token(
        kind in 0usize..4,
        tokens in 9u32..24,
        first in any::<prop::sample::Index>(),
        second in any::<prop::sample::Index>(),
    ) {
        // All tokens equal: only positions tell the blocks apart.
        let prompt = vec![5; tokens as usize];
        let layout = layout(kind, 4);
        let mut world = World::plain(layout.clone());
        let mut sequence = Sequence::new(0, &prompt, 0..BLOCKS);
        world.run(&mut sequence, 1, usize::MAX);
        let whole = sequence.filled / 4;
        let (first, second) = (first.index(whole), second.index(whole));
        prop_assume!(first != second);
        sequence.blocks.swap(first, second);
        world.run(&mut sequence, 2, usize::MAX);
        prop_assert_ne!(&sequence.output, &alone(layout, &prompt, 2));
    }

    /// A block that still has what was there before: from an earlier request, or from the same
    /// one's place before its last token was written.
    #[test]
    fn i09_stale_blocks_change_the_next_token(
        kind in 0usize..4,
        prompt in proptest::collection::vec(0u32..1000, 5..20),
        which in any::<prop::sample::Index>(),
        own in any::<bool>(),
    ) {
        let layout = layout(kind, 4);
        let mut world = World::plain(layout.clone());
        let mut other: Vec<_> = prompt.clone();
        other[0] += 1;
        let mut stale = Sequence::new(1, &other, 32..BLOCKS);
        world.run(&mut stale, 1, usize::MAX);
        let mut sequence = Sequence::new(0, &prompt, 0..32);
        world.run(&mut sequence, 1, usize::MAX);
        let index = if own { sequence.filled / 4 } else { which.index(sequence.filled.div_ceil(4)) };
        let saved = world.memory.read(sequence.blocks[index]).unwrap().bytes().to_vec();
        world.run(&mut sequence, 2, usize::MAX);
        let bytes = if own {
            saved
        } else {
            world.memory.read(stale.blocks[index]).unwrap().bytes().to_vec()
        };
        world.memory.write(sequence.blocks[index]).unwrap().bytes_mut().copy_from_slice(&bytes);
        world.run(&mut sequence, 3, usize::MAX);
        prop_assert_ne!(sequence.output.last().copied(), alone(layout, &prompt, 3).last().copied());
    }
}

/// Changes one byte among those of the sequence's filled positions.
fn damage(
    memory: &PlainMemory,
    sequence: &Sequence,
    at: prop::sample::Index,
    change: impl Fn(u8) -> u8,
) {
    let block_tokens = memory.layout().block_tokens() as usize;
    let position = at.index(sequence.filled);
    let mut block = memory
        .write(sequence.blocks[position / block_tokens])
        .unwrap();
    let row = at.index(memory.layout().rows_per_block() as usize);
    let share = block.row(row).len() / block_tokens;
    let byte = (position % block_tokens) * share + at.index(share);
    let byte = &mut block.row_mut(row)[byte];
    *byte = change(*byte);
}

/// Three choices after a prompt of six tokens in blocks of four: each has emitted one token, and
/// the second block, half full of the prompt, is to be copied for the choices 1 and 2.
struct Parted {
    prompt: Vec<TokenId>,
    first: Vec<[TokenId; 1]>,
    tables: [[BlockId; 2]; 3],
    params: SamplingParams,
}

impl Parted {
    const COPIES: [BlockCopy; 2] = [
        BlockCopy {
            from: BlockId::new(1),
            to: BlockId::new(2),
        },
        BlockCopy {
            from: BlockId::new(1),
            to: BlockId::new(3),
        },
    ];

    /// Runs the prompt once, as choice 0, and samples three times.
    fn new(world: &mut World) -> Self {
        let mut parted = Self {
            prompt: (0..6).map(TokenId).collect(),
            first: Vec::new(),
            tables: [[0, 1], [0, 2], [0, 3]].map(|table| table.map(BlockId::new)),
            params: SamplingParams::default(),
        };
        let row = BatchRow {
            position: 0,
            tokens: &parted.prompt,
            samples: (0..3).map(|choice| parted.sample(choice, &[])).collect(),
            ..parted.row(0, &[])
        };
        parted.first = world.sample(&[], &[row])[0]
            .iter()
            .map(|&token| [token])
            .collect();
        parted
    }

    fn sample<'a>(&'a self, choice: u32, output: &'a [TokenId]) -> Sample<'a> {
        Sample {
            choice: Choice::new(choice),
            params: &self.params,
            output,
        }
    }

    fn row<'a>(&'a self, choice: u32, output: &'a [TokenId]) -> BatchRow<'a> {
        BatchRow {
            request: RequestId(1),
            choice: Choice::new(choice),
            blocks: &self.tables[choice as usize],
            position: 6,
            tokens: output,
            prompt: &self.prompt,
            samples: vec![self.sample(choice, output)],
        }
    }

    /// Runs each choice's first token.
    fn second(&self, world: &mut World, copies: &[BlockCopy]) -> Vec<TokenId> {
        let rows: Vec<_> = (0..)
            .zip(&self.first)
            .map(|(choice, output)| self.row(choice, output))
            .collect();
        world
            .sample(copies, &rows)
            .iter()
            .map(|row| row[0])
            .collect()
    }
}

#[test]
fn i10_choices_share_a_prompt_and_part_by_copy_on_write() {
    let prompt: Vec<u32> = (0..6).collect();
    let mut world = World::plain(layout(0, 4));
    let parted = Parted::new(&mut world);
    let [[a], [b], [c]] = parted.first[..] else {
        panic!("three choices")
    };
    assert!(a != b && b != c && c != a);
    let second = parted.second(&mut world, &Parted::COPIES);
    assert_eq!([a, second[0]], alone(layout(0, 4), &prompt, 2)[..]);

    // Each choice recomputed alone, without a shared block, says the same.
    for (choice, output) in (0..).zip(&parted.first) {
        let mut sequence = Sequence::new(1, &prompt, 8..12);
        world.step(&mut [&mut sequence], 6);
        sequence.choice = Choice::new(choice);
        sequence.output = output.to_vec();
        world.step(&mut [&mut sequence], 1);
        assert_eq!(
            sequence.output[1], second[choice as usize],
            "choice {choice}"
        );
    }
}

#[test]
fn i09_a_missing_copy_on_write_shows() {
    let mut right = World::plain(layout(0, 4));
    let right = Parted::new(&mut right).second(&mut right, &Parted::COPIES);
    let mut wrong = World::plain(layout(0, 4));
    let wrong = Parted::new(&mut wrong).second(&mut wrong, &[]);
    assert_eq!(right[0], wrong[0], "choice 0 keeps its block");
    assert!(right[1] != wrong[1] && right[2] != wrong[2]);
}

#[test]
fn a_busy_block_fails_the_step_and_ends_it() {
    let mut world = World::plain(layout(0, 4));
    let mut sequence = Sequence::new(0, &[1, 2, 3, 4, 5], 0..4);
    world.run(&mut sequence, 1, usize::MAX);
    let memory = Arc::clone(&world.memory);
    let output = sequence.output.clone();
    let params = SamplingParams::default();
    let mut decode = |step| {
        let row = BatchRow {
            request: RequestId(0),
            choice: Choice::new(0),
            blocks: &sequence.blocks,
            position: 5,
            tokens: &output,
            prompt: &sequence.prompt,
            samples: vec![Sample {
                choice: Choice::new(0),
                params: &params,
                output: &output,
            }],
        };
        let result = world.oracle.execute(&Batch {
            copies: &[],
            rows: &[row],
        });
        let fence = kv_core::Fence::of_step(step);
        assert!(
            world.memory.wait_step(fence, Span::from_secs(0)),
            "failed steps end as well"
        );
        result
    };
    let is_violation = |result: Result<_, ExecuteError>| {
        result.is_err_and(|error: ExecuteError| error.what.starts_with("contract violation"))
    };
    // The oracle reads block 0 and writes block 1.
    let writer = memory.write(BlockId::new(0)).unwrap();
    assert!(is_violation(decode(2)));
    drop(writer);
    let reader = memory.read(BlockId::new(1)).unwrap();
    assert!(is_violation(decode(3)));
    drop(reader);
    let reader = memory.read(BlockId::new(0)).unwrap();
    assert!(decode(4).is_ok(), "two may read the same block");
    drop(reader);
}

#[test]
fn broken_batches_are_refused() {
    const FAR: [BlockId; 2] = [BlockId::new(0), BlockId::new(BLOCKS)];
    let mut world = World::plain(layout(0, 4));
    let parted = Parted::new(&mut world);
    let mut refused = |copies: &[BlockCopy], rows: &[BatchRow<'_>], what: &str| {
        let error = world.oracle.execute(&Batch { copies, rows }).unwrap_err();
        assert!(error.what.contains(what), "{error}, not {what}");
    };
    let output = [TokenId(9)];
    let good = parted.row(0, &output);
    let row = |change: &dyn Fn(&mut BatchRow<'_>)| {
        let mut row = good.clone();
        change(&mut row);
        [row]
    };
    refused(&[], &row(&|row| row.tokens = &[]), "without tokens");
    refused(
        &[],
        &row(&|row| row.blocks = &row.blocks[..1]),
        "1 blocks in the table",
    );
    refused(&[], &row(&|row| row.blocks = &FAR), "of a pool");
    refused(&[], &row(&|row| row.position = 5), "those of the prompt");
    refused(
        &[],
        &row(&|row| row.samples[0].output = &[]),
        "a sample after 6 tokens",
    );
    refused(
        &[],
        &row(&|row| row.tokens = &[TokenId(8)]),
        "those emitted",
    );
    refused(&[], &[good.clone(), good.clone()], "two rows write");
    let block = BlockId::new(3);
    refused(
        &[BlockCopy {
            from: block,
            to: block,
        }],
        &[],
        "copied to itself",
    );
    world.sample(&[], &[good]);
}

fn scripted(end: ScriptEnd) -> World {
    let script = OracleScript::new(end).choice(Choice::new(0), [7, 8, 9].map(TokenId));
    let config = OracleConfig {
        vocab: 20,
        script: Some(script),
        seed: 3,
        ..OracleConfig::default()
    };
    World::new(layout(1, 4), config)
}

#[test]
fn a_script_is_followed_while_no_byte_is_damaged() {
    let emit = |end, chunk| {
        let mut world = scripted(end);
        let mut sequence = Sequence::new(0, &[1, 2, 3, 4, 5], 0..8);
        world.run(&mut sequence, 7, chunk);
        sequence
            .output
            .iter()
            .map(|token| token.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(emit(ScriptEnd::Repeat, 3), [7, 8, 9, 7, 8, 9, 7]);
    assert_eq!(emit(ScriptEnd::Token(TokenId(2)), 9), [7, 8, 9, 2, 2, 2, 2]);
    assert_eq!(emit(ScriptEnd::Hashed, 9)[..3], [7, 8, 9]);
    assert_eq!(emit(ScriptEnd::Hashed, 9), emit(ScriptEnd::Hashed, 1));
}

proptest! {
    /// With a script a damaged byte always shows, however small the vocabulary.
    #[test]
    fn i09_damage_leaves_the_script(at in any::<prop::sample::Index>(), change in 1u8..) {
        let mut world = scripted(ScriptEnd::Repeat);
        let mut sequence = Sequence::new(0, &[1, 2, 3, 4, 5], 0..8);
        world.run(&mut sequence, 2, usize::MAX);
        damage(&world.memory, &sequence, at, |byte| byte.wrapping_add(change));
        world.run(&mut sequence, 3, usize::MAX);
        prop_assert_ne!(sequence.output[2], TokenId(9));
    }
}

#[test]
fn choices_without_a_script_emit_hashed_tokens() {
    let mut world = scripted(ScriptEnd::Repeat);
    let mut sequence = Sequence::new(0, &[1], 0..8);
    sequence.choice = Choice::new(1);
    world.run(&mut sequence, 12, usize::MAX);
    let repeats = sequence
        .output
        .windows(3)
        .filter(|w| **w == [7, 8, 9].map(TokenId))
        .count();
    assert!(repeats < 2, "{:?}", sequence.output);
}

#[test]
fn tokens_stay_in_range_and_the_end_comes_as_often_as_asked() {
    let config = OracleConfig {
        vocab: 300,
        lowest: TokenId(256),
        eos: Some(TokenId(270)),
        eos_every: 10,
        ..OracleConfig::default()
    };
    let mut world = World::new(layout(1, 8), config);
    let mut ends = 0;
    for request in 0u32..40 {
        let mut sequence = Sequence::new(request.into(), &[request], 0..BLOCKS);
        world.run(&mut sequence, 100, usize::MAX);
        assert!(
            sequence
                .output
                .iter()
                .all(|token| (256..300).contains(&token.0))
        );
        ends += sequence
            .output
            .iter()
            .filter(|token| token.0 == 270)
            .count();
    }
    // 4,000 draws at one in ten: the deviation is 19.
    assert!((300..500).contains(&ends), "{ends}");
}

#[test]
fn made_up_logprobs_are_a_distribution() {
    let mut world = World::plain(layout(1, 4));
    world.params.logprobs = Some(4);
    let tokens = [TokenId(3)];
    let blocks = [BlockId::new(0)];
    let row = BatchRow {
        request: RequestId(0),
        choice: Choice::new(0),
        blocks: &blocks,
        position: 0,
        tokens: &tokens,
        prompt: &tokens,
        samples: vec![Sample {
            choice: Choice::new(0),
            params: &world.params,
            output: &[],
        }],
    };
    let output = world
        .oracle
        .execute(&Batch {
            copies: &[],
            rows: &[row],
        })
        .unwrap();
    let sampled = &output.rows[0].as_ref().unwrap()[0];
    let logprobs = sampled.logprobs.as_ref().unwrap();
    assert_eq!(logprobs.top.len(), 4);
    assert_eq!(logprobs.top[0], (sampled.token, logprobs.chosen));
    assert!(logprobs.top.is_sorted_by(|a, b| a.1 > b.1));
    let mut ids: Vec<_> = logprobs.top.iter().map(|top| top.0).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    let mass: f32 = logprobs.top.iter().map(|top| top.1.exp()).sum();
    assert!(mass > 0.5 && mass <= 1.0, "{mass}");
}

#[test]
fn what_an_oracle_cant_do_is_refused_at_the_start() {
    let refuse = |layout, config| Oracle::new(Arc::new(PlainMemory::new(layout)), config).err();
    let uneven = RowGroup {
        region: 0,
        base: 0,
        block_stride: 10,
        rows: 1,
        row_stride: 10,
        row_bytes: 10,
    };
    let uneven = Layout::new(4, 2, &[20], &[uneven]).unwrap();
    let error = refuse(uneven, OracleConfig::default()).unwrap();
    assert_eq!(
        error,
        OracleError::UnevenRow {
            group: 0,
            row_bytes: 10,
            block_tokens: 4
        }
    );
    assert_eq!(
        error.to_string(),
        "rows of row group 0 have 10 bytes, not a multiple of 4 tokens per block",
    );
    let small = OracleConfig {
        vocab: 2,
        eos: Some(TokenId(0)),
        ..OracleConfig::default()
    };
    assert_eq!(
        refuse(layout(0, 4), small),
        Some(OracleError::Vocabulary { ordinary: 1 })
    );
    let eos = OracleConfig {
        vocab: 9,
        eos: Some(TokenId(9)),
        ..OracleConfig::default()
    };
    assert_eq!(
        refuse(layout(0, 4), eos),
        Some(OracleError::Eos { eos: 9, vocab: 9 })
    );
    let script = OracleScript::new(ScriptEnd::Token(TokenId(30)));
    let script = OracleConfig {
        vocab: 9,
        script: Some(script),
        ..OracleConfig::default()
    };
    assert_eq!(
        refuse(layout(0, 4), script),
        Some(OracleError::Script {
            token: 30,
            vocab: 9
        })
    );
}
