//! Metadata values.

/// A metadata value; numbers are widened, lists have one type.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// A truth value.
    Bool(bool),
    /// Truth values.
    Bools(Vec<bool>),
    /// A floating-point number.
    Float(f64),
    /// Floating-point numbers.
    Floats(Vec<f32>),
    /// A whole number; those of 64 bits without a sign that don't fit are [`Uint`](Self::Uint).
    Int(i64),
    /// Whole numbers.
    Ints(Vec<i64>),
    /// A text.
    String(String),
    /// Texts.
    Strings(Vec<String>),
    /// A whole number above the range of `i64`.
    Uint(u64),
}

impl MetadataValue {
    /// The type in words.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::Bool(_) => "a truth value",
            Self::Bools(_) => "a list of truth values",
            Self::Float(_) => "a floating-point number",
            Self::Floats(_) => "a list of floating-point numbers",
            Self::Int(number) if *number < 0 => "a negative number",
            Self::Int(_) | Self::Uint(_) => "a whole number",
            Self::Ints(_) => "a list of whole numbers",
            Self::String(_) => "a text",
            Self::Strings(_) => "a list of texts",
        }
    }

    pub(super) fn to_u32(&self) -> Option<u32> {
        match self {
            Self::Int(number) => u32::try_from(*number).ok(),
            _ => None,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the file holds f32, or f64 whose further digits aren't wanted"
    )]
    pub(super) const fn to_f32(&self) -> Option<f32> {
        match self {
            Self::Float(number) => Some(*number as f32),
            _ => None,
        }
    }

    pub(super) const fn to_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }
}
