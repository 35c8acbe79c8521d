//! The store in process: updates and reads by id without a log, learning epochs and recovery with one, memory per memory.

pub(crate) mod footprint;
mod logged;
mod unlogged;

use std::path::Path;

use anyhow::{Result, bail, ensure};
use engram_memory::{
    Command, FeatureShape, Law, LearningEpoch, MemoryId, PartitionId, QualityVector, Record, Reply, RunId, Shape, edge,
};

use crate::population::{self, DECAY, PARTITIONS, UPDATES};
use crate::row::Row;

/// Memories per batch while the store is filled.
const ROWS: u32 = 1 << 16;

/// Measures all sizes; logs are in folders under `scratch`.
///
/// # Errors
/// When the store fails, or returns unexpected results.
pub(crate) fn store_rows(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &memories in sizes {
        eprintln!("store: {memories} memories, without log");
        rows.extend(unlogged::unlogged_rows(memories, threads)?);
        eprintln!("store: {memories} memories, with log");
        rows.extend(logged::logged_rows(memories, threads, scratch)?);
    }
    rows.extend(footprint::footprint_rows(sizes, scratch)?);
    Ok(rows)
}

/// Cluster id of all suites.
const SHAPE: Shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };

/// Returns batches that insert `memories` memories.
fn inserts(memories: u32) -> impl Iterator<Item = Vec<(PartitionId, Record)>> {
    (0..memories).step_by(ROWS as usize).map(move |start| {
        let end = memories.min(start.saturating_add(ROWS));
        let ids: Vec<_> = (start..end).map(population::id).collect();
        population::records(&ids, population::upsert)
    })
}

/// The learning epochs of a run, with the same updates each.
struct Epochs {
    ids: Vec<MemoryId>,
    delta: i32,
    decay: u32,
    records: Vec<(PartitionId, Record)>,
    n: u64,
}

impl Epochs {
    /// Creates updates of distinct memories in random order.
    fn new(memories: u32) -> Result<Self> {
        let (delta, decay) = (population::delta()?, edge::setting(DECAY)?);
        let ids = population::distinct(UPDATES, memories).into_iter().map(population::id).collect();
        let mut epochs = Self { ids, delta, decay, records: Vec::new(), n: 0 };
        epochs.split();
        Ok(epochs)
    }

    /// Recreates the records, one per partition: a partition without updates decays, too.
    fn split(&mut self) {
        let parts = population::by_partition(&self.ids).into_iter().map(|ids| {
            let (run, n) = (RunId(1), LearningEpoch(self.n));
            let updates = population::by_id(ids, self.delta);
            Record::bare(Command::Epoch { run, n, decay: self.decay, updates })
        });
        self.records = (0..).map(PartitionId).zip(parts).collect();
    }

    /// Returns the records of the next epoch.
    fn next(&mut self) -> &[(PartitionId, Record)] {
        self.n += 1;
        for (_, record) in &mut self.records {
            if let Command::Epoch { n, .. } = &mut record.command {
                *n = LearningEpoch(self.n);
            }
        }
        &self.records
    }
}

/// Checks the results of an epoch on all memories.
fn check_epoch<'a>(memories: u32, replies: impl IntoIterator<Item = &'a Reply>) -> Result<()> {
    let (mut whole, mut applied) = (QualityVector::default(), 0);
    for reply in replies {
        let Reply::Applied(outcome) = reply else { bail!("epoch was rejected: {reply:?}") };
        whole.merge(outcome.quality.as_ref().unwrap_or(&QualityVector::default()));
        applied += outcome.applied;
    }
    let (expected, counted) = (UPDATES.min(memories as usize) as u64, whole.total().count);
    ensure!(applied == expected, "{applied} of {expected} updates were applied");
    ensure!(counted == u64::from(memories), "quality is that of {counted} of {memories} memories");
    Ok(())
}

/// Returns the number of applied rows and updates; 0 if rejected.
fn applied(reply: &Reply) -> u64 {
    match reply {
        Reply::Applied(outcome) => outcome.applied,
        Reply::Refused(_) => 0,
    }
}
