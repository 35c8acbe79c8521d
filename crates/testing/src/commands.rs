//! Random valid commands, for the property tests of every implementation of a partition.
//!
//! A [`World`] is a small space of ids and keys, so that commands meet: hot ids, groups, keys that collide, deltas near the
//! clamps, decays that fold every few records, limits that evict. Sequence numbers, epochs, parts and versions follow a
//! shadow [`Ledger`], with now and then a repeat, a late one or a gap, so that most records are executed and every refusal
//! is met. Every record passes [`Record::check`] and the feature check.
//!
//! ```
//! use engram_memory::{FeatureShape, Law, Shape, reference::Partition};
//! use engram_testing::commands::World;
//! use proptest::prelude::*;
//!
//! let world = World::small(FeatureShape::NONE);
//! proptest!(ProptestConfig::with_cases(4), |(settings in world.arb_settings(), records in world.arb_records(0..50))| {
//!     let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
//!     let mut partition = Partition::new(shape, settings);
//!     for record in &records {
//!         let _ = partition.apply(record);
//!     }
//! });
//! ```

use engram_memory::command::{Blobs, Command, OnMissing, Record, Updates, Upsert};
use engram_memory::hash::{key_id, partition_of};
use engram_memory::law::{ONE, Weight};
use engram_memory::ledger::{Gate, Ledger};
use engram_memory::outcome::{Outcome, Reply};
use engram_memory::{
    CapacityPolicy, FeatureShape, FeatureType, Group, LearningEpoch, MemoryId, PartitionId, Request, RunId, SessionId,
    Settings,
};
use proptest::collection::{SizeRange, vec};
use proptest::prelude::*;
use proptest::sample::select;

/// Sessions that clients of a world use: two of one millisecond, and one younger.
const SESSIONS: [SessionId; 3] = [
    SessionId { opened_ms: 1_000, random: 1 },
    SessionId { opened_ms: 1_000, random: 2 },
    SessionId { opened_ms: 2_000, random: 1 },
];

/// Runs that clients of a world drive.
const RUNS: [RunId; 2] = [RunId(7), RunId(u128::MAX)];

/// Few groups, so that a group update addresses several memories; 255 because it is the last.
const GROUPS: [Group; 4] = [Group(0), Group(1), Group(7), Group(255)];

/// The ids, keys and sizes that random commands draw from.
#[derive(Debug, Clone)]
pub struct World {
    features: FeatureShape,
    /// Ids without a key.
    ids: Vec<MemoryId>,
    /// Keys; each has its id by [`key_id`].
    keys: Vec<String>,
    /// Most rows of a command.
    rows: usize,
}

impl World {
    /// 24 ids, a quarter of them keyed, up to 12 rows a command: everything meets everything.
    pub fn small(features: FeatureShape) -> Self {
        Self::sized(features, 24, 12)
    }

    /// A world of `ids` ids, a quarter of them keyed, and up to `rows` rows a command. Large ones cross the tiles of a store.
    ///
    /// # Panics
    /// When `ids` is below 4 or `rows` is 0.
    pub fn sized(features: FeatureShape, ids: usize, rows: usize) -> Self {
        Self::of_partition(features, ids, rows, PartitionId(0), 1)
    }

    /// [`World::sized`] with only such ids as hash to one of `partitions` partitions.
    ///
    /// # Panics
    /// When `ids` is below 4, `rows` is 0, or there is no such partition.
    pub fn of_partition(
        features: FeatureShape,
        ids: usize,
        rows: usize,
        partition: PartitionId,
        partitions: u32,
    ) -> Self {
        assert!(ids >= 4 && rows > 0 && partition.0 < partitions, "a world has ids, rows and a partition of its own");
        let here = |id: &MemoryId| partition_of(*id, partitions) == partition;
        let keyed = ids / 4;
        Self {
            features,
            // The ends of the range first: indices and sort orders go wrong there.
            ids: [0, u64::MAX, 1 << 63].into_iter().chain(1..).map(MemoryId).filter(here).take(ids - keyed).collect(),
            keys: (0..).map(|n| format!("key-{n}")).filter(|key| here(&key_id(key.as_bytes()))).take(keyed).collect(),
            rows,
        }
    }

