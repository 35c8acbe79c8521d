//! Rows of a Parquet file, read by column, one batch of rows at a time.

use super::cell::Cell;
use super::{Layout, Row, Rows};
use crate::source::{Location, SourceError};
use parquet::basic::{Compression, ConvertedType, LogicalType, TimeUnit, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType, Int96};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;
use std::borrow::Cow;
use std::fs::File;

/// Compressions that the reader is built with.
const COMPRESSIONS: &str = "no compression, Snappy, gzip, Zstandard, LZ4 or Brotli";
/// Rows that are decoded at once.
const BATCH: usize = 8_192;

pub(super) struct Reader {
    layout: Layout,
    file: SerializedFileReader<File>,
    /// Column of the file and meaning of its values, for each wanted column.
    selected: Vec<(usize, Meaning)>,
    /// The row group that is being read, and its columns.
    group: usize,
    columns: Vec<ColumnReader>,
    batch: Vec<Column>,
    /// Number of the batch's first row in its group, rows of the batch, rows given out.
    first: u64,
    rows: usize,
    next: usize,
}

/// What the integers of a column count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Number,
    Unsigned,
    /// A time: one millisecond is this many units.
    PerMilli(i64),
    /// Days since 1970-01-01.
    Days,
    /// A type without meaning for events: decimals, times of day.
    Foreign,
}

/// The values of a batch; an absent one is null.
enum Column {
    Int32(Vec<Option<i32>>),
    Int64(Vec<Option<i64>>),
    /// Times as Spark and Hive wrote them: a Julian day and nanoseconds.
    Int96(Vec<Option<Int96>>),
    Float(Vec<Option<f32>>),
    Double(Vec<Option<f64>>),
    Bytes(Vec<Option<ByteArray>>),
}

impl Reader {
    pub(super) fn open(layout: Layout, file: File) -> Result<Self, SourceError> {
        let file = SerializedFileReader::new(file).map_err(|e| layout.unreadable(e))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let flat = |column: &ColumnDescriptor| column.max_rep_level() == 0;
        let indices: Vec<usize> = (0..schema.num_columns()).filter(|&index| flat(&schema.column(index))).collect();
        let names: Vec<String> = indices.iter().map(|&index| schema.column(index).path().string()).collect();
        let mut selected = Vec::new();
        for position in 0..layout.columns().len() {
            let at = indices[layout.find_column(position, &names)?];
            let column = schema.column(at);
            let unsupported = |found: String, allowed| layout.unsupported_column(position, found, allowed);
            if matches!(column.physical_type(), PhysicalType::BOOLEAN | PhysicalType::FIXED_LEN_BYTE_ARRAY) {
                return Err(unsupported(type_name(&column), "integers, numbers, strings or times"));
            }
            for group in file.metadata().row_groups() {
                let codec = group.column(at).compression();
                if codec == Compression::LZO {
                    return Err(unsupported("compressed with LZO".to_owned(), COMPRESSIONS));
                }
            }
            selected.push((at, meaning(&column)));
        }
        let columns = Vec::new();
        Ok(Self { layout, file, selected, group: 0, columns, batch: Vec::new(), first: 0, rows: 0, next: 0 })
    }

    /// Decodes the next rows; `false` after the last row group.
    fn fill(&mut self) -> Result<bool, SourceError> {
        loop {
            if self.columns.is_empty() {
                if self.group == self.file.num_row_groups() {
                    return Ok(false);
                }
                let group = self.file.get_row_group(self.group).map_err(|e| self.layout.unreadable(e))?;
                let open = |&(at, _): &(usize, Meaning)| group.get_column_reader(at);
                self.columns =
                    self.selected.iter().map(open).collect::<Result<_, _>>().map_err(|e| self.damaged(&e))?;
                (self.first, self.rows) = (0, 0);
            }
            self.first += self.rows as u64;
            let mut batch = Vec::with_capacity(self.columns.len());
            for (column, &(at, _)) in self.columns.iter_mut().zip(&self.selected) {
                let nullable = self.file.metadata().file_metadata().schema_descr().column(at).max_def_level();
                batch.push(read(column, nullable).map_err(|e| damaged(&self.layout, self.group, self.first, &e))?);
            }
            let rows = batch[0].len();
            if batch.iter().any(|column| column.len() != rows) {
                return Err(self.damaged(&"columns of different lengths"));
            }
            (self.batch, self.rows, self.next) = (batch, rows, 0);
            if rows > 0 {
                return Ok(true);
            }
            self.columns.clear();
            self.group += 1;
        }
    }

    fn damaged(&self, cause: &dyn std::fmt::Display) -> SourceError {
        damaged(&self.layout, self.group, self.first, cause)
    }
}

fn damaged(layout: &Layout, group: usize, row: u64, cause: &dyn std::fmt::Display) -> SourceError {
    layout.bad_row(Location::Row { group, row }, "row", cause.to_string(), "columns of numbers or strings that decode")
}

impl Rows for Reader {
    fn next_row(&mut self) -> Result<Option<Row>, SourceError> {
        if self.next == self.rows && !self.fill()? {
            return Ok(None);
        }
        let at = self.next;
        self.next += 1;
        let place = Location::Row { group: self.group, row: self.first + at as u64 };
        let cells: Vec<Cell<'_>> =
            self.batch.iter().zip(&self.selected).map(|(column, &(_, meaning))| column.cell(at, meaning)).collect();
        self.layout.row(place, &cells).map(Some)
    }
}

