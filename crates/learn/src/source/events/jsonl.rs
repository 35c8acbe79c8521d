//! Rows of a file with one JSON object per line; empty lines count and are skipped.

use super::cell::Cell;
use super::{Layout, Row, Rows};
use crate::source::{Location, SourceError};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, BufReader, Read};

/// U+FEFF in UTF-8, which some programs write at the beginning of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

pub(super) struct Reader {
    layout: Layout,
    text: BufReader<Box<dyn Read + Send>>,
    line: Vec<u8>,
    number: u64,
    /// Whether an object was read: a name missing in the first one is a wrong column name, later it is a missing value.
    has_read_object: bool,
}

impl Reader {
    pub(super) fn new(layout: Layout, text: Box<dyn Read + Send>) -> Self {
        Self { layout, text: BufReader::new(text), line: Vec::new(), number: 0, has_read_object: false }
    }

    /// Reads a line, `false` at the end.
    fn read_line(&mut self) -> Result<bool, SourceError> {
        let limit = self.layout.limits.record_bytes;
        self.line.clear();
        self.number += 1;
        let bytes = (&mut self.text)
            .take(limit as u64 + 1)
            .read_until(b'\n', &mut self.line)
            .map_err(|e| self.layout.unreadable(format!("{e} (line {})", self.number)))?;
        if bytes > limit && self.line.last() != Some(&b'\n') {
            let place = Location::Line(self.number);
            return Err(self.layout.bad_row(
                place,
                "row",
                "a longer line".to_owned(),
                format!("at most {limit} bytes"),
            ));
        }
        if self.number == 1 && self.line.starts_with(BYTE_ORDER_MARK) {
            self.line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(bytes > 0)
    }
}

impl Rows for Reader {
    fn next_row(&mut self) -> Result<Option<Row>, SourceError> {
        loop {
            if !self.read_line()? {
                return Ok(None);
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        let place = Location::Line(self.number);
        let columns = self.layout.columns();
        let mut json = serde_json::Deserializer::from_slice(&self.line);
        let fields = SelectedFields(&columns)
            .deserialize(&mut json)
            .and_then(|fields| json.end().map(|()| fields))
            .map_err(|e| self.layout.bad_row(place, "row", reason(&e), "one JSON object per line"))?;
        if !self.has_read_object {
            if let Some(position) = fields.iter().position(Option::is_none) {
                return Err(self.layout.no_column(position, names(&self.line)));
            }
            self.has_read_object = true;
        }
        let cells: Vec<Cell<'_>> = fields.into_iter().map(|field| field.map_or(Cell::Missing, cell)).collect();
        self.layout.row(place, &cells).map(Some)
    }
}

/// The text of a JSON error without its position, which counts from the start of the line.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    format!("{} (column {})", &text[..end], error.column())
}

fn cell(raw: &RawValue) -> Cell<'_> {
    let text = raw.get();
    match text.as_bytes().first() {
        Some(b'"') => serde_json::from_str::<JsonString<'_>>(text).map_or(Cell::Other(text), |text| Cell::Text(text.0)),
        Some(b'-' | b'0'..=b'9') => Cell::Literal(text),
        Some(b'n') => Cell::Missing,
        _ => Cell::Other(text),
    }
}

/// A string that is copied only where it holds an escape.
#[derive(serde::Deserialize)]
struct JsonString<'a>(#[serde(borrow)] Cow<'a, str>);

/// Selects fields of an object, which must not be repeated, and skips the others without building them.
struct SelectedFields<'a>(&'a [(&'static str, &'a str)]);

impl<'de> DeserializeSeed<'de> for SelectedFields<'_> {
    type Value = Vec<Option<&'de RawValue>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SelectedFields<'_> {
    type Value = Vec<Option<&'de RawValue>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = vec![None; self.0.len()];
        while let Some(JsonString(name)) = map.next_key()? {
            // One field may serve two columns.
            let is_selected = |column: &(&str, &str)| column.1 == name;
            if self.0.iter().any(is_selected) {
                let value = map.next_value()?;
                for (_, field) in self.0.iter().zip(&mut fields).filter(|(column, _)| is_selected(column)) {
                    if field.replace(value).is_some() {
                        return Err(serde::de::Error::custom(format!("the field {name:?} more than once")));
                    }
                }
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(fields)
    }
}

/// Returns the names of an object's fields, for an error.
fn names(line: &[u8]) -> Vec<String> {
    serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line)
        .map(|object| object.into_iter().map(|(name, _)| name).collect())
        .unwrap_or_default()
}
