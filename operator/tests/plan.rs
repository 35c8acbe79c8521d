//! Property tests of plans in a simulated world, and tests of single decisions.
//!
//! The world simulates the StatefulSet controller, re-replicating workers, and an API server, as values.

use std::collections::BTreeMap;

use engram_api::status::{ClusterPhase, Truth, condition};
use engram_coordinator::{BootstrapProgress, GpuFault};
use engram_memory::Ordinal;
use engram_operator::{
    Action, ClaimView, CoordinatorGoal, MapView, Observation, Offer, PartitionView, Plan, PodView, SetView,
    StartFailure, StartFailureCause, ValidatedCluster, coordinator_goal, plan, validate,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const PARTITIONS: u32 = 8;
/// Cluster id derived from the object's UID.
const CLUSTER_ID: &str = "0f6c1d528a534a0a9d1e2f8f5f0f7a11";
const NOW: &str = "2026-11-21T09:00:00Z";

struct World {
    object: Value,
    observed: Observation,
    offer: Offer,
    pods_made: u32,
}

impl World {
    fn new(workers: u32, copies: u32) -> Self {
        let object = json!({
            "apiVersion": "engram.dev/v1alpha1",
            "kind": "LearnerCluster",
            "metadata": {
                "name": "words", "namespace": "research", "uid": "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11", "generation": 1,
                "annotations": {},
            },
            "spec": { "workers": workers, "replicationFactor": copies, "gpu": { "mode": "Disabled" } },
        });
        Self { object, observed: Observation::default(), offer: Offer::new("registry/worker", "1"), pods_made: 0 }
    }

    /// An idle world.
    fn idle(workers: u32, copies: u32) -> Self {
        let mut world = Self::new(workers, copies);
        world.run_until_idle();
        world
    }

    fn cluster(&self) -> ValidatedCluster {
        validate(&self.object).unwrap_or_else(|refused| panic!("{refused}"))
    }

    fn plan(&self) -> Plan {
        let plan = plan(&self.cluster(), &self.observed, &self.offer, NOW);
        assert_explained(&plan);
        plan
    }

    fn spec(&mut self, field: &str, value: Value) {
        self.object["spec"][field] = value;
        let generation = self.object["metadata"]["generation"].as_i64().expect("a number");
        self.object["metadata"]["generation"] = (generation + 1).into();
    }

    fn map(&mut self) -> &mut MapView {
        self.observed.map.as_mut().expect("a map")
    }

    /// Applies the plan, and checks after each step that no partition has lost more than one replica.
    fn apply(&mut self, plan: Plan) {
        for object in plan.objects {
            let same = |found: &Value| {
                found["kind"] == object["kind"] && found["metadata"]["name"] == object["metadata"]["name"]
            };
            if object["kind"] == "StatefulSet" {
                let replicas = object["spec"]["replicas"].as_u64().expect("a number") as u32;
                let update_revision = object["spec"]["template"].to_string();
                self.observed.set = Some(SetView { replicas, update_revision, created: None });
            }
            let mut object = object.clone();
            object["metadata"]["uid"] = "some".into();
            self.observed.objects.retain(|found| !same(found));
            self.observed.objects.push(object);
        }
        for action in plan.actions {
            self.act(action);
            self.check();
        }
        self.observed.status = plan.status;
    }

    fn act(&mut self, action: Action) {
        let workers = self.object["spec"]["workers"].as_u64().expect("a number") as u32;
        match action {
            Action::DeleteObject { kind, name, .. } => {
                self.observed.objects.retain(|found| found["kind"] != *kind || found["metadata"]["name"] != *name);
            }
            Action::OrphanSet { .. } => {
                self.observed.objects.retain(|found| found["kind"] != "StatefulSet");
                self.observed.set = None;
            }
            Action::Drain { ordinal, evacuate, .. } => {
                let live: Vec<u32> = self.observed.pods.iter().map(|pod| pod.ordinal).collect();
                for partition in &mut self.map().partitions {
                    let target = (0..workers)
                        .find(|other| *other != ordinal && live.contains(other) && !partition.in_sync.contains(other));
                    match (evacuate, target) {
                        (true, Some(target)) => {
                            partition
                                .in_sync
                                .iter_mut()
                                .filter(|member| **member == ordinal)
                                .for_each(|it| *it = target);
                        }
                        _ => partition.in_sync.sort_by_key(|member| *member == ordinal),
                    }
                    if partition.primary == ordinal {
                        partition.primary = partition.in_sync[0];
                    }
                }
            }
            Action::DeletePod { ordinal, uid, .. } => {
                self.observed.pods.retain(|pod| pod.uid != uid);
                for partition in &mut self.map().partitions {
                    if partition.in_sync.len() > 1 {
                        assert_ne!(partition.primary, ordinal, "it was drained");
                        partition.in_sync.retain(|member| *member != ordinal);
                    }
                }
            }
            Action::DeleteClaim { ordinal, uid } => {
                for partition in self.map().partitions.iter().filter(|it| it.in_sync.contains(&ordinal)) {
                    assert!(
                        partition.in_sync.len() > 1 && partition.primary != ordinal,
                        "its data is replicated elsewhere"
                    );
                }
                self.observed.claims.retain(|claim| claim.uid != uid);
            }
            Action::GrowClaim { ordinal, size_bytes, .. } => {
                self.observed.claims.iter_mut().filter(|claim| claim.ordinal == ordinal).for_each(|claim| {
                    claim.size_bytes = size_bytes;
                });
            }
            Action::MarkSuspended { suspended, .. } => self.map().suspended = suspended,
            Action::SetMapOwner { is_owned, .. } => {
                let uid = self.object["metadata"]["uid"].as_str().expect("a UID").to_owned();
                self.map().owner = is_owned.then_some(uid);
            }
            Action::ClearReplaceAnnotation => self.object["metadata"]["annotations"] = json!({}),
        }
    }

    fn check(&self) {
        let copies = self.object["spec"]["replicationFactor"].as_u64().expect("a number") as usize;
        for partition in self.observed.map.iter().flat_map(|map| &map.partitions) {
            assert!(partition.in_sync.len() >= copies.saturating_sub(1).max(1), "{partition:?}");
            assert!(partition.in_sync.contains(&partition.primary), "{partition:?}");
        }
    }

    /// Simulates the StatefulSet controller: creates and deletes pods.
    fn pods(&mut self) {
        let Some(set) = self.observed.set.clone() else { return };
        self.observed.pods.retain(|pod| pod.ordinal < set.replicas);
        let id = CLUSTER_ID.to_owned();
        let size = self.observed.objects.iter().find(|object| object["kind"] == "StatefulSet").map(|object| {
            object["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"].clone()
        });
        let size: engram_api::Size = serde_json::from_value(size.expect("a size")).expect("a size");
        for ordinal in 0..set.replicas {
            if !self.observed.claims.iter().any(|claim| claim.ordinal == ordinal) {
                let uid = format!("claim-{ordinal}-{}", self.pods_made);
                self.observed.claims.push(ClaimView {
                    ordinal,
                    uid,
                    size_bytes: size.as_bytes(),
                    cluster_id: Some(id.clone()),
                    ..ClaimView::default()
                });
            }
            if !self.observed.pods.iter().any(|pod| pod.ordinal == ordinal) {
                self.pods_made += 1;
                self.observed.pods.push(PodView {
                    ordinal,
                    uid: format!("pod-{}", self.pods_made),
                    revision: set.update_revision.clone(),
                    ready: true,
                    node: Some(format!("n{ordinal}")),
                    ..PodView::default()
                });
            }
        }
    }

    /// Simulates the workers: re-replicates partitions.
    fn re_replicate(&mut self) {
        let copies = self.object["spec"]["replicationFactor"].as_u64().expect("a number") as usize;
        let mut live: Vec<u32> = self.observed.pods.iter().map(|pod| pod.ordinal).collect();
        live.sort_unstable();
        if live.is_empty() {
            return;
        }
        let cluster_id = CLUSTER_ID.to_owned();
        let map = self.observed.map.get_or_insert_with(|| MapView {
            resource_version: "1".into(),
            cluster_id,
            partitions: (0..PARTITIONS)
                .map(|id| {
                    let primary = live[id as usize % live.len()];
                    PartitionView { primary, in_sync: vec![primary], learners: Vec::new(), activated: true }
                })
                .collect(),
            ..MapView::default()
        });
        // Every worker has its first store; numbers are in the order of ordinals.
        map.stores.extend(live.iter().map(|ordinal| (*ordinal, ordinal + 10)));
        for partition in &mut map.partitions {
            for ordinal in &live {
                if partition.in_sync.len() < copies && !partition.in_sync.contains(ordinal) {
                    partition.in_sync.push(*ordinal);
                }
            }
        }
    }

    /// Applies plans until nothing is left to do.
    fn run_until_idle(&mut self) {
        for _ in 0..300 {
            let plan = self.plan();
            let done = plan.objects.is_empty() && plan.actions.is_empty() && plan.status == self.observed.status;
            self.apply(plan);
            if done {
                return;
            }
            self.pods();
            self.re_replicate();
        }
        panic!("not idle after 300 plans: {:?}", self.plan());
    }

    fn truth(&self, kind: &str) -> Truth {
        self.observed.status.conditions.iter().find(|it| it.kind == kind).expect("the condition").status
    }
}

#[derive(Clone, Debug)]
enum Event {
    Plan,
    Pods,
    Copies,
    Image(u8),
    Workers(u32),
    Replace(usize),
    Grow(u32),
    Suspend(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => Just(Event::Plan),
        3 => Just(Event::Pods),
        2 => Just(Event::Copies),
        1 => any::<u8>().prop_map(Event::Image),
        1 => (3..7_u32).prop_map(Event::Workers),
        1 => (0..7_usize).prop_map(Event::Replace),
        1 => (50..60_u32).prop_map(Event::Grow),
        1 => any::<bool>().prop_map(Event::Suspend),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn partitions_lose_at_most_one_replica_and_the_cluster_becomes_idle(
        workers in 3..7_u32,
        copies in 1..4_u32,
        events in proptest::collection::vec(event(), 0..40),
    ) {
        let mut world = World::idle(workers, copies);
        let mut size = 50;
        for event in events {
            match event {
                Event::Plan => {
                    let plan = world.plan();
                    assert_explained(&plan);
                    let taken = plan.actions.iter().filter(|action| matches!(action, Action::DeletePod { .. })).count();
                    prop_assert!(taken <= 1, "one worker at a time");
                    world.apply(plan);
                }
                Event::Pods => world.pods(),
                Event::Copies => world.re_replicate(),
                Event::Image(tag) => world.spec("image", format!("a/b:{tag}").into()),
                Event::Workers(workers) => world.spec("workers", workers.into()),
                Event::Replace(index) => {
                    if let Some(pod) = world.observed.pods.get(index) {
                        world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": pod.uid });
                    }
                }
                Event::Grow(to) => {
                    size = size.max(to);
                    world.spec("storage", json!({ "size": format!("{size}Gi") }));
                }
                Event::Suspend(suspend) => world.spec("suspend", suspend.into()),
            }
            world.check();
        }
        world.spec("suspend", false.into());
        world.run_until_idle();
        let cluster = world.cluster();
        let set = world.observed.set.clone().expect("a set");
        prop_assert_eq!(world.observed.pods.len(), cluster.spec.workers as usize);
        prop_assert!(world.observed.pods.iter().all(|pod| pod.revision == set.update_revision));
        prop_assert!(world.observed.claims.iter().all(|claim| claim.ordinal < cluster.spec.workers));
        prop_assert_eq!(world.truth(condition::READY), Truth::True);
        prop_assert_eq!(world.plan().requeue.as_secs(), 60);
    }
}

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
fn gpus_are_decided_once_per_generation() {
    let mut world = World::new(3, 2);
    world.spec("gpu", json!({ "mode": "Auto" }));
    world.observed.gpu_offered = Some(false);
    world.run_until_idle();
    world.observed.gpu_offered = Some(true);
    assert!(world.plan().objects.is_empty(), "a new node moves no pod");
    world.spec("gpu", json!({ "mode": "Auto", "count": 2 }));
    let requests_gpus =
        world.plan().objects.iter().any(|object| object.to_string().contains(r#""nvidia.com/gpu":"2""#));
    assert!(requests_gpus);
    let reasons: BTreeMap<_, _> = world.plan().status.conditions.into_iter().map(|it| (it.kind, it.reason)).collect();
    assert_eq!(reasons[condition::GPU_AVAILABLE], "GpuNodesAvailable");
}

#[test]
fn an_unused_gpu_is_reported_and_moves_no_pod() {
    let of = |world: &World| {
        let conditions = world.plan().status.conditions;
        conditions.into_iter().find(|it| it.kind == condition::GPU_AVAILABLE).expect("the condition")
    };
    let fault = |was_in_use: bool, why: &str| GpuFault { was_in_use, reason: why.into() };
    let mut world = World::new(3, 2);
    world.spec("gpu", json!({ "mode": "Auto" }));
    world.observed.gpu_problems = [(1, fault(false, "there is no CUDA driver"))].into();
    world.observed.gpu_offered = Some(false);
    assert_eq!(of(&world).reason, "NoGpuNodes", "its pod has no GPU");
    world.observed.gpu_offered = Some(true);
    world.run_until_idle();
    let condition = of(&world);
    assert_eq!(
        (condition.status, condition.reason.as_str()),
        (Truth::True, "GpuNodesAvailable"),
        "its pod has none yet"
    );
    world.observed.pods.iter_mut().for_each(|pod| pod.has_devices = true);
    let condition = of(&world);
    assert_eq!((condition.status, condition.reason.as_str()), (Truth::False, "GpuUnusable"));
    assert!(condition.message.starts_with("worker 1: there is no CUDA driver; "), "{}", condition.message);
    world.observed.gpu_problems.insert(2, fault(true, "H100 failed"));
    let condition = of(&world);
    assert_eq!(condition.reason, "GpuFailed");
    assert!(condition.message.contains("; worker 2: H100 failed"), "{}", condition.message);
    assert!(world.plan().objects.is_empty(), "pods keep their GPUs");
    world.observed.gpu_problems.clear();
    assert_eq!((of(&world).status, of(&world).reason.as_str()), (Truth::True, "GpuNodesAvailable"));

    let mut world = World::new(9, 2);
    world.spec("gpu", json!({ "mode": "Required" }));
    world.run_until_idle();
    world.observed.pods.iter_mut().for_each(|pod| pod.has_devices = true);
    world.observed.gpu_problems = (0..9).map(|ordinal| (ordinal, fault(true, "lost"))).collect();
    assert!(of(&world).message.contains("worker 3: lost; and 5 more; "), "{}", of(&world).message);
    world.spec("gpu", json!({ "mode": "Disabled" }));
    assert_eq!(of(&world).reason, "Disabled");
}

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

/// Asserts that every condition that is not in its good state says why.
fn assert_explained(plan: &Plan) {
    for entry in &plan.status.conditions {
        let is_good = match entry.kind.as_str() {
            condition::RECONCILING | condition::STALLED | condition::UPDATE_AVAILABLE => entry.status == Truth::False,
            // Neither state is a fault.
            condition::SUSPENDED => true,
            _ => entry.status == Truth::True,
        };
        let is_explained = !entry.message.is_empty() && !entry.message.ends_with([' ', ';']);
        assert!(is_good || is_explained, "{entry:?}");
    }
}

fn entry(plan: &Plan, kind: &str) -> (Truth, String, String) {
    assert_explained(plan);
    let entry = plan.status.conditions.iter().find(|entry| entry.kind == kind).expect("the condition");
    (entry.status, entry.reason.clone(), entry.message.clone())
}

fn deletions(plan: &Plan) -> Vec<u32> {
    let of_pods = plan.actions.iter().filter_map(|action| match action {
        Action::DeletePod { ordinal, .. } => Some(*ordinal),
        _ => None,
    });
    of_pods.collect()
}

impl World {
    /// Lets a pod of the newest template fail to start.
    fn break_pod(&mut self, ordinal: usize, cause: StartFailureCause, since: Option<&str>) {
        let failure =
            StartFailure { cause, detail: "ImagePullBackOff: not found".into(), since: since.map(str::to_owned) };
        let revision = self.observed.set.as_ref().expect("a set").update_revision.clone();
        let pod = &mut self.observed.pods[ordinal];
        (pod.ready, pod.revision, pod.start_failure) = (false, revision, Some(failure));
        for partition in &mut self.map().partitions {
            partition.in_sync.retain(|member| *member != ordinal as u32);
            partition.primary = partition.in_sync[0];
        }
    }
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
    let objects: Vec<Value> = world.plan().objects.iter().map(|object| object["kind"].clone()).collect();
    assert_eq!(objects, ["Service", "StatefulSet"]);
}
