//! Past decisions as a table of text, which people read and from which the autoscaler of another process continues.
//!
//! The table is CSV with a header: [`HEADER`]. Its columns `time` and `load` are those of a recorded load, so a history can be simulated.
//! The message comes last and is written only for decisions that change the number of workers or are not written because of a conflict.

use crate::forecaster::MAX_SAMPLES;
use std::collections::VecDeque;
use std::fmt::Write as _;

/// First line of a table.
pub const HEADER: &str = "time,load,workers,desired,expected,upper,horizon,startup,forecast,reason,message";
/// Records that are kept: as many as the forecast has samples.
pub const CAPACITY: usize = MAX_SAMPLES;
/// Bytes of a table: it fits into a ConfigMap, whose limit is 1 MiB.
pub const MAX_BYTES: usize = 800 << 10;
/// Columns before the message.
const COLUMNS: usize = 10;

/// One decision.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// Wall clock in seconds since the epoch.
    pub seconds: i64,
    /// Observed load, if there was a sample.
    pub load: Option<f64>,
    /// Workers before the decision.
    pub workers: u32,
    /// Workers that were decided on.
    pub desired: u32,
    /// Highest expected load within the horizon.
    pub expected: Option<f64>,
    /// Upper bound of the expected load.
    pub upper: Option<f64>,
    /// Horizon of the forecast in seconds.
    pub horizon_seconds: Option<f64>,
    /// Start-up time that was measured since the last decision, in seconds.
    pub startup_seconds: Option<f64>,
    /// Whether the forecast took part.
    pub forecast: String,
    /// Why.
    pub reason: String,
    /// The decision in a sentence; empty for most.
    pub message: String,
}

impl Record {
    /// Returns the line of a table.
    fn line(&self) -> String {
        let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let Self { seconds, workers, desired, forecast, reason, .. } = self;
        let [load, expected, upper] = [self.load, self.expected, self.upper].map(number);
        let [horizon, startup] = [self.horizon_seconds, self.startup_seconds].map(number);
        let message = self.message.replace('"', "'").replace(['\r', '\n'], " ");
        let quote = if message.is_empty() { "" } else { "\"" };
        format!(
            "{seconds},{load},{workers},{desired},{expected},{upper},{horizon},{startup},{forecast},{reason},{quote}{message}{quote}"
        )
    }

    /// Parses the line of a table; `None` if it is not one.
    fn parse(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.splitn(COLUMNS + 1, ',').collect();
        let [seconds, load, workers, desired, expected, upper, horizon, startup, forecast, reason, message] =
            <[&str; COLUMNS + 1]>::try_from(cells).ok()?;
        // `None` for an empty cell, an error for one that is not a number of at least 0.
        let number = |cell: &str| match cell.parse::<f64>() {
            _ if cell.is_empty() => Some(None),
            Ok(value) if value.is_finite() && value >= 0.0 => Some(Some(value)),
            _ => None,
        };
        Some(Self {
            seconds: seconds.parse().ok().filter(|seconds| (0..=MOST_SECONDS).contains(seconds))?,
            load: number(load)?,
            workers: workers.parse().ok()?,
            desired: desired.parse().ok()?,
            expected: number(expected)?,
            upper: number(upper)?,
            horizon_seconds: number(horizon)?,
            startup_seconds: number(startup)?,
            forecast: forecast.to_owned(),
            reason: reason.to_owned(),
            message: message.trim_matches('"').to_owned(),
        })
    }
}

/// Latest time of a record: year 9999.
const MOST_SECONDS: i64 = 253_402_300_799;

/// The last [`CAPACITY`] decisions, oldest first.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History(VecDeque<Record>);

impl History {
    /// Adds a decision, and removes the oldest above the capacity.
    pub fn push(&mut self, record: Record) {
        if self.0.len() == CAPACITY {
            self.0.pop_front();
        }
        self.0.push_back(record);
    }

    /// Returns the decisions, oldest first.
    pub fn records(&self) -> impl DoubleEndedIterator<Item = &Record> + ExactSizeIterator {
        self.0.iter()
    }

    /// Returns the table: of the newest decisions that fit into [`MAX_BYTES`].
    pub fn to_text(&self) -> String {
        let lines: Vec<String> = self.0.iter().map(Record::line).collect();
        let mut bytes = HEADER.len() + 1;
        let fits = |line: &&String| {
            bytes += line.len() + 1;
            bytes <= MAX_BYTES
        };
        let newest = lines.iter().rev().take_while(fits).count();
        let mut text = format!("{HEADER}\n");
        for line in &lines[lines.len() - newest..] {
            let _ = writeln!(text, "{line}");
        }
        text
    }

    /// Parses a table, and returns the number of lines that are none of its lines. Without its header it has no decisions.
    pub fn parse(text: &str) -> (Self, usize) {
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        if lines.next() != Some(HEADER) {
            return (Self::default(), text.lines().count());
        }
        let mut history = Self::default();
        let mut invalid = 0;
        for line in lines {
            match Record::parse(line) {
                Some(record) => history.push(record),
                None => invalid += 1,
            }
        }
        (history, invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seconds: i64) -> Record {
        Record {
            seconds,
            load: Some(4_200.5),
            workers: 2,
            desired: 6,
            expected: Some(4_300.0),
            upper: None,
            horizon_seconds: Some(180.0),
            startup_seconds: None,
            forecast: "Active".into(),
            reason: "LoadAboveTarget".into(),
            message: "Scale from 2 to 6 workers: the load is 4200, and needs 6.".into(),
        }
    }

    #[test]
    fn table_has_the_same_decisions_after_parsing() {
        let mut history = History::default();
        history.push(record(1_700_000_000));
        history.push(Record { load: None, message: String::new(), ..record(1_700_000_060) });
        let text = history.to_text();
        assert_eq!(text.lines().nth(2), Some("1700000060,,2,6,4300,,180,,Active,LoadAboveTarget,"));
        assert_eq!(History::parse(&text), (history, 0));
    }

    #[test]
    fn damaged_lines_are_left_out_and_counted() {
        let mut history = History::default();
        history.push(record(1_700_000_000));
        let good = history.to_text();
        let damaged = ["1,2,3", "x,1,2,6,,,,,Active,OnTarget,", "5,-1,2,6,,,,,Active,OnTarget,", "5,NaN,2,6,,,,,,,"];
        assert_eq!(History::parse(&(good + &damaged.join("\n"))), (history, damaged.len()));
        assert_eq!(History::parse("time,load\n1,2\n"), (History::default(), 2));
    }

    #[test]
    fn table_and_history_are_bounded() {
        let mut history = History::default();
        for seconds in 0..CAPACITY as i64 + 5 {
            history.push(Record { message: "m".repeat(400), ..record(seconds) });
        }
        assert_eq!((history.records().len(), history.records().next().unwrap().seconds), (CAPACITY, 5));
        let text = history.to_text();
        assert!(text.len() <= MAX_BYTES && text.len() > MAX_BYTES - 600, "{}", text.len());
        let (parsed, invalid) = History::parse(&text);
        assert_eq!((invalid, parsed.records().next_back()), (0, history.records().next_back()));
    }
}
