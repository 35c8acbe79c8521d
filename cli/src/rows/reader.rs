//! Reads rows in batches.

use super::{Compression, Format, Purpose, Row};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engram_api::{Code, Problem};
use engram_memory::{MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MemoryId, key_id};
use serde::Deserialize;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of rows of a batch.
const BATCH_ROWS: usize = 16_384;
/// Size limit of a batch in bytes of keys, features and payloads.
const BATCH_BYTES: usize = 4 << 20;
/// Size limit of a line: the longest features and payload as text. Bounds memory for a file without line ends.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// U+FEFF in UTF-8, which some programs write at the beginning of a file. The CSV reader skips it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reader of one file.
pub(crate) struct Reader {
    name: String,
    purpose: Purpose,
    rows: Source,
    read: Arc<AtomicU64>,
    line: u64,
}

enum Source {
    Jsonl(BufReader<Box<dyn Read + Send>>, Vec<u8>),
    Csv(Box<Csv>),
}

struct Csv {
    reader: csv::Reader<Bounded>,
    /// Bytes left for the current record.
    left: Arc<AtomicU64>,
    names: csv::StringRecord,
    record: csv::StringRecord,
}

/// A row as written in a file; `F` is the type of the features.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, bound = "F: Deserialize<'de>")]
struct Raw<F> {
    id: Option<u64>,
    key: Option<String>,
    weight: Option<f64>,
    group: Option<u64>,
    features: Option<F>,
    payload: Option<String>,
    payload_base64: Option<String>,
    quality: Option<f64>,
    delta: Option<f64>,
}

impl Reader {
    /// Opens a file, or standard input for `-`.
    ///
    /// # Errors
    /// The file cannot be opened, or its format is unknown.
    pub(crate) fn open(path: &Path, format: Option<Format>, purpose: Purpose) -> Result<Self, Problem> {
        let unreadable = |error: io::Error| {
            Problem::new(Code::SourceUnreadable, format!("failed to read {}: {error}", path.display()))
        };
        let read = Arc::new(AtomicU64::new(0));
        if path == Path::new("-") {
            let counted = Counted { inner: io::stdin(), read: Arc::clone(&read) };
            let format = format.unwrap_or(Format::Jsonl);
            return Ok(Self::new("standard input".into(), format, purpose, Box::new(counted), read));
        }
        let format = match format {
            Some(format) => format,
            None => Format::of_path(path)?,
        };
        let counted = Counted { inner: File::open(path).map_err(unreadable)?, read: Arc::clone(&read) };
        let text = Compression::of_path(path).reader(counted).map_err(unreadable)?;
        Ok(Self::new(path.display().to_string(), format, purpose, text, read))
    }

    pub(super) fn new(
        name: String,
        format: Format,
        purpose: Purpose,
        text: Box<dyn Read + Send>,
        read: Arc<AtomicU64>,
    ) -> Self {
        let rows = match format {
            Format::Jsonl => Source::Jsonl(BufReader::new(text), Vec::new()),
            Format::Csv => {
                let left = Arc::new(AtomicU64::new(MAX_LINE_BYTES));
                let bounded = Bounded { inner: text, left: Arc::clone(&left) };
                let reader = csv::ReaderBuilder::new().has_headers(false).from_reader(bounded);
                let (names, record) = Default::default();
                Source::Csv(Box::new(Csv { reader, left, names, record }))
            }
        };
        Self { name, purpose, rows, read, line: 0 }
    }

