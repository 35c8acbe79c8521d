//! Items in Parquet files: a column per field. A field with dimensions is a list of its elements in row-major order; a complex number is two
//! elements. The key `engram.fields` of the file has the types and shapes.
//!
//! Files of other programs are read, too: a list is a jagged field there, unless the buffer says otherwise.

use super::rows::{HANDLE, PRIORITY, Rows, TAG, TRAJECTORY, VERSION, WEIGHT, row_bytes};
use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use engram_client::{Column, DType, Field};
use parquet::basic::{Compression, LogicalType, Repetition, Type as PhysicalType, ZstdLevel};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::column::writer::{ColumnWriter, ColumnWriterImpl};
use parquet::data_type::{ByteArray, DataType, FixedLenByteArray};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnDescriptor, Type};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;

/// Key of the types and shapes in a file.
const FIELDS: &str = "engram.fields";

/// Type and shape of a field.
#[derive(Debug, Serialize, Deserialize)]
struct FieldEntry {
    name: String,
    dtype: String,
    shape: Vec<u32>,
    jagged: bool,
}

/// Values of a column, and elements per item of a list.
struct Values {
    elements: Elements,
    lengths: Option<Vec<u32>>,
}

/// Elements as Parquet stores them.
enum Elements {
    Bool(Vec<bool>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Float(Vec<f32>),
    Double(Vec<f64>),
    Fixed(Vec<FixedLenByteArray>),
    Bytes(Vec<ByteArray>),
}

/// Writes items, one group of rows after another.
pub(super) struct Writer<W: Write + Send> {
    file: SerializedFileWriter<W>,
}

impl<W: Write + Send> Writer<W> {
    /// Begins a file for items like `rows`.
    pub(super) fn new(out: W, rows: &Rows) -> anyhow::Result<Self> {
        let mut message = String::from("message items {\n");
        for field in rows.fields() {
            message += &column_text(&field);
        }
        message += &format!("required int64 {HANDLE} (INTEGER(64,false));\nrequired double {PRIORITY};\n");
        message += &format!("required int64 {VERSION} (INTEGER(64,false));\n");
        message += &format!("required int64 {TRAJECTORY} (INTEGER(64,false));\nrequired byte_array {TAG};\n");
        if !rows.weights.is_empty() {
            message += &format!("required float {WEIGHT};\n");
        }
        message += "}";
        let schema = parquet::schema::parser::parse_message_type(&message).context("failed to make a schema")?;
        let entries: Vec<FieldEntry> = rows.fields().into_iter().map(entry).collect();
        let entries = KeyValue::new(FIELDS.to_owned(), serde_json::to_string(&entries)?);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(1)?))
            .set_key_value_metadata(Some(vec![entries]));
        Ok(Self { file: SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties.build()))? })
    }

    /// Writes a group of rows.
    pub(super) fn push(&mut self, rows: &Rows) -> anyhow::Result<()> {
        let mut columns: Vec<Values> = rows.columns.iter().map(|column| values(column, rows.count)).collect();
        let unsigned = |column: &[u64]| Elements::Int64(column.iter().map(|it| it.cast_signed()).collect());
        let tags = rows.tags.iter().map(|tag| ByteArray::from(tag.clone())).collect();
        columns.extend(
            [
                unsigned(&rows.handles),
                Elements::Double(rows.priorities.clone()),
                unsigned(&rows.versions),
                unsigned(&rows.trajectories),
                Elements::Bytes(tags),
            ]
            .map(|elements| Values { elements, lengths: None }),
        );
        if !rows.weights.is_empty() {
            columns.push(Values { elements: Elements::Float(rows.weights.clone()), lengths: None });
        }
        let mut group = self.file.next_row_group()?;
        let mut columns = columns.into_iter();
        while let Some(mut column) = group.next_column()? {
            let values = columns.next().context("a column of the schema has no values")?;
            write(column.untyped(), &values)?;
            column.close()?;
        }
        group.close()?;
        Ok(())
    }

    /// Ends the file.
    pub(super) fn finish(self) -> anyhow::Result<W> {
        Ok(self.file.into_inner()?)
    }
}

