//! Events from a file: JSON Lines, CSV or Parquet, one row per event, ordered by epoch.
//!
//! With an `epoch` column each distinct value is one learning epoch: values are names in ascending order, and missing numbers cause
//! no epochs. (Years, addresses and days written as 20260131 all work; there should be no decay for the days between the 31st and
//! the 99th.) With a `time` column an epoch is a time span on the grid that starts at the Unix epoch, so that spans of a day are
//! UTC days wherever the file starts. Spans without an event are epochs, too, because decay depends on the passage of time. Rows of
//! one span may come in any order.

mod cell;
mod csv;
mod jsonl;
mod parquet;
mod time;

use super::{Content, Epoch, Event, Limits, Location, Source, SourceError, StopFlag, in_order};
use std::fs::{File, Metadata};
use std::io::{self, BufReader, Read, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of events and how to read it.
#[derive(Debug, Clone, PartialEq)]
pub struct EventsOptions {
    /// The file; for supplied content the name in errors and reports.
    pub path: PathBuf,
    /// Location of its bytes.
    pub origin: Origin,
    /// File format.
    pub format: Format,
    /// Separator of the columns of a CSV file; `None` = comma.
    pub separator: Option<u8>,
    /// Meaning of the columns.
    pub columns: Columns,
    /// How an event reinforces.
    pub signal: SignalSource,
}

/// Location of the bytes of an event file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// On the disk, under its path.
    #[default]
    Disk,
    /// In this folder, which is not trusted: a path that leads out of it, for example by symbolic links, is rejected.
    Folder(PathBuf),
    /// In memory.
    Content(Arc<[u8]>),
    /// In an unnamed file.
    Fetched(FetchedFile),
}

/// A temporary file that is deleted with its last handle.
#[derive(Debug, Clone)]
pub struct FetchedFile(Arc<File>);

impl FetchedFile {
    /// Wraps a complete file. All handles share one position, so only one of them may read at a time.
    pub fn new(file: File) -> Self {
        Self(Arc::new(file))
    }
}

impl PartialEq for FetchedFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FetchedFile {}

impl EventsOptions {
    /// Opens the file, at its beginning.
    pub(crate) fn open(&self) -> io::Result<File> {
        Self::open_origin(&self.origin, &self.path)
    }

    /// Opens the file of an origin and a path.
    pub(super) fn open_origin(origin: &Origin, path: &Path) -> io::Result<File> {
        match origin {
            Origin::Disk => open_regular(path),
            Origin::Folder(folder) => {
                let (folder, path) = (folder.canonicalize()?, path.canonicalize()?);
                if !path.starts_with(&folder) {
                    return Err(io::Error::other(format!("it leads out of {}", folder.display())));
                }
                open_regular(&path)
            }
            // A file as well, because Parquet is read from its end.
            Origin::Content(content) => {
                let mut file = tempfile::tempfile()?;
                file.write_all(content)?;
                file.rewind()?;
                Ok(file)
            }
            Origin::Fetched(FetchedFile(file)) => {
                let mut file = file.try_clone()?;
                file.rewind()?;
                Ok(file)
            }
        }
    }
}

/// Opens a regular file. A device or a pipe may have no end, and opening a pipe would wait for its writer.
fn open_regular(path: &Path) -> io::Result<File> {
    // Checked by name first, because opening a device may have effects, then by handle.
    let check = |about: &Metadata| match about.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(io::Error::other("it is a folder")),
        _ => Err(io::Error::other("it is not a regular file; allowed: regular files, which have an end")),
    };
    check(&std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

/// Format of an event file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// By extension.
    #[default]
    Auto,
    /// One JSON object per line; `.gz` and `.zst` are unpacked.
    Jsonl,
    /// Comma-separated, with a header; `.gz` and `.zst` are unpacked.
    Csv,
    /// Parquet with flat columns.
    Parquet,
}

/// Columns of memory and epoch.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// Memory of an event.
    pub memory: MemoryColumn,
    /// Epoch of an event.
    pub time: TimeColumn,
}

/// How a row names its memory.
#[derive(Debug, Clone, PartialEq)]
pub enum MemoryColumn {
    /// By id, an integer from 0 to 2^64 - 1.
    Id(String),
    /// By key, a string of 1 to 1,024 bytes.
    Key(String),
}

/// How a row names its epoch.
#[derive(Debug, Clone, PartialEq)]
pub enum TimeColumn {
    /// By a non-decreasing integer.
    Epoch(String),
    /// By a time: RFC 3339, or milliseconds since the Unix epoch.
    Time {
        /// The column.
        column: String,
        /// Length of an epoch in milliseconds, at least 1.
        span_ms: u64,
    },
}

