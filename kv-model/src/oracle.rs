//! The hash oracle: an executor without weights whose text is a corruption detector.
//!
//! Every position of a sequence has bytes of its own, made from the prompt, the choice, the
//! position and the token; the prompt's positions belong to choice 0, since choices share them.
//! The next token of a choice is a hash over *all* KV bytes of that choice, read from memory
//! through the block table. One lost, stale, foreign or early byte changes this token and, because
//! the byte stays wrong, all later ones too, each but for one chance in the vocabulary's size.
//!
//! While no byte is damaged, a choice's tokens are a function of prompt, choice and count alone:
//! pausing, batching, chunking and recomputing can't change them.
//! Sampling parameters mean nothing to the oracle, except that log-probabilities are made up,
//! from the same hash, when a request asks for them.

use std::fmt;
use std::sync::Arc;

use kv_core::host::{BlockRead, BlockWrite, PlainMemory};
use kv_core::{BlockId, Choice, Fence};
use kv_scheduler::{
    Batch, BatchRow, BlockCopy, ExecuteError, Executor, Sample, Sampled, StepOutput, TokenId,
};
use xxhash_rust::xxh3::Xxh3;

pub use self::script::{OracleScript, ScriptEnd};
use self::trace::{Geometry, Trace};
use self::vocabulary::Vocabulary;

mod script;
mod trace;
mod vocabulary;

/// What an [`Oracle`] emits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OracleConfig {
    /// Number of tokens; ids are below it.
    pub vocab: u32,
    /// The lowest id that is emitted, apart from `eos`. A tokenizer whose first 256 tokens are
    /// single bytes wants 256, so that the text is readable and two tokens never look alike.
    pub lowest: TokenId,
    /// The token that ends a choice.
    pub eos: Option<TokenId>,
    /// Mean number of tokens up to and including `eos`; 0 never emits it.
    pub eos_every: u32,
    /// Two oracles with different seeds agree on nothing.
    pub seed: u64,
    /// Tokens to emit instead of hashed ones, for tests.
    pub script: Option<OracleScript>,
}

impl Default for OracleConfig {
    /// 4,096 tokens, no end, no script.
    fn default() -> Self {
        Self {
            vocab: 4096,
            lowest: TokenId(0),
            eos: None,
            eos_every: 0,
            seed: 0,
            script: None,
        }
    }
}

/// Why an oracle can't be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// A position's share of a row isn't a whole number of bytes.
    #[error(
        "rows of row group {group} have {row_bytes} bytes, not a multiple of \
         {block_tokens} tokens per block"
    )]
    UnevenRow {
        /// Which row group of the layout.
        group: usize,
        /// Its row length.
        row_bytes: u64,
        /// Tokens per block.
        block_tokens: u32,
    },
    /// With fewer than two tokens damage could not be told from health.
    #[error("the vocabulary has {ordinary} tokens besides eos, must be at least 2")]
    Vocabulary {
        /// Tokens that can be emitted, without `eos`.
        ordinary: u32,
    },
    /// The end token isn't in the vocabulary.
    #[error("eos is token {eos} of a vocabulary of {vocab}")]
    Eos {
        /// The end token.
        eos: u32,
        /// Number of tokens.
        vocab: u32,
    },
    /// The script emits a token that isn't in the vocabulary.
    #[error("the script emits token {token} of a vocabulary of {vocab}")]
    Script {
        /// The token.
        token: u32,
        /// Number of tokens.
        vocab: u32,
    },
}

/// Runs steps over plain memory of any geometry; see the [module](self).
///
/// The bytes of position `p` lie in each row of its block at
/// `(p % block_tokens) * (row_bytes / block_tokens)`.
///
/// A batch that breaks the contract of [`Executor`] fails as a whole: a block that somebody else
/// is reading or writing, a table that is too short, tokens that aren't those of the history, or
/// two rows that write the same block.
pub struct Oracle {
    memory: Arc<PlainMemory>,
    geometry: Geometry,
    vocabulary: Vocabulary,
    script: Option<OracleScript>,
    /// Blocks that this step has written, kept to reuse its memory.
    written: Vec<BlockId>,
}