fn entry(field: Field) -> FieldEntry {
    FieldEntry { name: field.name, dtype: field.dtype.name().to_owned(), shape: field.shape, jagged: field.jagged }
}

/// Whether a field is a list.
fn is_list(field: &Field) -> bool {
    field.jagged || !field.shape.is_empty() || matches!(field.dtype, DType::Complex64 | DType::Complex128)
}

/// Returns the declaration of a column.
fn column_text(field: &Field) -> String {
    let (physical, logical) = match field.dtype {
        DType::Bool => ("boolean", ""),
        DType::Int8 => ("int32", "(INTEGER(8,true))"),
        DType::Int16 => ("int32", "(INTEGER(16,true))"),
        DType::Int32 => ("int32", ""),
        DType::Int64 => ("int64", ""),
        DType::UInt8 => ("int32", "(INTEGER(8,false))"),
        DType::UInt16 | DType::BFloat16 => ("int32", "(INTEGER(16,false))"),
        DType::UInt32 => ("int32", "(INTEGER(32,false))"),
        DType::UInt64 => ("int64", "(INTEGER(64,false))"),
        DType::Float16 => ("fixed_len_byte_array(2)", "(FLOAT16)"),
        DType::Float32 | DType::Complex64 => ("float", ""),
        DType::Float64 | DType::Complex128 => ("double", ""),
    };
    let name = &field.name;
    if is_list(field) {
        format!("required group {name} (LIST) {{ repeated group list {{ required {physical} element {logical}; }} }}\n")
    } else {
        format!("required {physical} {name} {logical};\n")
    }
}

/// Converts a column of `count` items.
fn values(column: &Column, count: usize) -> Values {
    let data = &column.data;
    let elements = match column.dtype {
        DType::Bool => Elements::Bool(data.iter().map(|byte| *byte != 0).collect()),
        DType::Int8 => Elements::Int32(data.iter().map(|byte| byte.cast_signed().into()).collect()),
        DType::UInt8 => Elements::Int32(data.iter().map(|byte| i32::from(*byte)).collect()),
        DType::Int16 => Elements::Int32(numbers(data, |it| i16::from_le_bytes(it).into())),
        DType::UInt16 | DType::BFloat16 => Elements::Int32(numbers(data, |it| u16::from_le_bytes(it).into())),
        DType::Int32 | DType::UInt32 => Elements::Int32(numbers(data, i32::from_le_bytes)),
        DType::Int64 | DType::UInt64 => Elements::Int64(numbers(data, i64::from_le_bytes)),
        DType::Float16 => {
            let half = |at: usize| FixedLenByteArray::from(ByteArray::from(data.slice(at..at + 2)));
            Elements::Fixed((0..data.len()).step_by(2).map(half).collect())
        }
        DType::Float32 | DType::Complex64 => Elements::Float(numbers(data, f32::from_le_bytes)),
        DType::Float64 | DType::Complex128 => Elements::Double(numbers(data, f64::from_le_bytes)),
    };
    let jagged = column.rows.is_some();
    let field = Field { name: String::new(), dtype: column.dtype, shape: column.shape.clone(), jagged };
    let per_row = elements_per_row(&field);
    let lengths = is_list(&field).then(|| match &column.rows {
        Some(rows) => rows.iter().map(|rows| rows * per_row).collect(),
        None => vec![per_row; count],
    });
    Values { elements, lengths }
}

/// Returns the elements of a list per row of a field.
fn elements_per_row(field: &Field) -> u32 {
    let parts = if matches!(field.dtype, DType::Complex64 | DType::Complex128) { 2 } else { 1 };
    field.shape.iter().product::<u32>() * parts
}

fn numbers<const N: usize, T>(data: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|bytes| number(*bytes)).collect()
}

