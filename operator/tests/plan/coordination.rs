//! The coordinator's goal, and the owner of the map.

use crate::world::{World, entry};
use engram_api::status::{Truth, condition};
use engram_coordinator::BootstrapProgress;
use engram_memory::Ordinal;
use engram_operator::{CoordinatorGoal, MapView, PartitionView, coordinator_goal};
use serde_json::json;

#[test]
fn the_coordinator_goal_follows_the_plan_and_is_none_while_suspended() {
    let goal = |world: &World| coordinator_goal(&world.cluster(), &world.observed, &world.plan());
    let mut world = World::idle(3, 2);
    assert_eq!(goal(&world), Some(CoordinatorGoal { workers: 3, ..CoordinatorGoal::default() }));
    world.spec("workers", 4.into());
    assert_eq!(goal(&world).expect("coordinated").workers, 4);

    // Evacuated until the pod is deleted, since its disk would otherwise be filled again.
    let mut world = World::idle(3, 2);
    let uid = world.observed.pods[1].uid.clone();
    world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": uid });
    assert_eq!(goal(&world).expect("coordinated").evacuating, [1].into());
    for partition in &mut world.map().partitions {
        *partition = PartitionView { primary: 0, in_sync: vec![0, 2], activated: true, ..PartitionView::default() };
    }
    world.observed.pods[1].terminating = true;
    let last = goal(&world).expect("coordinated");
    assert_eq!((last.evacuating, last.without_primaries), ([1].into(), [1].into()));

    let mut world = World::idle(3, 2);
    world.spec("image", "a/b:2".into());
    let plan = world.plan();
    world.apply(plan);
    assert_eq!(goal(&world).expect("coordinated").without_primaries.len(), 1, "one worker at a time is drained");

    let mut world = World::idle(3, 2);
    world.spec("suspend", true.into());
    assert!(goal(&world).is_some(), "replicas are synchronized first");
    world.map().suspended = true;
    assert_eq!(goal(&world), None, "pods of a suspended cluster have not failed");
    let mut world = World::idle(3, 2);
    world.observed.map = None;
    assert!(goal(&world).is_none_or(|goal| goal.had_map), "no initial map is created if data exists");
    world.observed.claims[0].cluster_id = Some("00".into());
    assert_eq!(goal(&world), None, "foreign data is not coordinated");
}

#[test]
fn a_cluster_whose_bootstrap_fails_is_still_coordinated() {
    let mut world = World::idle(3, 2);
    world.observed.map = None;
    world.observed.claims.clear();
    let problem = Some((Ordinal(1), "ENG-0510".to_owned(), "the storage does not answer".to_owned()));
    world.observed.bootstrapping =
        Some(BootstrapProgress { loaded: 0, workers: 3, done_bytes: 0, total_bytes: 0, problem });
    let plan = world.plan();
    let stalled = plan.status.conditions.iter().find(|it| it.kind == condition::STALLED).expect("Stalled");
    assert_eq!(stalled.status, Truth::True, "the problem is reported");
    assert!(coordinator_goal(&world.cluster(), &world.observed, &plan).is_some(), "bootstrap is retried");
}

#[test]
fn the_map_follows_the_retain_policy() {
    let mut world = World::idle(3, 2);
    assert_eq!(world.map().owner, None);
    world.spec("storage", json!({ "size": "50Gi", "retainPolicy": "Delete" }));
    world.run_until_idle();
    assert!(world.map().owner.is_some());
    world.spec("storage", json!({ "size": "50Gi", "retainPolicy": "Retain" }));
    world.run_until_idle();
    assert_eq!(world.map().owner, None);

    // A map that outlived its data stalls a new cluster of the same name.
    let map = world.observed.map.clone().expect("a map");
    let mut world = World::new(3, 2);
    world.object["metadata"]["uid"] = "ffffffff-8a53-4a0a-9d1e-2f8f5f0f7a11".into();
    world.observed.map = Some(map.clone());
    let (stalled, reason, message) = entry(&world.plan(), condition::STALLED);
    assert_eq!((stalled, reason.as_str()), (Truth::True, "VolumesMissing"));
    assert!(message.contains("delete partitionmap words"), "{message}");
    assert_eq!(coordinator_goal(&world.cluster(), &world.observed, &world.plan()), None);
    world.observed.map = Some(MapView { owner: Some("0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11".into()), ..map });
    assert_eq!(entry(&world.plan(), condition::STALLED).1, "PartitionMapOfDeletedCluster");
}
