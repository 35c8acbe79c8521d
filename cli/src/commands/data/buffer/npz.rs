//! Files of NumPy: `.npz` archives of `.npy` arrays.
//!
//! An archive is a ZIP file: entries are written without compression, and read with or without it.

use super::rows::{HANDLE, PRIORITY, Rows, TAG, TRAJECTORY, VERSION, WEIGHT, row_bytes};
use crate::error::problem;
use engram_api::Code;
use engram_client::{Column, DType};
use flate2::Crc;
use flate2::read::DeflateDecoder;
use std::io::Read as _;

/// Largest archive: offsets have 32 bits.
pub(crate) const MAX_BYTES: usize = u32::MAX as usize;
const LOCAL: u32 = 0x0403_4B50;
const CENTRAL: u32 = 0x0201_4B50;
const END: u32 = 0x0605_4B50;
const LOCAL_BYTES: usize = 30;
const CENTRAL_BYTES: usize = 46;
const END_BYTES: usize = 22;
const MAGIC: &[u8] = b"\x93NUMPY";

/// An array of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Array {
    /// Name, without `.npy`.
    pub(crate) name: String,
    /// Type of the elements.
    pub(crate) dtype: DType,
    /// All dimensions.
    pub(crate) shape: Vec<usize>,
    /// Elements, little-endian, row-major.
    pub(crate) data: Vec<u8>,
}

/// Why a file is no archive of arrays.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    #[error("it is not an .npz archive: {0}")]
    Archive(&'static str),
    #[error("array {name:?}: {what}")]
    Array { name: String, what: String },
    #[error("{0} bytes do not fit into an .npz archive; allowed: below 4 GiB, or a .parquet file")]
    TooLarge(usize),
}

/// Encodes an archive.
pub(crate) fn encode(arrays: &[Array]) -> Result<Vec<u8>, Error> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for array in arrays {
        let name = format!("{}.npy", array.name);
        let header = header(array);
        let mut crc = Crc::new();
        crc.update(&header);
        crc.update(&array.data);
        let bytes = header.len() + array.data.len();
        let offset = file.len();
        if offset + bytes + name.len() + LOCAL_BYTES > MAX_BYTES {
            return Err(Error::TooLarge(offset + bytes));
        }
        // Version 2.0, no flags, stored, no time.
        let common = |out: &mut Vec<u8>| {
            out.extend([20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0]);
            out.extend(crc.sum().to_le_bytes());
            out.extend((bytes as u32).to_le_bytes());
            out.extend((bytes as u32).to_le_bytes());
            out.extend((name.len() as u16).to_le_bytes());
            out.extend([0, 0]);
        };
        file.extend(LOCAL.to_le_bytes());
        common(&mut file);
        file.extend(name.as_bytes());
        file.extend(header);
        file.extend(&array.data);
        directory.extend(CENTRAL.to_le_bytes());
        directory.extend([20, 0]);
        common(&mut directory);
        directory.extend([0; 10]);
        directory.extend((offset as u32).to_le_bytes());
        directory.extend(name.as_bytes());
    }
    if file.len() + directory.len() + END_BYTES > MAX_BYTES {
        return Err(Error::TooLarge(file.len()));
    }
    let (start, count) = (file.len() as u32, arrays.len() as u16);
    file.extend(&directory);
    file.extend(END.to_le_bytes());
    file.extend([0; 4]);
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0; 2]);
    Ok(file)
}

/// Encodes an array as a file of its own.
pub(crate) fn encode_array(array: &Array) -> Vec<u8> {
    let mut file = header(array);
    file.extend_from_slice(&array.data);
    file
}

/// Returns the `.npy` header of an array, version 1.0.
fn header(array: &Array) -> Vec<u8> {
    let dimensions: String = array.shape.iter().map(|dimension| format!("{dimension}, ")).collect();
    let text =
        format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({dimensions}), }}", description(array.dtype));
    let padded = (MAGIC.len() + 4 + text.len() + 1).next_multiple_of(64) - MAGIC.len() - 4;
    let mut header = MAGIC.to_vec();
    header.extend([1, 0]);
    header.extend((padded as u16).to_le_bytes());
    header.extend(format!("{text:<width$}\n", width = padded - 1).as_bytes());
    header
}

