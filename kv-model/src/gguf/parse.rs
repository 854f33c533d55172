//! The header: metadata and tensor descriptions.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};

use super::{GgufFault, MetadataValue, TensorInfo, TensorType};

/// Everything but the tensor data.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) metadata: BTreeMap<String, MetadataValue>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// Where the tensor data starts in the file.
    pub(super) data_start: u64,
}

/// Smallest number of bytes that a metadata entry takes: key length, value type, one byte.
const METADATA_BYTES_MIN: u64 = 8 + 4 + 1;
/// Smallest number of bytes that a tensor description takes: name length, number of dimensions,
/// one dimension, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;
/// Most dimensions of a tensor in the format.
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// Reads the header of a file of `file_bytes` bytes.
pub(super) fn parse(from: &mut impl Read, file_bytes: u64) -> Result<Contents, GgufFault> {
    let mut reader = Reader {
        from,
        left: file_bytes,
    };
    let magic = reader.array::<4>("the magic number")?;
    if &magic != b"GGUF" {
        return Err(GgufFault::Magic { found: magic });
    }
    let version = reader.u32("the version")?;
    if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
        return Err(GgufFault::BigEndian);
    }
    if version != 2 && version != 3 {
        return Err(GgufFault::Version { version });
    }
    let tensor_count = reader.count("the number of tensors", TENSOR_BYTES_MIN)?;
    let metadata_count = reader.count("the number of metadata entries", METADATA_BYTES_MIN)?;

    let mut metadata = BTreeMap::new();
    for _ in 0..metadata_count {
        let key = reader.string("a metadata key")?;
        let number = reader.u32("a metadata type")?;
        let value = reader.value(&key, number)?;
        if metadata.contains_key(&key) {
            return Err(GgufFault::Duplicate {
                what: "metadata",
                name: key,
            });
        }
        metadata.insert(key, value);
    }
    let alignment = alignment(&metadata)?;

    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let (name, tensor) = reader.tensor()?;
        if tensors.contains_key(&name) {
            return Err(GgufFault::Duplicate {
                what: "tensor",
                name,
            });
        }
        tensors.insert(name, tensor);
    }

    let header_bytes = file_bytes - reader.left;
    let data_start = header_bytes.next_multiple_of(alignment);
    let data_bytes = file_bytes.saturating_sub(data_start);
    for (name, tensor) in &tensors {
        check_place(name, tensor, data_bytes, alignment)?;
    }
    Ok(Contents {
        metadata,
        tensors,
        data_start,
    })
}

fn alignment(metadata: &BTreeMap<String, MetadataValue>) -> Result<u64, GgufFault> {
    let key = "general.alignment";
    let Some(value) = metadata.get(key) else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    let alignment = value
        .to_u32()
        .map(u64::from)
        .ok_or_else(|| GgufFault::MetadataType {
            key: key.to_owned(),
            found: value.type_name(),
            expected: "a whole number",
        })?;
    if alignment == 0 || !alignment.is_multiple_of(8) || alignment > ALIGNMENT_MAX {
        return Err(GgufFault::Alignment { alignment });
    }
    Ok(alignment)
}

fn check_place(
    name: &str,
    tensor: &TensorInfo,
    data_bytes: u64,
    alignment: u64,
) -> Result<(), GgufFault> {
    // Can't overflow: the description was refused if the product left the range of 64 bits.
    let bytes = tensor.rows() * tensor.row_bytes;
    let offset = tensor.offset;
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= data_bytes);
    if inside && offset.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(GgufFault::TensorPlace {
        name: name.to_owned(),
        offset,
        bytes,
        data_bytes,
        alignment,
    })
}

/// Little-endian values from a file of known length.
struct Reader<'a, R> {
    from: &'a mut R,
    /// Bytes of the file that were not read yet.
    left: u64,
}

