//! Files of NumPy: `.npz` archives of `.npy` arrays.
//!
//! An archive is a ZIP file: entries are written without compression, and read with or without it.

use engram_client::DType;
use flate2::Crc;
use flate2::read::DeflateDecoder;
use std::io::Read as _;

/// Largest archive: offsets have 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;
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
    #[error("{0} bytes do not fit into an .npz archive; allowed: below 4 GiB")]
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
        arrays.push(array(name_of_array, &content)?);
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

/// Decodes an array of an archive.
fn array(name: &str, content: &[u8]) -> Result<Array, Error> {
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