    /// Returns the feature shape that its commands fit.
    pub fn features(&self) -> FeatureShape {
        self.features
    }

    /// Returns every id that can occur, keyed ones last.
    pub fn ids(&self) -> impl Iterator<Item = MemoryId> {
        self.ids.iter().copied().chain(self.keys.iter().map(|key| key_id(key.as_bytes())))
    }

    /// Settings with a limit that the ids of this world exceed.
    pub fn arb_settings(&self) -> BoxedStrategy<Settings> {
        let ids = self.ids.len() + self.keys.len();
        let policy = prop_oneof![7 => Just(CapacityPolicy::Evict), 1 => Just(CapacityPolicy::Refuse)];
        (1..=ONE, arb_weight(), (ids / 4).max(1)..=ids + ids / 4, policy, any::<bool>())
            .prop_map(|(rate, initial_weight, limit, policy, count_updates)| Settings {
                rate,
                initial_weight,
                limit: limit as u64,
                policy,
                count_updates,
            })
            .boxed()
    }

    /// Records as a log would hold them, for a partition that starts empty.
    pub fn arb_records(&self, count: impl Into<SizeRange>) -> BoxedStrategy<Vec<Record>> {
        let features = self.features;
        vec(self.arb_draft(), count)
            .prop_map(move |drafts| {
                let mut shadow = Ledger::default();
                drafts.into_iter().map(|draft| draft.number(&mut shadow, features)).collect()
            })
            .boxed()
    }

    /// One record, numbered for a partition that starts empty.
    pub fn arb_record(&self) -> BoxedStrategy<Record> {
        let features = self.features;
        self.arb_draft().prop_map(move |draft| draft.number(&mut Ledger::default(), features)).boxed()
    }

    fn arb_draft(&self) -> impl Strategy<Value = Draft> + use<> {
        let session = proptest::option::weighted(0.4, (select(&SESSIONS[..]), arb_seq_drift()));
        (self.arb_command(), session, arb_drift()).prop_map(|(command, session, drift)| Draft {
            command,
            session,
            drift,
        })
    }

    fn arb_command(&self) -> BoxedStrategy<Command> {
        let run = || select(&RUNS[..]);
        let n = LearningEpoch(0);
        let ids = self.ids().collect::<Vec<_>>();
        let closed = (select(&SESSIONS[..]), 1..80_u64).prop_map(|(session, seq)| Request { session, seq });
        let bytes = || vec(any::<u8>(), 0..6);
        prop_oneof![
            8 => self.arb_upsert().prop_map(Command::Upsert),
            2 => vec(select(ids), 0..=self.rows.min(4)).prop_map(|ids| Command::Remove { ids }),
            8 => self.arb_updates().prop_map(Command::Reinforce),
            4 => arb_decay().prop_map(|amount| Command::Decay { amount }),
            4 => (run(), arb_decay(), self.arb_updates())
                .prop_map(move |(run, decay, updates)| Command::Epoch { run, n, decay, updates }),
            2 => (run(), arb_decay()).prop_map(move |(run, decay)| Command::EpochBegin { run, n, decay }),
            3 => (run(), self.arb_updates())
                .prop_map(move |(run, updates)| Command::EpochPart { run, n, part: 0, updates }),
            2 => run().prop_map(move |run| Command::EpochEnd { run, n, parts: 0 }),
            1 => (0..4_u64).prop_map(|count| Command::Evict { count }),
            1 => self.arb_settings().prop_map(Command::Configure),
            1 => closed.prop_map(Command::CloseRequest),
            1 => select(vec![0, 900, 1_000, 1_001, 2_000]).prop_map(|before_ms| Command::ExpireSessions { before_ms }),
            1 => (run(), bytes(), proptest::option::of(bytes()))
                .prop_map(|(run, state, row)| Command::RunRecord { run, expected: 0, state, row }),
            1 => run().prop_map(|run| Command::RunRemove { run }),
            2 => any::<u64>().prop_map(|marker| Command::DigestMarker { marker }),
        ]
        .boxed()
    }