    /// Returns a counter of the (compressed) bytes read.
    pub(crate) fn bytes_read(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.read)
    }

    /// Returns the rows in batches.
    pub(crate) fn batches(self) -> Batches {
        Batches { reader: self, ended: false }
    }

    /// Validates all rows.
    ///
    /// # Errors
    /// As [`Self::next_row`].
    pub(crate) fn check(mut self) -> Result<(), Problem> {
        while self.next_row()?.is_some() {}
        Ok(())
    }

    /// Reads the next row; `None` at the end.
    ///
    /// # Errors
    /// The row is invalid: with line, value and allowed values.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, Problem> {
        match &mut self.rows {
            Source::Jsonl(text, line) => loop {
                line.clear();
                self.line += 1;
                let bytes = text.take(MAX_LINE_BYTES + 1).read_until(b'\n', line);
                let bytes = match bytes {
                    Ok(bytes) => bytes,
                    Err(error) => return Err(self.invalid(error)),
                };
                if bytes == 0 {
                    return Ok(None);
                }
                if bytes as u64 > MAX_LINE_BYTES {
                    return Err(self.invalid(format!("the line is longer than {MAX_LINE_BYTES} bytes")));
                }
                if self.line == 1 && line.starts_with(BYTE_ORDER_MARK) {
                    line.drain(..BYTE_ORDER_MARK.len());
                }
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let raw: Result<Raw<Vec<f32>>, _> = serde_json::from_slice(line);
                return match raw {
                    Ok(raw) => self.row(raw, Ok).map(Some),
                    Err(error) => {
                        let text = error.to_string();
                        let end = text.rfind(" at line ").unwrap_or(text.len());
                        Err(self.invalid(format!("{} (column {})", &text[..end], error.column())))
                    }
                };
            },
            Source::Csv(csv) => {
                let Csv { reader, left, names, record } = &mut **csv;
                left.store(MAX_LINE_BYTES, Ordering::Relaxed);
                if names.is_empty() && !reader.read_record(names).map_err(|error| invalid(&self.name, 1, error))? {
                    return Ok(None);
                }
                let more = reader.read_record(record);
                self.line = record.position().map_or(self.line + 1, csv::Position::line);
                match more {
                    Ok(false) => return Ok(None),
                    Ok(true) => {}
                    Err(error) => {
                        let line = error.position().map_or(self.line, csv::Position::line);
                        return Err(invalid(&self.name, line, error));
                    }
                }
                let raw: Result<Raw<String>, _> = record.deserialize(Some(names));
                match raw {
                    Ok(raw) => self.row(raw, |text| numbers(&text)).map(Some),
                    Err(error) => Err(self.invalid(csv_reason(&error))),
                }
            }
        }
    }

    fn row<F>(&self, raw: Raw<F>, features: impl FnOnce(F) -> Result<Vec<f32>, String>) -> Result<Row, Problem> {
        let key = raw.key.filter(|key| !key.is_empty());
        let id = match (raw.id, &key) {
            (None, None) => return Err(self.invalid("neither id nor key is given; one is required")),
            (Some(id), None) => MemoryId(id),
            (id, Some(key)) => {
                if key.len() > MAX_KEY_BYTES {
                    return Err(self.invalid(format!("key has {} bytes; allowed: 1 to {MAX_KEY_BYTES}", key.len())));
                }
                let derived = key_id(key.as_bytes());
                if let Some(id) = id.filter(|id| *id != derived.0) {
                    return Err(self.invalid(format!("id is {id}, but key {key:?} has the id {derived}")));
                }
                derived
            }
        };
        let group = match raw.group {
            None => None,
            Some(group) => {
                Some(u8::try_from(group).map_err(|_| self.invalid(format!("group is {group}; allowed: 0 to 255")))?)
            }
        };
        let payload = match (raw.payload, raw.payload_base64) {
            (Some(_), Some(_)) => return Err(self.invalid("payload and payloadBase64 cannot both be given")),
            (Some(text), None) => text.into_bytes(),
            (None, Some(text)) => STANDARD
                .decode(&text)
                .map_err(|error| self.invalid(format!("payloadBase64 is not valid Base64: {error}")))?,
            (None, None) => Vec::new(),
        };
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(
                self.invalid(format!("payload has {} bytes; allowed: at most {MAX_PAYLOAD_BYTES}", payload.len()))
            );
        }
        let has_features = raw.features.is_some();
        let features = raw.features.map_or(Ok(Vec::new()), features).map_err(|error| self.invalid(error))?;
        match self.purpose {
            Purpose::Insert { .. } if raw.quality.is_some() || raw.delta.is_some() => {
                return Err(self.invalid("quality and delta are not allowed in `engram insert`; use weight"));
            }
            Purpose::Insert { dimension } if !features.is_empty() && features.len() != dimension => {
                let message =
                    format!("features have {} numbers; the dimension of the cluster is {dimension}", features.len());
                return Err(self.problem(Code::WrongDimension, message));
            }
            Purpose::Insert { .. } => {}
            Purpose::Reinforce => {
                if raw.quality.is_some() == raw.delta.is_some() {
                    return Err(self.invalid("exactly one of quality and delta is required"));
                }
                if raw.weight.is_some() || group.is_some() || has_features || !payload.is_empty() {
                    return Err(
                        self.invalid("weight, group, features and payload are not allowed in `engram reinforce`")
                    );
                }
            }
        }
        if let Some(bad) = features.iter().find(|feature| !feature.is_finite()) {
            return Err(self.invalid(format!("features contain {bad}; allowed: finite single-precision numbers")));
        }
        Ok(Row {
            id,
            key,
            weight: self.number("weight", raw.weight, 0.0)?,
            group,
            features,
            payload,
            quality: self.number("quality", raw.quality, 0.0)?,
            delta: self.number("delta", raw.delta, -1.0)?,
        })
    }

    fn number(&self, name: &str, value: Option<f64>, least: f64) -> Result<Option<f32>, Problem> {
        match value {
            Some(value) if !(least..=1.0).contains(&value) => {
                Err(self.invalid(format!("{name} is {value}; allowed: {least} to 1")))
            }
            other => Ok(other.map(|value| value as f32)),
        }
    }

    /// Returns an error for the current row.
    fn invalid(&self, message: impl std::fmt::Display) -> Problem {
        invalid(&self.name, self.line, message)
    }

    fn problem(&self, code: Code, message: impl std::fmt::Display) -> Problem {
        Problem::new(code, format!("{}, line {}: {message}", self.name, self.line))
    }
}

