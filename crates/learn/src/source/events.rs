//! Events from a file: JSON Lines, CSV or Parquet, one row per event, ordered by epoch.
//!
//! With an `epoch` column each distinct value is one learning epoch: values are names in ascending order, and a number
//! that is left out costs nothing. (Years, addresses, days written as 20260131 all work; nobody wants decay for the days
//! between the 31st and the 99th.) With a `time` column an epoch is a span of time on the grid that starts at the Unix
//! epoch, so that with a span of a day it is a UTC day wherever the file begins; spans without an event are epochs too,
//! because time that passes is what decay is about. Within a span rows may come in any order.

mod cell;
mod csv;
mod jsonl;
mod parquet;
mod time;

use super::{Content, Epoch, Event, Limits, Place, Source, SourceError, in_order};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of events and how to read it.
#[derive(Debug, Clone, PartialEq)]
pub struct EventsOptions {
    /// The file; of content that was handed over, the name that errors and reports give it.
    pub path: PathBuf,
    /// Where its bytes are.
    pub origin: Origin,
    /// How it is written.
    pub format: Format,
    /// Which columns say what.
    pub columns: Columns,
    /// How an event reinforces.
    pub signal: SignalSource,
}

/// Where the bytes of a file of events are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// On the disk, under its path.
    #[default]
    Disk,
    /// In this folder, which somebody else fills: a path that leads out of it, as symbolic links do, is not followed.
    Folder(PathBuf),
    /// Here.
    Content(Arc<[u8]>),
    /// In a file that needs no name any more.
    Fetched(Fetched),
}

/// A file of this machine that goes when nobody has it any more, by whatever end.
#[derive(Debug, Clone)]
pub struct Fetched(Arc<File>);

impl Fetched {
    /// Takes a file that is whole. All who open it have one position in it: one of them reads at a time.
    pub fn new(file: File) -> Self {
        Self(Arc::new(file))
    }
}

impl PartialEq for Fetched {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Fetched {}

impl EventsOptions {
    /// Opens the file, at its beginning.
    pub(crate) fn open(&self) -> io::Result<File> {
        match &self.origin {
            Origin::Disk => File::open(&self.path),
            Origin::Folder(folder) => {
                let (folder, path) = (folder.canonicalize()?, self.path.canonicalize()?);
                if !path.starts_with(&folder) {
                    return Err(io::Error::other(format!("it leads out of {}", folder.display())));
                }
                File::open(path)
            }
            // A file all the same: Parquet is read from its end.
            Origin::Content(content) => {
                let mut file = tempfile::tempfile()?;
                file.write_all(content)?;
                file.rewind()?;
                Ok(file)
            }
            Origin::Fetched(Fetched(file)) => {
                let mut file = file.try_clone()?;
                file.rewind()?;
                Ok(file)
            }
        }
    }
}

/// How a file of events is written.
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

/// The columns that say which memory and which epoch.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// Which memory an event is about.
    pub memory: MemoryColumn,
    /// To which epoch it belongs.
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
    /// By an integer that never falls.
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

/// The options with the columns in one list: what the readers of the three formats share.
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

    fn no_column(&self, position: usize, columns: Vec<String>) -> SourceError {
        let (field, column) = self.columns()[position];
        SourceError::NoColumn { path: self.path.clone(), field, column: column.to_owned(), columns }
    }

    fn bad_row(&self, place: Place, column: &str, value: String, allowed: impl Into<String>) -> SourceError {
        let (path, column) = (self.path.clone(), column.to_owned());
        SourceError::Row { path, place, column, value, allowed: allowed.into() }
    }

    fn unreadable(&self, cause: impl std::fmt::Display) -> SourceError {
        SourceError::unreadable(&self.path, cause)
    }
}

/// A row whose epoch is known; what else it says may still be wrong, which then concerns that epoch alone.
struct Row {
    place: Place,
    /// Value of the epoch column, or number of the span of time.
    epoch: i64,
    event: Result<Event, SourceError>,
}

/// A reader of one format.
trait Rows: Send {
    /// The next row, `None` at the end. An error here cannot be assigned to an epoch.
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
}

