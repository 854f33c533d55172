//! Reading GGUF files: right values for every element type, and a clear error, never a panic and
//! never a large allocation, for every broken file.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::excessive_precision,
    reason = "helpers of tests, and values as the other reader printed them"
)]

#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use std::num::NonZero;

use gguf_writer::{File, Lcg, Sizes, TYPES, TempFile, Value, tiny_llama};
use kv_model::ModelError;
use kv_model::gguf::{GgufError, GgufFault, GgufFile, TensorType};
use kv_model::llama::LlamaModel;

fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    GgufFile::open(&TempFile::new(bytes).0)
}

fn fault(bytes: &[u8]) -> GgufFault {
    *open(bytes).unwrap_err().fault
}

/// Opens and loads whatever can be opened.
fn model(bytes: &[u8]) -> Result<LlamaModel, ModelError> {
    let file = TempFile::new(bytes);
    LlamaModel::load(&GgufFile::open(&file.0)?, NonZero::new(2).unwrap())
}

/// Values and a sum over all, made by the reader of the `gguf` Python package from the same bytes.
const GOLDEN: [(u32, usize, f64, [f32; 8]); 10] = [
    (
        2,
        64,
        34.62445068359375,
        [
            0.0,
            0.0,
            0.0,
            -0.09808349609375,
            -0.09808349609375,
            -0.8544921875,
            -0.5340576171875,
            -0.42724609375,
        ],
    ),
    (
        3,
        64,
        1364.5894775390625,
        [
            0.58984375,
            -0.0008544921875,
            1.1805419921875,
            0.3929443359375,
            0.3929443359375,
            0.6373291015625,
            0.41009521484375,
            0.48583984375,
        ],
    ),
    (
        6,
        64,
        463.4259033203125,
        [
            0.4974365234375,
            -0.6964111328125,
            -0.596923828125,
            0.4974365234375,
            0.4974365234375,
            0.830078125,
            1.348876953125,
            0.20751953125,
        ],
    ),
    (
        7,
        64,
        840.9999389648438,
        [
            -3.427734375,
            -1.69647216796875,
            -2.7352294921875,
            -2.38897705078125,
            -2.38897705078125,
            1.12518310546875,
            0.9261474609375,
            0.528076171875,
        ],
    ),
    (
        8,
        64,
        2077.8801879882812,
        [
            -3.35772705078125,
            -0.34735107421875,
            9.14691162109375,
            8.45220947265625,
            8.45220947265625,
            8.3642578125,
            5.436767578125,
            -12.65093994140625,
        ],
    ),
    (
        10,
        512,
        -121367.84466552734,
        [
            1.1422119140625,
            1.4666748046875,
            3.1343994140625,
            1.91766357421875,
            5.28570556640625,
            -0.27117919921875,
            -1.084716796875,
            -1.084716796875,
        ],
    ),
    (
        11,
        512,
        105971.83526611328,
        [
            -1.54351806640625,
            3.0870361328125,
            0.0,
            0.0,
            0.0,
            0.0,
            1.6007080078125,
            0.0,
        ],
    ),
    (
        12,
        512,
        -1260012.1610107422,
        [
            90.50225830078125,
            57.1212158203125,
            37.09259033203125,
            23.74017333984375,
            25.23492431640625,
            -56.867919921875,
            -22.5943603515625,
            -12.81103515625,
        ],
    ),
    (
        13,
        512,
        -3056326.6889648438,
        [
            66.4102783203125,
            79.92193603515625,
            50.1962890625,
            63.70794677734375,
            94.276611328125,
            -120.2762451171875,
            -49.339599609375,
            -22.6162109375,
        ],
    ),
    (
        14,
        512,
        -459079.3472290039,
        [
            -240.5238037109375,
            9.25091552734375,
            117.14361572265625,
            0.0,
            23.698974609375,
            -126.17431640625,
            -114.10546875,
            65.830078125,
        ],
    ),
];

