//! Decisions about updates: which worker is replaced, and when.

use crate::world::World;
use engram_api::status::{ClusterPhase, Truth, condition};
use engram_operator::{Action, Offer, PartitionView, Plan};
use serde_json::json;

#[test]
fn a_rollout_starts_with_the_worker_with_the_fewest_primaries() {
    let mut world = World::idle(3, 2);
    for (id, partition) in world.map().partitions.iter_mut().enumerate() {
        let primary = [0, 0, 0, 2, 2, 1, 0, 2][id];
        *partition = PartitionView { primary, in_sync: vec![primary, (primary + 1) % 3], ..partition.clone() };
    }
    world.spec("image", "a/b:2".into());
    world.apply(world.plan());
    let drained = |plan: &Plan| match &plan.actions[..] {
        [Action::Drain { ordinal, evacuate: false, .. }] => *ordinal,
        other => panic!("{other:?}"),
    };
    let plan = world.plan();
    assert_eq!(drained(&plan), 1);
    // During a leadership transfer the worker stays drained and is not restarted yet.
    world.map().partitions[5].activated = false;
    assert_eq!(drained(&world.plan()), 1);
    world.apply(plan);
    assert_eq!(drained(&world.plan()), 1);
    world.map().partitions[5].activated = true;
    let plan = world.plan();
    assert!(matches!(plan.actions[..], [Action::DeletePod { ordinal: 1, force: false, .. }]), "{:?}", plan.actions);
    assert_eq!(plan.status.phase, Some(ClusterPhase::Updating));
    let disks: Vec<_> = plan.status.members.iter().map(|member| (member.name.as_str(), member.store)).collect();
    assert_eq!(disks, [("words-worker-0", Some(10)), ("words-worker-1", Some(11)), ("words-worker-2", Some(12))]);
    world.apply(plan);
    assert!(world.plan().actions.is_empty(), "the other workers wait for re-replication");
}

#[test]
fn a_worker_whose_replicas_cannot_move_is_replaced_once_it_has_no_primaries() {
    let mut world = World::idle(3, 3);
    let uid = world.observed.pods[1].uid.clone();
    world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": uid });
    let plan = world.plan();
    assert!(matches!(plan.actions[..], [Action::Drain { ordinal: 1, evacuate: false, .. }]), "{:?}", plan.actions);
    assert_eq!(plan.status.workers.as_ref().map(|workers| workers.draining), Some(1), "the autoscaler waits");
    world.apply(plan);
    world.run_until_idle();
    assert!(world.observed.pods.iter().all(|pod| pod.uid != uid), "the pod was replaced");
}

#[test]
fn a_new_operator_restarts_no_worker_before_an_upgrade_is_requested() {
    let mut world = World::idle(3, 2);
    world.offer = Offer { template_revision: 2, ..Offer::new("registry/worker", "2") };
    let plan = world.plan();
    assert!(plan.objects.is_empty() && plan.actions.is_empty(), "{plan:?}");
    world.apply(plan);
    assert_eq!(world.truth(condition::UPDATE_AVAILABLE), Truth::True);
    world.spec("upgrade", "Auto".into());
    world.run_until_idle();
    let worker = world.observed.status.worker.clone().expect("a worker");
    assert_eq!((worker.image.as_str(), worker.template_revision), ("registry/worker:2", 2));
    assert_eq!(world.truth(condition::UPDATE_AVAILABLE), Truth::False);
}

#[test]
fn claims_of_a_lost_node_are_deleted_only_if_fully_replicated_elsewhere() {
    let lose = |world: &mut World, ordinal: usize, for_ms| world.observed.pods[ordinal].node_lost_for_ms = Some(for_ms);
    let mut world = World::idle(4, 2);
    lose(&mut world, 3, 400_000);
    assert!(world.plan().actions.is_empty(), "it still holds replicas");
    for partition in &mut world.map().partitions {
        *partition = PartitionView { primary: 0, in_sync: vec![0, 1], ..partition.clone() };
    }
    let replaced = world.plan().actions;
    assert!(matches!(replaced[..], [Action::DeleteClaim { .. }, Action::DeletePod { ordinal: 3, force: true, .. }]));
    lose(&mut world, 3, 200_000);
    assert!(world.plan().actions.is_empty(), "the node may still return");
    lose(&mut world, 3, 400_000);
    lose(&mut world, 2, 400_000);
    assert!(world.plan().actions.is_empty(), "half of all workers are unreachable: a mass failure");
    world.observed.pods[2].node_lost_for_ms = None;
    world.spec("storage", json!({ "size": "50Gi", "onNodeLoss": { "action": "Wait" } }));
    assert!(!world.plan().actions.iter().any(|action| matches!(action, Action::DeleteClaim { .. })));
}

#[test]
fn a_paused_cluster_is_not_changed_and_still_reported() {
    let mut world = World::idle(3, 2);
    world.spec("paused", true.into());
    world.spec("image", "a/b:2".into());
    world.spec("workers", 5.into());
    let plan = world.plan();
    assert!(plan.objects.is_empty() && plan.actions.is_empty(), "{plan:?}");
    assert_eq!(plan.status.observed_generation, Some(4));
    assert_eq!(plan.status.phase, Some(ClusterPhase::Scaling));
}

#[test]
fn the_first_pods_of_a_cluster_are_no_update() {
    let mut world = World::new(3, 2);
    world.apply(world.plan());
    world.pods();
    world.observed.set.as_mut().expect("a set").update_revision = String::new();
    let workers = world.plan().status.workers.expect("counts");
    assert_eq!((workers.total, workers.up_to_date), (3, 3), "the StatefulSet has no status yet");
    // Later, an unknown revision means a template that its controller has not observed.
    let mut world = World::idle(3, 2);
    world.observed.set.as_mut().expect("a set").update_revision = String::new();
    assert_eq!(world.plan().status.workers.expect("counts").up_to_date, 0);
}

#[test]
fn a_setting_that_is_removed_from_the_spec_is_removed_from_the_objects() {
    let mut world = World::idle(3, 2);
    world.spec("storage", json!({ "size": "50Gi", "storageClassName": "fast" }));
    world.run_until_idle();
    world.spec("storage", json!({ "size": "50Gi" }));
    assert!(
        world.plan().actions.iter().any(|action| matches!(action, Action::OrphanSet { .. })),
        "templates are immutable"
    );
    world.run_until_idle();
    assert!(world.plan().actions.is_empty());

    world.spec("scheduling", json!({ "priorityClassName": "high" }));
    world.spec("service", json!({ "annotations": { "team": "ml" } }));
    world.run_until_idle();
    world.spec("scheduling", json!({}));
    world.spec("service", json!({}));
    let objects: Vec<&str> = world.plan().objects.iter().map(|object| object.kind().name()).collect();
    assert_eq!(objects, ["Service", "StatefulSet"]);
}
