//! Run records kept in a partition: state, cursor and history, opaque to the store.

use crate::ids::RunId;
use crate::outcome::Refusal;
use std::collections::BTreeMap;

/// Most bytes of state plus history that one run may keep.
pub const MAX_RUN_BYTES: u64 = 64 << 20;

/// Maximum number of runs in a partition, and of bytes that all of them keep. New ones are refused above it: each holds the identity
/// of a name, so none may be removed on its own.
pub const MAX_RUNS: usize = 4_096;
/// See [`MAX_RUNS`].
pub const MAX_PARTITION_BYTES: u64 = 256 << 20;

/// Record of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entry {
    /// Number of records so far.
    pub version: u64,
    /// Latest state.
    pub state: Vec<u8>,
    /// History, in order.
    pub rows: Vec<Vec<u8>>,
    /// Bytes of `rows`, cached so that a record costs the same at any history length.
    rows_bytes: u64,
}

impl Entry {
    pub(crate) fn new(version: u64, state: Vec<u8>, rows: Vec<Vec<u8>>) -> Self {
        let rows_bytes = rows.iter().map(|row| row_bytes(row)).sum();
        Self { version, state, rows, rows_bytes }
    }

    /// Returns the record without its history, which a list of runs does not need.
    #[must_use]
    pub fn without_rows(&self) -> Self {
        Self::new(self.version, self.state.clone(), Vec::new())
    }

    pub(crate) const fn fits(&self) -> bool {
        self.record_bytes() <= MAX_RUN_BYTES
    }

    const fn record_bytes(&self) -> u64 {
        self.rows_bytes + self.state.len() as u64
    }
}

/// Returns the accounted bytes of a row: content and length prefix, so that empty rows are bounded too.
const fn row_bytes(row: &[u8]) -> u64 {
    row.len() as u64 + 4
}

/// Run records of a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    runs: BTreeMap<RunId, Entry>,
    /// Bytes of all records, cached.
    total_bytes: u64,
}

impl Table {
    pub(crate) fn new(runs: BTreeMap<RunId, Entry>) -> Self {
        let total_bytes = runs.values().map(Entry::record_bytes).sum();
        Self { runs, total_bytes }
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the bytes of all records.
    pub const fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the record of one run.
    pub fn get(&self, run: RunId) -> Option<&Entry> {
        self.runs.get(&run)
    }

    /// Returns all runs, by id.
    pub fn iter(&self) -> impl Iterator<Item = (RunId, &Entry)> {
        self.runs.iter().map(|(run, entry)| (*run, entry))
    }

    /// Replaces the state of a run and adds a row.
    ///
    /// # Errors
    /// [`Refusal::RunConflict`] after a write of another driver; [`Refusal::RunFull`].
    pub fn record(&mut self, run: RunId, expected: u64, state: &[u8], row: Option<&[u8]>) -> Result<(), Refusal> {
        let version = self.runs.get(&run).map_or(0, |entry| entry.version);
        if version != expected {
            return Err(Refusal::RunConflict { expected, found: version });
        }
        if version == 0 && (self.runs.len() >= MAX_RUNS || self.total_bytes >= MAX_PARTITION_BYTES) {
            return Err(Refusal::RunFull { bytes: MAX_PARTITION_BYTES });
        }
        let rows_bytes = self.runs.get(&run).map_or(0, |entry| entry.rows_bytes) + row.map_or(0, row_bytes);
        if rows_bytes + state.len() as u64 > MAX_RUN_BYTES {
            return Err(Refusal::RunFull { bytes: MAX_RUN_BYTES });
        }
        let entry = self.runs.entry(run).or_default();
        self.total_bytes -= entry.record_bytes();
        entry.version += 1;
        entry.state = state.to_vec();
        entry.rows.extend(row.map(<[u8]>::to_vec));
        entry.rows_bytes = rows_bytes;
        self.total_bytes += entry.record_bytes();
        Ok(())
    }

    /// Removes a run; returns whether it existed.
    pub fn remove(&mut self, run: RunId) -> bool {
        let removed = self.runs.remove(&run);
        self.total_bytes -= removed.as_ref().map_or(0, Entry::record_bytes);
        removed.is_some()
    }
}