fn write(writer: &mut ColumnWriter<'_>, values: &Values) -> anyhow::Result<()> {
    let levels = values.lengths.as_ref().map(|lengths| {
        let mut levels: (Vec<i16>, Vec<i16>) = Default::default();
        for &length in lengths {
            levels.0.extend(std::iter::repeat_n(i16::from(length > 0), length.max(1) as usize));
            levels.1.push(0);
            levels.1.extend(std::iter::repeat_n(1, length.saturating_sub(1) as usize));
        }
        levels
    });
    let levels = levels.as_ref();
    match (writer, &values.elements) {
        (ColumnWriter::BoolColumnWriter(writer), Elements::Bool(values)) => batch(writer, values, levels),
        (ColumnWriter::Int32ColumnWriter(writer), Elements::Int32(values)) => batch(writer, values, levels),
        (ColumnWriter::Int64ColumnWriter(writer), Elements::Int64(values)) => batch(writer, values, levels),
        (ColumnWriter::FloatColumnWriter(writer), Elements::Float(values)) => batch(writer, values, levels),
        (ColumnWriter::DoubleColumnWriter(writer), Elements::Double(values)) => batch(writer, values, levels),
        (ColumnWriter::FixedLenByteArrayColumnWriter(writer), Elements::Fixed(values)) => batch(writer, values, levels),
        (ColumnWriter::ByteArrayColumnWriter(writer), Elements::Bytes(values)) => batch(writer, values, levels),
        _ => bail!("a column has values of another type than the schema"),
    }
}

fn batch<T: DataType>(
    writer: &mut ColumnWriterImpl<'_, T>,
    values: &[T::T],
    levels: Option<&(Vec<i16>, Vec<i16>)>,
) -> anyhow::Result<()> {
    let (definitions, repetitions) = (levels.map(|it| &it.0[..]), levels.map(|it| &it.1[..]));
    writer.write_batch(values, definitions, repetitions)?;
    Ok(())
}

/// Reads a file, one group of rows after another.
pub(super) struct Reader {
    file: SerializedFileReader<File>,
    group: usize,
    /// Types and shapes that the file or the buffer declares.
    declared: Vec<Field>,
}

impl Reader {
    /// Opens a file. `existing` are the fields of the buffer, for a file that does not declare its own.
    pub(super) fn open(file: File, existing: Option<&[Field]>) -> anyhow::Result<Self> {
        let file = SerializedFileReader::new(file).context("it is no Parquet file")?;
        let entries = file.metadata().file_metadata().key_value_metadata();
        let text = entries.into_iter().flatten().find(|it| it.key == FIELDS).and_then(|it| it.value.as_deref());
        let declared = match text {
            Some(text) => {
                let entries: Vec<FieldEntry> =
                    serde_json::from_str(text).with_context(|| format!("failed to read its key {FIELDS}"))?;
                entries.into_iter().map(field).collect::<anyhow::Result<_>>()?
            }
            None => existing.map(<[Field]>::to_vec).unwrap_or_default(),
        };
        Ok(Self { file, group: 0, declared })
    }

    /// Reads the next group of rows; `None` at the end.
    pub(super) fn next_rows(&mut self) -> anyhow::Result<Option<Rows>> {
        if self.group >= self.file.num_row_groups() {
            return Ok(None);
        }
        let group = self.file.get_row_group(self.group)?;
        self.group += 1;
        let count = group.metadata().num_rows().max(0) as usize;
        let mut rows = Rows { count, ..Rows::default() };
        for index in 0..group.num_columns() {
            let descriptor = group.metadata().column(index).column_descr_ptr();
            let name = descriptor.path().parts().first().cloned().unwrap_or_default();
            let values = read(
                group.get_column_reader(index)?,
                &descriptor,
                count,
                self.file.metadata().file_metadata().schema(),
            );
            let values = values.with_context(|| format!("column {name:?}"))?;
            let of_item = || Field { name: name.clone(), dtype: DType::UInt64, shape: Vec::new(), jagged: false };
            match (&*name, &values.elements) {
                (HANDLE | WEIGHT, _) => {}
                (VERSION, Elements::Int64(_)) => {
                    rows.versions = numbers(&bytes(&values, &of_item())?, u64::from_le_bytes);
                }
                (TRAJECTORY, Elements::Int64(_)) => {
                    rows.trajectories = numbers(&bytes(&values, &of_item())?, u64::from_le_bytes);
                }
                (PRIORITY, Elements::Double(priorities)) => rows.priorities.clone_from(priorities),
                (TAG, Elements::Bytes(tags)) => {
                    rows.tags = tags.iter().map(|tag| Bytes::copy_from_slice(tag.data())).collect();
                }
                (PRIORITY | VERSION | TRAJECTORY | TAG, _) => bail!(
                    "column {name:?} is {}; allowed: double for {PRIORITY}, int64 for {VERSION} and {TRAJECTORY}, bytes for {TAG}",
                    descriptor.physical_type()
                ),
                _ => rows.columns.push(self.column(&name, &descriptor, &values, count)?),
            }
        }
        Ok(Some(rows))
    }

