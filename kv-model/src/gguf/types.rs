//! Element types and descriptions of tensors.

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point, IEEE.
    F16,
    /// Blocks of 32 values: 4 bits each, scale.
    Q4_0,
    /// Blocks of 32 values: 4 bits each, scale and minimum.
    Q4_1,
    /// Blocks of 32 values: 5 bits each, scale.
    Q5_0,
    /// Blocks of 32 values: 5 bits each, scale and minimum.
    Q5_1,
    /// Blocks of 32 values: 8 bits each, scale.
    Q8_0,
    /// Super-blocks of 256 values: 2 bits each.
    Q2K,
    /// Super-blocks of 256 values: 3 bits each.
    Q3K,
    /// Super-blocks of 256 values: 4 bits each.
    Q4K,
    /// Super-blocks of 256 values: 5 bits each.
    Q5K,
    /// Super-blocks of 256 values: 6 bits each.
    Q6K,
    /// Super-blocks of 256 values: 8 bits each.
    Q8K,
    /// 16-bit floating point, upper half of 32 bits.
    Bf16,
}

impl TensorType {
    pub(super) const NAMES: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K";

    /// The type with that number in the format.
    #[must_use]
    pub const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            15 => Self::Q8K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Number of values that are stored together.
    #[must_use]
    pub const fn block_values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Q8K => 256,
        }
    }

    /// Bytes that [`block_values`](Self::block_values) values take.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q2K => 16 + 64 + 4,
            Self::Q3K => 32 + 64 + 12 + 2,
            Self::Q4K => 4 + 12 + 128,
            Self::Q5K => 4 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
            Self::Q8K => 4 + 256 + 32,
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub(super) shape: Vec<u64>,
    pub(super) tensor_type: TensorType,
    pub(super) offset: u64,
    pub(super) row_bytes: u64,
}

impl TensorInfo {
    /// Its dimensions, fastest first: a matrix that makes `n` values of `k` is `[k, n]`.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How its values are stored.
    #[must_use]
    pub const fn tensor_type(&self) -> TensorType {
        self.tensor_type
    }

    /// Where it starts in the data part of the file, bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Values of a row.
    #[must_use]
    pub fn row_values(&self) -> u64 {
        self.shape[0]
    }

    /// Number of rows: the product of all dimensions but the first.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.shape[1..].iter().product()
    }

    /// Bytes of a row.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
}
