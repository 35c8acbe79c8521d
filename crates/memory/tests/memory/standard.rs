//! Standard experiments on the reference partition: known trajectories, and faults that must be visible.

use engram_memory::reference::Partition;
use engram_memory::{
    Command, Digest, FeatureShape, Group, Law, LearningEpoch, MemoryId, OnMissing, Outcome, QualityVector, Record,
    Reply, RunId, Settings, Shape, Updates, Upsert, Weight, partition_of,
};

const REWARDED: i32 = 42_949_673;
const PUNISHED: i32 = -42_949_672;
const DECAY: u32 = 10_737_418;
const RUN: RunId = RunId(1);

/// The reference store: partitions, and records split over them as a client splits them.
struct Store {
    partitions: Vec<Partition>,
}

impl Store {
    fn new(partitions: u32, settings: Settings) -> Self {
        let shape = Shape { partitions, law: Law::Linear, features: FeatureShape::NONE };
        Self { partitions: (0..partitions).map(|_| Partition::new(shape, settings)).collect() }
    }

    /// Two populations: ids 0 to `memories` - 1, the even ones in group 0, the odd ones in group 1.
    fn with_two_groups(partitions: u32, memories: u64, settings: Settings) -> Self {
        let mut store = Self::new(partitions, settings);
        for partition in 0..partitions {
            let ids: Vec<_> =
                (0..memories).map(MemoryId).filter(|id| partition_of(*id, partitions).0 == partition).collect();
            for ids in ids.chunks(50_000) {
                let groups = ids.iter().map(|id| Group((id.0 & 1) as u8)).collect();
                store.apply(partition, Command::Upsert(Upsert { ids: ids.to_vec(), groups, ..Upsert::default() }));
            }
        }
        store
    }

    fn apply(&mut self, partition: u32, command: Command) -> Outcome {
        command.check().unwrap();
        match self.partitions[partition as usize].apply(&Record::bare(command)) {
            Reply::Applied(outcome) => outcome,
            Reply::Refused(refusal) => panic!("{refusal}"),
        }
    }

    fn epoch(&mut self, n: u64, decay: u32, updates: impl Fn(u32) -> Updates) -> QualityVector {
        let mut total = Outcome::default();
        for partition in 0..self.partitions.len() as u32 {
            let command = Command::Epoch { run: RUN, n: LearningEpoch(n), decay, updates: updates(partition) };
            total.merge(&self.apply(partition, command));
        }
        total.quality.unwrap()
    }

    fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        self.partitions.iter().for_each(|partition| digest.merge(partition.digest()));
        digest
    }

    /// Returns the number of memories whose `updates` equal `epochs`, and of all.
    fn covered(&self, epochs: u16) -> (usize, usize) {
        let memories = || self.partitions.iter().flat_map(|partition| partition.memories().values());
        (memories().filter(|memory| memory.updates == epochs).count(), memories().count())
    }
}

fn by_group() -> Updates {
    Updates::ByGroup(vec![(Group(0), REWARDED), (Group(1), PUNISHED)])
}

/// The standard updates by id, without `left_out`.
fn by_id(memories: u64, partition: u32, partitions: u32, left_out: Option<u64>) -> Updates {
    let here = |id: &u64| partition_of(MemoryId(*id), partitions).0 == partition && Some(*id) != left_out;
    let ids: Vec<_> = (0..memories).filter(here).map(MemoryId).collect();
    let deltas = ids.iter().map(|id| if id.0 & 1 == 0 { REWARDED } else { PUNISHED }).collect();
    Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None }
}

/// `mean(R) - mean(P)` in units, where both groups are of one weight each.
fn separation(quality: &QualityVector) -> i64 {
    let mean = |group| {
        let quality = quality.group(Group(group));
        assert_eq!(quality.min, quality.max, "all memories of a group are equal");
        assert_eq!(quality.sum, u128::from(quality.count) * u128::from(quality.min));
        i64::from(quality.min)
    };
    mean(0) - mean(1)
}

#[test]
fn separation_and_digest_do_not_depend_on_partitions_or_on_the_form_of_the_updates() {
    for (partitions, memories, grouped) in [(1, 1_000, true), (7, 1_000, false), (256, 1_000, true), (7, 100_000, true)]
    {
        let mut store = Store::with_two_groups(partitions, memories, Settings::default());
        let mut separations = Vec::new();
        for n in 1..=20 {
            let quality =
                store.epoch(
                    n,
                    DECAY,
                    |partition| {
                        if grouped { by_group() } else { by_id(memories, partition, partitions, None) }
                    },
                );
            assert_eq!(quality.total().count, memories);
            separations.push(separation(&quality));
            if (memories, n) == (1_000, 5) {
                assert_eq!(store.digest().to_string(), "85540e11f201328e777384429e8fcfa8");
            }
        }
        assert_eq!((separations[0], separations[9], separations[19]), (85_899_345, 858_993_450, 1_073_741_824));
        let digest =
            if memories == 1_000 { "81614da90c4f4be97e63ff0b5f2fb1ce" } else { "0569a0a6cd4901dddad8e5e7fe77534e" };
        assert_eq!(store.digest().to_string(), digest, "{partitions} partitions, {memories} memories");
    }
}