/// Returns the type as NumPy writes it.
const fn description(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "|b1",
        DType::Int8 => "|i1",
        DType::Int16 => "<i2",
        DType::Int32 => "<i4",
        DType::Int64 => "<i8",
        DType::UInt8 => "|u1",
        DType::UInt16 => "<u2",
        DType::UInt32 => "<u4",
        DType::UInt64 => "<u8",
        DType::Float16 => "<f2",
        // NumPy itself has no such type: ml_dtypes writes two opaque bytes.
        DType::BFloat16 => "<V2",
        DType::Float32 => "<f4",
        DType::Float64 => "<f8",
        DType::Complex64 => "<c8",
        DType::Complex128 => "<c16",
    }
}

/// Decodes an archive.
pub(crate) fn decode(file: &[u8]) -> Result<Vec<Array>, Error> {
    let end = file.len().checked_sub(END_BYTES).ok_or(Error::Archive("it is too short"))?;
    // A comment may follow the end record.
    let end =
        (end.saturating_sub(usize::from(u16::MAX))..=end).rev().find(|at| number(file, *at, 4) == Some(END.into()));
    let end = end.ok_or(Error::Archive("it has no directory"))?;
    let truncated = || Error::Archive("its directory is damaged");
    let (count, mut at) = number(file, end + 10, 2).zip(number(file, end + 16, 4)).ok_or_else(truncated)?;
    let mut arrays = Vec::new();
    for _ in 0..count {
        let entry = at as usize;
        if number(file, entry, 4) != Some(CENTRAL.into()) {
            return Err(truncated());
        }
        let field = |offset, bytes| number(file, entry + offset, bytes).ok_or_else(truncated);
        let (method, crc, packed, bytes) = (field(10, 2)?, field(16, 4)?, field(20, 4)?, field(24, 4)?);
        let (name, extra, comment) = (field(28, 2)?, field(30, 2)?, field(32, 2)?);
        let start = entry + CENTRAL_BYTES;
        let text = file.get(start..start + name as usize).ok_or_else(truncated)?;
        let text = String::from_utf8_lossy(text).into_owned();
        let refused = |what: &str| Error::Array { name: text.clone(), what: what.to_owned() };
        let content = content(file, field(42, 4)? as usize, packed as usize).ok_or_else(truncated)?;
        let content = match method {
            0 => content.to_vec(),
            8 => {
                let mut unpacked = Vec::new();
                let read = DeflateDecoder::new(content).take(bytes + 1).read_to_end(&mut unpacked);
                read.map_err(|_| refused("its compressed data is damaged"))?;
                unpacked
            }
            _ => return Err(refused("its compression is unknown; allowed: none or deflate")),
        };
        let mut sum = Crc::new();
        sum.update(&content);
        if u64::from(sum.sum()) != crc || content.len() as u64 != bytes {
            return Err(refused("its checksum does not match"));
        }
        let name_of_array = text.strip_suffix(".npy").unwrap_or(&text);
        arrays.push(decode_array(name_of_array, &content)?);
        at += CENTRAL_BYTES as u64 + name + extra + comment;
    }
    Ok(arrays)
}

/// Returns the data of an entry by its local header.
fn content(file: &[u8], at: usize, bytes: usize) -> Option<&[u8]> {
    (number(file, at, 4)? == u64::from(LOCAL)).then_some(())?;
    let names = number(file, at + 26, 2)? + number(file, at + 28, 2)?;
    let start = at.checked_add(LOCAL_BYTES)?.checked_add(names as usize)?;
    file.get(start..start.checked_add(bytes)?)
}

fn number(file: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..bytes].copy_from_slice(file.get(at..at.checked_add(bytes)?)?);
    Some(u64::from_le_bytes(word))
}

