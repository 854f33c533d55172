//! The bytes that every position of a sequence must have, and where they lie.

use kv_core::host::{BlockRead, BlockWrite};
use kv_core::{Choice, Layout};
use kv_scheduler::TokenId;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::{OracleError, owner};

/// How a block's rows are divided among its tokens.
#[derive(Debug)]
pub(super) struct Geometry {
    block_tokens: usize,
    /// Bytes of one position in each row of a block.
    shares: Vec<usize>,
}

impl Geometry {
    pub(super) fn new(layout: &Layout) -> Result<Self, OracleError> {
        let block_tokens = layout.block_tokens();
        let mut shares = Vec::with_capacity(layout.rows_per_block() as usize);
        for (group, rows) in layout.row_groups().iter().enumerate() {
            let row_bytes = rows.row_bytes;
            if !row_bytes.is_multiple_of(block_tokens.into()) {
                return Err(OracleError::UnevenRow {
                    group,
                    row_bytes,
                    block_tokens,
                });
            }
            let share = usize::try_from(row_bytes / u64::from(block_tokens))
                .expect("a row of the pool fits into the address space");
            shares.extend((0..rows.rows).map(|_| share));
        }
        Ok(Self {
            block_tokens: block_tokens as usize,
            shares,
        })
    }

    pub(super) const fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Writes a position's bytes into its place in each row.
    pub(super) fn fill(&self, block: &mut BlockWrite<'_>, offset: usize, mut cell: Cell) {
        for (row, &share) in self.shares.iter().enumerate() {
            cell.fill(&mut block.row_mut(row)[offset * share..][..share]);
        }
    }

    /// Hashes the first `tokens` positions of a block, row by row.
    pub(super) fn hash(&self, block: &BlockRead<'_>, tokens: usize, hash: &mut Xxh3) {
        if tokens == self.block_tokens {
            // All rows whole, and they lie back to back.
            hash.update(block.bytes());
            return;
        }
        for (row, &share) in self.shares.iter().enumerate() {
            hash.update(&block.row(row)[..tokens * share]);
        }
    }

    /// The hash over the KV bytes that a choice must have after `output`, in the order of
    /// [`hash`](Self::hash), made from the history alone.
    pub(super) fn expected(
        &self,
        trace: &Trace,
        prompt: &[TokenId],
        choice: Choice,
        output: &[TokenId],
    ) -> u64 {
        let mut cells: Vec<Cell> = prompt
            .iter()
            .chain(output)
            .enumerate()
            .map(|(position, &token)| trace.cell(choice, position, token))
            .collect();
        let widest = self.shares.iter().copied().max().unwrap_or(0);
        let mut buffer = vec![0; widest];
        let mut hash = Xxh3::new();
        for block in cells.chunks_mut(self.block_tokens) {
            for &share in &self.shares {
                for cell in &mut *block {
                    cell.fill(&mut buffer[..share]);
                    hash.update(&buffer[..share]);
                }
            }
        }
        hash.digest()
    }
}

/// What all positions of one request have in common.
#[derive(Debug)]
pub(super) struct Trace {
    prompt: u64,
    prompt_tokens: usize,
}

impl Trace {
    pub(super) fn new(seed: u64, prompt: &[TokenId]) -> Self {
        let mut hash = Xxh3::with_seed(seed);
        let mut buffer = [0u8; 256];
        for chunk in prompt.chunks(buffer.len() / 4) {
            for (place, token) in buffer.chunks_exact_mut(4).zip(chunk) {
                place.copy_from_slice(&token.0.to_le_bytes());
            }
            hash.update(&buffer[..chunk.len() * 4]);
        }
        Self {
            prompt: hash.digest(),
            prompt_tokens: prompt.len(),
        }
    }

    /// The source of one position's bytes.
    pub(super) fn cell(&self, choice: Choice, position: usize, token: TokenId) -> Cell {
        let choice = owner(position, self.prompt_tokens, choice);
        let mut key = [0u8; 16];
        key[..4].copy_from_slice(&choice.value().to_le_bytes());
        key[4..8].copy_from_slice(&token.0.to_le_bytes());
        key[8..].copy_from_slice(&(position as u64).to_le_bytes());
        Cell(xxh3_64_with_seed(&key, self.prompt))
    }
}

/// The bytes of one position, one row after the other: SplitMix64.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell(u64);

impl Cell {
    fn fill(&mut self, place: &mut [u8]) {
        for piece in place.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }

    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
