//! The schema of a buffer: typed fields, and the payload of an item as bytes.
//!
//! The payload is the fields in the order of the schema, little-endian, without padding. A jagged field begins with its first dimension as a
//! u32. A reader that wants some fields finds their byte ranges without decoding the others.

use std::fmt;
use std::ops::Range;

/// Maximum number of fields of a buffer.
pub const MAX_FIELDS: usize = 64;
/// Maximum number of dimensions of a field, the jagged one included.
pub const MAX_DIMENSIONS: usize = 8;
/// Maximum number of bytes of an item's payload.
pub const MAX_ITEM_BYTES: usize = 4 << 20;
/// Maximum length of a field name in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Type of the elements of a field, as in NumPy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    Bool,
    Int8,
    Int16,
    Int32,
    Int64,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    Float16,
    BFloat16,
    Float32,
    Float64,
    Complex64,
    Complex128,
}

impl DType {
    /// All types.
    pub const ALL: [Self; 15] = [
        Self::Bool,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::UInt8,
        Self::UInt16,
        Self::UInt32,
        Self::UInt64,
        Self::Float16,
        Self::BFloat16,
        Self::Float32,
        Self::Float64,
        Self::Complex64,
        Self::Complex128,
    ];

    /// Returns the bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Int8 | Self::UInt8 => 1,
            Self::Int16 | Self::UInt16 | Self::Float16 | Self::BFloat16 => 2,
            Self::Int32 | Self::UInt32 | Self::Float32 => 4,
            Self::Int64 | Self::UInt64 | Self::Float64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
        }
    }

    /// Returns the name, as NumPy spells it (`bfloat16` as ml_dtypes does).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::UInt8 => "uint8",
            Self::UInt16 => "uint16",
            Self::UInt32 => "uint32",
            Self::UInt64 => "uint64",
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
        }
    }

    /// Returns the type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One field of a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Name: letters, digits, `_`, `.` and `-`, 1 to 64 bytes.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// The fixed dimensions. Empty for a scalar.
    pub shape: Vec<u32>,
    /// Whether a first dimension of any length precedes the fixed ones.
    pub jagged: bool,
}

impl Field {
    /// Returns the bytes of one row: the product of the fixed dimensions times the element size; `None` on overflow.
    pub fn row_bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.bytes(), |bytes, &dimension| bytes.checked_mul(dimension as usize))
    }

    /// Describes type and shape: `float32[*, 3, 4]`.
    pub fn describe(&self) -> String {
        describe(self.dtype, self.jagged.then_some("*".to_owned()).into_iter(), &self.shape)
    }
}

fn describe(dtype: DType, first: impl Iterator<Item = String>, shape: &[u32]) -> String {
    let dimensions: Vec<String> = first.chain(shape.iter().map(u32::to_string)).collect();
    format!("{dtype}[{}]", dimensions.join(", "))
}

/// Why a schema or an item was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The number of fields.
    #[error("fields: {0} is not allowed; allowed: 1 to {MAX_FIELDS}")]
    Fields(usize),
    /// A name.
    #[error(
        "fields[{index}].name: {name:?} is not allowed; allowed: letters, digits, '_', '.' and '-', 1 to {MAX_NAME_BYTES} bytes, unique"
    )]
    Name {
        /// Index of the field.
        index: usize,
        /// The refused name.
        name: String,
    },
    /// A shape.
    #[error(
        "field {field}: shape {shape} is not allowed; allowed: at most {MAX_DIMENSIONS} dimensions of at least 1, {MAX_ITEM_BYTES} bytes per item"
    )]
    Shape {
        /// Name of the field.
        field: String,
        /// The refused type and shape.
        shape: String,
    },
    /// A field that the schema does not have.
    #[error("field {field:?} does not exist; the buffer has: {}", existing.join(", "))]
    Unknown {
        /// The name.
        field: String,
        /// Names of the schema.
        existing: Vec<String>,
    },
    /// A field of the schema that an item lacks.
    #[error("field {field} is missing")]
    Missing {
        /// The name.
        field: String,
    },
    /// Type or shape of a value.
    #[error("field {field}: {found} is not allowed; allowed: {expected}")]
    Value {
        /// Name of the field.
        field: String,
        /// Type and shape of the value.
        found: String,
        /// Type and shape of the schema.
        expected: String,
    },
    /// The payload of an item.
    #[error("item: {0} bytes are not allowed; allowed: at most {MAX_ITEM_BYTES}")]
    ItemBytes(usize),
    /// A schema that differs from the buffer's.
    #[error("field {field}: the buffer has {existing}, the request declares {declared}")]
    Changed {
        /// Name of the first field that differs.
        field: String,
        /// What the buffer has.
        existing: String,
        /// What the request declares.
        declared: String,
    },
    /// Bytes that are no payload of this schema.
    #[error("payload of {bytes} bytes does not match the schema at field {field}")]
    Payload {
        /// Length of the payload.
        bytes: usize,
        /// Field at which it ends or contradicts.
        field: String,
    },
}