/// Two blocks of bytes of a known generator, halves forced into a sane range.
fn golden_bytes(kind: u32) -> Vec<u8> {
    let &(_, _, _, block_bytes, halves) = TYPES.iter().find(|entry| entry.1 == kind).unwrap();
    let mut random = Lcg(kind.wrapping_mul(2_654_435_761).wrapping_add(1));
    let mut bytes: Vec<_> = (0..2 * block_bytes).map(|_| random.byte()).collect();
    for block in bytes.chunks_exact_mut(block_bytes) {
        for &at in halves {
            block[at + 1] = block[at + 1] & 0x83 | 0x2C;
        }
    }
    bytes
}

fn values(kind: u32, count: usize, bytes: Vec<u8>) -> Vec<f32> {
    let mut file = File::default();
    file.tensor("t", &[count as u64], kind, bytes);
    let written = TempFile::new(&file.bytes());
    let file = GgufFile::open(&written.0).unwrap();
    let mut values = vec![0.0; count];
    file.read_rows(file.tensor("t").unwrap(), 0, &mut values, &mut Vec::new())
        .unwrap();
    values
}

#[test]
fn quantised_values_equal_those_of_an_independent_reader() {
    for (kind, count, sum, picked) in GOLDEN {
        let values = values(kind, count, golden_bytes(kind));
        let found: f64 = (1..)
            .zip(&values)
            .map(|(i, &v)| f64::from(i) * f64::from(v))
            .sum();
        assert!(
            (found - sum).abs() < 1e-6 * sum.abs(),
            "type {kind}: {found}, must be {sum}"
        );
        let places = [
            0,
            1,
            17,
            31,
            count / 2 - 1,
            count / 2 + 5,
            count - 2,
            count - 1,
        ]
        .map(|i| values[i]);
        assert_eq!(places, picked, "type {kind}");
    }
}

#[test]
fn plain_values_and_those_with_eight_bits_are_exact() {
    let numbers = [1.0f32, -0.5, 65504.0, 1.5e-5, 0.0];
    let f32s = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(values(0, 5, f32s), numbers);
    let f16s = numbers
        .iter()
        .flat_map(|&x| half::f16::from_f32(x).to_le_bytes())
        .collect();
    let rounded = numbers.map(|x| half::f16::from_f32(x).to_f32());
    assert_eq!(values(1, 5, f16s), rounded);
    let bf16s = numbers
        .iter()
        .flat_map(|&x| half::bf16::from_f32(x).to_le_bytes())
        .collect();
    let rounded = numbers.map(|x| half::bf16::from_f32(x).to_f32());
    assert_eq!(values(30, 5, bf16s), rounded);
    // Q8_K: scale, 256 signed bytes, sums that nobody needs.
    let mut q8_k = 0.25f32.to_le_bytes().to_vec();
    q8_k.extend(0..=255u8);
    q8_k.extend([0xEE; 32]);
    let right: Vec<_> = (0..=255u8)
        .map(|q| f32::from(i8::from_le_bytes([q])) * 0.25)
        .collect();
    assert_eq!(values(15, 256, q8_k), right);
}

