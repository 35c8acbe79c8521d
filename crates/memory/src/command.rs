//! Commands of a partition: the body of a log record.
//!
//! A record is replicated and replayed, so it contains only integers and opaque bytes; floats are converted at the edge. Columns
//! of one command have equal lengths, which the decoder checks.

use crate::buffer::BufferCommand;
use crate::ids::{Group, LearningEpoch, MemoryId, RunId};
use crate::law::ONE;
use crate::outcome::Refusal;
use crate::session::{Request, SessionId};
use crate::settings::{FeatureShape, Settings};
use crate::{MAX_IDS, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES};

/// A log record: a command, and the session request that it executes, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Request; `None` for commands of the cluster itself (epochs of a run are numbered separately).
    pub request: Option<Request>,
    /// The command.
    pub command: Command,
}

/// Command of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Inserts memories, or changes the given fields of existing ones.
    Upsert(Upsert),
    /// Removes memories; unknown ids are reported.
    Remove {
        /// Ids, in order.
        ids: Vec<MemoryId>,
    },
    /// Applies updates outside an epoch.
    Reinforce(Updates),
    /// Decays every memory by `amount` units, at most ONE.
    Decay {
        /// Units.
        amount: u32,
    },
    /// A whole small learning epoch: decay, updates, quality.
    Epoch {
        /// Run.
        run: RunId,
        /// Number in the run.
        n: LearningEpoch,
        /// Units of decay, at most ONE.
        decay: u32,
        /// Updates, after the decay.
        updates: Updates,
    },
    /// Opens a large epoch and decays.
    EpochBegin {
        /// Run.
        run: RunId,
        /// Number in the run.
        n: LearningEpoch,
        /// Units of decay, at most ONE.
        decay: u32,
    },
    /// Part `part` = 1, 2, ... of a large epoch.
    EpochPart {
        /// Run.
        run: RunId,
        /// Number in the run.
        n: LearningEpoch,
        /// Number of the part.
        part: u32,
        /// Updates.
        updates: Updates,
    },
    /// Closes a large epoch of `parts` parts; the result is the quality vector.
    EpochEnd {
        /// Run.
        run: RunId,
        /// Number in the run.
        n: LearningEpoch,
        /// Number of parts.
        parts: u32,
    },
    /// Removes the `count` lowest memories by rank order.
    Evict {
        /// Number of memories.
        count: u64,
    },
    /// Replaces the settings.
    Configure(Settings),
    /// Closes a request, so that it is not executed if it has not arrived yet. Replies with the reply of an executed one,
    /// [`Refusal::AlreadyClosed`] for one that is never executed, and [`Refusal::SessionExpired`] or [`Refusal::OutOfWindow`] if
    /// the outcome is no longer known.
    CloseRequest(Request),
    /// Raises the expiry watermark: every session opened before it expires.
    ExpireSessions {
        /// Milliseconds since the Unix epoch.
        before_ms: u64,
    },
    /// Replaces the state of a run, and may add a row to its history.
    RunRecord {
        /// Run.
        run: RunId,
        /// Expected number of records of this run so far: of two concurrent drivers one is rejected.
        expected: u64,
        /// New state, opaque to the partition.
        state: Vec<u8>,
        /// Additional row of its history, opaque.
        row: Option<Vec<u8>>,
    },
    /// Removes a run and its history.
    RunRemove {
        /// Run.
        run: RunId,
    },
    /// Computes the replica digest at this position of the log.
    DigestMarker {
        /// Chosen by the proposer.
        marker: u64,
    },
    /// Changes a replay buffer or its items.
    Buffer(BufferCommand),
}

/// What to do with an update of an unknown id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OnMissing {
    /// Reports the id; the rest is applied.
    #[default]
    Report,
    /// Creates the memory at the initial weight, then applies the delta.
    Create,
}

/// Updates of one record, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Updates {
    /// One delta per id.
    ById {
        /// Ids; an id may occur several times and is clamped after each.
        ids: Vec<MemoryId>,
        /// Signed units, absolute value at most ONE.
        deltas: Vec<i32>,
        /// What to do with unknown ids.
        on_missing: OnMissing,
        /// Keys of the ids, empty = none; compared with the stored keys. `None`: no keys at all.
        keys: Option<Blobs>,
    },
    /// One delta for every memory of a group.
    ByGroup(Vec<(Group, i32)>),
}

impl Updates {
    /// No update.
    pub const NONE: Self = Self::ByGroup(Vec::new());