impl<R: Read> Reader<'_, R> {
    fn bytes(&mut self, into: &mut [u8], what: &'static str) -> Result<(), GgufFault> {
        let left = self.left.checked_sub(into.len() as u64);
        self.left = left.ok_or(GgufFault::Truncated { what })?;
        self.from
            .read_exact(into)
            .map_err(|error| match error.kind() {
                // The file became shorter since its length was read.
                ErrorKind::UnexpectedEof => GgufFault::Truncated { what },
                _ => GgufFault::Io(error),
            })
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufFault> {
        let mut bytes = [0; N];
        self.bytes(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufFault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufFault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things of at least `bytes_min` bytes each; never more than the file can hold.
    fn count(&mut self, what: &'static str, bytes_min: u64) -> Result<usize, GgufFault> {
        let value = self.u64(what)?;
        let allowed = self.left / bytes_min;
        let count = usize::try_from(value).ok().filter(|_| value <= allowed);
        count.ok_or(GgufFault::Count {
            what,
            value,
            allowed,
        })
    }

    fn string(&mut self, what: &'static str) -> Result<String, GgufFault> {
        let length = self.count(what, 1)?;
        let mut bytes = vec![0; length];
        self.bytes(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| GgufFault::Utf8 { what })
    }

    fn list<T>(
        &mut self,
        bytes_min: u64,
        mut one: impl FnMut(&mut Self) -> Result<T, GgufFault>,
    ) -> Result<Vec<T>, GgufFault> {
        let count = self.count("the length of a metadata list", bytes_min)?;
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(one(self)?);
        }
        Ok(list)
    }

    fn value(&mut self, key: &str, number: u32) -> Result<MetadataValue, GgufFault> {
        let what = "a metadata value";
        Ok(match number {
            0..=5 | 10 | 11 => match self.whole(number, what)? {
                Ok(number) => MetadataValue::Int(number),
                Err(large) => MetadataValue::Uint(large),
            },
            6 => MetadataValue::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => MetadataValue::Bool(self.array::<1>(what)? != [0]),
            8 => MetadataValue::String(self.string("a metadata text")?),
            9 => {
                let element = self.u32("a metadata list type")?;
                self.list_value(key, element)?
            }
            12 => MetadataValue::Float(f64::from_le_bytes(self.array(what)?)),
            _ => {
                return Err(GgufFault::ValueType {
                    key: key.to_owned(),
                    number,
                });
            }
        })
    }

    fn list_value(&mut self, key: &str, number: u32) -> Result<MetadataValue, GgufFault> {
        let what = "a metadata list";
        Ok(match number {
            0..=5 | 10 | 11 => {
                let bytes = [1, 1, 2, 2, 4, 4, 0, 0, 0, 0, 8, 8][number as usize];
                let refuse = |_| GgufFault::ValueType {
                    key: key.to_owned(),
                    number,
                };
                MetadataValue::Ints(self.list(bytes, |r| r.whole(number, what)?.map_err(refuse))?)
            }
            6 => MetadataValue::Floats(self.list(4, |r| Ok(f32::from_le_bytes(r.array(what)?)))?),
            7 => MetadataValue::Bools(self.list(1, |r| Ok(r.array::<1>(what)? != [0]))?),
            8 => MetadataValue::Strings(self.list(8, |r| r.string("a text of a metadata list"))?),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "lists of f64 are kept as f32"
            )]
            12 => MetadataValue::Floats(
                self.list(8, |r| Ok(f64::from_le_bytes(r.array(what)?) as f32))?,
            ),
            _ => {
                return Err(GgufFault::ValueType {
                    key: key.to_owned(),
                    number,
                });
            }
        })
    }

    /// A whole number of the type with that number; `Err` if it is above the range of `i64`.
    fn whole(&mut self, number: u32, what: &'static str) -> Result<Result<i64, u64>, GgufFault> {
        Ok(Ok(match number {
            0 => u8::from_le_bytes(self.array(what)?).into(),
            1 => i8::from_le_bytes(self.array(what)?).into(),
            2 => u16::from_le_bytes(self.array(what)?).into(),
            3 => i16::from_le_bytes(self.array(what)?).into(),
            4 => self.u32(what)?.into(),
            5 => i32::from_le_bytes(self.array(what)?).into(),
            10 => {
                let number = self.u64(what)?;
                return Ok(i64::try_from(number).map_err(|_| number));
            }
            _ => i64::from_le_bytes(self.array(what)?),
        }))
    }

    fn tensor(&mut self) -> Result<(String, TensorInfo), GgufFault> {
        let name = self.string("a tensor name")?;
        let dimensions = self.u32("the number of dimensions of a tensor")?;
        if dimensions == 0 || dimensions > DIMENSIONS_MAX {
            return Err(GgufFault::Count {
                what: "the number of dimensions of a tensor",
                value: dimensions.into(),
                allowed: DIMENSIONS_MAX.into(),
            });
        }
        let mut shape = Vec::with_capacity(DIMENSIONS_MAX as usize);
        for _ in 0..dimensions {
            shape.push(self.u64("the shape of a tensor")?);
        }
        let number = self.u32("the type of a tensor")?;
        let offset = self.u64("the offset of a tensor")?;
        let Some(tensor_type) = TensorType::of_number(number) else {
            return Err(GgufFault::TensorType { name, number });
        };
        match row_bytes(&shape, tensor_type) {
            Ok(row_bytes) => Ok((
                name,
                TensorInfo {
                    shape,
                    tensor_type,
                    offset,
                    row_bytes,
                },
            )),
            Err(why) => Err(GgufFault::Shape { name, shape, why }),
        }
    }
}

/// Bytes of a row, if the shape is possible.
fn row_bytes(shape: &[u64], tensor_type: TensorType) -> Result<u64, &'static str> {
    if shape.contains(&0) {
        return Err("no dimension may be 0");
    }
    let block_values = tensor_type.block_values() as u64;
    if !shape[0].is_multiple_of(block_values) {
        return Err("the first dimension must be a multiple of the type's block length");
    }
    // Values and bytes of the whole tensor must be numbers; that they lie inside the file is
    // checked once all is known.
    let row_bytes = (shape[0] / block_values).checked_mul(tensor_type.block_bytes() as u64);
    let values = shape
        .iter()
        .try_fold(1u64, |all, &dimension| all.checked_mul(dimension));
    let bytes = shape[1..]
        .iter()
        .try_fold(row_bytes.unwrap_or(u64::MAX), |all, &dimension| {
            all.checked_mul(dimension)
        });
    match (row_bytes, values, bytes) {
        (Some(row_bytes), Some(_), Some(_)) => Ok(row_bytes),
        _ => Err("it has more than 2^64 bytes"),
    }
}