/// Decodes an array: a file of its own, or the content of an archive's entry.
pub(crate) fn decode_array(name: &str, content: &[u8]) -> Result<Array, Error> {
    let refused = |what: &str| Error::Array { name: name.to_owned(), what: what.to_owned() };
    let short = || refused("it is no .npy array");
    let rest = content.strip_prefix(MAGIC).ok_or_else(short)?;
    let (length, start) = match rest.first() {
        Some(1) => (number(rest, 2, 2), 4),
        Some(2 | 3) => (number(rest, 2, 4), 6),
        _ => (None, 0),
    };
    let end = start + length.ok_or_else(short)? as usize;
    let header = rest.get(start..end).and_then(|header| str::from_utf8(header).ok()).ok_or_else(short)?;
    let value = |key: &str| header.split_once(&format!("'{key}':")).map(|(_, value)| value.trim_start());
    let description_text = value("descr").and_then(|it| it.strip_prefix('\'')?.split_once('\'')).map(|(text, _)| text);
    let dtype = DType::ALL.into_iter().find(|dtype| Some(description(*dtype)) == description_text);
    let dtype = dtype.ok_or_else(|| {
        let found = description_text.unwrap_or("a structure");
        refused(&format!("its type {found} is not allowed; allowed: little-endian numbers and bool"))
    })?;
    if !value("fortran_order").is_some_and(|value| value.starts_with("False")) {
        return Err(refused("Fortran order is not allowed; allowed: C order"));
    }
    let shape = value("shape").and_then(|it| it.strip_prefix('(')?.split_once(')')).ok_or_else(short)?.0;
    let dimensions = shape.split(',').map(str::trim).filter(|it| !it.is_empty());
    let shape = dimensions.map(|it| it.parse().map_err(|_| short())).collect::<Result<Vec<usize>, Error>>()?;
    let data = rest.get(end..).unwrap_or_default().to_vec();
    let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, dimension| bytes.checked_mul(*dimension));
    if bytes != Some(data.len()) {
        return Err(refused("its data does not match its shape"));
    }
    Ok(Array { name: name.to_owned(), dtype, shape, data })
}

/// Rows per item of a jagged field follow in an array of this suffix.
const ROWS: &str = ".rows";

/// Returns the arrays of items: the fields first.
pub(crate) fn arrays(rows: &Rows) -> Vec<Array> {
    let flat = |name: &str, dtype: DType, data: Vec<u8>| Array {
        name: name.to_owned(),
        dtype,
        shape: vec![data.len() / dtype.bytes()],
        data,
    };
    let lengths = |name: &str, lengths: &[u32]| {
        flat(&format!("{name}{ROWS}"), DType::UInt32, lengths.iter().flat_map(|it| it.to_le_bytes()).collect())
    };
    let unsigned =
        |name: &str, column: &[u64]| flat(name, DType::UInt64, column.iter().flat_map(|it| it.to_le_bytes()).collect());
    let mut arrays = Vec::new();
    for column in &rows.columns {
        let first = column.data.len() / row_bytes(column).max(1);
        let shape = std::iter::once(first).chain(column.shape.iter().map(|it| *it as usize)).collect();
        arrays.push(Array { name: column.name.clone(), dtype: column.dtype, shape, data: column.data.to_vec() });
        arrays.extend(column.rows.as_ref().map(|rows| lengths(&column.name, rows)));
    }
    arrays.push(unsigned(HANDLE, &rows.handles));
    let priorities = rows.priorities.iter().flat_map(|it| it.to_le_bytes()).collect();
    arrays.push(flat(PRIORITY, DType::Float64, priorities));
    arrays.push(unsigned(VERSION, &rows.versions));
    arrays.push(unsigned(TRAJECTORY, &rows.trajectories));
    if rows.tags.iter().any(|tag| !tag.is_empty()) {
        let tags: Vec<u32> = rows.tags.iter().map(|tag| tag.len() as u32).collect();
        arrays.push(flat(TAG, DType::UInt8, rows.tags.concat()));
        arrays.push(lengths(TAG, &tags));
    }
    if !rows.weights.is_empty() {
        arrays.push(flat(WEIGHT, DType::Float32, rows.weights.iter().flat_map(|it| it.to_le_bytes()).collect()));
    }
    arrays
}

