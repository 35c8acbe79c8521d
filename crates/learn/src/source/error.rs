//! Errors of sources, with their error codes.

use std::fmt;
use std::path::PathBuf;

/// Position in an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// A line of a text file, from 1.
    Line(u64),
    /// A row of a Parquet file, both from 0.
    Row {
        /// Row group.
        group: usize,
        /// Row within the group.
        row: u64,
    },
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row { group, row } => write!(f, "row group {group}, row {row}"),
        }
    }
}

/// Why a source cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The extension does not indicate the format.
    #[error(
        "the extension of {} names no known format; allowed: .jsonl, .ndjson, .csv (each also with .gz or .zst), \
         .parquet, or set format", path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A separator is set for a file of another format.
    #[error("separator is set, and {} is not CSV; allowed: a separator for CSV files only", path.display())]
    NotCsv {
        /// The file.
        path: PathBuf,
    },
    /// The file or repository cannot be read.
    #[error("failed to read {}: {cause}", path.display())]
    Unreadable {
        /// The file or repository.
        path: PathBuf,
        /// What went wrong.
        cause: String,
    },
    /// An output cannot be written.
    #[error("failed to write {}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        cause: std::io::Error,
    },
    /// A column that the options name is not in the file.
    #[error("{field} is {column:?}, which is not a column of {}; its columns: {}", path.display(), listed(columns))]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// The option, as in `columns.key`.
        field: &'static str,
        /// What it names.
        column: String,
        /// Existing columns.
        columns: Vec<String>,
    },
    /// A column that the options name occurs several times.
    #[error("{field} is {column:?}, which occurs {occurrences} times in {}; allowed: a column that occurs once", path.display())]
    AmbiguousColumn {
        /// The file.
        path: PathBuf,
        /// The option, as in `columns.key`.
        field: &'static str,
        /// What it names.
        column: String,
        /// How many columns have the name.
        occurrences: usize,
    },
    /// A column that the options name cannot be decoded.
    #[error("{field} is {column:?}, which is {found} in {}; allowed: {allowed}", path.display())]
    UnsupportedColumn {
        /// The file.
        path: PathBuf,
        /// The option, as in `columns.key`.
        field: &'static str,
        /// What it names.
        column: String,
        /// Type or compression of the column.
        found: String,
        /// Allowed types or compressions.
        allowed: &'static str,
    },
    /// A row is wrong.
    #[error("{}, {location}, {column}: found {value}; allowed: {allowed}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Position.
        location: Location,
        /// Which column, or `row` when it is the row as a whole.
        column: String,
        /// The value, truncated if long.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// A commit of a repository cannot become an epoch.
    #[error("{}, commit {commit}: found {value}; allowed: {allowed}", path.display())]
    Commit {
        /// The repository.
        path: PathBuf,
        /// Its id.
        commit: String,
        /// What is wrong.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// The revision names no commit.
    #[error("revision {revision:?} names no commit of {}: {cause}", path.display())]
    NoCommit {
        /// The repository.
        path: PathBuf,
        /// The revision.
        revision: String,
        /// What went wrong.
        cause: String,
    },
}

impl SourceError {
    /// Returns the error code.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::UnknownFormat { .. } | Self::NotCsv { .. } => "ENG-0106",
            Self::Unreadable { .. } | Self::Unwritable { .. } => "ENG-0302",
            Self::NoColumn { .. } | Self::AmbiguousColumn { .. } | Self::UnsupportedColumn { .. } => "ENG-0303",
            Self::Row { .. } | Self::Commit { .. } => "ENG-0304",
            Self::NoCommit { .. } => "ENG-0305",
        }
    }

    /// Returns the message without content of the source, for clients that may start a run but not read the file: position, column
    /// and what is allowed there.
    pub fn without_content(&self) -> String {
        let text = match self {
            Self::NoColumn { path, field, column, .. } => {
                format!("{field} is {column:?}, which is not a column of {}", path.display())
            }
            Self::Row { path, location, column, allowed, .. } => {
                format!("{}, {location}, {column}: the value is invalid; allowed: {allowed}", path.display())
            }
            Self::Commit { path, commit, allowed, .. } => {
                format!("{}, commit {commit}: not usable; allowed: {allowed}", path.display())
            }
            error => error.to_string(),
        };
        match text.char_indices().nth(MAX_MESSAGE_CHARS) {
            None => text,
            Some((end, _)) => format!("{}...", &text[..end]),
        }
    }

    pub(super) fn unreadable(path: impl Into<PathBuf>, cause: impl fmt::Display) -> Self {
        Self::Unreadable { path: path.into(), cause: cause.to_string() }
    }
}

/// Formats an error with its causes.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

/// Maximum number of characters of a message in a run's status: it is replicated and listed. Twice that of a long path.
const MAX_MESSAGE_CHARS: usize = 500;

/// Maximum number of names in an error message.
const LISTED: usize = 20;

fn listed(names: &[String]) -> String {
    let mut text = names.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > LISTED {
        text.push_str(&format!(" and {} more", names.len() - LISTED));
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

/// Maximum number of characters of a value in an error.
const SHOWN: usize = 60;

/// Formats a value for an error: quoted, and truncated if long.
pub(super) fn shown(value: &str) -> String {
    match value.char_indices().nth(SHOWN) {
        None => format!("{value:?}"),
        Some((end, _)) => format!("{:?}... ({} bytes)", &value[..end], value.len()),
    }
}

/// Formats a value for an error as the file has it, and truncated if long.
pub(super) fn shortened(value: &str) -> String {
    match value.char_indices().nth(SHOWN) {
        None => value.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", &value[..end], value.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_content_names_the_place_only() {
        let path = PathBuf::from("/data/events.csv");
        let row = SourceError::Row {
            path: path.clone(),
            location: Location::Line(2),
            column: "quality".into(),
            value: shown("s3cret"),
            allowed: "0 to 1".into(),
        };
        assert_eq!(row.without_content(), "/data/events.csv, line 2, quality: the value is invalid; allowed: 0 to 1");
        let columns = vec!["root:s3cret:1".to_owned()];
        let column = SourceError::NoColumn { path, field: "columns.key", column: "k".into(), columns };
        assert!(column.to_string().contains("s3cret") && !column.without_content().contains("s3cret"));
        let long = SourceError::unreadable("x".repeat(4_000), "no");
        assert!(long.without_content().chars().count() <= MAX_MESSAGE_CHARS + 3);
    }
}
