//! A history in memory, compact enough to be learned hundreds of times.

use crate::source::{Content, Epoch, Event, Signal, Source, SourceError};
use engram_memory::{MemoryId, edge};
use hashbrown::HashMap;
use std::collections::VecDeque;

/// Most events that are kept, the newest ones: a search over more would take longer than a minute on two cores.
pub const MAX_EVENTS: usize = 1_000_000;

/// How an event reinforces, in units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// A quality, which the learning rate turns into a change.
    Quality(u32),
    /// A change of weight, whatever the learning rate.
    Delta(i32),
}

/// Epochs of events, oldest first. Memories are numbered by ascending id, so that ties of a ranking are broken by number.
#[derive(Debug, Clone, Default)]
pub struct History {
    epochs: Vec<Vec<(u32, Change)>>,
    /// Number of the first epoch in the source.
    first: u64,
    memories: usize,
    has_rate: bool,
}

impl History {
    /// Reads all epochs of a source and keeps the newest ones with at most `max_events` events together. `progress` receives the number
    /// of epochs read and their total, if known. `None` if the source has no events of single memories.
    ///
    /// # Errors
    /// The source cannot be read.
    pub fn read(
        source: &mut dyn Source,
        max_events: usize,
        mut progress: impl FnMut(u64, Option<u64>),
    ) -> Result<Option<Self>, SourceError> {
        let total = source.epochs();
        let (mut epochs, mut first, mut events, mut read) = (VecDeque::new(), 0, 0, 0);
        while let Some(Epoch { content, .. }) = source.next_epoch()? {
            let Content::Events(content) = content else { return Ok(None) };
            read += 1;
            events += content.len();
            epochs.push_back(content.iter().map(change).collect::<Vec<_>>());
            while events > max_events && epochs.len() > 1 {
                events -= epochs.pop_front().map_or(0, |oldest| oldest.len());
                first += 1;
            }
            progress(read, total);
        }
        Ok((events > 0).then(|| Self::new(epochs, first)))
    }

    fn new(epochs: VecDeque<Vec<(MemoryId, Change)>>, first: u64) -> Self {
        let mut ids: Vec<MemoryId> = epochs.iter().flatten().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        let numbers: HashMap<MemoryId, u32> = (0..).zip(&ids).map(|(number, id)| (*id, number)).collect();
        let has_rate = epochs.iter().flatten().any(|(_, change)| matches!(change, Change::Quality(_)));
        let numbered =
            |epoch: Vec<(MemoryId, Change)>| epoch.into_iter().map(|(id, change)| (numbers[&id], change)).collect();
        Self { memories: ids.len(), epochs: epochs.into_iter().map(numbered).collect(), first, has_rate }
    }

    /// Returns the number of epochs.
    pub fn len(&self) -> usize {
        self.epochs.len()
    }

    /// Returns whether there are no epochs.
    pub fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    /// Returns the number of events.
    pub fn events(&self) -> usize {
        self.epochs.iter().map(Vec::len).sum()
    }

    /// Returns the number of different memories.
    pub const fn distinct_memories(&self) -> usize {
        self.memories
    }

    /// Returns the number of older epochs of the source that are not part of it.
    pub const fn skipped_epochs(&self) -> u64 {
        self.first
    }

    /// Returns whether the learning rate has an effect: an event has a quality instead of a change of weight.
    pub const fn depends_on_rate(&self) -> bool {
        self.has_rate
    }

    pub(super) fn epochs(&self) -> &[Vec<(u32, Change)>] {
        &self.epochs
    }

    /// Returns the epoch at `index` with memory numbers as ids, for the baselines.
    pub(super) fn epoch(&self, index: usize) -> Epoch {
        let event = |(memory, _): &(u32, Change)| Event {
            id: MemoryId(u64::from(*memory)),
            key: None,
            signal: Signal::Delta(0.0),
        };
        let content = Content::Events(self.epochs[index].iter().map(event).collect());
        Epoch { number: index as u64, label: None, content }
    }
}

/// Converts an event as the edge of a cluster does.
fn change(event: &Event) -> (MemoryId, Change) {
    let checked = "a source yields values in range";
    let change = match event.signal {
        Signal::Quality(quality) => Change::Quality(edge::quality(quality).expect(checked)),
        Signal::Delta(delta) => Change::Delta(edge::delta(delta).expect(checked)),
    };
    (event.id, change)
}