    fn column(&self, name: &str, of: &ColumnDescriptor, values: &Values, count: usize) -> anyhow::Result<Column> {
        let declared = self.declared.iter().find(|field| field.name == name).cloned();
        let is_list = values.lengths.is_some();
        let inferred = || -> anyhow::Result<Field> {
            Ok(Field { name: name.to_owned(), dtype: dtype(of)?, shape: Vec::new(), jagged: is_list })
        };
        let field = match declared {
            Some(field) => field,
            None => inferred()?,
        };
        let data = bytes(values, &field).with_context(|| format!("column {name:?}"))?;
        let mut column = Column { rows: None, ..Column::new(name, field.dtype, field.shape.clone(), data) };
        let per_row = elements_per_row(&field).max(1);
        let lengths = values.lengths.as_ref();
        if field.jagged {
            let lengths =
                lengths.with_context(|| format!("column {name:?} is no list; field {name} is {}", field.describe()))?;
            let rows = lengths.iter().map(|length| (length % per_row == 0).then_some(length / per_row));
            let rows: Option<Vec<u32>> = rows.collect();
            column.rows = Some(rows.with_context(|| {
                format!(
                    "column {name:?} has lists that are no multiple of {per_row} elements: field {name} is {}",
                    field.describe()
                )
            })?);
        } else if let Some(other) = lengths.and_then(|lengths| lengths.iter().find(|length| **length != per_row)) {
            bail!(
                "column {name:?} has a list of {other} elements; allowed: {per_row}, as field {name} is {}",
                field.describe()
            );
        }
        ensure!(column.rows.is_some() || column.data.len() == count * row_bytes(&column), "column {name:?} has nulls");
        Ok(column)
    }
}

fn field(entry: FieldEntry) -> anyhow::Result<Field> {
    let dtype = DType::from_name(&entry.dtype).with_context(|| format!("unknown dtype {:?}", entry.dtype))?;
    Ok(Field { name: entry.name, dtype, shape: entry.shape, jagged: entry.jagged })
}

/// Returns the type of the elements of a column that the file does not declare.
fn dtype(of: &ColumnDescriptor) -> anyhow::Result<DType> {
    let integer = |width: u8, signed: bool| match of.logical_type_ref() {
        Some(LogicalType::Integer(kind)) => Some((kind.bit_width as u8, kind.is_signed)),
        None => Some((width, signed)),
        Some(_) => None,
    };
    let found = match of.physical_type() {
        PhysicalType::BOOLEAN => Some(DType::Bool),
        PhysicalType::INT32 => integer(32, true).and_then(of_width),
        PhysicalType::INT64 => integer(64, true).and_then(of_width),
        PhysicalType::FLOAT => Some(DType::Float32),
        PhysicalType::DOUBLE => Some(DType::Float64),
        PhysicalType::FIXED_LEN_BYTE_ARRAY if of.type_length() == 2 => Some(DType::Float16),
        _ => None,
    };
    let unknown = || {
        format!(
            "{} {} is not allowed; allowed: numbers and bool, or lists of them",
            of.physical_type(),
            of.converted_type()
        )
    };
    found.with_context(unknown)
}

fn of_width((width, signed): (u8, bool)) -> Option<DType> {
    Some(match (width, signed) {
        (8, true) => DType::Int8,
        (16, true) => DType::Int16,
        (32, true) => DType::Int32,
        (64, true) => DType::Int64,
        (8, false) => DType::UInt8,
        (16, false) => DType::UInt16,
        (32, false) => DType::UInt32,
        (64, false) => DType::UInt64,
        _ => return None,
    })
}

