//! Reads rows, a batch at a time.

use super::{Format, Packing, Purpose, Row};
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

/// Rows that are read, sent and acknowledged together.
const BATCH_ROWS: usize = 16_384;
/// The same in bytes of keys, features and payloads, which may be large.
const BATCH_BYTES: usize = 4 << 20;
/// Most bytes of one line: the longest features and payload, as text, and some room. A file without line ends is an error and
/// not an exhausted machine.
const LINE_BYTES: u64 = 1 << 20;

/// Reads rows of one file.
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
    /// What the reader may still take for the record at hand.
    left: Arc<AtomicU64>,
    names: csv::StringRecord,
    record: csv::StringRecord,
}

/// A row as it stands in a file; `F` is how features are written.
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
    /// It cannot be opened, or its name tells no format and none was given.
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
        let text = Packing::of_path(path).reader(counted).map_err(unreadable)?;
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
                let left = Arc::new(AtomicU64::new(LINE_BYTES));
                let bounded = Bounded { inner: text, left: Arc::clone(&left) };
                let reader = csv::ReaderBuilder::new().has_headers(false).from_reader(bounded);
                let (names, record) = Default::default();
                Source::Csv(Box::new(Csv { reader, left, names, record }))
            }
        };
        Self { name, purpose, rows, read, line: 0 }
    }

    /// Bytes of the file that were read so far, packed as they are.
    pub(crate) fn bytes_read(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.read)
    }

    /// Groups the rows into batches.
    pub(crate) fn batches(self) -> Batches {
        Batches { reader: self, ended: false }
    }

    /// Reads all rows and keeps none: whether they are right.
    ///
    /// # Errors
    /// As [`Self::next_row`].
    pub(crate) fn check(mut self) -> Result<(), Problem> {
        while self.next_row()?.is_some() {}
        Ok(())
    }

    /// Reads the next row, `None` at the end.
    ///
    /// # Errors
    /// The row is wrong: with its line, what was found and what is allowed.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, Problem> {
        match &mut self.rows {
            Source::Jsonl(text, line) => loop {
                line.clear();
                self.line += 1;
                let bytes = text.take(LINE_BYTES + 1).read_until(b'\n', line);
                let bytes = match bytes {
                    Ok(bytes) => bytes,
                    Err(error) => return Err(self.wrong(error)),
                };
                if bytes == 0 {
                    return Ok(None);
                }
                if bytes as u64 > LINE_BYTES {
                    return Err(self.wrong(format!("the line is longer than {LINE_BYTES} bytes")));
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
                        Err(self.wrong(format!("{} (column {})", &text[..end], error.column())))
                    }
                };
            },
            Source::Csv(csv) => {
                let Csv { reader, left, names, record } = &mut **csv;
                left.store(LINE_BYTES, Ordering::Relaxed);
                if names.is_empty() && !reader.read_record(names).map_err(|error| wrong(&self.name, 1, error))? {
                    return Ok(None);
                }
                let more = reader.read_record(record);
                self.line = record.position().map_or(self.line + 1, csv::Position::line);
                match more {
                    Ok(false) => return Ok(None),
                    Ok(true) => {}
                    Err(error) => {
                        let line = error.position().map_or(self.line, csv::Position::line);
                        return Err(wrong(&self.name, line, error));
                    }
                }
                let raw: Result<Raw<String>, _> = record.deserialize(Some(names));
                match raw {
                    Ok(raw) => self.row(raw, |text| numbers(&text)).map(Some),
                    Err(error) => Err(self.wrong(csv_reason(&error))),
                }
            }
        }
    }

    fn row<F>(&self, raw: Raw<F>, features: impl FnOnce(F) -> Result<Vec<f32>, String>) -> Result<Row, Problem> {
        let key = raw.key.filter(|key| !key.is_empty());
        let id = match (raw.id, &key) {
            (None, None) => return Err(self.wrong("neither id nor key is given; one of them is needed")),
            (Some(id), None) => MemoryId(id),
            (given, Some(key)) => {
                if key.len() > MAX_KEY_BYTES {
                    return Err(self.wrong(format!("key has {} bytes; allowed: 1 to {MAX_KEY_BYTES}", key.len())));
                }
                let id = key_id(key.as_bytes());
                if given.is_some_and(|given| given != id.0) {
                    return Err(self.wrong(format!("id is {}, but key {key:?} has the id {id}", given.unwrap_or(0))));
                }
                id
            }
        };
        let group = match raw.group {
            None => None,
            Some(group) => {
                Some(u8::try_from(group).map_err(|_| self.wrong(format!("group is {group}; allowed: 0 to 255")))?)
            }
        };
        let payload = match (raw.payload, raw.payload_base64) {
            (Some(_), Some(_)) => return Err(self.wrong("payload and payloadBase64 are both given; allowed: one")),
            (Some(text), None) => text.into_bytes(),
            (None, Some(text)) => {
                STANDARD.decode(&text).map_err(|error| self.wrong(format!("payloadBase64 is no Base64: {error}")))?
            }
            (None, None) => Vec::new(),
        };
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(
                self.wrong(format!("payload has {} bytes; allowed: at most {MAX_PAYLOAD_BYTES}", payload.len()))
            );
        }
        let has_features = raw.features.is_some();
        let features = raw.features.map_or(Ok(Vec::new()), features).map_err(|error| self.wrong(error))?;
        match self.purpose {
            Purpose::Insert { .. } if raw.quality.is_some() || raw.delta.is_some() => {
                return Err(self.wrong("quality and delta are for `reinforce`; allowed here: weight"));
            }
            Purpose::Insert { dimension } if !features.is_empty() && features.len() != dimension => {
                let what = format!("features have {} numbers; the cluster's dimension is {dimension}", features.len());
                return Err(self.problem(Code::WrongDimension, what));
            }
            Purpose::Insert { .. } => {}
            Purpose::Reinforce => {
                if raw.quality.is_some() == raw.delta.is_some() {
                    return Err(self.wrong("exactly one of quality and delta is needed"));
                }
                if raw.weight.is_some() || group.is_some() || has_features || !payload.is_empty() {
                    return Err(self.wrong("weight, group, features and payload are for `insert`"));
                }
            }
        }
        if let Some(bad) = features.iter().find(|feature| !feature.is_finite()) {
            return Err(self.wrong(format!("features hold {bad}; allowed: finite numbers of single precision")));
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
                Err(self.wrong(format!("{name} is {value}; allowed: {least} to 1")))
            }
            other => Ok(other.map(|value| value as f32)),
        }
    }

    /// A problem of the row that was read last.
    fn wrong(&self, what: impl std::fmt::Display) -> Problem {
        wrong(&self.name, self.line, what)
    }

    fn problem(&self, code: Code, what: impl std::fmt::Display) -> Problem {
        Problem::new(code, format!("{}, line {}: {what}", self.name, self.line))
    }
}

fn wrong(name: &str, line: u64, what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::InvalidValue, format!("{name}, line {line}: {what}"))
}

fn numbers(text: &str) -> Result<Vec<f32>, String> {
    let number =
        |word: &str| word.parse().map_err(|_| format!("features hold {word:?}; allowed: numbers, blanks between"));
    text.split_ascii_whitespace().map(number).collect()
}

/// The text of a CSV error without its position, which is said already.
fn csv_reason(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => err.kind().to_string(),
        _ => error.to_string(),
    }
}

/// Rows in batches.
pub(crate) struct Batches {
    reader: Reader,
    ended: bool,
}

impl Batches {
    /// Reads the next batch, `None` at the end. Rows of one batch have the same columns.
    ///
    /// # Errors
    /// A row is wrong; rows before it that were not given out yet are dropped.
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

/// Keeps an unclosed quote from drawing the whole file into memory.
struct Bounded {
    inner: Box<dyn Read + Send>,
    left: Arc<AtomicU64>,
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(io::Error::other(format!("a record is longer than {LINE_BYTES} bytes")));
        }
        let most = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut bytes[..most])?;
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
