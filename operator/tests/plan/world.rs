//! A simulated world: the StatefulSet controller, re-replicating workers and an API server, as values.

use engram_api::status::{Truth, condition};
use engram_operator::{
    Action, ApiObject, ClaimView, ClusterObject, MapView, Observation, Offer, PartitionView, Plan, PodView, SetView,
    StartFailure, StartFailureCause, ValidatedCluster, plan, validate,
};
use serde_json::{Value, json};

const PARTITIONS: u32 = 8;
/// Cluster id derived from the object's UID.
pub(crate) const CLUSTER_ID: &str = "0f6c1d528a534a0a9d1e2f8f5f0f7a11";
pub(crate) const NOW: &str = "2026-11-21T09:00:00Z";

fn is_set(object: &ApiObject) -> bool {
    object.kind().name() == "StatefulSet"
}

pub(crate) struct World {
    pub(crate) object: Value,
    pub(crate) observed: Observation,
    pub(crate) offer: Offer,
    pods_made: u32,
}

impl World {
    pub(crate) fn new(workers: u32, copies: u32) -> Self {
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
    pub(crate) fn idle(workers: u32, copies: u32) -> Self {
        let mut world = Self::new(workers, copies);
        world.run_until_idle();
        world
    }

    pub(crate) fn cluster(&self) -> ValidatedCluster {
        validate(&serde_json::from_value::<ClusterObject>(self.object.clone()).expect("an object"))
            .unwrap_or_else(|refused| panic!("{refused}"))
    }

    pub(crate) fn plan(&self) -> Plan {
        let plan = plan(&self.cluster(), &self.observed, &self.offer, NOW);
        assert_explained(&plan);
        plan
    }

    pub(crate) fn spec(&mut self, field: &str, value: Value) {
        self.object["spec"][field] = value;
        let generation = self.object["metadata"]["generation"].as_i64().expect("a number");
        self.object["metadata"]["generation"] = (generation + 1).into();
    }

    pub(crate) fn map(&mut self) -> &mut MapView {
        self.observed.map.as_mut().expect("a map")
    }

    /// Applies the plan, and checks after each step that no partition has lost more than one replica.
    pub(crate) fn apply(&mut self, plan: Plan) {
        for object in plan.objects {
            let mut content = object.content().clone();
            if is_set(&object) {
                let replicas = content["spec"]["replicas"].as_u64().expect("a number") as u32;
                let update_revision = content["spec"]["template"].to_string();
                self.observed.set = Some(SetView { replicas, update_revision, created: None });
            }
            content["metadata"]["uid"] = "some".into();
            self.observed.objects.retain(|found| !found.is_same(&object));
            self.observed.objects.push(ApiObject::new(object.kind(), content));
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
                self.observed.objects.retain(|found| found.kind().name() != kind || found.name() != name);
            }
            Action::OrphanSet { .. } => {
                self.observed.objects.retain(|found| !is_set(found));
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

    pub(crate) fn check(&self) {
        let copies = self.object["spec"]["replicationFactor"].as_u64().expect("a number") as usize;
        for partition in self.observed.map.iter().flat_map(|map| &map.partitions) {
            assert!(partition.in_sync.len() >= copies.saturating_sub(1).max(1), "{partition:?}");
            assert!(partition.in_sync.contains(&partition.primary), "{partition:?}");
        }
    }

    /// Simulates the StatefulSet controller: creates and deletes pods.
    pub(crate) fn pods(&mut self) {
        let Some(set) = self.observed.set.clone() else { return };
        self.observed.pods.retain(|pod| pod.ordinal < set.replicas);
        let id = CLUSTER_ID.to_owned();
        let size = self.observed.objects.iter().find(|object| is_set(object)).map(|set| {
            set.content()["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"].clone()
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
    pub(crate) fn re_replicate(&mut self) {
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
    pub(crate) fn run_until_idle(&mut self) {
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

    pub(crate) fn truth(&self, kind: &str) -> Truth {
        self.observed.status.conditions.iter().find(|it| it.kind == kind).expect("the condition").status
    }

    /// Lets a pod of the newest template fail to start.
    pub(crate) fn break_pod(&mut self, ordinal: usize, cause: StartFailureCause, since: Option<&str>) {
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

/// Asserts that every condition that is not in its good state says why.
pub(crate) fn assert_explained(plan: &Plan) {
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

pub(crate) fn entry(plan: &Plan, kind: &str) -> (Truth, String, String) {
    assert_explained(plan);
    let entry = plan.status.conditions.iter().find(|entry| entry.kind == kind).expect("the condition");
    (entry.status, entry.reason.clone(), entry.message.clone())
}

pub(crate) fn deletions(plan: &Plan) -> Vec<u32> {
    let of_pods = plan.actions.iter().filter_map(|action| match action {
        Action::DeletePod { ordinal, .. } => Some(*ordinal),
        _ => None,
    });
    of_pods.collect()
}