/// A value of one field of one item.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Value<'a> {
    /// Name of the field.
    pub field: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// All dimensions, the jagged one included.
    pub shape: &'a [u32],
    /// Elements, little-endian, row-major.
    pub bytes: &'a [u8],
}

/// Where a field lies in a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldRange {
    /// Its elements, without the length of a jagged field.
    pub bytes: Range<usize>,
    /// First dimension of a jagged field.
    pub rows: Option<u32>,
}

/// A checked schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema {
    fields: Vec<Field>,
}

impl Schema {
    /// Checks and creates a schema.
    ///
    /// # Errors
    /// [`Error::Fields`], [`Error::Name`], [`Error::Shape`].
    pub fn new(fields: Vec<Field>) -> Result<Self, Error> {
        if !(1..=MAX_FIELDS).contains(&fields.len()) {
            return Err(Error::Fields(fields.len()));
        }
        let mut total = 0_usize;
        for (index, field) in fields.iter().enumerate() {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
            let valid = (1..=MAX_NAME_BYTES).contains(&field.name.len()) && field.name.bytes().all(allowed);
            if !valid || fields[..index].iter().any(|other| other.name == field.name) {
                return Err(Error::Name { index, name: field.name.clone() });
            }
            let refused = || Error::Shape { field: field.name.clone(), shape: field.describe() };
            let dimensions = field.shape.len() + usize::from(field.jagged);
            if dimensions > MAX_DIMENSIONS || field.shape.contains(&0) {
                return Err(refused());
            }
            let bytes = field.row_bytes().ok_or_else(refused)?;
            // A jagged field may be empty: only its length is sure.
            total = total.saturating_add(if field.jagged { 4 } else { bytes });
            if bytes > MAX_ITEM_BYTES || total > MAX_ITEM_BYTES {
                return Err(refused());
            }
        }
        Ok(Self { fields })
    }

    /// Returns the fields.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Checks that a declared schema equals this one.
    ///
    /// # Errors
    /// [`Error::Changed`] names the first field that differs.
    pub fn expect(&self, declared: &Self) -> Result<(), Error> {
        let longest = self.fields.len().max(declared.fields.len());
        let differs = (0..longest).find(|&index| self.fields.get(index) != declared.fields.get(index));
        let Some(index) = differs else { return Ok(()) };
        let text =
            |field: Option<&Field>| field.map_or("no field".into(), |it| format!("{} {}", it.name, it.describe()));
        let (existing, declared) = (self.fields.get(index), declared.fields.get(index));
        let field = existing.or(declared).map_or_else(String::new, |it| it.name.clone());
        Err(Error::Changed { field, existing: text(existing), declared: text(declared) })
    }

