//! Persistent state of a run: enough for another driver to resume at the exact epoch.

use super::federated::FederatedState;
use super::status::Phase;
use super::training::TrainingState;
use crate::prediction::Hits;
use crate::report::{EpochName, EpochRow, Experiment, GroupBins, GroupSummary, RankHistory, RankNote, RankedMemory};
use crate::task_run::TaskSummary;
use engram_memory::{ClusterId, MemoryId, PartitionId, RunId, partition_of, run::Entry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_128;

/// The record of a run cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the record of the run is damaged or of a newer version: {0}")]
pub struct CorruptRecord(#[from] serde_json::Error);

/// State of a run, as recorded (JSON).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunState {
    /// Version of this structure.
    pub format: u32,
    /// Name of the run.
    pub name: String,
    /// Identity of its submission: the UID of its object; empty if it was submitted by name only.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// The `uid` under which its learning epochs are numbered, if it was resumed by a submission with another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_uid: Option<String>,
    /// The `spec` of the manifest, as it was submitted.
    pub spec: serde_json::Value,
    /// Phase.
    pub phase: Phase,
    /// Whether it is suspended; its phase is the one to resume from.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// Submission time in milliseconds since 1970, which orders waiting runs.
    #[serde(default)]
    pub submitted_ms: u64,
    /// End time in milliseconds since 1970; 0 = not ended, or recorded by an earlier version.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ended_ms: u64,
    /// Whether it had ended and continues: its input may differ in epochs that it has not learned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resumed: bool,
    /// Identity of the input when the run started or was resumed; see `pin`.
    #[serde(default)]
    pub input: Option<Input>,
    /// Epochs of the source, if known.
    #[serde(default)]
    pub epochs: Option<u64>,
    /// Whether the memories of an experiment are inserted.
    #[serde(default)]
    pub populated: bool,
    /// Completed epochs; the next one is this plus one.
    #[serde(default)]
    pub done: u64,
    /// Hits of the rankings in the next epoch, recorded before it was sent.
    #[serde(default)]
    pub predicted: Option<Vec<Hits>>,
    /// Fingerprint of the next epoch, recorded before it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent: Option<String>,
    /// Milliseconds of learning, all drivers together.
    #[serde(default)]
    pub elapsed_ms: u64,
    /// Updates applied.
    #[serde(default)]
    pub updates: u64,
    /// Separation after the first epoch: (rewarded sum, count, punished sum, count) as decimal text, exact.
    #[serde(default)]
    pub first: Option<FirstSeparation>,
    /// Final results.
    #[serde(default)]
    pub result: Option<Findings>,
    /// Figures of the run when it ended, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Progress of a snapshot run; `None` for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotState>,
    /// Findings of a run that is split into tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskSummary>,
    /// Progress of a Replay run; `None` for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingState>,
    /// Progress of a Federated run; `None` for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub federated: Option<FederatedState>,
    /// Reason of the end, unless it succeeded.
    #[serde(default)]
    pub message: String,
    /// Error code.
    #[serde(default)]
    pub code: String,
}

/// Progress of a snapshot run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotState {
    /// Attempts so far; each has its own files.
    pub attempt: u32,
    /// The manifest, once all files exist: from then on every driver writes exactly this text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// The written snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<SnapshotResult>,
}

/// A written snapshot.
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

/// Final results after the last epoch.
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

/// Row of a run's history, as recorded (JSON).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) row: EpochRow,
    /// Ranking after the epoch, if it was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<RankNote>,
    /// [`Epoch::fingerprint`](crate::source::Epoch::fingerprint); absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) fingerprint: Option<String>,
}

impl Row {
    /// Rebuilds the rank history from the recorded notes.
    pub(super) fn history(rows: &[Self]) -> RankHistory {
        let mut history = RankHistory::default();
        rows.iter().filter_map(|row| row.note.clone()).for_each(|note| history.note(note));
        history
    }
}