    /// Number of entries, not of memories.
    pub fn len(&self) -> usize {
        match self {
            Self::ById { ids, .. } => ids.len(),
            Self::ByGroup(groups) => groups.len(),
        }
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memories to insert or change, as columns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Upsert {
    /// Ids; a repeated id is applied in order.
    pub ids: Vec<MemoryId>,
    /// Weight in units per id, [`Upsert::KEEP`] = keep (or the initial weight); empty = keep all.
    pub weights: Vec<u32>,
    /// Group per id; empty = keep (or group 0).
    pub groups: Vec<Group>,
    /// Key per id, empty bytes = none.
    pub keys: Option<Blobs>,
    /// Feature bits, one vector per id, little-endian as stored; empty = keep (or zeros for new memories).
    pub features: Vec<u8>,
    /// Payload per id, empty = keep.
    pub payloads: Option<Blobs>,
}

impl Upsert {
    /// No weight, in [`Upsert::weights`].
    pub const KEEP: u32 = u32::MAX;
}

/// A column of byte strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blobs {
    ends: Vec<u32>,
    bytes: Vec<u8>,
}

impl Blobs {
    /// Rebuilds a column; `None` if the ends do not ascend to the length of the bytes.
    pub fn from_parts(ends: Vec<u32>, bytes: Vec<u8>) -> Option<Self> {
        let ascending = ends.windows(2).all(|pair| pair[0] <= pair[1]);
        let fits = ends.last().copied().unwrap_or(0) as usize == bytes.len();
        (ascending && fits).then_some(Self { ends, bytes })
    }

    /// Returns the end of each entry in [`Blobs::bytes`].
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Returns all entries, concatenated.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns an empty column with room for entries of `bytes` in all.
    pub fn with_capacity(entries: usize, bytes: usize) -> Self {
        Self { ends: Vec::with_capacity(entries), bytes: Vec::with_capacity(bytes) }
    }

    /// Appends an entry.
    ///
    /// # Panics
    /// When the column would exceed 4 GiB; records are bounded far below.
    pub fn push(&mut self, entry: &[u8]) {
        self.push_with(|bytes| bytes.extend_from_slice(entry));
    }

    /// Appends the entry that `append` adds to the bytes.
    ///
    /// # Panics
    /// As [`Self::push`].
    pub fn push_with(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.bytes);
        self.ends.push(u32::try_from(self.bytes.len()).expect("a column is bounded by the record size"));
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns entry `index`.
    ///
    /// # Panics
    /// When there is no such entry.
    pub fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.bytes[start..self.ends[index] as usize]
    }

