//! A model, a pool and sequences that keep their own block tables.

use std::num::NonZero;
use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::{BlockId, Choice};
use kv_model::gguf::GgufFile;
use kv_model::llama::{LlamaCpu, LlamaModel};
use kv_scheduler::{
    Batch, BatchRow, BlockCopy, ExecuteError, Executor, RequestId, RowFault, Sample, Sampled,
    SamplingParams, TokenId,
};

pub(crate) struct World {
    pub(crate) memory: Arc<PlainMemory>,
    pub(crate) executor: LlamaCpu,
}

/// A piece of a sequence: its block table, where it starts, its tokens.
#[derive(Clone)]
pub(crate) struct Piece<'a> {
    pub(crate) blocks: &'a [BlockId],
    pub(crate) position: usize,
    pub(crate) tokens: &'a [TokenId],
    pub(crate) samples: usize,
}

impl World {
    pub(crate) fn new(
        model: &Arc<LlamaModel>,
        blocks: u32,
        block_tokens: u32,
        threads: usize,
    ) -> Self {
        let layout = model.config().kv_layout(blocks, block_tokens).unwrap();
        let memory = Arc::new(PlainMemory::new(layout));
        // Whatever lay there before must not matter.
        for block in 0..blocks {
            memory
                .write(BlockId::new(block))
                .unwrap()
                .bytes_mut()
                .fill(0xFF);
        }
        let threads = NonZero::new(threads).unwrap();
        let executor = LlamaCpu::new(Arc::clone(model), Arc::clone(&memory), threads).unwrap();
        Self { memory, executor }
    }

    pub(crate) fn step(
        &mut self,
        copies: &[BlockCopy],
        pieces: &[Piece<'_>],
    ) -> Result<Vec<Result<Vec<Sampled>, RowFault>>, ExecuteError> {
        let params = SamplingParams::default();
        let sample = Sample {
            choice: Choice::new(0),
            params: &params,
            output: &[],
        };
        let rows: Vec<_> = pieces
            .iter()
            .enumerate()
            .map(|(request, piece)| BatchRow {
                request: RequestId(request as u64),
                choice: Choice::new(0),
                blocks: piece.blocks,
                position: u32::try_from(piece.position).unwrap(),
                tokens: piece.tokens,
                prompt: piece.tokens,
                samples: vec![sample; piece.samples],
            })
            .collect();
        let output = self.executor.execute(&Batch {
            copies,
            rows: &rows,
        })?;
        assert!(
            self.memory
                .wait_step(output.fence, kv_core::Span::from_millis(0))
        );
        Ok(output.rows)
    }

    /// Runs a step that must work and returns the logits of each piece with samples.
    pub(crate) fn logits(&mut self, pieces: &[Piece<'_>]) -> Vec<Vec<f32>> {
        for row in self.step(&[], pieces).unwrap() {
            row.unwrap();
        }
        let sampled = pieces.iter().filter(|piece| piece.samples > 0).count();
        (0..sampled)
            .map(|index| self.executor.last_logits(index).unwrap())
            .collect()
    }
}

pub(crate) fn load(path: &std::path::Path) -> Arc<LlamaModel> {
    let file = GgufFile::open(path).unwrap();
    Arc::new(LlamaModel::load(&file, NonZero::new(2).unwrap()).unwrap())
}

/// Blocks in an order that isn't their natural one.
pub(crate) fn table(first: u32, count: u32, of: u32) -> Vec<BlockId> {
    (0..count)
        .map(|i| BlockId::new((first + i * 7) % of))
        .collect()
}

pub(crate) fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The next token, greedily.
pub(crate) fn argmax(logits: &[f32]) -> TokenId {
    let best = (0..logits.len())
        .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
        .unwrap();
    TokenId(u32::try_from(best).unwrap())
}