/// Returns elements as bytes of the type of a field.
fn bytes(values: &Values, field: &Field) -> anyhow::Result<Bytes> {
    let flat = |bytes: Vec<u8>| Ok(Bytes::from(bytes));
    match (&values.elements, field.dtype) {
        (Elements::Bool(it), DType::Bool) => flat(it.iter().map(|bit| u8::from(*bit)).collect()),
        (Elements::Int32(it), DType::Int8 | DType::UInt8) => flat(it.iter().map(|it| it.to_le_bytes()[0]).collect()),
        (Elements::Int32(it), DType::Int16 | DType::UInt16 | DType::BFloat16) => {
            flat(it.iter().flat_map(|it| [it.to_le_bytes()[0], it.to_le_bytes()[1]]).collect())
        }
        (Elements::Int32(it), DType::Int32 | DType::UInt32) => {
            flat(it.iter().flat_map(|it| it.to_le_bytes()).collect())
        }
        (Elements::Int64(it), DType::Int64 | DType::UInt64) => {
            flat(it.iter().flat_map(|it| it.to_le_bytes()).collect())
        }
        (Elements::Float(it), DType::Float32 | DType::Complex64) => {
            flat(it.iter().flat_map(|it| it.to_le_bytes()).collect())
        }
        (Elements::Double(it), DType::Float64 | DType::Complex128) => {
            flat(it.iter().flat_map(|it| it.to_le_bytes()).collect())
        }
        (Elements::Fixed(it), DType::Float16) if it.iter().all(|it| it.data().len() == 2) => {
            flat(it.iter().flat_map(|it| it.data().to_vec()).collect())
        }
        _ => bail!("its values do not fit field {}, which is {}", field.name, field.describe()),
    }
}

fn read(reader: ColumnReader, of: &ColumnDescriptor, rows: usize, schema: &Type) -> anyhow::Result<Values> {
    ensure!(of.max_rep_level() <= 1, "lists of lists are not allowed; allowed: numbers, bool, or lists of them");
    let repeated = repeated_level(schema, of.path().parts());
    let (elements, lengths) = match reader {
        ColumnReader::BoolColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Bool),
        ColumnReader::Int32ColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Int32),
        ColumnReader::Int64ColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Int64),
        ColumnReader::FloatColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Float),
        ColumnReader::DoubleColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Double),
        ColumnReader::FixedLenByteArrayColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Fixed),
        ColumnReader::ByteArrayColumnReader(it) => wrap(all(it, of, rows, repeated)?, Elements::Bytes),
        ColumnReader::Int96ColumnReader(_) => {
            bail!("INT96 is not allowed; allowed: numbers and bool, or lists of them")
        }
    };
    Ok(Values { elements, lengths })
}

/// The values of a column, and elements per item of a list.
type Read<T> = (Vec<T>, Option<Vec<u32>>);

fn wrap<T>((values, lengths): Read<T>, of: impl Fn(Vec<T>) -> Elements) -> (Elements, Option<Vec<u32>>) {
    (of(values), lengths)
}

/// Returns the definition level from which on a list has elements; `None` if the column is no list.
fn repeated_level(schema: &Type, path: &[String]) -> Option<i16> {
    let (mut node, mut level) = (schema, 0);
    for part in path {
        node = node.get_fields().iter().find(|field| field.name() == part)?;
        match node.get_basic_info().repetition() {
            Repetition::REQUIRED => {}
            Repetition::OPTIONAL => level += 1,
            Repetition::REPEATED => return Some(level + 1),
        }
    }
    None
}

