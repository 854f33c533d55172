//! Text in and text out: tokenizers, chat templates, the incremental detokeniser.

#![expect(clippy::unwrap_used, reason = "a failed test says where by panicking")]

mod chat;
mod detokenize;
mod fixture;
mod real;
mod sentence_piece;
mod tokenizer;
