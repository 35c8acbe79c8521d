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
    /// The file or repository cannot be read.
    #[error("failed to read {}: {cause}", path.display())]
    Unreadable {
        /// The file or repository.
        path: PathBuf,
        /// What went wrong.
        cause: String,
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
            Self::UnknownFormat { .. } => "ENG-0106",
            Self::Unreadable { .. } => "ENG-0302",
            Self::NoColumn { .. } => "ENG-0303",
            Self::Row { .. } | Self::Commit { .. } => "ENG-0304",
            Self::NoCommit { .. } => "ENG-0305",
        }
    }

    pub(super) fn unreadable(path: impl Into<PathBuf>, cause: impl fmt::Display) -> Self {
        Self::Unreadable { path: path.into(), cause: cause.to_string() }
    }
}

/// Maximum number of names in an error message.
const LISTED: usize = 20;

fn listed(names: &[String]) -> String {
    let mut text = names.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > LISTED {
        text.push_str(&format!(" and {} more", names.len() - LISTED));
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

/// Formats a value for an error: quoted, and truncated if long.
pub(super) fn shown(value: &str) -> String {
    const SHOWN: usize = 60;
    if value.chars().count() <= SHOWN {
        return format!("{value:?}");
    }
    let start: String = value.chars().take(SHOWN).collect();
    format!("{start:?}... ({} bytes)", value.len())
}
