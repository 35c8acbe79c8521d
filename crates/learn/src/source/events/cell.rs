//! Cells of a row and their meaning in each column: the same rules for all three formats.

use super::{Layout, MEMORY, MemoryColumn, Row, SIGNAL, SignalSource, TIME, TimeColumn, time};
use crate::source::error::{shortened, shown};
use crate::source::{Event, Location, Signal, SourceError};
use engram_memory::{MAX_KEY_BYTES, MemoryId, key_id};
use std::borrow::Cow;
use std::sync::Arc;

/// A value as the file gives it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell<'a> {
    /// Nothing: null, or the field is left out.
    Missing,
    /// Untyped text of CSV.
    Plain(&'a str),
    /// A string of a typed format.
    Text(Cow<'a, str>),
    /// A number as written.
    Literal(&'a str),
    /// An integer, signed or not.
    Integer(i128),
    /// A number in single precision.
    Single(f32),
    /// A number in double precision.
    Double(f64),
    /// A time in milliseconds since the Unix epoch.
    Millis(i64),
    /// A value without meaning in any column, as text.
    Other(&'a str),
}

impl Cell<'_> {
    /// The digits of a number, or a string that may hold one.
    fn digits(&self) -> Option<&str> {
        match self {
            Self::Plain(text) | Self::Literal(text) => Some(text.trim()),
            Self::Text(text) => Some(text.trim()),
            _ => None,
        }
    }

    /// JSON writes integers beyond 2^53 as strings where it has to, so strings of digits count.
    fn integer(&self) -> Option<i128> {
        match self {
            Self::Integer(value) => Some(*value),
            _ => self.digits()?.parse().ok(),
        }
    }

    /// Value to check, in double precision, and value to use: decimal text becomes single precision directly, never by
    /// way of a double, so that every client takes the same path.
    fn number(&self) -> Option<(f64, f32)> {
        match self {
            Self::Integer(value) => Some((*value as f64, *value as f32)),
            Self::Single(value) => Some((f64::from(*value), *value)),
            Self::Double(value) => Some((*value, *value as f32)),
            Self::Text(_) => None,
            _ => {
                let text = self.digits()?;
                Some((text.parse().ok()?, text.parse().ok()?))
            }
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Missing => "nothing".to_owned(),
            Self::Plain(text) => shown(text),
            Self::Text(text) => shown(text),
            Self::Literal(text) | Self::Other(text) => shortened(text),
            Self::Integer(value) => value.to_string(),
            Self::Single(value) => value.to_string(),
            Self::Double(value) => value.to_string(),
            Self::Millis(value) => time::format(*value),
        }
    }
}

impl Layout {
    /// Reads a row from its cells: memory, time, and strength where a column gives it.
    pub(super) fn row(&self, place: Location, cells: &[Cell<'_>]) -> Result<Row, SourceError> {
        let refuse = |position: usize, allowed: &str| {
            self.bad_row(place, self.columns()[position].1, cells[position].shown(), allowed)
        };
        let epoch = match &self.options.columns.time {
            TimeColumn::Epoch(_) => cells[TIME]
                .integer()
                .and_then(|value| i64::try_from(value).ok())
                .ok_or_else(|| refuse(TIME, "an integer from -2^63 to 2^63 - 1"))?,
            TimeColumn::Time { span_ms, .. } => {
                let at = cells[TIME].millis().map_err(|allowed| refuse(TIME, allowed))?;
                time::span_of(at, *span_ms)
            }
        };
        let event = self.event(cells, refuse);
        Ok(Row { place, epoch, event })
    }

    fn event(&self, cells: &[Cell<'_>], refuse: impl Fn(usize, &str) -> SourceError) -> Result<Event, SourceError> {
        let (id, key) = match (&self.options.columns.memory, &cells[MEMORY]) {
            (MemoryColumn::Key(_), Cell::Plain(key)) => parse_key(key),
            (MemoryColumn::Key(_), Cell::Text(key)) => parse_key(key),
            (MemoryColumn::Key(_), _) => None,
            (MemoryColumn::Id(_), cell) => {
                cell.integer().and_then(|id| u64::try_from(id).ok()).map(|id| (MemoryId(id), None))
            }
        }
        .ok_or_else(|| match self.options.columns.memory {
            MemoryColumn::Key(_) => refuse(MEMORY, "a string of 1 to 1,024 bytes"),
            MemoryColumn::Id(_) => refuse(MEMORY, "an integer from 0 to 2^64 - 1"),
        })?;
        let column = |low: f64| {
            let (exact, value) = cells[SIGNAL].number()?;
            (low..=1.0).contains(&exact).then_some(value)
        };
        let signal = match self.options.signal {
            SignalSource::Quality(value) => Signal::Quality(value),
            SignalSource::Delta(value) => Signal::Delta(value),
            SignalSource::QualityColumn(_) => {
                Signal::Quality(column(0.0).ok_or_else(|| refuse(SIGNAL, "a number from 0 to 1"))?)
            }
            SignalSource::DeltaColumn(_) => {
                Signal::Delta(column(-1.0).ok_or_else(|| refuse(SIGNAL, "a number from -1 to 1"))?)
            }
        };
        Ok(Event { id, key, signal })
    }
}

impl Cell<'_> {
    /// Returns the time in milliseconds, or what is allowed instead.
    fn millis(&self) -> Result<i64, &'static str> {
        const ALLOWED: &str = "a time as in RFC 3339, or milliseconds since the Unix epoch, of the years 0 to 9999";
        let text = match self {
            Self::Text(text) => Some(&**text),
            Self::Plain(text) => Some(*text),
            _ => None,
        };
        let (millis, is_bare) = match (self, text.and_then(time::parse)) {
            (Self::Millis(value), _) => (Some(*value), false),
            (_, Some(value)) => (Some(value), false),
            (Self::Text(_), None) => (None, false),
            _ => (self.integer().and_then(|value| i64::try_from(value).ok()), true),
        };
        match millis.filter(|millis| time::RANGE_MS.contains(millis)) {
            Some(millis) if is_bare && time::LIKELY_SECONDS.contains(&millis) => Err(
                "milliseconds since the Unix epoch (this looks like seconds: multiply it by 1,000), or a time as in RFC 3339",
            ),
            Some(millis) => Ok(millis),
            None if text.is_some_and(|text| time::parse(&format!("{}Z", text.trim())).is_some()) => {
                Err("a time as in RFC 3339 (this one has no zone: append Z for UTC, or an offset such as +01:00)")
            }
            None => Err(ALLOWED),
        }
    }
}

fn parse_key(key: &str) -> Option<(MemoryId, Option<Arc<str>>)> {
    (1..=MAX_KEY_BYTES).contains(&key.len()).then(|| (key_id(key.as_bytes()), Some(Arc::from(key))))
}
