//! Rows of a CSV file with a header.

use super::cell::Cell;
use super::{Layout, Row, Rows};
use crate::source::error::shown;
use crate::source::{Location, SourceError};
use std::io::{self, Read};

pub(super) struct Reader {
    layout: Layout,
    reader: csv::Reader<BoundedReader>,
    record: csv::ByteRecord,
    /// Field of each wanted column.
    fields: Vec<usize>,
}

impl Reader {
    pub(super) fn open(layout: Layout, text: Box<dyn Read + Send>) -> Result<Self, SourceError> {
        let limit = layout.limits.record_bytes;
        let bounded = BoundedReader { text, limit: limit + BUFFER, left: limit + BUFFER };
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(layout.options.separator.unwrap_or(b','))
            .buffer_capacity(BUFFER)
            .from_reader(bounded);
        let header = reader.byte_headers().map_err(|e| failed(&layout, &e, 1))?;
        let names: Vec<String> = header.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        let fields = (0..layout.columns().len())
            .map(|position| layout.find_column(position, &names))
            .collect::<Result<_, _>>()?;
        Ok(Self { layout, reader, record: csv::ByteRecord::new(), fields })
    }
}

impl Rows for Reader {
    fn next_row(&mut self) -> Result<Option<Row>, SourceError> {
        self.reader.get_mut().refill();
        let line = self.reader.position().line();
        if !self.reader.read_byte_record(&mut self.record).map_err(|e| failed(&self.layout, &e, line))? {
            return Ok(None);
        }
        let place = Location::Line(self.record.position().map_or(line, csv::Position::line));
        let mut cells = Vec::with_capacity(self.fields.len());
        for (&field, (_, column)) in self.fields.iter().zip(self.layout.columns()) {
            let bytes = self.record.get(field).expect("the reader refuses records shorter than the header");
            let text = std::str::from_utf8(bytes).map_err(|_| {
                self.layout.bad_row(place, column, shown(&String::from_utf8_lossy(bytes)), "text in UTF-8")
            })?;
            cells.push(if text.is_empty() { Cell::Missing } else { Cell::Plain(text) });
        }
        self.layout.row(place, &cells).map(Some)
    }
}

fn failed(layout: &Layout, error: &csv::Error, line: u64) -> SourceError {
    let place = Location::Line(error.position().map_or(line, csv::Position::line));
    match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            layout.bad_row(place, "row", format!("{len} fields"), format!("{expected_len} fields, as in the header"))
        }
        csv::ErrorKind::Io(cause) if cause.kind() == io::ErrorKind::FileTooLarge => {
            let allowed = format!("at most {} bytes; is a quote left open?", layout.limits.record_bytes);
            layout.bad_row(place, "row", "a longer record".to_owned(), allowed)
        }
        csv::ErrorKind::Io(cause) => layout.unreadable(format!("{cause} (after line {line})")),
        _ => layout.bad_row(place, "row", error.to_string(), "a CSV record"),
    }
}

/// Buffer size of the CSV reader.
const BUFFER: usize = 64 << 10;

/// Fails when one record exceeds the limit: an open quote would otherwise swallow the file.
struct BoundedReader {
    text: Box<dyn Read + Send>,
    limit: usize,
    left: usize,
}

impl BoundedReader {
    /// Resets the limit for the next record. Up to a buffer of it may have been read with the previous one.
    fn refill(&mut self) {
        self.left = self.limit;
    }
}

impl Read for BoundedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.text.read(buffer)?;
        self.left = self.left.checked_sub(bytes).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(bytes)
    }
}