#[test]
fn decay_alone_is_monotone_and_exact() {
    let mut store = Store::with_two_groups(1, 10, Settings::default());
    for n in 1..=20 {
        store.apply(0, Command::Decay { amount: 21_474_836 });
        let total = store.partitions[0].quality().total();
        assert_eq!((total.min, total.max), (total.min, total.min));
        assert_eq!(total.min, 536_870_912 - n * 21_474_836);
    }
    assert_eq!(store.partitions[0].quality().total().min, 107_374_192);
    // From one half to nothing: 51 decays of 0.01 and 26 of 0.02, not 50 and 25.
    for (decay, decays) in [(DECAY, 51), (21_474_836, 26)] {
        let left = |times| (0..times).fold(Weight::HALF, |weight, _| weight.decayed(decay));
        assert!(left(decays - 1) > Weight::ZERO && left(decays) == Weight::ZERO);
    }
}

#[test]
fn two_groups_part_in_order() {
    let mut store = Store::with_two_groups(1, 10, Settings::default());
    (1..=10).for_each(|n| {
        store.epoch(n, DECAY, |_| by_group());
    });
    let quality = store.partitions[0].quality();
    assert_eq!((quality.group(Group(0)).min, quality.group(Group(0)).max), (858_993_462, 858_993_462));
    assert_eq!((quality.group(Group(1)).min, quality.group(Group(1)).max), (12, 12));
    let rank: Vec<_> = store.partitions[0].rank().into_iter().map(|(_, id)| id.0).collect();
    assert_eq!(rank, [0, 2, 4, 6, 8, 1, 3, 5, 7, 9], "all pairs in order, ties by id");

    let mut undecayed = Store::with_two_groups(1, 10, Settings::default());
    (1..=10).for_each(|n| {
        undecayed.epoch(n, 0, |_| by_group());
    });
    let mean = |group| undecayed.partitions[0].quality().group(Group(group)).mean().unwrap();
    assert!((mean(0) - 0.9).abs() < 1e-6 && (mean(1) - 0.1).abs() < 1e-6);
}

#[test]
fn swapped_order_of_decay_and_reinforcement_shows_in_the_factor() {
    let factor = |reinforce_first: bool| {
        let mut store = Store::with_two_groups(1, 100, Settings::default());
        let mut first = 0;
        for n in 1..=20 {
            let quality = if reinforce_first {
                store.apply(0, Command::Reinforce(by_group()));
                store.apply(0, Command::Decay { amount: DECAY });
                store.partitions[0].quality()
            } else {
                store.epoch(n, DECAY, |_| by_group())
            };
            if n == 1 {
                first = separation(&quality);
            }
        }
        separation(&store.partitions[0].quality()) as f64 / first as f64
    };
    assert!((factor(false) - 12.500_000_134).abs() < 1e-9);
    assert!((factor(true) - 12.375_000_135).abs() < 1e-9);
}

#[test]
fn a_missed_update_shows_in_digest_and_coverage_though_the_factor_stays() {
    let counted = Settings { count_updates: true, ..Settings::default() };
    let (mut whole, mut faulty) =
        (Store::with_two_groups(7, 1_000, counted), Store::with_two_groups(7, 1_000, counted));
    let mut separations = Vec::new();
    for n in 1..=20 {
        whole.epoch(n, DECAY, |partition| by_id(1_000, partition, 7, None));
        let left_out = (n == 10).then_some(42);
        let quality = faulty.epoch(n, DECAY, |partition| by_id(1_000, partition, 7, left_out));
        let mean = |group| quality.group(Group(group)).mean().unwrap();
        separations.push(mean(0) - mean(1));
        assert_eq!(whole.digest() == faulty.digest(), !(10..18).contains(&n), "epoch {n}");
    }
    assert!((separations[19] / separations[0] - 12.5).abs() < 1e-6, "the ratio is blind");
    assert_eq!(whole.covered(20), (1_000, 1_000));
    assert_eq!(faulty.covered(20), (999, 1_000));
}

#[test]
fn updates_saturate_and_leave_the_digest_alone() {
    let settings = |count_updates| Settings { count_updates, ..Settings::default() };
    let (mut counting, mut plain) = (Store::new(1, settings(true)), Store::new(1, settings(false)));
    let one =
        || Updates::ById { ids: vec![MemoryId(5)], deltas: vec![REWARDED], on_missing: OnMissing::Create, keys: None };
    for n in 1..=70_000 {
        counting.epoch(n, DECAY, |_| one());
        plain.epoch(n, DECAY, |_| one());
    }
    let updates = |store: &Store| store.partitions[0].memories()[&MemoryId(5)].updates;
    assert_eq!((updates(&counting), updates(&plain)), (65_535, 0));
    assert_eq!(counting.digest(), plain.digest());
    counting.apply(0, Command::Configure(settings(false)));
    assert_eq!(updates(&counting), 0, "disabling resets the counts");
}
