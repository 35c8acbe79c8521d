//! Where learning epochs come from: the built-in example, a file of events, a repository's history, or the
//! two-population experiment.
//!
//! A source yields epochs numbered densely from 0, one at a time, so memory is bounded by one epoch whatever the length of the
//! input. It can be opened at any epoch, so a run can resume on another worker; the same source opened twice yields the same
//! epochs, bit for bit, on every platform.
//!
//! Invariants: the events of an epoch are sorted by memory id, equal ids in source order (the law applies duplicates in that order,
//! and the store does not sort). Every quality and delta is in range. After an error a source yields nothing more, and nothing of
//! the epoch with the error.

mod data;
mod error;
mod events;
mod example;
mod git;
mod manifest;
mod options;
mod synthetic;

pub use data::read_data;
pub use error::{Location, SourceError};
pub use events::{Columns, EventsOptions, FetchedFile, Format, MemoryColumn, Origin, SignalSource, TimeColumn};
pub use example::ExampleName;
pub use git::{GitOptions, export as export_git, is_shallow as is_shallow_git, resolve as resolve_git};
pub use options::{Limits, SourceOptions};
pub use synthetic::{NoisyEpoch, Population, SyntheticOptions};

use engram_memory::{Group, MemoryId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::Xxh3;

/// How a memory is reinforced. Both are checked when they are read: a store converts them, it never clamps them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Signal {
    /// A quality in [0, 1]; above 0.5 it rewards.
    Quality(f32),
    /// A signed change of weight in [-1, 1].
    Delta(f32),
}

/// One reinforcement of one memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The memory.
    pub id: MemoryId,
    /// Its key, from which the id was made; `None` where the source names ids.
    pub key: Option<Arc<str>>,
    /// How it is reinforced.
    pub signal: Signal,
}

/// What an epoch reinforces.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Single memories, sorted by id; empty in an epoch in which time passed and nothing happened.
    Events(Vec<Event>),
    /// Whole groups, one signal each: constant size whatever the number of memories.
    Groups(Vec<(Group, Signal)>),
    /// Every memory of a synthetic population, generated piece by piece where it is wanted.
    Noise(NoisyEpoch),
}

impl Content {
    /// How many entries there are to apply: memories, or groups.
    pub fn len(&self) -> u64 {
        match self {
            Self::Events(events) => events.len() as u64,
            Self::Groups(groups) => groups.len() as u64,
            Self::Noise(noise) => noise.memories(),
        }
    }

    /// Whether nothing is reinforced.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One learning epoch of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct Epoch {
    /// Number of the epoch, dense from 0.
    pub number: u64,
    /// Name for users: an address, a commit, a day. `None` if there is nothing better than the number.
    pub label: Option<String>,
    /// What it reinforces.
    pub content: Content,
}

impl Epoch {
    /// Returns a fingerprint of number, label and content, 32 hexadecimal digits: the same for the same epoch on every platform.
    pub fn fingerprint(&self) -> String {
        let mut hasher = Xxh3::new();
        hasher.update(&self.number.to_le_bytes());
        let mut text = |text: Option<&str>| {
            hasher.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            hasher.update(text.unwrap_or_default().as_bytes());
        };
        text(self.label.as_deref());
        match &self.content {
            Content::Events(events) => {
                for event in events {
                    text(event.key.as_deref());
                    text(Some(&format!("{:x} {}", event.id.0, event.signal.bits())));
                }
            }
            Content::Groups(groups) => {
                groups.iter().for_each(|(group, signal)| text(Some(&format!("{} {}", group.0, signal.bits()))));
            }
            // Generated from the specification.
            Content::Noise(_) => {}
        }
        format!("{:032x}", hasher.digest128())
    }
}

impl Signal {
    fn bits(self) -> String {
        match self {
            Self::Quality(quality) => format!("q{:08x}", quality.to_bits()),
            Self::Delta(delta) => format!("d{:08x}", delta.to_bits()),
        }
    }
}

/// Ends a read that nothing waits for any more. Clones share one state.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Stops the read.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the read must end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stream of learning epochs.
pub trait Source: Send {
    /// Reads the next epoch, `None` after the last one and after an error.
    ///
    /// # Errors
    /// The input cannot be read or does not match the options; see [`SourceError`].
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError>;

    /// Uses `stop` for further reads: once it is set, a long read ends early with an error.
    fn stop_by(&mut self, _stop: StopFlag) {}

    /// How many epochs there are from number 0 on, where that is known without reading everything.
    fn epochs(&self) -> Option<u64>;
}

/// Opens a source so that the first epoch it yields has the number `from`.
///
/// A `from` beyond the end gives a source that yields nothing.
///
/// # Errors
/// The input cannot be opened, or what lies before `from` cannot be read.
pub fn open(options: &SourceOptions, limits: Limits, from: u64) -> Result<Box<dyn Source>, SourceError> {
    match options {
        SourceOptions::Example(name) => Ok(Box::new(example::Example::open(*name, from)?)),
        SourceOptions::Events(events) => Ok(Box::new(events::EventFile::open(events, limits, from)?)),
        SourceOptions::Git(git) => Ok(Box::new(git::History::open(git, limits, from)?)),
        SourceOptions::Synthetic(synthetic) => Ok(Box::new(synthetic::Synthetic::new(synthetic.clone(), from))),
    }
}

/// Puts events into the order of application: by id, equal ids as they came.
fn in_order(mut events: Vec<Event>) -> Vec<Event> {
    events.sort_by_key(|event| event.id);
    events
}