/// Where the strength of an event comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum SignalSource {
    /// The same quality for every event, in [0, 1].
    Quality(f32),
    /// The same delta for every event, in [-1, 1].
    Delta(f32),
    /// A quality per row.
    QualityColumn(String),
    /// A delta per row.
    DeltaColumn(String),
}

/// Options with the columns as one list, shared by the readers of all formats.
#[derive(Debug, Clone)]
struct Layout {
    path: PathBuf,
    options: EventsOptions,
    limits: Limits,
}

/// Positions in the list of columns: memory, time, and strength where a column gives it.
const MEMORY: usize = 0;
const TIME: usize = 1;
const SIGNAL: usize = 2;

impl Layout {
    /// Option and column name, in the order of the positions above.
    fn columns(&self) -> Vec<(&'static str, &str)> {
        let mut columns = vec![
            match &self.options.columns.memory {
                MemoryColumn::Id(column) => ("columns.id", column.as_str()),
                MemoryColumn::Key(column) => ("columns.key", column.as_str()),
            },
            match &self.options.columns.time {
                TimeColumn::Epoch(column) => ("columns.epoch", column.as_str()),
                TimeColumn::Time { column, .. } => ("columns.time", column.as_str()),
            },
        ];
        match &self.options.signal {
            SignalSource::QualityColumn(column) => columns.push(("columns.quality", column)),
            SignalSource::DeltaColumn(column) => columns.push(("columns.delta", column)),
            SignalSource::Quality(_) | SignalSource::Delta(_) => {}
        }
        columns
    }

    /// Returns the index of a wanted column among the columns of the file, where its name occurs exactly once.
    fn find_column(&self, position: usize, names: &[String]) -> Result<usize, SourceError> {
        let (field, column) = self.columns()[position];
        let mut indices = names.iter().enumerate().filter(|(_, name)| *name == column).map(|(index, _)| index);
        match (indices.next(), indices.count()) {
            (None, _) => Err(self.no_column(position, names.to_vec())),
            (Some(index), 0) => Ok(index),
            (Some(_), others) => {
                let (path, column) = (self.path.clone(), column.to_owned());
                Err(SourceError::AmbiguousColumn { path, field, column, occurrences: others + 1 })
            }
        }
    }

    fn no_column(&self, position: usize, columns: Vec<String>) -> SourceError {
        let (field, column) = self.columns()[position];
        SourceError::NoColumn { path: self.path.clone(), field, column: column.to_owned(), columns }
    }

    fn unsupported_column(&self, position: usize, found: String, allowed: &'static str) -> SourceError {
        let (field, column) = self.columns()[position];
        SourceError::UnsupportedColumn { path: self.path.clone(), field, column: column.to_owned(), found, allowed }
    }

    fn bad_row(&self, place: Location, column: &str, value: String, allowed: impl Into<String>) -> SourceError {
        let (path, column) = (self.path.clone(), column.to_owned());
        SourceError::Row { path, location: place, column, value, allowed: allowed.into() }
    }

    fn unreadable(&self, cause: impl std::fmt::Display) -> SourceError {
        SourceError::unreadable(&self.path, cause)
    }
}

/// A row whose epoch is known; other errors in it concern only that epoch.
struct Row {
    place: Location,
    /// Value of the epoch column, or number of the span of time.
    epoch: i64,
    event: Result<Event, SourceError>,
}

/// A reader of one format.
trait Rows: Send {
    /// Reads the next row, `None` at the end. An error cannot be assigned to an epoch.
    fn next_row(&mut self) -> Result<Option<Row>, SourceError>;
}

pub(super) struct EventFile {
    layout: Layout,
    rows: Box<dyn Rows>,
    /// First row of the epoch that comes next, already read.
    pending: Option<Row>,
    /// Epoch column value or span of the last epoch that was yielded.
    last: Option<i64>,
    next: u64,
    ended: bool,
    stop: StopFlag,
}

impl EventFile {
    pub(super) fn open(options: &EventsOptions, limits: Limits, from: u64) -> Result<Self, SourceError> {
        let layout = Layout { path: options.path.clone(), options: options.clone(), limits };
        let rows = open_rows(&layout)?;
        let mut file =
            Self { layout, rows, pending: None, last: None, next: 0, ended: false, stop: StopFlag::default() };
        while file.next < from && file.next_epoch()?.is_some() {}
        Ok(file)
    }