fn invalid(name: &str, line: u64, message: impl std::fmt::Display) -> Problem {
    Problem::new(Code::InvalidValue, format!("{name}, line {line}: {message}"))
}

fn numbers(text: &str) -> Result<Vec<f32>, String> {
    let number = |text: &str| {
        text.parse().map_err(|_| format!("features contain {text:?}; allowed: numbers separated by spaces"))
    };
    text.split_ascii_whitespace().map(number).collect()
}

/// Returns the message of a CSV error without its position, which is added separately.
fn csv_reason(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => err.kind().to_string(),
        _ => error.to_string(),
    }
}

/// Iterator over batches of rows.
pub(crate) struct Batches {
    reader: Reader,
    ended: bool,
}

impl Batches {
    /// Reads the next batch; `None` at the end.
    ///
    /// # Errors
    /// A row is invalid; earlier rows of the batch are dropped.
    pub(crate) fn next_batch(&mut self) -> Result<Option<Vec<Row>>, Problem> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while !self.ended && rows.len() < BATCH_ROWS && bytes < BATCH_BYTES {
            match self.reader.next_row()? {
                Some(row) => {
                    bytes += row.payload.len() + row.features.len() * 4 + row.key.as_ref().map_or(0, String::len) + 16;
                    rows.push(row);
                }
                None => self.ended = true,
            }
        }
        Ok((!rows.is_empty()).then_some(rows))
    }
}

/// Limits the size of a record: an unclosed quote would otherwise read the whole file into memory.
struct Bounded {
    inner: Box<dyn Read + Send>,
    left: Arc<AtomicU64>,
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(io::Error::other(format!("a record is longer than {MAX_LINE_BYTES} bytes")));
        }
        let limit = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut bytes[..limit])?;
        self.left.store(left - read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

struct Counted<R> {
    inner: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