    /// Encodes one item. `values` has every field once, in any order.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Missing`], [`Error::Value`], [`Error::ItemBytes`].
    pub fn encode(&self, values: &[Value<'_>]) -> Result<Vec<u8>, Error> {
        if let Some(unknown) = values.iter().find(|value| self.position(value.field).is_none()) {
            return Err(self.unknown(unknown.field));
        }
        let mut payload = Vec::new();
        for field in &self.fields {
            let mut given = values.iter().filter(|value| value.field == field.name);
            let value = given.next().ok_or_else(|| Error::Missing { field: field.name.clone() })?;
            check(field, value)?;
            if payload.len() + value.bytes.len() + 4 > MAX_ITEM_BYTES + 4 {
                return Err(Error::ItemBytes(payload.len() + value.bytes.len()));
            }
            if field.jagged {
                payload.extend_from_slice(&value.shape[0].to_le_bytes());
            }
            payload.extend_from_slice(value.bytes);
        }
        if payload.len() > MAX_ITEM_BYTES { Err(Error::ItemBytes(payload.len())) } else { Ok(payload) }
    }

    /// Returns the positions of the named fields.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn select(&self, names: &[&str]) -> Result<Vec<usize>, Error> {
        names.iter().map(|name| self.position(name).ok_or_else(|| self.unknown(name))).collect()
    }

    /// Returns where each field lies in a payload, in the order of the schema.
    ///
    /// # Errors
    /// [`Error::Payload`].
    pub fn ranges(&self, payload: &[u8]) -> Result<Vec<FieldRange>, Error> {
        let mut at = 0_usize;
        let mut ranges = Vec::with_capacity(self.fields.len());
        for field in &self.fields {
            let refused = || Error::Payload { bytes: payload.len(), field: field.name.clone() };
            let row = field.row_bytes().ok_or_else(refused)?;
            let mut first = None;
            let mut bytes = row;
            if field.jagged {
                let header = payload.get(at..at + 4).and_then(|it| it.try_into().ok()).ok_or_else(refused)?;
                let rows = u32::from_le_bytes(header);
                (at, first) = (at + 4, Some(rows));
                bytes = row.checked_mul(rows as usize).ok_or_else(refused)?;
            }
            let end = at.checked_add(bytes).filter(|end| *end <= payload.len()).ok_or_else(refused)?;
            ranges.push(FieldRange { bytes: at..end, rows: first });
            at = end;
        }
        let last = self.fields.last().expect("a schema has fields");
        if at == payload.len() {
            Ok(ranges)
        } else {
            Err(Error::Payload { bytes: payload.len(), field: last.name.clone() })
        }
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }

    fn unknown(&self, name: &str) -> Error {
        Error::Unknown { field: name.into(), existing: self.fields.iter().map(|field| field.name.clone()).collect() }
    }
}

