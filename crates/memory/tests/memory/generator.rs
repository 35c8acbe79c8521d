//! The generator of random commands reaches the cases of the properties that use it.

use engram_memory::reference::Partition;
use engram_memory::{Command, FeatureShape, FeatureType, Law, PartitionId, Refusal, Reply, Shape, partition_of};
use engram_testing::commands::{World, arb_log};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;

fn shape(features: FeatureShape) -> Shape {
    Shape { partitions: 1, law: Law::Linear, features }
}

#[test]
fn random_logs_execute_most_records_and_reach_every_refusal() {
    let mut runner = TestRunner::deterministic();
    let mut counts = BTreeMap::<&str, usize>::new();
    for _ in 0..80 {
        let (features, settings, records) = arb_log(60..120).new_tree(&mut runner).unwrap().current();
        let mut partition = Partition::new(shape(features), settings);
        for record in &records {
            let clock = partition.clock().units();
            let repeated = partition.ledger().lookup_reply(record).is_some();
            let reply = partition.apply(record);
            let mut count = |what, holds: bool| *counts.entry(what).or_default() += usize::from(holds);
            count("records", true);
            count("fold", partition.clock().units() < clock);
            count("answered by ledger", repeated);
            count("with features", matches!(&record.command, Command::Upsert(upsert) if !upsert.features.is_empty()));
            match &reply {
                Reply::Applied(outcome) => {
                    count("applied", outcome.applied > 0);
                    count("created", outcome.created > 0);
                    count("evicted", outcome.evicted > 0 && !matches!(record.command, Command::Remove { .. }));
                    count("large epoch", matches!(record.command, Command::EpochEnd { .. }) && !repeated);
                    for rejection in &outcome.rejections {
                        count(
                            match rejection.reason {
                                engram_memory::RejectionReason::Unknown => "unknown",
                                engram_memory::RejectionReason::KeyCollision => "key collision",
                                engram_memory::RejectionReason::KeyMismatch => "key mismatch",
                            },
                            true,
                        );
                    }
                }
                Reply::Refused(refusal) => count(
                    match refusal {
                        Refusal::SessionExpired => "session expired",
                        Refusal::AlreadyClosed => "already closed",
                        Refusal::OutOfWindow { .. } => "out of window",
                        Refusal::EpochGap { .. } => "epoch gap",
                        Refusal::EpochForgotten { .. } => "epoch forgotten",
                        Refusal::RunConflict { .. } => "run conflict",
                        Refusal::RunUnknown => "run unknown",
                        Refusal::RunFull { .. } => "run full",
                        Refusal::BufferUnknown
                        | Refusal::BufferConflict
                        | Refusal::BufferFull { .. }
                        | Refusal::BufferLimit { .. } => "buffer",
                        Refusal::Malformed { .. } => "malformed",
                    },
                    true,
                ),
            }
        }
    }
    let records = counts["records"];
    assert!(counts["applied"] > records / 4 && counts["answered by ledger"] < records / 2, "{counts:#?}");
    for what in [
        "fold",
        "created",
        "evicted",
        "large epoch",
        "with features",
        "unknown",
        "key collision",
        "key mismatch",
        "session expired",
        "already closed",
        "out of window",
        "epoch gap",
        "run conflict",
        "run unknown",
    ] {
        assert!(counts.get(what).is_some_and(|&times| times >= 3), "{what} is rarely reached: {counts:#?}");
    }
    assert!(!counts.contains_key("malformed"), "{counts:#?}");
}

proptest! {
    #[test]
    fn ids_generated_for_a_partition_hash_to_it(partition in 0..7_u32) {
        let features = FeatureShape { dimension: 1, dtype: FeatureType::F32 };
        let world = World::of_partition(features, 40, 5, PartitionId(partition), 7);
        prop_assert_eq!(world.ids().count(), 40);
        prop_assert!(world.ids().all(|id| partition_of(id, 7) == PartitionId(partition)));
    }
}