    /// An id and a key for it: none, its own, or another's.
    fn arb_name(&self) -> BoxedStrategy<(MemoryId, Vec<u8>)> {
        let ids = self.ids().collect::<Vec<_>>();
        let hot = ids.iter().copied().take(3).collect::<Vec<_>>();
        prop_oneof![
            2 => select(hot).prop_map(|id| (id, Vec::new())),
            4 => select(ids.clone()).prop_map(|id| (id, Vec::new())),
            4 => select(self.keys.clone()).prop_map(|key| (key_id(key.as_bytes()), key.into_bytes())),
            1 => (select(ids), select(self.keys.clone())).prop_map(|(id, key)| (id, key.into_bytes())),
        ]
        .boxed()
    }

    fn arb_updates(&self) -> BoxedStrategy<Updates> {
        let create = prop_oneof![Just(OnMissing::Report), Just(OnMissing::Create)];
        let by_id = (vec((self.arb_name(), arb_delta()), 0..=self.rows), create, any::<bool>()).prop_map(
            |(rows, on_missing, keyed)| Updates::ById {
                ids: rows.iter().map(|((id, _), _)| *id).collect(),
                deltas: rows.iter().map(|(_, delta)| *delta).collect(),
                on_missing,
                keys: keyed.then(|| rows.iter().map(|((_, key), _)| key).collect()),
            },
        );
        let by_group = vec((select(&GROUPS[..]), arb_delta()), 0..4).prop_map(Updates::ByGroup);
        prop_oneof![4 => by_id, 1 => by_group].boxed()
    }

    fn arb_upsert(&self) -> BoxedStrategy<Upsert> {
        let width = self.features.bytes();
        let weight = prop_oneof![3 => arb_weight().prop_map(Weight::units), 1 => Just(Upsert::KEEP)];
        let payload = prop_oneof![1 => Just(Vec::new()), 1 => vec(any::<u8>(), 0..9)];
        let row = (self.arb_name(), weight, select(&GROUPS[..]), vec(any::<u8>(), width), payload);
        (vec(row, 0..=self.rows), any::<[bool; 5]>())
            .prop_map(|(rows, [weights, groups, keys, features, payloads])| {
                let column = |present: bool| if present { &rows[..] } else { &[] };
                Upsert {
                    ids: rows.iter().map(|row| row.0.0).collect(),
                    weights: column(weights).iter().map(|row| row.1).collect(),
                    groups: column(groups).iter().map(|row| row.2).collect(),
                    keys: keys.then(|| rows.iter().map(|row| &row.0.1).collect()),
                    features: column(features).iter().flat_map(|row| row.3.iter().copied()).collect(),
                    payloads: payloads.then(|| rows.iter().map(|row| &row.4).collect::<Blobs>()),
                }
            })
            .boxed()
    }
}

/// A record without its numbers, which depend on the preceding records.
#[derive(Debug, Clone)]
struct Draft {
    command: Command,
    /// The session, and the distance of the seq from the next one.
    session: Option<(SessionId, i64)>,
    /// Distance of epoch, part or version from the next one.
    drift: i64,
}

