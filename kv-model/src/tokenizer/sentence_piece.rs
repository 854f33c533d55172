//! Vocabularies of SentencePiece, as Llama 2 has one: pieces with scores instead of merges.

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::{DecoderWrapper, Error, decoders};

/// What stands for a space.
const SPACE: &str = "\u{2581}";

/// The bytes that an ordinary piece stands for.
pub(super) fn decode(piece: &str) -> Vec<u8> {
    piece.replace(SPACE, " ").into_bytes()
}

/// The byte that a piece like `<0x0A>` stands for, or the piece's own bytes.
pub(super) fn decode_byte(piece: &str) -> Vec<u8> {
    let digits = piece
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
    byte.map_or_else(|| decode(piece), |byte| vec![byte])
}

/// A byte that has no piece, so that not every text could be said.
pub(super) fn missing_byte(vocab: &Vocab) -> Option<u8> {
    (0..=u8::MAX).find(|byte| !vocab.contains_key(&format!("<0x{byte:02X}>")))
}

/// The model: whatever two pieces make a piece may be merged, the best score first. What the
/// pieces can't say is said in bytes.
pub(super) fn model(vocab: Vocab, tokens: &[String], scores: &[f32]) -> Result<BPE, Error> {
    let merges = merges(&vocab, tokens, scores);
    BPE::builder()
        .vocab_and_merges(vocab, merges)
        .byte_fallback(true)
        .fuse_unk(true)
        .build()
}

fn merges(vocab: &Vocab, tokens: &[String], scores: &[f32]) -> Merges {
    let mut merges = Vec::new();
    for (token, &score) in tokens.iter().zip(scores) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left_id), Some(right_id)) = (vocab.get(left), vocab.get(right)) {
                merges.push((score, *left_id, *right_id, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges
        .into_iter()
        .map(|merge| (merge.3.to_owned(), merge.4.to_owned()))
        .collect()
}

/// Spaces become visible; where wanted one is put before each text.
pub(super) fn normalizer(prefix_space: bool) -> Result<NormalizerWrapper, Error> {
    let mut steps = Vec::new();
    if prefix_space {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE)?.into());
    Ok(Sequence::new(steps).into())
}

/// The way back, for clients that load the saved tokenizer.
pub(super) fn decoder(prefix_space: bool) -> Result<DecoderWrapper, Error> {
    let mut steps: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ")?.into(),
        decoders::byte_fallback::ByteFallback::new().into(),
        decoders::fuse::Fuse::new().into(),
    ];
    if prefix_space {
        steps.push(decoders::strip::Strip::new(' ', 1, 0).into());
    }
    Ok(decoders::sequence::Sequence::new(steps).into())
}