/// Returns the items of arrays.
pub(crate) fn rows(mut arrays: Vec<Array>) -> anyhow::Result<Rows> {
    let mut take = |name: &str| arrays.iter().position(|array| array.name == name).map(|index| arrays.remove(index));
    let _ = (take(HANDLE), take(WEIGHT));
    let mut rows = Rows {
        priorities: numbers(take(PRIORITY), DType::Float64, f64::from_le_bytes)?,
        versions: numbers(take(VERSION), DType::UInt64, u64::from_le_bytes)?,
        trajectories: numbers(take(TRAJECTORY), DType::UInt64, u64::from_le_bytes)?,
        ..Rows::default()
    };
    let tags = take(TAG).map(|tags| tags.data).unwrap_or_default();
    let mut rest = &tags[..];
    for length in numbers(take(&format!("{TAG}{ROWS}")), DType::UInt32, u32::from_le_bytes)? {
        let (tag, later) = rest.split_at_checked(length as usize).ok_or_else(|| {
            problem(Code::InvalidValue, format!("array {TAG:?} has fewer bytes than {TAG}{ROWS} says"))
        })?;
        rows.tags.push(tag.to_vec().into());
        rest = later;
    }
    let names: Vec<String> =
        arrays.iter().map(|array| array.name.clone()).filter(|name| !name.ends_with(ROWS)).collect();
    for name in names {
        let mut take =
            |name: &str| arrays.iter().position(|array| array.name == name).map(|index| arrays.remove(index));
        let (Some(array), lengths) = (take(&name), take(&format!("{name}{ROWS}"))) else { continue };
        let lengths = lengths.map(|it| numbers(Some(it), DType::UInt32, u32::from_le_bytes)).transpose()?;
        let count = lengths.as_ref().map_or(array.shape.first().copied().unwrap_or(0), Vec::len);
        if rows.columns.is_empty() {
            rows.count = count;
        } else if count != rows.count {
            let message = format!("array {name:?} has {count} items; allowed: {}, as the first array", rows.count);
            return Err(problem(Code::InvalidValue, message));
        }
        let shape = array.shape.iter().skip(1).map(|it| *it as u32).collect();
        rows.columns.push(Column { rows: lengths, ..Column::new(name, array.dtype, shape, array.data) });
    }
    Ok(rows)
}

/// Returns the numbers of an array; none if it is absent.
fn numbers<const N: usize, T>(array: Option<Array>, dtype: DType, number: fn([u8; N]) -> T) -> anyhow::Result<Vec<T>> {
    let Some(array) = array else { return Ok(Vec::new()) };
    if array.dtype != dtype || array.shape.len() != 1 {
        let message =
            format!("array {:?} is {}{:?}; allowed: {dtype} with one dimension", array.name, array.dtype, array.shape);
        return Err(problem(Code::InvalidValue, message));
    }
    let (numbers, _) = array.data.as_chunks::<N>();
    Ok(numbers.iter().copied().map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_survive_and_damage_is_found() {
        let arrays = [
            Array { name: "obs".into(), dtype: DType::Float32, shape: vec![2, 3], data: (0..24).collect() },
            Array { name: "done".into(), dtype: DType::Bool, shape: vec![2], data: vec![1, 0] },
            Array { name: "scalar".into(), dtype: DType::BFloat16, shape: vec![], data: vec![1, 2] },
        ];
        let file = encode(&arrays).unwrap();
        assert_eq!(decode(&file).unwrap(), arrays);
        let mut damaged = file.clone();
        damaged[150] ^= 1;
        assert!(decode(&damaged).is_err());
        assert!((0..file.len()).step_by(7).all(|end| decode(&file[..end]).is_err()), "a truncated file was read");
        assert_eq!(decode(b"no archive at all......"), Err(Error::Archive("it has no directory")));
    }

    #[test]
    fn header_is_what_numpy_writes() {
        let array = Array { name: "x".into(), dtype: DType::Int64, shape: vec![5], data: vec![0; 40] };
        let header = header(&array);
        assert_eq!(header.len() % 64, 0);
        assert!(header.starts_with(b"\x93NUMPY\x01\x00"));
        let text = String::from_utf8(header[10..].to_vec()).unwrap();
        assert!(text.starts_with("{'descr': '<i8', 'fortran_order': False, 'shape': (5, ), }") && text.ends_with('\n'));
    }
}
