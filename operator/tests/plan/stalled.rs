//! Clusters whose pods cannot start, and what their status says.

use crate::world::{CLUSTER_ID, World, deletions, entry};
use engram_api::status::{ClusterPhase, Truth, condition};
use engram_operator::{Action, StartFailure, StartFailureCause, coordinator_goal};
use serde_json::json;

#[test]
fn a_missing_map_with_existing_data_stalls_the_cluster() {
    let mut world = World::idle(3, 2);
    world.spec("image", "a/b:2".into());
    let map = world.observed.map.take();
    let plan = world.plan();
    assert!(plan.objects.is_empty() && plan.actions.is_empty());
    assert_eq!(plan.status.phase, Some(ClusterPhase::Stalled));
    let stalled = plan.status.conditions.iter().find(|it| it.kind == condition::STALLED).expect("Stalled");
    assert_eq!((stalled.status, stalled.reason.as_str()), (Truth::True, "PartitionMapMissing"));
    assert!(stalled.message.contains("partition rebuild-map"), "{}", stalled.message);
    let last = coordinator_goal(&world.cluster(), &world.observed, &plan).expect("the map can be rebuilt");
    assert!(last.had_map && last.evacuating.is_empty(), "no initial map is created");

    // The same volumes under a new LearnerCluster of the same name: foreign without a map, adopted with it.
    world.observed.status = Default::default();
    world.object["metadata"]["uid"] = "ffffffff-8a53-4a0a-9d1e-2f8f5f0f7a11".into();
    assert_eq!(world.plan().status.phase, Some(ClusterPhase::Stalled));
    assert_eq!(
        coordinator_goal(&world.cluster(), &world.observed, &world.plan()),
        None,
        "the origin of the data is unknown"
    );
    world.observed.map = map;
    let adopted = world.plan().status;
    assert_eq!(adopted.cluster_id.as_deref(), Some(CLUSTER_ID));
    world.observed.claims[1].cluster_id = Some("00".into());
    let foreign = world.plan().status;
    let stalled = foreign.conditions.iter().find(|it| it.kind == condition::STALLED).expect("Stalled");
    assert_eq!(stalled.reason, "ForeignVolume");
}

