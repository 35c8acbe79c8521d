//! What a driver keeps with the run: enough for another to go on at the exact epoch.

use super::status::Phase;
use crate::prediction::Hits;
use crate::report::{EpochName, EpochRow, Experiment, GroupBins, GroupSummary, RankHistory, RankNote, RankedMemory};
use engram_memory::{ClusterId, MemoryId, PartitionId, RunId, partition_of, run::Entry};
use serde::{Deserialize, Serialize};

/// The record of a run cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the record of the run is damaged or of a newer version: {0}")]
pub struct Damaged(#[from] serde_json::Error);

/// The state of a run, as its record carries it (JSON).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunState {
    /// Version of this structure.
    pub format: u32,
    /// Name of the run.
    pub name: String,
    /// The `spec` of the manifest, as it was submitted.
    pub spec: serde_json::Value,
    /// Phase.
    pub phase: Phase,
    /// Whether it waits for somebody to let it go on; its phase is the one to go on from.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// When it was submitted, in milliseconds since 1970: who came first has the first turn.
    #[serde(default)]
    pub submitted_ms: u64,
    /// What the input was when the run began; see `pin`.
    #[serde(default)]
    pub input: Option<Input>,
    /// Epochs of the source, where it says.
    #[serde(default)]
    pub epochs: Option<u64>,
    /// Whether the memories of an experiment are in place.
    #[serde(default)]
    pub populated: bool,
    /// Epochs that are done for good: the next one is this plus one.
    #[serde(default)]
    pub done: u64,
    /// What the rankings predicted of the next epoch, noted before it was sent.
    #[serde(default)]
    pub predicted: Option<Vec<Hits>>,
    /// Milliseconds of learning, all drivers together.
    #[serde(default)]
    pub elapsed_ms: u64,
    /// Updates applied.
    #[serde(default)]
    pub updates: u64,
    /// Separation after the first epoch: (rewarded sum, count, punished sum, count) as decimal text, exact.
    #[serde(default)]
    pub first: Option<FirstSeparation>,
    /// What was found at the end.
    #[serde(default)]
    pub result: Option<Findings>,
    /// How far a snapshot is; nothing of other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotState>,
    /// Why it ended, where it did not succeed.
    #[serde(default)]
    pub message: String,
    /// Number under which that is explained.
    #[serde(default)]
    pub code: String,
}

/// How far a snapshot is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotState {
    /// Attempts so far: each has files of its own.
    pub attempt: u32,
    /// The manifest, once all files are there: whoever drives the run from then on writes this one and no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// What was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<SnapshotResult>,
}

/// A snapshot that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotResult {
    /// Where it is.
    pub url: String,
    /// Digest of all memories, 32 hexadecimal digits.
    pub digest: String,
    /// Memories in it.
    pub memories: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its partitions.
    pub partitions: u32,
}

/// The input of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Input {
    /// Names its content.
    pub content: String,
    /// The commit, where the input is a repository.
    #[serde(default)]
    pub revision: Option<String>,
}

/// The two groups after the first epoch, so that the convergence factor stays exact over restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FirstSeparation {
    /// Sum of the rewarded weights in units, and their number.
    pub rewarded: (u64, u64),
    /// The same of the punished.
    pub punished: (u64, u64),
}

/// What was found when the last epoch was done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Findings {
    /// Workers of the cluster.
    pub workers: u32,
    /// Its partitions.
    pub partitions: u32,
    /// Its name.
    pub cluster: String,
    /// Learning rate.
    pub rate: f64,
    /// Weight of a new memory.
    pub initial_weight: f64,
    /// Decay per epoch.
    pub decay: f64,
    /// Quality per group.
    pub quality: Vec<GroupSummary>,
    /// Histogram per group.
    pub histogram: Vec<GroupBins>,
    /// The epochs after which ranks were noted.
    pub earlier: Vec<EpochName>,
    /// The memories of highest rank.
    pub top: Vec<RankedMemory>,
    /// Memories that gained most.
    pub risen: Vec<RankedMemory>,
    /// Memories that lost most.
    pub fallen: Vec<RankedMemory>,
    /// Results of the experiment.
    pub experiment: Option<Experiment>,
    /// Digest of the store.
    pub digest: String,
}

/// A row of the history of a run, as its record carries it (JSON).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) row: EpochRow,
    /// The ranking after the epoch, where it was worth noting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<RankNote>,
}

impl Row {
    /// Gives the notes of the past to `history`, in order.
    pub(super) fn remember(rows: &[Self]) -> RankHistory {
        let mut history = RankHistory::default();
        rows.iter().filter_map(|row| row.note.clone()).for_each(|note| history.note(note));
        history
    }
}

impl RunState {
    const FORMAT: u32 = 1;

    /// A run that was just submitted.
    pub fn new(name: impl Into<String>, spec: serde_json::Value) -> Self {
        Self {
            format: Self::FORMAT,
            name: name.into(),
            spec,
            phase: Phase::Queued,
            suspended: false,
            submitted_ms: 0,
            input: None,
            epochs: None,
            populated: false,
            done: 0,
            predicted: None,
            elapsed_ms: 0,
            updates: 0,
            first: None,
            result: None,
            snapshot: None,
            message: String::new(),
            code: String::new(),
        }
    }

    /// Reads the state of a record.
    ///
    /// # Errors
    /// It is not the state of a run of this version.
    pub fn of(entry: &Entry) -> Result<Self, Damaged> {
        Ok(serde_json::from_slice(&entry.state)?)
    }

    /// Reads the rows of a record.
    ///
    /// # Errors
    /// One of them is not a row of this version.
    pub(super) fn rows(entry: &Entry) -> Result<Vec<Row>, Damaged> {
        Ok(entry.rows.iter().map(|row| serde_json::from_slice(row)).collect::<Result<_, _>>()?)
    }

    /// Where the run stands, as people and monitors are told.
    pub const fn told_phase(&self) -> Phase {
        if self.suspended && !self.phase.is_final() { Phase::Suspended } else { self.phase }
    }

    /// The bytes that a record carries.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a state has string keys only")
    }

    /// The run of this name on this cluster: a name stands for one run for ever.
    pub fn run_id(cluster: ClusterId, name: &str) -> RunId {
        engram_client::run_id(cluster, name)
    }

    /// The partition that keeps the record of a run; its primary drives it.
    pub fn partition(run: RunId, partitions: u32) -> PartitionId {
        partition_of(MemoryId(run.0 as u64), partitions)
    }
}