/// Returns milliseconds since 1970.
fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde wants")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl RunState {
    const FORMAT: u32 = 1;

    /// Creates the state of a new run.
    pub fn new(name: impl Into<String>, spec: serde_json::Value) -> Self {
        Self {
            format: Self::FORMAT,
            name: name.into(),
            uid: String::new(),
            first_uid: None,
            spec,
            phase: Phase::Queued,
            suspended: false,
            submitted_ms: 0,
            ended_ms: 0,
            resumed: false,
            input: None,
            epochs: None,
            populated: false,
            done: 0,
            predicted: None,
            sent: None,
            elapsed_ms: 0,
            updates: 0,
            first: None,
            result: None,
            metrics: BTreeMap::new(),
            snapshot: None,
            tasks: None,
            training: None,
            federated: None,
            message: String::new(),
            code: String::new(),
        }
    }

    /// Reads the state of a record.
    ///
    /// # Errors
    /// It is not the state of a run of this version.
    pub fn of(entry: &Entry) -> Result<Self, CorruptRecord> {
        Ok(serde_json::from_slice(&entry.state)?)
    }

    /// Reads the rows of a record.
    ///
    /// # Errors
    /// One of them is not a row of this version.
    pub(super) fn rows(entry: &Entry) -> Result<Vec<Row>, CorruptRecord> {
        Ok(entry.rows.iter().map(|row| serde_json::from_slice(row)).collect::<Result<_, _>>()?)
    }

    /// Returns the phase as users see it.
    pub const fn reported_phase(&self) -> Phase {
        if self.suspended && !self.phase.is_final() { Phase::Suspended } else { self.phase }
    }

    /// Returns the small strings that the run produced: the digest of the memories at its end; of a snapshot, its digest and address.
    pub fn outputs(&self) -> BTreeMap<String, String> {
        let mut outputs = BTreeMap::new();
        if let Some(result) = &self.result {
            outputs.insert("digest".to_owned(), result.digest.clone());
        }
        let keys = self.federated.iter().map(|federated| &federated.model_key).filter(|key| !key.is_empty());
        outputs.extend(keys.map(|key| ("model_key".to_owned(), key.clone())));
        outputs.extend(self.tasks.iter().flat_map(|tasks| tasks.outputs.clone()));
        if let Some(written) = self.snapshot.as_ref().and_then(|snapshot| snapshot.written.as_ref()) {
            outputs.insert("digest".to_owned(), written.digest.clone());
            outputs.insert("url".to_owned(), written.url.clone());
        }
        outputs
    }

    /// Encodes the state for the record.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a state has string keys only")
    }

    /// Returns the identity of the run whose record is `record`, for its epochs and the turn. Two runs that were submitted under
    /// one name with different uids have different ones, so that the epochs of the second are not taken for repeats.
    pub fn identity(&self, record: RunId) -> RunId {
        let uid = self.first_uid.as_ref().unwrap_or(&self.uid);
        if uid.is_empty() {
            return record;
        }
        RunId(xxh3_128(&[&record.0.to_be_bytes(), uid.as_bytes()].concat()))
    }

    /// Records the end of the run at `now`.
    pub fn end(&mut self, phase: Phase, code: &str, message: String, now: SystemTime) {
        (self.phase, self.code, self.message) = (phase, code.to_owned(), message);
        self.ended_ms = milliseconds(now);
    }

    /// Returns the state with which a run that has ended continues, submitted again under `uid` (empty = the same) at `now`.
    #[must_use]
    pub fn resume(mut self, uid: &str, now: SystemTime) -> Self {
        if !uid.is_empty() && uid != self.uid {
            let previous = std::mem::replace(&mut self.uid, uid.to_owned());
            self.first_uid.get_or_insert(previous);
        }
        (self.phase, self.code, self.message) = (Phase::Queued, String::new(), String::new());
        (self.ended_ms, self.submitted_ms) = (0, milliseconds(now));
        (self.result, self.resumed, self.suspended) = (None, true, false);
        self
    }

    /// Returns the id of the record of the run with this name on this cluster.
    pub fn run_id(cluster: ClusterId, name: &str) -> RunId {
        engram_client::run_id(cluster, name)
    }

    /// Returns the partition of a run's record; its primary drives the run.
    pub fn partition(run: RunId, partitions: u32) -> PartitionId {
        partition_of(MemoryId(run.0 as u64), partitions)
    }
}
