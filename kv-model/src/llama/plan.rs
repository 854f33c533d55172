//! From a batch to tokens, tiles and tasks; and the blocks that the step holds.

use std::collections::BTreeMap;
use std::ops::Range;

use kv_core::host::{BlockRead, BlockWrite, PlainMemory};
use kv_core::{BlockId, Layout};
use kv_scheduler::{Batch, BatchRow, BlockCopy, ExecuteError, RowFault};
use parking_lot::RwLock;

use super::kernels::TILE_TOKENS_MAX;

/// Most tokens of one row that share one attention task.
const ATTENTION_TOKENS_MAX: usize = 16;

/// A block of the batch. Locked once for the whole step, however many rows name it.
#[derive(Debug)]
pub(super) enum Held<'a> {
    /// Nobody writes it in this step.
    Read(&'a [u8]),
    /// One row writes it; the lock is between the threads of this step.
    Write(RwLock<&'a mut [u8]>),
}

/// The locks behind [`Held`].
#[derive(Debug)]
pub(super) enum Guard<'a> {
    Read(BlockRead<'a>),
    Write(BlockWrite<'a>),
}

impl Guard<'_> {
    pub(super) fn held(&mut self) -> Held<'_> {
        match self {
            Self::Read(block) => Held::Read(block.bytes()),
            Self::Write(block) => Held::Write(RwLock::new(block.bytes_mut())),
        }
    }
}

/// One token to be run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub(super) id: usize,
    pub(super) position: usize,
    /// Which of the held blocks gets its K and V, and where in it.
    pub(super) block: usize,
    pub(super) place: usize,
}

/// One usable row of the batch.
#[derive(Debug)]
pub(super) struct Row {
    /// Its place in the batch.
    pub(super) index: usize,
    /// Position `p` lies in held block `blocks[p / block_tokens]`.
    pub(super) blocks: Vec<usize>,
    /// Its tokens, in the step's list.
    pub(super) tokens: Range<usize>,
}

/// Neighbouring tokens of one row whose attention is computed together.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) row: usize,
    pub(super) tokens: Range<usize>,
}

/// What a step will do.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) rows: Vec<Row>,
    pub(super) tokens: Vec<Token>,
    /// Tokens whose dense layers are computed together.
    pub(super) tiles: Vec<Range<usize>>,
    /// Longest first.
    pub(super) spans: Vec<Span>,
    /// By row of the batch: why it is left out.
    pub(super) faults: Vec<Option<RowFault>>,
    /// All blocks of the usable rows, and whether they are written.
    pub(super) blocks: BTreeMap<BlockId, Access>,
    /// Usable rows that want samples.
    pub(super) sampled: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// What tokens and positions must stay below.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) vocab: u32,
    pub(super) positions: u32,
}

impl Plan {
    pub(super) fn new(
        batch: &Batch<'_>,
        layout: &Layout,
        limits: Limits,
    ) -> Result<Self, ExecuteError> {
        let block_tokens = layout.block_tokens() as usize;
        let mut faults: Vec<_> = Vec::with_capacity(batch.rows.len());
        let mut blocks = BTreeMap::new();
        for row in batch.rows {
            let fault = fault_of(row, block_tokens, limits);
            if fault.is_none() {
                claim(row, layout, &mut blocks)?;
            }
            faults.push(fault);
        }
        let mut plan = Self {
            rows: Vec::with_capacity(batch.rows.len()),
            tokens: Vec::new(),
            tiles: Vec::new(),
            spans: Vec::new(),
            faults,
            blocks,
            sampled: Vec::new(),
        };
        let numbers: BTreeMap<_, _> = plan.blocks.keys().copied().zip(0..).collect();
        for (index, row) in batch.rows.iter().enumerate() {
            if plan.faults[index].is_none() {
                plan.add(index, row, &numbers, block_tokens);
            }
        }
        plan.tiles = even_pieces(plan.tokens.len(), TILE_TOKENS_MAX);
        // The longest last task would make all threads wait for one.
        let tokens = &plan.tokens;
        plan.spans.sort_by_key(|span| {
            let work = tokens[span.tokens.end - 1].position * span.tokens.len();
            std::cmp::Reverse(work)
        });
        Ok(plan)
    }

