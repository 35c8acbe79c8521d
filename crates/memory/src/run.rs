//! Records of the runs whose driver lives with this partition: state, cursor and history, opaque to the store.

use crate::ids::RunId;
use crate::outcome::Refusal;
use std::collections::BTreeMap;

/// Most bytes of state plus history that one run may keep.
pub const MAX_RUN_BYTES: u64 = 64 << 20;

/// What is kept of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entry {
    /// Number of records so far.
    pub version: u64,
    /// Latest state.
    pub state: Vec<u8>,
    /// History, in order.
    pub rows: Vec<Vec<u8>>,
}

impl Entry {
    fn bytes(&self) -> u64 {
        (self.state.len() + self.rows.iter().map(Vec::len).sum::<usize>()) as u64
    }
}

/// The runs recorded in a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) runs: BTreeMap<RunId, Entry>,
}

impl Table {
    /// One run.
    pub fn get(&self, run: RunId) -> Option<&Entry> {
        self.runs.get(&run)
    }

    /// All runs, by id.
    pub fn iter(&self) -> impl Iterator<Item = (RunId, &Entry)> {
        self.runs.iter().map(|(run, entry)| (*run, entry))
    }

    /// Replaces the state of a run and adds a row.
    ///
    /// # Errors
    /// Another writer came first ([`Refusal::RunConflict`]), or the history is full ([`Refusal::RunFull`]).
    pub fn record(&mut self, run: RunId, expected: u64, state: &[u8], row: Option<&[u8]>) -> Result<(), Refusal> {
        let found = self.runs.get(&run).map_or(0, |entry| entry.version);
        if found != expected {
            return Err(Refusal::RunConflict { expected, found });
        }
        let before = self.runs.get(&run).map_or(0, |entry| entry.bytes() - entry.state.len() as u64);
        let after = before + (state.len() + row.map_or(0, <[u8]>::len)) as u64;
        if after > MAX_RUN_BYTES {
            return Err(Refusal::RunFull { bytes: MAX_RUN_BYTES });
        }
        let entry = self.runs.entry(run).or_default();
        entry.version += 1;
        entry.state = state.to_vec();
        entry.rows.extend(row.map(<[u8]>::to_vec));
        Ok(())
    }

    /// Forgets a run; whether it was there.
    pub fn remove(&mut self, run: RunId) -> bool {
        self.runs.remove(&run).is_some()
    }
}
