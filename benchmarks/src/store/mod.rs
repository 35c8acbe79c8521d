//! The store in process: updates by id and reads without a log, learning epochs and recovery with one, memory per memory.

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

/// Memories given to the store at once while it is filled.
const ROWS: u32 = 1 << 16;

/// Measures all sizes; logs lie in folders under `scratch`.
///
/// # Errors
/// When the store fails, or does not hold or do what it was told.
pub(crate) fn rows(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &memories in sizes {
        eprintln!("store: {memories} memories, log off");
        rows.extend(unlogged::rows(memories, threads)?);
        eprintln!("store: {memories} memories, log on");
        rows.extend(logged::rows(memories, threads, scratch)?);
    }
    rows.extend(footprint::rows(sizes, scratch)?);
    Ok(rows)
}

/// The cluster that all of this is a part of.
const SHAPE: Shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };

/// Batches that insert `memories` memories.
fn inserts(memories: u32) -> impl Iterator<Item = Vec<(PartitionId, Record)>> {
    (0..memories).step_by(ROWS as usize).map(move |start| {
        let end = memories.min(start.saturating_add(ROWS));
        let ids: Vec<_> = (start..end).map(population::id).collect();
        population::records(&ids, population::upsert)
    })
}

/// The learning epochs of one run, with the same updates each.
struct Epochs {
    ids: Vec<MemoryId>,
    delta: i32,
    decay: u32,
    records: Vec<(PartitionId, Record)>,
    n: u64,
}

impl Epochs {
    /// Updates of distinct memories in no order.
    fn new(memories: u32) -> Result<Self> {
        let (delta, decay) = (population::delta()?, edge::setting(DECAY)?);
        let ids = population::distinct(UPDATES, memories).into_iter().map(population::id).collect();
        let mut epochs = Self { ids, delta, decay, records: Vec::new(), n: 0 };
        epochs.split();
        Ok(epochs)
    }

    /// Makes the records anew, one for each partition: one without updates decays all the same.
    fn split(&mut self) {
        let parts = population::by_partition(&self.ids).into_iter().map(|ids| {
            let (run, n) = (RunId(1), LearningEpoch(self.n));
            let updates = population::by_id(ids, self.delta);
            Record::bare(Command::Epoch { run, n, decay: self.decay, updates })
        });
        self.records = (0..).map(PartitionId).zip(parts).collect();
    }

    /// The records of the next epoch.
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

/// Checks that an epoch did what it was to do, on all memories.
fn check_epoch<'a>(memories: u32, replies: impl IntoIterator<Item = &'a Reply>) -> Result<()> {
    let (mut whole, mut applied) = (QualityVector::default(), 0);
    for reply in replies {
        let Reply::Applied(outcome) = reply else { bail!("an epoch was refused: {reply:?}") };
        whole.merge(outcome.quality.as_ref().unwrap_or(&QualityVector::default()));
        applied += outcome.applied;
    }
    let (expected, counted) = (UPDATES.min(memories as usize) as u64, whole.total().count);
    ensure!(applied == expected, "{applied} of {expected} updates were applied");
    ensure!(counted == u64::from(memories), "quality is that of {counted} of {memories} memories");
    Ok(())
}

/// Rows and updates that were applied; none where they were refused.
fn applied(reply: &Reply) -> u64 {
    match reply {
        Reply::Applied(outcome) => outcome.applied,
        Reply::Refused(_) => 0,
    }
}