#[test]
fn a_pod_that_cannot_start_halts_the_update_and_is_replaced_once_the_spec_is_corrected() {
    let mut world = World::idle(3, 2);
    world.spec("image", "a/b:missing".into());
    world.apply(world.plan());
    world.break_pod(1, StartFailureCause::ImagePull, None);
    let halted = world.plan();
    assert!(deletions(&halted).is_empty(), "the other pods serve");
    let (stalled, reason, message) = entry(&halted, condition::STALLED);
    assert_eq!((stalled, reason.as_str()), (Truth::True, "ImagePullFailed"));
    for part in ["the update is halted", "words-worker-1", "on node n1", "ImagePullBackOff: not found", "spec.image"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(halted.status.phase, Some(ClusterPhase::Stalled));
    world.apply(halted);

    world.spec("image", "a/b:1".into());
    world.apply(world.plan());
    let corrected = world.plan();
    assert_eq!(deletions(&corrected), [1], "at once, although not all replicas are in sync");
    assert_eq!(entry(&corrected, condition::STALLED).0, Truth::False);
    world.apply(corrected);
    world.run_until_idle();
    assert_eq!(world.truth(condition::READY), Truth::True);

    // The same before the cluster has a map, and not where the user deletes pods.
    let mut world = World::new(3, 2);
    world.apply(world.plan());
    world.pods();
    world.observed.pods.iter_mut().for_each(|pod| {
        let (cause, detail) = (StartFailureCause::CrashLoop, "exit code 1".to_owned());
        (pod.ready, pod.start_failure) = (false, Some(StartFailure { cause, detail, since: None }));
    });
    assert_eq!((deletions(&world.plan()), entry(&world.plan(), condition::STALLED).0), (vec![], Truth::True));
    world.spec("image", "a/b:1".into());
    world.apply(world.plan());
    assert_eq!(deletions(&world.plan()), [0, 1, 2]);
    world.spec("updateStrategy", json!({ "type": "OnDelete" }));
    world.apply(world.plan());
    assert_eq!((deletions(&world.plan()), entry(&world.plan(), condition::STALLED).0), (vec![], Truth::True));
}

#[test]
fn a_pod_whose_volume_is_on_a_drained_node_is_named_and_can_be_replaced() {
    for (workers, copies) in [(4, 2), (3, 3)] {
        let mut world = World::idle(workers, copies);
        world.break_pod(2, StartFailureCause::Unschedulable, Some("2026-11-21T08:59:30Z"));
        let early = world.plan();
        assert_eq!(
            (entry(&early, condition::STALLED).0, entry(&early, condition::RECONCILING).0),
            (Truth::False, Truth::True)
        );
        assert_eq!(early.requeue.as_secs(), 2, "the grace ends without an event");
        world.break_pod(2, StartFailureCause::Unschedulable, Some("2026-11-21T08:58:00Z"));
        let (stalled, reason, message) = entry(&world.plan(), condition::STALLED);
        assert_eq!((stalled, reason.as_str()), (Truth::True, "PodUnschedulable"));
        let uid = world.observed.pods[2].uid.clone();
        for part in ["words-worker-2", "claim data-words-worker-2", &format!("engram.dev/replace={uid}")] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(!entry(&world.plan(), condition::REPLICATED).2.is_empty());
        world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": uid });
        let actions = world.plan().actions;
        assert!(
            matches!(actions[..], [Action::DeleteClaim { ordinal: 2, .. }, Action::DeletePod { ordinal: 2, .. }]),
            "{actions:?}"
        );
        world.run_until_idle();
        assert_eq!(world.truth(condition::READY), Truth::True);
    }
    // The only replica is never given up.
    let mut world = World::idle(3, 1);
    let uid = world.observed.pods[2].uid.clone();
    world.observed.pods[2].ready = false;
    world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": uid });
    assert!(deletions(&world.plan()).is_empty());
}

#[test]
fn a_claim_without_a_volume_is_named_with_its_storage_class() {
    for (storage, expected) in [
        (json!({ "size": "50Gi" }), "create the default StorageClass"),
        (json!({ "size": "50Gi", "storageClassName": "fast" }), "create StorageClass fast"),
    ] {
        let mut world = World::new(3, 2);
        world.spec("storage", storage);
        world.apply(world.plan());
        world.pods();
        world.observed.pods.iter_mut().for_each(|pod| {
            let detail = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims".to_owned();
            let cause = StartFailureCause::Unschedulable;
            (pod.ready, pod.start_failure) = (false, Some(StartFailure { cause, detail, since: None }));
        });
        let (stalled, reason, message) = entry(&world.plan(), condition::STALLED);
        assert_eq!((stalled, reason.as_str()), (Truth::True, "PodUnschedulable"));
        for part in ["describe pvc data-words-worker-0", expected] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(!message.contains("engram.dev/replace"), "an empty disk does not help: {message}");
    }
}

#[test]
fn a_pending_claim_of_another_storage_class_is_replaced_and_one_with_a_volume_is_not() {
    let mut world = World::new(3, 2);
    world.spec("storage", json!({ "size": "50Gi", "storageClassName": "fast" }));
    world.apply(world.plan());
    world.pods();
    for pod in &mut world.observed.pods {
        let detail = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims".to_owned();
        let cause = StartFailureCause::Unschedulable;
        (pod.ready, pod.start_failure) = (false, Some(StartFailure { cause, detail, since: None }));
    }
    for claim in &mut world.observed.claims {
        (claim.storage_class, claim.is_pending) = (Some("fast".into()), claim.ordinal != 1);
    }
    assert!(deletions(&world.plan()).is_empty(), "the class of the spec may still be created");
    let (_, _, message) = entry(&world.plan(), condition::STALLED);
    let listed =
        "pods words-worker-0 on node n0, words-worker-1 on node n1, words-worker-2 on node n2 cannot start: 0/3";
    assert!(message.starts_with(listed), "one reason is listed once: {message}");

    world.spec("storage", json!({ "size": "50Gi", "storageClassName": "local" }));
    let (_, _, message) = entry(&world.plan(), condition::STALLED);
    assert!(message.contains("create StorageClass fast"), "that of the claim: {message}");
    let orphaned = world.plan();
    assert!(deletions(&orphaned).is_empty(), "the StatefulSet still has the old template: {:?}", orphaned.actions);
    world.apply(orphaned);
    world.apply(world.plan());
    let plan = world.plan();
    assert_eq!(deletions(&plan), [0, 2]);
    let claims = plan.actions.iter().filter(|action| matches!(action, Action::DeleteClaim { .. })).count();
    assert_eq!(claims, 2, "{:?}", plan.actions);
}

#[test]
fn pods_that_the_api_server_refuses_stall_a_new_cluster_with_the_way_out() {
    let mut world = World::new(3, 2);
    world.apply(world.plan());
    world.pods();
    world.observed.pods.retain(|pod| pod.ordinal == 0);
    world.observed.pods[0].ready = false;
    let mut stalled_after = |created: &str| {
        world.observed.set.as_mut().expect("a set").created = Some(created.into());
        entry(&world.plan(), condition::STALLED)
    };
    assert_eq!(stalled_after("2026-11-21T08:59:30Z").0, Truth::False);
    let (stalled, reason, message) = stalled_after("2026-11-21T08:59:00Z");
    assert_eq!((stalled, reason.as_str()), (Truth::True, "PodsNotCreated"));
    for part in ["words-worker-1, words-worker-2 do not exist", "describe statefulset", "annotate statefulset"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // A running cluster whose pod is being replaced is not stalled.
    let mut world = World::idle(3, 2);
    world.observed.set.as_mut().expect("a set").created = Some("2026-11-20T09:00:00Z".into());
    world.observed.pods.retain(|pod| pod.ordinal != 2);
    assert_eq!(entry(&world.plan(), condition::STALLED).0, Truth::False);
}