impl EventFile {
    pub(super) fn open(options: &EventsOptions, limits: Limits, from: u64) -> Result<Self, SourceError> {
        let layout = Layout { path: options.path.clone(), options: options.clone(), limits };
        let rows = open_rows(&layout)?;
        let mut file = Self { layout, rows, pending: None, last: None, next: 0, ended: false };
        while file.next < from && file.next_epoch()?.is_some() {}
        Ok(file)
    }

    fn read_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let Some(first) = self.pending.take().map_or_else(|| self.rows.next_row(), |row| Ok(Some(row)))? else {
            return Ok(None);
        };
        if let Some(empty) = self.gap_before(&first)? {
            self.pending = Some(first);
            return Ok(Some(self.yielded(empty, Vec::new())));
        }
        let value = first.epoch;
        let mut events = Vec::new();
        let mut row = Some(first);
        while let Some(current) = row {
            if current.epoch < value {
                return Err(self.fell(&current, value));
            }
            if current.epoch > value {
                self.pending = Some(current);
                break;
            }
            if events.len() == self.layout.limits.epoch_events {
                return Err(self.too_many(current.place));
            }
            events.push(current.event?);
            row = self.rows.next_row()?;
        }
        Ok(Some(self.yielded(value, events)))
    }

    fn yielded(&mut self, value: i64, events: Vec<Event>) -> Epoch {
        self.last = Some(value);
        let number = self.next;
        self.next += 1;
        Epoch { number, label: Some(self.label(value)), content: Content::Events(in_order(events)) }
    }

    /// The span without events that has to be yielded before `first`.
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

    fn fell(&self, row: &Row, before: i64) -> SourceError {
        let (_, column) = self.layout.columns()[TIME];
        let (value, before) = (self.label(row.epoch), self.label(before));
        self.layout.bad_row(row.place, column, value, format!("{before} or later: epochs never fall"))
    }

    fn too_many(&self, place: Place) -> SourceError {
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

    fn epochs(&self) -> Option<u64> {
        None
    }
}

/// How the bytes of a text file are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// Format and packing by name: `events.csv.zst` is packed CSV.
fn format_of(path: &Path, format: Format) -> Result<(Format, Packing), SourceError> {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let (name, packing) = if let Some(stem) = name.strip_suffix(".gz") {
        (stem, Packing::Gzip)
    } else if let Some(stem) = name.strip_suffix(".zst") {
        (stem, Packing::Zstd)
    } else {
        (name.as_str(), Packing::Plain)
    };
    let unknown = || SourceError::UnknownFormat { path: path.to_owned() };
    let by_name = match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("jsonl" | "ndjson") => Some(Format::Jsonl),
        Some("csv") => Some(Format::Csv),
        Some("parquet") => Some(Format::Parquet),
        _ => None,
    };
    let format = if format == Format::Auto { by_name.ok_or_else(unknown)? } else { format };
    // A Parquet file is read from its end, so a packed one would have to be unpacked first; it is compressed inside.
    if format == Format::Parquet && packing != Packing::Plain { Err(unknown()) } else { Ok((format, packing)) }
}

fn open_rows(layout: &Layout) -> Result<Box<dyn Rows>, SourceError> {
    let (format, packing) = format_of(&layout.path, layout.options.format)?;
    let file = layout.options.open().map_err(|e| layout.unreadable(e))?;
    if file.metadata().is_ok_and(|about| about.is_dir()) {
        return Err(layout.unreadable("it is a folder"));
    }
    if format == Format::Parquet {
        return Ok(Box::new(parquet::Reader::open(layout.clone(), file)?));
    }
    let file = BufReader::new(file);
    let text: Box<dyn Read + Send> = match packing {
        Packing::Plain => Box::new(file),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Packing::Zstd => Box::new(zstd::Decoder::with_buffer(file).map_err(|e| layout.unreadable(e))?),
    };
    Ok(match format {
        Format::Csv => Box::new(csv::Reader::open(layout.clone(), text)?),
        _ => Box::new(jsonl::Reader::new(layout.clone(), text)),
    })
}

#[cfg(test)]
mod tests;
