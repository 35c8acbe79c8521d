//! Options of a source, already validated with the manifest.

use super::{EventsOptions, ExampleName, GitOptions, SyntheticOptions};

/// A source, by kind.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceOptions {
    /// Data that is built into the program.
    Example(ExampleName),
    /// A file of events.
    Events(EventsOptions),
    /// The history of a repository.
    Git(GitOptions),
    /// The experiment with two populations.
    Synthetic(SyntheticOptions),
}

impl SourceOptions {
    /// Returns its name in manifests and reports.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Example(_) => "example",
            Self::Events(_) => "events",
            Self::Git(_) => "git",
            Self::Synthetic(_) => "synthetic",
        }
    }

    /// Returns whether epochs come from outside, so that predictions of the next one are meaningful.
    pub const fn is_predictable(&self) -> bool {
        !matches!(self, Self::Synthetic(_))
    }
}

/// Memory limits of a source. Input above a limit is rejected with an error that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of events of one epoch, which is sorted in memory at about 64 bytes per event.
    pub epoch_events: usize,
    /// Maximum size of one line or CSV record, so that a file without line ends is an error instead of exhausting memory.
    pub record_bytes: usize,
    /// Maximum number of consecutive epochs without an event in a file with times: years of nothing indicate a wrong unit.
    pub empty_epochs: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { epoch_events: 4 << 20, record_bytes: 1 << 20, empty_epochs: 100_000 }
    }
}
