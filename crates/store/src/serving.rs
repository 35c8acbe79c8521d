//! What is served here, readable from any thread, with notification of changes.

use engram_memory::{Lsn, PartitionId, Settings, Term};
use parking_lot::RwLock;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Called with a partition and the term at which it is served, or `None` when it stops being served.
type Listener = Box<dyn Fn(PartitionId, Option<Term>) + Send + Sync>;

/// Term, last applied record and settings of each partition.
pub(crate) struct Serving {
    partitions: Vec<PartitionServing>,
    listeners: RwLock<Vec<Listener>>,
}

#[derive(Debug, Default)]
struct PartitionServing {
    /// Term served; 0 = not served.
    term: AtomicU64,
    /// Last applied record.
    lsn: AtomicU64,
    /// Settings in force, for callers that prepare records.
    settings: RwLock<Option<Settings>>,
}

impl Serving {
    /// Creates it for partitions of which none is served.
    pub(crate) fn new(partitions: u32) -> Self {
        let partitions = (0..partitions).map(|_| PartitionServing::default()).collect();
        Self { partitions, listeners: RwLock::default() }
    }

    fn of(&self, partition: PartitionId) -> Option<&PartitionServing> {
        self.partitions.get(partition.0 as usize)
    }

    pub(crate) fn settings(&self, partition: PartitionId) -> Option<Settings> {
        *self.of(partition)?.settings.read()
    }

    pub(crate) fn set_settings(&self, partition: PartitionId, settings: Option<Settings>) {
        if let Some(serving) = self.of(partition) {
            *serving.settings.write() = settings;
        }
    }

    /// Returns the term at which `partition` is served, and its last applied LSN.
    pub(crate) fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        let serving = self.of(partition)?;
        let term = Term(serving.term.load(Ordering::Acquire));
        (term > Term(0)).then(|| (term, Lsn(serving.lsn.load(Ordering::Acquire))))
    }

    pub(crate) fn set_lsn(&self, partition: PartitionId, lsn: Lsn) {
        if let Some(serving) = self.of(partition) {
            serving.lsn.store(lsn.0, Ordering::Release);
        }
    }

    /// Publishes the term at which a partition is served, and calls the listeners if it differs from the term before.
    pub(crate) fn publish(&self, partition: PartitionId, term: Option<Term>) {
        let Some(serving) = self.of(partition) else { return };
        let number = term.unwrap_or_default().0;
        if serving.term.swap(number, Ordering::AcqRel) != number {
            self.listeners.read().iter().for_each(|listener| listener(partition, term));
        }
    }

    /// Adds a listener of changes after this call.
    pub(crate) fn listen(&self, listener: Listener) {
        self.listeners.write().push(listener);
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("partitions", &self.partitions).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    #[test]
    fn listeners_are_notified_of_each_change_and_see_it() {
        let (serving, seen) = (Arc::new(Serving::new(2)), Arc::new(Mutex::new(Vec::new())));
        let (observed, changes) = (Arc::downgrade(&serving), Arc::clone(&seen));
        serving.listen(Box::new(move |partition, term| {
            let published = observed.upgrade().and_then(|serving| serving.position(partition)).map(|it| it.0);
            changes.lock().push((partition.0, term, published));
        }));
        for (partition, term) in [(1, Some(3)), (1, Some(3)), (1, Some(4)), (0, None), (1, None), (7, Some(1))] {
            serving.publish(PartitionId(partition), term.map(Term));
        }
        let expected = [Some(Term(3)), Some(Term(4)), None].map(|term| (1, term, term));
        assert_eq!(*seen.lock(), expected, "one notification per change");
    }
}