impl fmt::Debug for Oracle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Oracle")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl Oracle {
    /// An oracle over `memory`.
    ///
    /// # Errors
    ///
    /// [`OracleError`] if the layout's rows can't be divided among the tokens of a block, or the
    /// vocabulary is too small for what is to be emitted.
    pub fn new(memory: Arc<PlainMemory>, config: OracleConfig) -> Result<Self, OracleError> {
        let geometry = Geometry::new(memory.layout())?;
        let vocabulary = Vocabulary::new(&config)?;
        if let Some(script) = &config.script {
            script.check(config.vocab)?;
        }
        Ok(Self {
            memory,
            geometry,
            vocabulary,
            script: config.script,
            written: Vec::new(),
        })
    }

    fn run(&mut self, batch: &Batch<'_>) -> Result<Vec<Vec<Sampled>>, ExecuteError> {
        self.written.clear();
        for copy in batch.copies {
            self.copy(*copy)?;
        }
        batch.rows.iter().map(|row| self.row(row)).collect()
    }

    fn copy(&self, copy: BlockCopy) -> Result<(), ExecuteError> {
        if copy.from == copy.to {
            return Err(violation(format_args!(
                "{:?} is to be copied to itself",
                copy.from
            )));
        }
        let from = self.open_read(copy.from)?;
        let mut to = self.open_write(copy.to)?;
        to.bytes_mut().copy_from_slice(from.bytes());
        Ok(())
    }

    fn row(&mut self, row: &BatchRow<'_>) -> Result<Vec<Sampled>, ExecuteError> {
        let end = self.check(row)?;
        let trace = Trace::new(self.vocabulary.seed(), row.prompt);
        self.write(row, &trace)?;
        if row.samples.is_empty() {
            return Ok(Vec::new());
        }
        let seen = self.read(row, end)?;
        Ok(row
            .samples
            .iter()
            .map(|sample| self.sample(row, sample, &trace, seen))
            .collect())
    }

    /// Checks a row against the contract; returns one past its last position.
    fn check(&self, row: &BatchRow<'_>) -> Result<usize, ExecuteError> {
        let at = format_args!("{:?} {:?}", row.request, row.choice).to_string();
        let broken = |what: fmt::Arguments<'_>| Err(violation(format_args!("{at}: {what}")));
        if row.tokens.is_empty() {
            return broken(format_args!("a row without tokens"));
        }
        let start = row.position as usize;
        let end = start + row.tokens.len();
        let needed = end.div_ceil(self.geometry.block_tokens());
        if row.blocks.len() < needed {
            let have = row.blocks.len();
            return broken(format_args!(
                "{have} blocks in the table, position needs {needed}"
            ));
        }
        let shared = row.prompt.len().saturating_sub(start).min(row.tokens.len());
        if shared > 0 && row.tokens[..shared] != row.prompt[start..start + shared] {
            return broken(format_args!("the row's tokens aren't those of the prompt"));
        }
        for sample in &row.samples {
            let history = row.prompt.len() + sample.output.len();
            if history != end {
                return broken(format_args!(
                    "a sample after {history} tokens in a row up to {end}"
                ));
            }
            let own = &row.tokens[shared..];
            if !own.is_empty() && !sample.output.ends_with(own) {
                return broken(format_args!("the row's tokens aren't those emitted"));
            }
        }
        Ok(end)
    }

    /// Writes the KV of the row's tokens, block by block.
    fn write(&mut self, row: &BatchRow<'_>, trace: &Trace) -> Result<(), ExecuteError> {
        let block_tokens = self.geometry.block_tokens();
        let mut position = row.position as usize;
        let mut tokens = row.tokens;
        while !tokens.is_empty() {
            let block = row.blocks[position / block_tokens];
            if self.written.contains(&block) {
                return Err(violation(format_args!("two rows write {block:?}")));
            }
            self.written.push(block);
            let offset = position % block_tokens;
            let (now, later) = tokens.split_at(tokens.len().min(block_tokens - offset));
            let mut place = self.open_write(block)?;
            for (index, &token) in now.iter().enumerate() {
                let cell = trace.cell(row.choice, position + index, token);
                self.geometry.fill(&mut place, offset + index, cell);
            }
            position += now.len();
            tokens = later;
        }
        Ok(())
    }

    /// Hashes all KV bytes of positions `0..end`, as memory has them.
    fn read(&self, row: &BatchRow<'_>, end: usize) -> Result<u64, ExecuteError> {
        let block_tokens = self.geometry.block_tokens();
        let mut hash = Xxh3::new();
        for (index, &block) in row.blocks.iter().enumerate() {
            let Some(rest) = end
                .checked_sub(index * block_tokens)
                .filter(|&rest| rest > 0)
            else {
                break;
            };
            let bytes = self.open_read(block)?;
            self.geometry
                .hash(&bytes, rest.min(block_tokens), &mut hash);
        }
        Ok(hash.digest())
    }

    fn sample(&self, row: &BatchRow<'_>, sample: &Sample<'_>, trace: &Trace, seen: u64) -> Sampled {
        let hash = self.vocabulary.mix(seen, sample.choice);
        let mut token = self.vocabulary.token(hash);
        let scripted = self
            .script
            .as_ref()
            .and_then(|s| s.token(sample.choice, sample.output.len()));
        if let Some(scripted) = scripted {
            let right = self
                .geometry
                .expected(trace, row.prompt, sample.choice, sample.output);
            if right == seen {
                token = scripted;
            } else if token == scripted {
                token = self.vocabulary.other(token);
            }
        }
        let logprobs = sample
            .params
            .logprobs
            .map(|top| self.vocabulary.logprobs(hash, token, top));
        Sampled { token, logprobs }
    }

    fn open_read(&self, block: BlockId) -> Result<BlockRead<'_>, ExecuteError> {
        self.in_pool(block)?;
        self.memory
            .read(block)
            .ok_or_else(|| violation(format_args!("{block:?} is being written by somebody else")))
    }

    fn open_write(&self, block: BlockId) -> Result<BlockWrite<'_>, ExecuteError> {
        self.in_pool(block)?;
        self.memory
            .write(block)
            .ok_or_else(|| violation(format_args!("{block:?} is in use by somebody else")))
    }

    fn in_pool(&self, block: BlockId) -> Result<(), ExecuteError> {
        let blocks = self.memory.layout().blocks();
        if block.value() < blocks {
            return Ok(());
        }
        Err(violation(format_args!(
            "{block:?} of a pool of {blocks} blocks"
        )))
    }
}

impl Executor for Oracle {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        let fence = self.memory.begin_step();
        let rows = self.run(batch);
        // A failed step is over as well: copies that wait for it must not wait for ever.
        self.memory.end_step(fence);
        Ok(output(rows?, fence))
    }
}

fn output(rows: Vec<Vec<Sampled>>, fence: Fence) -> StepOutput {
    StepOutput {
        rows: rows.into_iter().map(Ok).collect(),
        fence,
    }
}

fn violation(what: fmt::Arguments<'_>) -> ExecuteError {
    ExecuteError {
        what: format!("contract violation: {what}"),
    }
}

/// The choice to whom a position's bytes belong.
const fn owner(position: usize, prompt_tokens: usize, choice: Choice) -> Choice {
    if position < prompt_tokens {
        Choice::new(0)
    } else {
        choice
    }
}