fn check(field: &Field, value: &Value<'_>) -> Result<(), Error> {
    let refused = |found: String| Error::Value { field: field.name.clone(), found, expected: field.describe() };
    let shape = || describe(value.dtype, std::iter::empty(), value.shape);
    let fixed = if field.jagged { value.shape.split_first().map(|(_, fixed)| fixed) } else { Some(value.shape) };
    if value.dtype != field.dtype || fixed != Some(&field.shape[..]) {
        return Err(refused(shape()));
    }
    let elements = value.shape.iter().try_fold(1_usize, |product, &it| product.checked_mul(it as usize));
    let bytes = elements.and_then(|elements| elements.checked_mul(field.dtype.bytes()));
    if bytes != Some(value.bytes.len()) {
        return Err(refused(format!("{} with {} bytes", shape(), value.bytes.len())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn field(name: &str, dtype: DType, shape: &[u32], jagged: bool) -> Field {
        Field { name: name.into(), dtype, shape: shape.to_vec(), jagged }
    }

    fn schema() -> Schema {
        Schema::new(vec![
            field("obs", DType::Float32, &[2, 3], false),
            field("tokens", DType::Int64, &[], true),
            field("done", DType::Bool, &[], false),
        ])
        .unwrap()
    }

    fn item<'a>(obs: &'a [u8], tokens: &'a [u8], rows: &'a [u32]) -> Vec<Value<'a>> {
        vec![
            Value { field: "done", dtype: DType::Bool, shape: &[], bytes: &[1] },
            Value { field: "obs", dtype: DType::Float32, shape: &[2, 3], bytes: obs },
            Value { field: "tokens", dtype: DType::Int64, shape: rows, bytes: tokens },
        ]
    }

    proptest! {
        #[test]
        fn encoded_fields_are_found_again(obs in proptest::collection::vec(any::<u8>(), 24), rows in 0_u32..50) {
            let tokens: Vec<u8> = (0..rows * 8).map(|it| it as u8).collect();
            let payload = schema().encode(&item(&obs, &tokens, &[rows])).unwrap();
            let ranges = schema().ranges(&payload).unwrap();
            prop_assert_eq!(&payload[ranges[0].bytes.clone()], &obs[..]);
            prop_assert_eq!(&payload[ranges[1].bytes.clone()], &tokens[..]);
            prop_assert_eq!(ranges[1].rows, Some(rows));
            prop_assert_eq!(&payload[ranges[2].bytes.clone()], &[1][..]);
        }

        #[test]
        fn arbitrary_bytes_are_a_payload_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(ranges) = schema().ranges(&bytes) {
                prop_assert_eq!(ranges.last().unwrap().bytes.end, bytes.len());
            }
        }
    }

    #[test]
    fn wrong_value_is_named_by_field_with_both_shapes() {
        let (obs, tokens) = ([0; 24], [0; 16]);
        let error = |values: &[Value<'_>]| schema().encode(values).unwrap_err().to_string();
        let mut values = item(&obs, &tokens, &[2]);
        values[1].shape = &[3, 2];
        assert_eq!(error(&values), "field obs: float32[3, 2] is not allowed; allowed: float32[2, 3]");
        values[1].shape = &[2, 3];
        values[1].dtype = DType::Float64;
        assert!(error(&values).contains("float64[2, 3] is not allowed; allowed: float32[2, 3]"));
        values[1].dtype = DType::Float32;
        values[2].shape = &[3];
        assert_eq!(error(&values), "field tokens: int64[3] with 16 bytes is not allowed; allowed: int64[*]");
        assert_eq!(error(&item(&obs, &tokens, &[2])[..2]), "field tokens is missing");
        values[2].field = "token";
        assert_eq!(error(&values), r#"field "token" does not exist; the buffer has: obs, tokens, done"#);
    }

    #[test]
    fn item_above_the_limit_is_refused() {
        let big = vec![0; MAX_ITEM_BYTES];
        let rows = [(MAX_ITEM_BYTES / 8) as u32];
        assert!(matches!(schema().encode(&item(&[0; 24], &big, &rows)).unwrap_err(), Error::ItemBytes(_)));
    }

    #[test]
    fn schema_that_cannot_hold_an_item_is_refused() {
        let one = |field: Field| Schema::new(vec![field]);
        assert!(matches!(Schema::new(Vec::new()).unwrap_err(), Error::Fields(0)));
        assert!(
            one(field("a b", DType::Int8, &[], false)).unwrap_err().to_string().contains("fields[0].name: \"a b\"")
        );
        assert!(one(field("a", DType::Int8, &[0], false)).is_err());
        assert!(one(field("a", DType::Float64, &[u32::MAX, u32::MAX, u32::MAX], false)).is_err());
        assert!(one(field("a", DType::Float64, &[1 << 20], true)).is_err(), "one row exceeds an item");
        let twice = vec![field("a", DType::Int8, &[], false), field("a", DType::Int8, &[], false)];
        assert!(matches!(Schema::new(twice).unwrap_err(), Error::Name { index: 1, .. }));
    }

    #[test]
    fn changed_schema_names_the_field_and_both_types() {
        let mut fields = schema().fields().to_vec();
        fields[1].dtype = DType::Int32;
        let error = schema().expect(&Schema::new(fields).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "field tokens: the buffer has tokens int64[*], the request declares tokens int32[*]");
        assert_eq!(schema().expect(&schema()), Ok(()));
    }

    #[test]
    fn names_of_types_are_reversible() {
        assert!(DType::ALL.iter().all(|&dtype| DType::from_name(dtype.name()) == Some(dtype)));
        assert_eq!(DType::from_name("object"), None);
    }
}