impl Column {
    fn len(&self) -> usize {
        match self {
            Self::Int32(values) => values.len(),
            Self::Int64(values) => values.len(),
            Self::Int96(values) => values.len(),
            Self::Float(values) => values.len(),
            Self::Double(values) => values.len(),
            Self::Bytes(values) => values.len(),
        }
    }

    fn cell(&self, at: usize, meaning: Meaning) -> Cell<'_> {
        let integer = |value: i64, unsigned: i128| match meaning {
            Meaning::Number => Cell::Integer(i128::from(value)),
            Meaning::Unsigned => Cell::Integer(unsigned),
            Meaning::PerMilli(units) => Cell::Millis(value.div_euclid(units)),
            Meaning::Foreign => Cell::Other("a decimal or a time of day"),
            Meaning::Days => value.checked_mul(86_400_000).map_or(Cell::Missing, Cell::Millis),
        };
        match self {
            Self::Int32(values) => values[at].map(|value| integer(i64::from(value), i128::from(value.cast_unsigned()))),
            Self::Int64(values) => values[at].map(|value| integer(value, i128::from(value.cast_unsigned()))),
            Self::Int96(values) => values[at].map(|value| Cell::Millis(value.to_millis())),
            Self::Float(values) => values[at].map(Cell::Single),
            Self::Double(values) => values[at].map(Cell::Double),
            Self::Bytes(values) => values[at].as_ref().map(|bytes| match std::str::from_utf8(bytes.data()) {
                Ok(text) => Cell::Text(Cow::Borrowed(text)),
                Err(_) => Cell::Other("bytes that are not UTF-8"),
            }),
        }
        .unwrap_or(Cell::Missing)
    }
}

fn meaning(column: &ColumnDescriptor) -> Meaning {
    match (column.logical_type_ref(), column.converted_type()) {
        (Some(LogicalType::Integer(kind)), _) if !kind.is_signed => Meaning::Unsigned,
        (Some(LogicalType::Timestamp(kind)), _) => Meaning::PerMilli(match kind.unit {
            TimeUnit::MILLIS => 1,
            TimeUnit::MICROS => 1_000,
            TimeUnit::NANOS => 1_000_000,
        }),
        (Some(LogicalType::Date), _) | (None, ConvertedType::DATE) => Meaning::Days,
        (Some(LogicalType::Integer(_) | LogicalType::String | LogicalType::Enum | LogicalType::Unknown), _) => {
            Meaning::Number
        }
        (Some(_), _) | (None, ConvertedType::DECIMAL | ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS) => {
            Meaning::Foreign
        }
        (None, ConvertedType::UINT_8 | ConvertedType::UINT_16 | ConvertedType::UINT_32 | ConvertedType::UINT_64) => {
            Meaning::Unsigned
        }
        (None, ConvertedType::TIMESTAMP_MILLIS) => Meaning::PerMilli(1),
        (None, ConvertedType::TIMESTAMP_MICROS) => Meaning::PerMilli(1_000),
        (None, _) => Meaning::Number,
    }
}

/// Names the type of a column for an error: `FIXED_LEN_BYTE_ARRAY (Decimal)`.
fn type_name(column: &ColumnDescriptor) -> String {
    let physical = column.physical_type();
    match column.converted_type() {
        ConvertedType::NONE => format!("of type {physical}"),
        logical => format!("of type {physical} ({logical})"),
    }
}

fn read(column: &mut ColumnReader, nullable: i16) -> Result<Column, ParquetError> {
    Ok(match column {
        ColumnReader::Int32ColumnReader(reader) => Column::Int32(values(reader, nullable)?),
        ColumnReader::Int64ColumnReader(reader) => Column::Int64(values(reader, nullable)?),
        ColumnReader::FloatColumnReader(reader) => Column::Float(values(reader, nullable)?),
        ColumnReader::DoubleColumnReader(reader) => Column::Double(values(reader, nullable)?),
        ColumnReader::ByteArrayColumnReader(reader) => Column::Bytes(values(reader, nullable)?),
        ColumnReader::Int96ColumnReader(reader) => Column::Int96(values(reader, nullable)?),
        ColumnReader::BoolColumnReader(_) | ColumnReader::FixedLenByteArrayColumnReader(_) => {
            return Err(ParquetError::General("a type that is refused when the file is opened".to_owned()));
        }
    })
}

/// Reads a batch of one column. The reader returns the present values and a level per row; the highest level means that the value
/// is present.
fn values<T: DataType>(reader: &mut ColumnReaderImpl<T>, nullable: i16) -> Result<Vec<Option<T::T>>, ParquetError> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let (rows, _, _) = reader.read_records(BATCH, (nullable > 0).then_some(&mut levels), None, &mut values)?;
    let mut values = values.into_iter();
    if nullable == 0 {
        return Ok(values.map(Some).collect());
    }
    debug_assert_eq!(rows, levels.len());
    Ok(levels.into_iter().map(|level| if level == nullable { values.next() } else { None }).collect())
}