/// Reads all values of a column in a group of rows.
fn all<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    of: &ColumnDescriptor,
    rows: usize,
    repeated: Option<i16>,
) -> anyhow::Result<Read<T::T>> {
    let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let mut read = 0;
    while read < rows {
        let defined = (of.max_def_level() > 0).then_some(&mut definitions);
        let (records, ..) =
            reader.read_records(rows - read, defined, repeated.is_some().then_some(&mut repetitions), &mut values)?;
        ensure!(records > 0, "it ends before its last row");
        read += records;
    }
    let Some(repeated) = repeated else {
        ensure!(definitions.iter().all(|level| *level == of.max_def_level()), "nulls are not allowed");
        return Ok((values, None));
    };
    let mut lengths: Vec<u32> = Vec::with_capacity(rows);
    for (definition, repetition) in definitions.iter().zip(&repetitions) {
        if *repetition == 0 {
            lengths.push(0);
        }
        let is_element = *definition >= repeated;
        ensure!(
            *definition == of.max_def_level() || (!is_element && *definition == repeated - 1),
            "nulls are not allowed"
        );
        *lengths.last_mut().context("its levels are damaged")? += u32::from(is_element);
    }
    Ok((values, Some(lengths)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::data::buffer::rows::tests::every_type;

    fn written(groups: &[Rows]) -> File {
        let mut writer = Writer::new(tempfile::tempfile().unwrap(), &groups[0]).unwrap();
        groups.iter().for_each(|rows| writer.push(rows).unwrap());
        writer.finish().unwrap()
    }

    #[test]
    fn items_of_every_type_survive() {
        let rows = every_type();
        let mut reader = Reader::open(written(&[rows.clone(), rows.clone()]), None).unwrap();
        for _ in 0..2 {
            let read = reader.next_rows().unwrap().unwrap();
            // Handles are new after an import.
            assert_eq!(read, Rows { handles: Vec::new(), ..rows.clone() });
        }
        assert_eq!(reader.next_rows().unwrap(), None);
    }

    #[test]
    fn lists_of_other_programs_are_jagged_and_nulls_are_refused() {
        let schema = "message m { optional group x (LIST) { repeated group list { optional float element; } } required int64 n; }";
        let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
        let file = |definitions: &[i16], repetitions: &[i16], values: &[f32], n: &[i64]| {
            let properties = Arc::new(WriterProperties::builder().build());
            let mut writer =
                SerializedFileWriter::new(tempfile::tempfile().unwrap(), Arc::clone(&schema), properties).unwrap();
            let mut group = writer.next_row_group().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let floats = column.typed::<parquet::data_type::FloatType>();
            floats.write_batch(values, Some(definitions), Some(repetitions)).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<parquet::data_type::Int64Type>().write_batch(n, None, None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
            writer.into_inner().unwrap()
        };
        let good = || file(&[3, 3, 1, 3], &[0, 1, 0, 0], &[1.0, 2.0, 3.0], &[7, 8, 9]);
        let read = Reader::open(good(), None).unwrap().next_rows().unwrap().unwrap();
        assert_eq!(read.columns[0].rows, Some(vec![2, 0, 1]));
        assert_eq!((read.columns[1].dtype, read.columns[1].rows.clone(), read.count), (DType::Int64, None, 3));
        // The buffer says what a list is.
        let fixed = |shape| [Field { name: "x".into(), dtype: DType::Float32, shape, jagged: false }];
        let refused = Reader::open(good(), Some(&fixed(vec![2]))).unwrap().next_rows().unwrap_err().to_string();
        assert!(refused.contains("a list of 0 elements; allowed: 2, as field x is float32[2]"), "{refused}");
        let pairs = file(&[3, 3, 3, 3], &[0, 1, 0, 1], &[1.0, 2.0, 3.0, 4.0], &[7, 8]);
        let read = Reader::open(pairs, Some(&fixed(vec![2]))).unwrap().next_rows().unwrap().unwrap();
        assert_eq!((read.columns[0].shape.clone(), read.columns[0].data.len()), (vec![2], 16));
        for (definitions, repetitions) in [(&[3, 2][..], &[0, 1][..]), (&[3, 0], &[0, 0])] {
            let nulls =
                file(definitions, repetitions, &[1.0], &vec![1; repetitions.iter().filter(|it| **it == 0).count()]);
            let error = Reader::open(nulls, None).unwrap().next_rows().unwrap_err();
            assert!(format!("{error:#}").contains("nulls are not allowed"), "{error:#}");
        }
    }
}
