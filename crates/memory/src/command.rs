//! What a partition can be told to do: the body of a log record.
//!
//! A record is replicated and replayed, so it holds integers and opaque bytes only; floats were converted at the
//! edge. Columns of one command have equal lengths, which the decoder checks.

use crate::ids::{Group, LearningEpoch, MemoryId, RunId};
use crate::outcome::Refusal;
use crate::session::{Request, SessionId};
use crate::settings::Settings;

/// A body of the log: a command, and the request it answers when a session stands behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Who asked; `None` for what the cluster itself does (epochs of a run are numbered on their own).
    pub request: Option<Request>,
    /// What to do.
    pub command: Command,
}

/// What a partition can be told to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Inserts memories, or changes what is given of existing ones.
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
        /// How many parts there were.
        parts: u32,
    },
    /// Removes the `count` lowest memories by rank order.
    Evict {
        /// How many.
        count: u64,
    },
    /// Replaces the settings.
    Configure(Settings),
    /// Closes a request that never arrived: from here on it is never executed.
    CloseRequest(Request),
    /// Raises the expiry watermark: every session opened before it is gone.
    ExpireSessions {
        /// Milliseconds since the Unix epoch.
        before_ms: u64,
    },
    /// Replaces the state of a run, and may add a row to its history.
    RunRecord {
        /// Run.
        run: RunId,
        /// Number of records of this run so far: of two drivers one is refused.
        expected: u64,
        /// New state, opaque to the partition.
        state: Vec<u8>,
        /// One more row of its history, opaque.
        row: Option<Vec<u8>>,
    },
    /// Forgets a run and its history.
    RunRemove {
        /// Run.
        run: RunId,
    },
    /// Computes the replica digest at this place of the log.
    DigestMarker {
        /// Chosen by who asks.
        marker: u64,
    },
}

/// What to do with an update whose id is not there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OnMissing {
    /// Reports it; the rest is applied.
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
        /// Ids; an id may stand several times and is clamped after each.
        ids: Vec<MemoryId>,
        /// Signed units, absolute value at most ONE.
        deltas: Vec<i32>,
        /// What to do with unknown ids.
        on_missing: OnMissing,
        /// Keys of the ids, empty where the sender gives none; compared with what is stored. Absent: no keys at all.
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
    /// Key per id, empty bytes = none given.
    pub keys: Option<Blobs>,
    /// Feature bits, one vector per id, little-endian as stored; empty = keep (or zeros where the cluster has features).
    pub features: Vec<u8>,
    /// Payload per id, empty = keep.
    pub payloads: Option<Blobs>,
}

impl Upsert {
    /// In [`Upsert::weights`]: no weight is given.
    pub const KEEP: u32 = u32::MAX;
}

/// A column of byte strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blobs {
    ends: Vec<u32>,
    bytes: Vec<u8>,
}

impl Blobs {
    /// Rebuilds a column; `None` when the ends do not ascend to the length of the bytes.
    pub fn from_parts(ends: Vec<u32>, bytes: Vec<u8>) -> Option<Self> {
        let ascending = ends.windows(2).all(|pair| pair[0] <= pair[1]);
        let fits = ends.last().copied().unwrap_or(0) as usize == bytes.len();
        (ascending && fits).then_some(Self { ends, bytes })
    }

    /// End of each entry in [`Blobs::bytes`].
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// All entries, one after another.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Appends an entry.
    ///
    /// # Panics
    /// When the column would pass 4 GiB; records are bounded far below.
    pub fn push(&mut self, entry: &[u8]) {
        self.bytes.extend_from_slice(entry);
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

    /// Entry `index`.
    ///
    /// # Panics
    /// When there is no such entry.
    pub fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.bytes[start..self.ends[index] as usize]
    }

    /// The entries in order.
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
    /// The most memories this command can create: what a `Refuse` capacity counts before the log.
    pub fn may_create(&self) -> usize {
        match self {
            Self::Upsert(upsert) => upsert.ids.len(),
            Self::Reinforce(updates) | Self::Epoch { updates, .. } | Self::EpochPart { updates, .. } => match updates {
                Updates::ById { ids, on_missing: OnMissing::Create, .. } => ids.len(),
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Checks what the types do not: columns of equal length, values in range. The edge checks before the log, the
    /// decoder checks again.
    ///
    /// # Errors
    /// [`Refusal::Malformed`] with the column that does not fit.
    pub fn check(&self) -> Result<(), Refusal> {
        use crate::law::ONE;
        let malformed = |what| Err(Refusal::Malformed { what });
        match self {
            Self::Upsert(upsert) => upsert.check(),
            Self::Decay { amount } if *amount > ONE => malformed("decay above one"),
            Self::Epoch { decay, .. } | Self::EpochBegin { decay, .. } if *decay > ONE => malformed("decay above one"),
            Self::EpochPart { part: 0, .. } => malformed("parts are numbered from 1"),
            Self::Reinforce(updates) | Self::Epoch { updates, .. } | Self::EpochPart { updates, .. } => updates.check(),
            Self::Configure(settings) if settings.rate == 0 || settings.rate > ONE => malformed("rate out of range"),
            Self::Configure(settings) if settings.limit == 0 => malformed("limit of 0"),
            _ => Ok(()),
        }
    }
}

impl Updates {
    fn check(&self) -> Result<(), Refusal> {
        let in_range = |delta: i32| delta.unsigned_abs() <= crate::law::ONE;
        let fits = match self {
            Self::ById { ids, deltas, keys, .. } => {
                ids.len() == deltas.len()
                    && keys.as_ref().is_none_or(|keys| keys.len() == ids.len() && keys_fit(keys))
                    && deltas.iter().all(|&delta| in_range(delta))
            }
            Self::ByGroup(groups) => groups.iter().all(|&(_, delta)| in_range(delta)),
        };
        if fits { Ok(()) } else { Err(Refusal::Malformed { what: "columns of the updates" }) }
    }
}

impl Upsert {
    fn check(&self) -> Result<(), Refusal> {
        let rows = self.ids.len();
        let column = |len: usize| len == 0 || len == rows;
        let weight = |&units: &u32| units <= crate::law::ONE || units == Self::KEEP;
        let fits = column(self.weights.len())
            && self.weights.iter().all(weight)
            && column(self.groups.len())
            && self.keys.as_ref().is_none_or(|keys| keys.len() == rows && keys_fit(keys))
            && (self.features.is_empty() || (rows > 0 && self.features.len().is_multiple_of(rows)))
            && self.payloads.as_ref().is_none_or(|payloads| {
                payloads.len() == rows && payloads.iter().all(|payload| payload.len() <= crate::MAX_PAYLOAD_BYTES)
            });
        if fits { Ok(()) } else { Err(Refusal::Malformed { what: "columns of the upsert" }) }
    }
}

fn keys_fit(keys: &Blobs) -> bool {
    keys.iter().all(|key| key.len() <= crate::MAX_KEY_BYTES)
}

/// The session of a request, for callers that hold a whole record.
impl Record {
    /// A record that no session stands behind.
    pub const fn bare(command: Command) -> Self {
        Self { request: None, command }
    }

    /// The session, if there is one.
    pub fn session(&self) -> Option<SessionId> {
        self.request.map(|request| request.session)
    }
}