#[test]
fn metadata_has_the_types_it_was_written_with() {
    let mut file = File::default();
    file.set("bool", Value::Bool(true));
    file.set("f32", Value::F32(1.5));
    file.set("i32s", Value::I32s(vec![-1, 2]));
    file.set("string", Value::String("grüße".to_owned()));
    file.set(
        "strings",
        Value::Strings(vec!["a".to_owned(), String::new()]),
    );
    file.set("u32", Value::U32(7));
    file.set("large", Value::U64(u64::MAX));
    file.set(
        "f32s",
        Value::Raw(
            9,
            [
                &6u32.to_le_bytes()[..],
                &[1, 0, 0, 0, 0, 0, 0, 0],
                &2.0f32.to_le_bytes(),
            ]
            .concat(),
        ),
    );
    let file = open(&file.bytes()).unwrap();
    assert_eq!(file.metadata_bool("bool").unwrap(), Some(true));
    assert_eq!(file.metadata_f32("f32").unwrap(), Some(1.5));
    assert_eq!(file.metadata_i64_array("i32s").unwrap(), Some(&[-1, 2][..]));
    assert_eq!(file.metadata_f32_array("f32s").unwrap(), Some(&[2.0][..]));
    assert_eq!(file.metadata_string("string").unwrap(), Some("grüße"));
    let strings = file.metadata_string_array("strings").unwrap().unwrap();
    assert_eq!(strings, ["a", ""]);
    assert_eq!(file.metadata_u32("u32").unwrap(), Some(7));
    assert_eq!(file.metadata_u32("nothing").unwrap(), None);
    let wrong = file.metadata_u32("large").unwrap_err().to_string();
    assert!(
        wrong.contains("metadata \"large\" is a whole number, must be a number from"),
        "{wrong}"
    );
    let wrong = file.metadata_string("i32s").unwrap_err();
    assert!(
        wrong
            .to_string()
            .contains("a list of whole numbers, must be a text"),
        "{wrong}"
    );
    let missing = file.missing_metadata("tokenizer.chat_template").to_string();
    assert!(
        missing.contains("kv-model-test") && missing.contains("is missing"),
        "{missing}"
    );
    assert!(matches!(
        *file.tensor("t").unwrap_err().fault,
        GgufFault::MissingTensor { .. }
    ));
}

/// A tiny model whose header is about half of it.
fn small() -> File {
    let sizes = Sizes {
        layers: 1,
        hidden: 16,
        feed_forward: 16,
        vocab: 16,
        ..Sizes::ODD
    };
    let mut file = tiny_llama(sizes, 1, 1);
    file.set(
        "tokenizer.ggml.tokens",
        Value::Strings(vec!["ab".to_owned(); 16]),
    );
    file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; 16]));
    file
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let bytes = small().bytes();
    model(&bytes).unwrap();
    for length in 0..bytes.len() {
        match open(&bytes[..length]) {
            Ok(_) => panic!("a file of {length} of {} bytes was accepted", bytes.len()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn flipped_bytes_give_an_error_or_a_model_but_no_panic() {
    let bytes = small().bytes();
    let header = bytes.len().min(3000);
    let mut random = Lcg(1);
    let (mut refused, mut accepted) = (0, 0);
    for place in 0..header {
        let mut broken = bytes.clone();
        broken[place] ^= 1 << random.below(8);
        if place % 3 == 0 {
            broken[place] = [0xFF, 0x7F, 0x80][place / 3 % 3];
        }
        match model(&broken) {
            Ok(_) => accepted += 1,
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("kv-model-test"), "{error}");
            }
        }
    }
    // Both were met: names of keys and tokens may change, lengths and shapes may not.
    assert!(
        refused > 500 && accepted > 50,
        "{refused} refused, {accepted} accepted"
    );
}

#[test]
fn foreign_files_are_refused_by_name() {
    assert!(matches!(fault(b""), GgufFault::Truncated { .. }));
    assert!(matches!(fault(b"GGU"), GgufFault::Truncated { .. }));
    let foreign = fault(b"PK\x03\x04 and so on");
    assert!(matches!(foreign, GgufFault::Magic { found } if &found == b"PK\x03\x04"));
    assert!(matches!(
        fault(b"GGUF\x01\0\0\0rest"),
        GgufFault::Version { version: 1 }
    ));
    assert!(matches!(fault(b"GGUF\0\0\0\x03rest"), GgufFault::BigEndian));
    let missing = GgufFile::open("/nowhere/model.gguf").unwrap_err();
    assert!(
        missing
            .to_string()
            .starts_with("/nowhere/model.gguf: can't read"),
        "{missing}"
    );
    let folder = GgufFile::open(std::env::temp_dir()).unwrap_err();
    assert!(
        matches!(
            *folder.fault,
            GgufFault::Io(_) | GgufFault::Truncated { .. }
        ),
        "{folder}"
    );
}

#[test]
fn huge_counts_and_lengths_are_refused_before_anything_is_allocated() {
    let head = |tensors: u64, metadata: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(metadata.to_le_bytes());
        bytes
    };
    for huge in [u64::MAX, 1 << 62, 1 << 40, 1000] {
        assert!(matches!(fault(&head(huge, 0)), GgufFault::Count { value, .. } if value == huge));
        assert!(matches!(fault(&head(0, huge)), GgufFault::Count { value, .. } if value == huge));
        // A key, a text, a list of every type.
        let mut key = head(0, 1);
        key.extend(huge.to_le_bytes());
        key.extend([b'k'; 16]);
        assert!(matches!(fault(&key), GgufFault::Count { .. }));
        for list in [
            None,
            Some(0u32),
            Some(4),
            Some(6),
            Some(7),
            Some(8),
            Some(10),
            Some(12),
        ] {
            let mut file = File::default();
            let mut value = list.map_or_else(Vec::new, |kind| kind.to_le_bytes().to_vec());
            value.extend(huge.to_le_bytes());
            value.extend([0; 64]);
            file.set("k", Value::Raw(if list.is_some() { 9 } else { 8 }, value));
            assert!(
                matches!(fault(&file.bytes()), GgufFault::Count { .. }),
                "{list:?} {huge}"
            );
        }
        // Shapes.
        for shape in [vec![huge], vec![2, huge], vec![huge, huge, huge, huge]] {
            let mut file = File::default();
            file.tensor("t", &shape, 0, vec![0; 8]);
            let fault = fault(&file.bytes());
            let ok = matches!(
                fault,
                GgufFault::TensorPlace { .. } | GgufFault::Shape { .. }
            );
            assert!(ok, "{fault}");
        }
    }
}