impl Draft {
    /// Numbers the record after the state of `shadow`, and advances `shadow`.
    fn number(self, shadow: &mut Ledger, features: FeatureShape) -> Record {
        let Self { mut command, session, drift } = self;
        let high = |session| shadow.sessions.high(session).unwrap_or(0);
        let request = session.map(|(session, drift)| Request { session, seq: from_one(high(session), drift) });
        let progress_of =
            |run| shadow.epochs.progress(run).map_or((0, None), |progress| (progress.done, progress.open));
        // A step that is meant to follow goes to a run where it does, if there is one.
        if let Some((run, opens)) = epoch_run(&mut command).filter(|_| drift == 0) {
            let follows = |run: &RunId| progress_of(*run).1.is_none() == opens;
            *run = if follows(run) { *run } else { RUNS.into_iter().find(follows).unwrap_or(*run) };
        }
        match &mut command {
            Command::Epoch { run, n, .. } | Command::EpochBegin { run, n, .. } => {
                *n = LearningEpoch(from_one(progress_of(*run).0, drift));
            }
            Command::EpochPart { run, n, part, .. } => {
                let (done, open) = progress_of(*run);
                *n = LearningEpoch(from_one(done, 0));
                *part = from_one(open.unwrap_or(0).into(), drift) as u32;
            }
            Command::EpochEnd { run, n, parts } => {
                let (done, open) = progress_of(*run);
                *n = LearningEpoch(from_one(done, drift));
                *parts = open.unwrap_or(0);
            }
            Command::CloseRequest(Request { session, seq }) => {
                // As drawn, so anywhere in a window that starts at 1, or next to the highest.
                *seq = if drift == 0 { *seq } else { from_one(high(*session), drift) };
            }
            Command::RunRecord { run, expected, .. } => {
                let version = shadow.runs.get(*run).map_or(0, |entry| entry.version);
                *expected = version.saturating_add_signed(drift);
            }
            _ => {}
        }
        let record = Record { request, command };
        record.check().and_then(|()| record.command.check_features(features)).expect("generated records are valid");
        if shadow.admit(&record) == Gate::Execute {
            shadow.complete(&record, &Reply::Applied(Outcome::default()));
        }
        record
    }
}

/// The run of a step of an epoch, and whether the step starts one.
fn epoch_run(command: &mut Command) -> Option<(&mut RunId, bool)> {
    match command {
        Command::Epoch { run, .. } | Command::EpochBegin { run, .. } => Some((run, true)),
        Command::EpochPart { run, .. } | Command::EpochEnd { run, .. } => Some((run, false)),
        _ => None,
    }
}

/// The number after `last`, moved by `drift`, at least 1.
fn from_one(last: u64, drift: i64) -> u64 {
    last.saturating_add(1).saturating_add_signed(drift).max(1)
}

/// Mostly the next number; else a repeat, a late one or a gap.
fn arb_drift() -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(0), 1 => Just(-1), 1 => -20..=2_i64]
}

/// As [`arb_drift`], around the edges of the window of a session.
fn arb_seq_drift() -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(0), 2 => Just(-1), 2 => -6..=6_i64, 1 => -67..=-63_i64, 1 => 61..=65_i64]
}

/// Decays: none, the usual one, and large ones that fold the clock every few records.
fn arb_decay() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0), 4 => Just(10_737_418_u32), 2 => 0..=ONE / 64, 2 => ONE / 4..=ONE, 1 => Just(ONE)]
}

/// Deltas: the usual two, none, single units, and the whole range.
fn arb_delta() -> impl Strategy<Value = i32> {
    let one = ONE as i32;
    prop_oneof![
        3 => select(vec![42_949_673, -42_949_672]),
        2 => select(vec![0, 1, -1, one, -one, one - 1, 1 - one]),
        3 => -one..=one,
    ]
}

/// Weights, among them the ends and their neighbours.
pub fn arb_weight() -> impl Strategy<Value = Weight> + Clone {
    let ends = select(vec![0, 1, ONE / 2, ONE - 1, ONE]);
    prop_oneof![1 => ends, 2 => 0..=ONE].prop_map(|units| Weight::from_units(units).expect("at most ONE"))
}

/// Feature shapes of a cluster: none, small f16, small f32.
pub fn arb_features() -> impl Strategy<Value = FeatureShape> {
    select(vec![
        FeatureShape::NONE,
        FeatureShape { dimension: 3, dtype: FeatureType::F16 },
        FeatureShape { dimension: 2, dtype: FeatureType::F32 },
    ])
}

/// One record of the small world, as [`World::arb_record`].
pub fn arb_record(features: FeatureShape) -> BoxedStrategy<Record> {
    World::small(features).arb_record()
}

/// A feature shape, initial settings and the records of a log of the small world that fit them.
pub fn arb_log(count: impl Into<SizeRange>) -> impl Strategy<Value = (FeatureShape, Settings, Vec<Record>)> {
    let count = count.into();
    arb_features().prop_flat_map(move |features| {
        let world = World::small(features);
        (Just(features), world.arb_settings(), world.arb_records(count.clone()))
    })
}