    fn add(
        &mut self,
        index: usize,
        row: &BatchRow<'_>,
        numbers: &BTreeMap<BlockId, usize>,
        block_tokens: usize,
    ) {
        let first = self.tokens.len();
        let positions = row.position as usize..;
        let end = row.position as usize + row.tokens.len();
        let table = &row.blocks[..end.div_ceil(block_tokens)];
        let blocks: Vec<_> = table.iter().map(|block| numbers[block]).collect();
        for (position, token) in positions.zip(row.tokens) {
            self.tokens.push(Token {
                id: token.0 as usize,
                position,
                block: blocks[position / block_tokens],
                place: position % block_tokens,
            });
        }
        let number = self.rows.len();
        for piece in even_pieces(row.tokens.len(), ATTENTION_TOKENS_MAX) {
            let tokens = first + piece.start..first + piece.end;
            self.spans.push(Span {
                row: number,
                tokens,
            });
        }
        if !row.samples.is_empty() {
            self.sampled.push(number);
        }
        self.rows.push(Row {
            index,
            blocks,
            tokens: first..self.tokens.len(),
        });
    }
}

/// Cuts `0..count` into pieces of at most `most`, as equal as possible.
pub(super) fn even_pieces(count: usize, most: usize) -> Vec<Range<usize>> {
    let pieces = count.div_ceil(most);
    (0..pieces)
        .map(|i| i * count / pieces..(i + 1) * count / pieces)
        .collect()
}

/// Why a row can't be run, without harm to the others.
fn fault_of(row: &BatchRow<'_>, block_tokens: usize, limits: Limits) -> Option<RowFault> {
    let fault = |what: String| Some(RowFault { what });
    if row.tokens.is_empty() {
        return fault("the row has no tokens".to_owned());
    }
    if row.tokens.iter().any(|token| token.0 >= limits.vocab) {
        return fault(format!(
            "a token is outside the vocabulary of {}",
            limits.vocab
        ));
    }
    let end = u64::from(row.position) + row.tokens.len() as u64;
    if end > u64::from(limits.positions) {
        return fault(format!(
            "the row ends at position {end} of {}",
            limits.positions
        ));
    }
    let room = row.blocks.len() as u64 * block_tokens as u64;
    if end > room {
        return fault(format!(
            "the row ends at position {end}, its blocks end at {room}"
        ));
    }
    None
}

/// Notes the blocks of a row.
fn claim(
    row: &BatchRow<'_>,
    layout: &Layout,
    blocks: &mut BTreeMap<BlockId, Access>,
) -> Result<(), ExecuteError> {
    let block_tokens = layout.block_tokens() as usize;
    let end = row.position as usize + row.tokens.len();
    for (index, &block) in row.blocks[..end.div_ceil(block_tokens)].iter().enumerate() {
        if block.value() >= layout.blocks() {
            let what = format!("{block:?} is not in the pool of {} blocks", layout.blocks());
            return Err(ExecuteError { what });
        }
        let writes = index >= row.position as usize / block_tokens;
        let access = if writes { Access::Write } else { Access::Read };
        let before = blocks.insert(block, access);
        match (before, access) {
            (Some(Access::Write), Access::Write) => {
                let what = format!("two rows of the batch write {block:?}");
                return Err(ExecuteError { what });
            }
            (Some(Access::Write), Access::Read) => {
                blocks.insert(block, Access::Write);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes the copies, in order.
pub(super) fn copy_blocks(memory: &PlainMemory, copies: &[BlockCopy]) -> Result<(), ExecuteError> {
    for &BlockCopy { from, to } in copies {
        for block in [from, to] {
            if block.value() >= memory.layout().blocks() {
                let what = format!("a copy names {block:?}, which is not in the pool");
                return Err(ExecuteError { what });
            }
        }
        if from == to {
            return Err(ExecuteError {
                what: format!("a copy of {from:?} onto itself"),
            });
        }
        let from = memory.read(from).ok_or_else(|| busy(from))?;
        let mut to = memory.write(to).ok_or_else(|| busy(to))?;
        to.bytes_mut().copy_from_slice(from.bytes());
    }
    Ok(())
}

/// Takes every block once, in the order of their ids.
pub(super) fn lock<'a>(
    memory: &'a PlainMemory,
    blocks: &BTreeMap<BlockId, Access>,
) -> Result<Vec<Guard<'a>>, ExecuteError> {
    let one = |(&block, &access): (&BlockId, &Access)| {
        let guard = match access {
            Access::Read => memory.read(block).map(Guard::Read),
            Access::Write => memory.write(block).map(Guard::Write),
        };
        guard.ok_or_else(|| busy(block))
    };
    blocks.iter().map(one).collect()
}

fn busy(block: BlockId) -> ExecuteError {
    ExecuteError {
        what: format!("somebody else is using {block:?} of the batch"),
    }
}