#[test]
fn impossible_descriptions_are_refused_by_name() {
    let with = |change: &dyn Fn(&mut File)| {
        let mut file = File::default();
        file.tensor("t", &[32], 0, vec![0; 128]);
        change(&mut file);
        fault(&file.bytes())
    };
    let shape = |shape: &'static [u64], kind| {
        with(&move |file| {
            file.tensors[0].shape = shape.to_vec();
            file.tensors[0].kind = kind;
        })
    };
    assert!(matches!(shape(&[0], 0), GgufFault::Shape { .. }));
    assert!(matches!(shape(&[31], 2), GgufFault::Shape { .. }));
    assert!(matches!(
        shape(&[1, 1, 1, 1, 1], 0),
        GgufFault::Count { .. }
    ));
    assert!(matches!(shape(&[], 0), GgufFault::Count { .. }));
    assert!(matches!(
        shape(&[32], 4),
        GgufFault::TensorType { number: 4, .. }
    ));
    assert!(matches!(shape(&[33], 0), GgufFault::TensorPlace { .. }));
    let twice = with(&|file| file.tensors.push(file.tensors[0].clone()));
    assert!(matches!(twice, GgufFault::Duplicate { what: "tensor", .. }));
    let twice = with(&|file| {
        file.metadata = vec![
            ("k".to_owned(), Value::U32(1)),
            ("k".to_owned(), Value::U32(2)),
        ];
    });
    assert!(matches!(
        twice,
        GgufFault::Duplicate {
            what: "metadata",
            ..
        }
    ));
    for alignment in [0, 7, 1 << 30] {
        let found = with(&|file| file.set("general.alignment", Value::U32(alignment)));
        assert!(matches!(found, GgufFault::Alignment { .. }), "{alignment}");
    }
    let text = with(&|file| file.set("k", Value::Raw(8, vec![1, 0, 0, 0, 0, 0, 0, 0, 0xFF])));
    assert!(matches!(text, GgufFault::Utf8 { .. }));
    let nested = with(&|file| file.set("k", Value::Raw(9, [9, 0, 0, 0].repeat(9))));
    assert!(matches!(nested, GgufFault::ValueType { number: 9, .. }));
    let unknown = with(&|file| file.set("k", Value::Raw(13, vec![0; 8])));
    assert!(matches!(unknown, GgufFault::ValueType { number: 13, .. }));
    assert_eq!(TensorType::of_number(31), None);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn models_that_cannot_be_run_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut File)| {
        let mut file = small();
        change(&mut file);
        model(&file.bytes()).unwrap_err().to_string()
    };
    let set = |key: &'static str, value: Value| refused(&|file| file.set(key, value.clone()));
    for (error, parts) in [
        (
            set("general.architecture", Value::String("qwen2".to_owned())),
            ["\"qwen2\"", "\"llama\""],
        ),
        (
            refused(&|file| file.metadata.remove(0).1 = Value::U32(0)),
            ["general.architecture", "missing"],
        ),
        (
            set("llama.expert_count", Value::U32(8)),
            ["llama.expert_count is 8", "without experts"],
        ),
        (
            set("llama.rope.scaling.type", Value::String("yarn".to_owned())),
            ["\"linear\"", "yarn"],
        ),
        (
            set("llama.attention.sliding_window", Value::U32(64)),
            ["sliding_window", "64"],
        ),
        (
            set("llama.attention.causal", Value::Bool(false)),
            ["causal", "false"],
        ),
        (
            set("llama.logit_scale", Value::F32(2.0)),
            ["logit_scale", "2"],
        ),
        (
            set("split.count", Value::U32(2)),
            ["split.count", "one file"],
        ),
        (
            set("llama.attention.head_count", Value::U32(0)),
            ["head_count is 0", "from 1 to"],
        ),
        (
            set("llama.attention.head_count_kv", Value::U32(2)),
            ["head_count_kv is 2", "divisor"],
        ),
        (
            set("llama.attention.key_length", Value::U32(31)),
            ["key_length is 31", "even"],
        ),
        (
            set("llama.attention.value_length", Value::U32(16)),
            ["value_length is 16", "32"],
        ),
        (
            set("llama.rope.dimension_count", Value::U32(64)),
            ["dimension_count is 64", "32"],
        ),
        (
            set("llama.rope.freq_base", Value::F32(f32::NAN)),
            ["freq_base is NaN", "above 0"],
        ),
        (
            set("llama.vocab_size", Value::U32(17)),
            ["vocab_size is 17", "16"],
        ),
        (
            set("llama.block_count", Value::U32(2)),
            ["blk.1.", "missing"],
        ),
        (
            set("llama.block_count", Value::U32(u32::MAX)),
            ["block_count is", "from 1 to"],
        ),
        (
            set("llama.feed_forward_length", Value::U32(17)),
            ["[16, 16]", "[16, 17]"],
        ),
        (
            set("tokenizer.ggml.eos_token_id", Value::U32(16)),
            ["eos_token_id is 16", "below"],
        ),
        (
            set("llama.block_count", Value::F32(1.0)),
            ["floating-point", "must be a number"],
        ),
        (
            refused(&|file| file.tensor("blk.0.attn_q.bias", &[1], 0, vec![0; 4])),
            ["attn_q.bias", "plain Llama"],
        ),
        (
            refused(&|file| file.tensors.retain(|t| t.name != "blk.0.ffn_up.weight")),
            ["blk.0.ffn_up.weight", "missing"],
        ),
        (
            refused(&|file| file.tensors[0].bytes[1] = 0x7C),
            ["token_embd.weight", "not finite"],
        ),
    ] {
        assert!(error.contains("kv-model-test"), "names the file: {error}");
        for part in parts {
            assert!(error.contains(part), "{part:?} in {error}");
        }
    }
}

#[test]
fn scaled_rotations_are_read() {
    let mut file = small();
    file.set(
        "llama.rope.scaling.type",
        Value::String("linear".to_owned()),
    );
    file.set("llama.rope.scaling.factor", Value::F32(4.0));
    assert!((model(&file.bytes()).unwrap().config().rope_factor - 4.0).abs() < f32::EPSILON);
    let factors = [1.0f32; 16].iter().flat_map(|x| x.to_le_bytes()).collect();
    file.tensor("rope_freqs.weight", &[16], 0, factors);
    model(&file.bytes()).unwrap();
}