    fn read_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let Some(first) = self.pending.take().map_or_else(|| self.rows.next_row(), |row| Ok(Some(row)))? else {
            return Ok(None);
        };
        if let Some(empty) = self.gap_before(&first)? {
            self.pending = Some(first);
            return Ok(Some(self.emit(empty, Vec::new())));
        }
        let value = first.epoch;
        let mut events = Vec::new();
        let mut row = Some(first);
        while let Some(current) = row {
            if current.epoch < value {
                return Err(self.epoch_fell(&current, value));
            }
            if current.epoch > value {
                self.pending = Some(current);
                break;
            }
            if events.len() == self.layout.limits.epoch_events {
                return Err(self.too_many(current.place));
            }
            if self.stop.is_set() {
                return Err(self.layout.unreadable("the read was stopped"));
            }
            events.push(current.event?);
            row = self.rows.next_row()?;
        }
        Ok(Some(self.emit(value, events)))
    }

    fn emit(&mut self, value: i64, events: Vec<Event>) -> Epoch {
        self.last = Some(value);
        let number = self.next;
        self.next += 1;
        Epoch { number, label: Some(self.label(value)), content: Content::Events(in_order(events)) }
    }

    /// Returns the span without events that must be yielded before `first`.
    fn gap_before(&self, first: &Row) -> Result<Option<i64>, SourceError> {
        let (TimeColumn::Time { column, .. }, Some(last)) = (&self.layout.options.columns.time, self.last) else {
            return Ok(None);
        };
        let empty = first.epoch.abs_diff(last).saturating_sub(1);
        let limit = self.layout.limits.empty_epochs;
        if empty > limit {
            let value = format!("{empty} epochs without an event before this row");
            let allowed = format!("at most {limit}; is the unit of the times, or epochSpan, right?");
            return Err(self.layout.bad_row(first.place, column, value, allowed));
        }
        Ok((empty > 0).then_some(last + 1))
    }

    fn label(&self, value: i64) -> String {
        match self.layout.options.columns.time {
            TimeColumn::Epoch(_) => value.to_string(),
            TimeColumn::Time { span_ms, .. } => time::format_span(value, span_ms),
        }
    }

    fn epoch_fell(&self, row: &Row, before: i64) -> SourceError {
        let (_, column) = self.layout.columns()[TIME];
        let (value, before) = (self.label(row.epoch), self.label(before));
        self.layout.bad_row(row.place, column, value, format!("{before} or later: epochs never fall"))
    }

    fn too_many(&self, place: Location) -> SourceError {
        let limit = self.layout.limits.epoch_events;
        let (_, column) = self.layout.columns()[TIME];
        let allowed = format!("at most {limit} events in one epoch; split it into several");
        self.layout.bad_row(place, column, format!("event {} of its epoch", limit + 1), allowed)
    }
}

impl Source for EventFile {
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        if self.ended {
            return Ok(None);
        }
        let epoch = self.read_epoch();
        self.ended = !matches!(epoch, Ok(Some(_)));
        epoch
    }

    fn stop_by(&mut self, stop: StopFlag) {
        self.stop = stop;
    }

    fn epochs(&self) -> Option<u64> {
        None
    }
}

/// Compression of a text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    Plain,
    Gzip,
    Zstd,
}

/// Returns format and compression by file name: `events.csv.zst` is compressed CSV.
fn format_of(path: &Path, format: Format) -> Result<(Format, Compression), SourceError> {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let (name, compression) = if let Some(stem) = name.strip_suffix(".gz") {
        (stem, Compression::Gzip)
    } else if let Some(stem) = name.strip_suffix(".zst") {
        (stem, Compression::Zstd)
    } else {
        (name.as_str(), Compression::Plain)
    };
    let unknown = || SourceError::UnknownFormat { path: path.to_owned() };
    let by_name = match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("jsonl" | "ndjson") => Some(Format::Jsonl),
        Some("csv") => Some(Format::Csv),
        Some("parquet") => Some(Format::Parquet),
        _ => None,
    };
    let format = if format == Format::Auto { by_name.ok_or_else(unknown)? } else { format };
    // A Parquet file is read from its end, so a compressed one would have to be decompressed first; it is compressed internally.
    if format == Format::Parquet && compression != Compression::Plain {
        Err(unknown())
    } else {
        Ok((format, compression))
    }
}

fn open_rows(layout: &Layout) -> Result<Box<dyn Rows>, SourceError> {
    let (format, compression) = format_of(&layout.path, layout.options.format)?;
    if layout.options.separator.is_some() && format != Format::Csv {
        return Err(SourceError::NotCsv { path: layout.path.to_path_buf() });
    }
    let file = layout.options.open().map_err(|e| layout.unreadable(e))?;
    if format == Format::Parquet {
        return Ok(Box::new(parquet::Reader::open(layout.clone(), file)?));
    }
    let file = BufReader::new(file);
    let text: Box<dyn Read + Send> = match compression {
        Compression::Plain => Box::new(file),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(file).map_err(|e| layout.unreadable(e))?),
    };
    Ok(match format {
        Format::Csv => Box::new(csv::Reader::open(layout.clone(), text)?),
        _ => Box::new(jsonl::Reader::new(layout.clone(), text)),
    })
}

#[cfg(test)]
mod tests;
