//! What a source is made from, already checked for shape by whoever parsed the manifest.

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
    /// The word for it in manifests and reports.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Example(_) => "example",
            Self::Events(_) => "events",
            Self::Git(_) => "git",
            Self::Synthetic(_) => "synthetic",
        }
    }

    /// Whether epochs come from outside, so that it makes sense to ask how well the ranking predicts the next one.
    pub const fn is_predictable(&self) -> bool {
        !matches!(self, Self::Synthetic(_))
    }
}

/// Bounds on what a source may take in memory. What is over one is refused with an error that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most events of one epoch: an epoch is sorted in memory, at about 64 bytes an event.
    pub epoch_events: usize,
    /// Most bytes of one line or CSV record, so that a file without line ends is an error and not an exhausted machine.
    pub record_bytes: usize,
    /// Most consecutive epochs without an event in a file with times: years of nothing are a wrong unit, not a pause.
    pub empty_epochs: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { epoch_events: 4 << 20, record_bytes: 1 << 20, empty_epochs: 100_000 }
    }
}