    /// Returns the entries in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index))
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for Blobs {
    fn from_iter<I: IntoIterator<Item = T>>(entries: I) -> Self {
        let mut blobs = Self::default();
        entries.into_iter().for_each(|entry| blobs.push(entry.as_ref()));
        blobs
    }
}

impl Command {
    /// Returns the most memories that this command can create, for capacity checks before the log.
    pub fn may_create(&self) -> usize {
        match self {
            Self::Upsert(upsert) => upsert.ids.len(),
            Self::Buffer(command) => command.appended(),
            Self::Reinforce(updates) | Self::Epoch { updates, .. } | Self::EpochPart { updates, .. } => match updates {
                Updates::ById { ids, on_missing: OnMissing::Create, .. } => ids.len(),
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Checks what types do not enforce: columns of equal length, values in range. Called before the log, and by the decoder.
    /// Features need the cluster's shape: [`Command::check_features`].
    ///
    /// # Errors
    /// [`Refusal::Malformed`] with the field and what is allowed.
    pub fn check(&self) -> Result<(), Refusal> {
        match self {
            Self::Upsert(upsert) => upsert.check(),
            Self::Remove { ids } => check_ids(ids),
            Self::Reinforce(updates) => updates.check(),
            Self::Decay { amount } => check_decay(*amount),
            Self::Epoch { n, decay, updates, .. } => {
                check_epoch(*n)?;
                check_decay(*decay)?;
                updates.check()
            }
            Self::EpochBegin { n, decay, .. } => {
                check_epoch(*n)?;
                check_decay(*decay)
            }
            Self::EpochPart { n, part, updates, .. } => {
                check_epoch(*n)?;
                require(*part > 0, "part: numbered from 1")?;
                updates.check()
            }
            Self::EpochEnd { n, .. } => check_epoch(*n),
            Self::Configure(settings) => settings.check(),
            Self::CloseRequest(request) => request.check(),
            Self::Buffer(command) => command.check(),
            Self::Evict { .. }
            | Self::ExpireSessions { .. }
            | Self::RunRecord { .. }
            | Self::RunRemove { .. }
            | Self::DigestMarker { .. } => Ok(()),
        }
    }

    /// Checks that features match the cluster's shape. A command that passed [`Command::check`] and this can be applied.
    ///
    /// # Errors
    /// [`Refusal::Malformed`] with the field and what is allowed.
    pub fn check_features(&self, shape: FeatureShape) -> Result<(), Refusal> {
        match self {
            Self::Upsert(Upsert { ids, features, .. }) if !features.is_empty() => {
                require(shape.dimension > 0, "features: none, the cluster has dimension 0")?;
                require(
                    Some(features.len()) == ids.len().checked_mul(shape.bytes()),
                    "features: one vector of the cluster's dimension and type per id",
                )
            }
            _ => Ok(()),
        }
    }
}

impl Updates {
    fn check(&self) -> Result<(), Refusal> {
        let in_range = |delta: i32| delta.unsigned_abs() <= ONE;
        match self {
            Self::ById { ids, deltas, keys, .. } => {
                check_ids(ids)?;
                require(deltas.len() == ids.len(), "deltas: one per id")?;
                require(deltas.iter().all(|&delta| in_range(delta)), "delta: -2^30 to 2^30 units")?;
                check_keys(keys.as_ref(), ids.len())
            }
            Self::ByGroup(groups) => {
                require(groups.len() <= MAX_IDS, "group updates: at most 65,536")?;
                require(groups.iter().all(|&(_, delta)| in_range(delta)), "delta: -2^30 to 2^30 units")
            }
        }
    }
}

impl Upsert {
    fn check(&self) -> Result<(), Refusal> {
        let rows = self.ids.len();
        let column = |len: usize| len == 0 || len == rows;
        check_ids(&self.ids)?;
        require(column(self.weights.len()), "weights: one per id, or none")?;
        require(
            self.weights.iter().all(|&units| units <= ONE || units == Self::KEEP),
            "weight: 0 to 2^30 units, or 2^32 - 1 to keep it",
        )?;
        require(column(self.groups.len()), "groups: one per id, or none")?;
        check_keys(self.keys.as_ref(), rows)?;
        require(
            self.features.is_empty() || (rows > 0 && self.features.len().is_multiple_of(rows)),
            "features: one vector per id, or none",
        )?;
        self.payloads.as_ref().map_or(Ok(()), |payloads| {
            require(payloads.len() == rows, "payloads: one per id, or none")?;
            require(payloads.iter().all(|payload| payload.len() <= MAX_PAYLOAD_BYTES), "payload: at most 65,536 bytes")
        })
    }
}

impl Request {
    fn check(&self) -> Result<(), Refusal> {
        require(self.seq > 0, "sequence number: from 1")
    }
}

pub(crate) fn require(holds: bool, what: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Malformed { what }) }
}

pub(crate) fn check_ids(ids: &[MemoryId]) -> Result<(), Refusal> {
    require(ids.len() <= MAX_IDS, "ids: at most 65,536")
}

fn check_keys(keys: Option<&Blobs>, rows: usize) -> Result<(), Refusal> {
    keys.map_or(Ok(()), |keys| {
        require(keys.len() == rows, "keys: one per id, or none")?;
        require(keys.iter().all(|key| key.len() <= MAX_KEY_BYTES), "key: at most 1,024 bytes")?;
        require(keys.iter().all(|key| str::from_utf8(key).is_ok()), "key: UTF-8")
    })
}

fn check_decay(amount: u32) -> Result<(), Refusal> {
    require(amount <= ONE, "decay: 0 to 2^30 units")
}

fn check_epoch(n: LearningEpoch) -> Result<(), Refusal> {
    require(n.0 > 0, "learning epoch: numbered from 1")
}

impl Record {
    /// Creates a record without a session request.
    pub const fn bare(command: Command) -> Self {
        Self { request: None, command }
    }

    /// Checks request and command: [`Command::check`].
    ///
    /// # Errors
    /// [`Refusal::Malformed`] with the field and what is allowed.
    pub fn check(&self) -> Result<(), Refusal> {
        self.request.as_ref().map_or(Ok(()), Request::check)?;
        self.command.check()
    }

    /// Returns the session, if any.
    pub fn session(&self) -> Option<SessionId> {
        self.request.map(|request| request.session)
    }
}
