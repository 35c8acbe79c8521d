//! The reconcile plan: computes the next steps from a cluster's spec and its observed state.
//!
//! One disruptive operation takes place at a time, in this order: replacing the worker of a lost node, replacing a worker on request,
//! scaling down, rolling update. Each waits until every partition has all its replicas in sync. Replacing pods that cannot start with an
//! outdated template, or whose claims wait for an outdated storage class, disrupts nothing and waits for nothing.

pub mod lifecycle;
pub(crate) mod revision;
pub(crate) mod safety;

use std::collections::BTreeSet;
use std::time::Duration;

use engram_api::kubernetes_only::UpdateType;
use engram_api::status::LearnerClusterStatus;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use crate::cluster::build::{self, Inputs, PublishedSettings};
use crate::cluster::observe::observation::{ClaimView, MapView, Observation, PodView};
use crate::cluster::status::gpu::gpu;
use crate::cluster::status::{self as cluster_status, PlanSummary};
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::{ApiObject, covers, to_json};
use crate::kube::resource_kinds::SET;
use crate::names::REPLACE;
use revision::Offer;

/// Requeue delay of a cluster that is changing.
const CHANGING_REQUEUE: Duration = Duration::from_secs(2);
/// Requeue delay of an idle cluster, in case a watch event was missed.
const IDLE_REQUEUE: Duration = Duration::from_secs(60);

/// A plan that was not applied yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prepared;

/// Next steps for a cluster. Only one that was applied becomes a status.
#[derive(Clone, Debug)]
pub struct Plan<S = Prepared> {
    /// Objects to apply, in order: missing ones and those that differ.
    pub objects: Vec<ApiObject>,
    /// Further actions, in order, after the objects.
    pub actions: Vec<Action>,
    /// New status of the cluster.
    pub status: LearnerClusterStatus,
    /// Requeue delay.
    pub requeue: Duration,
    /// [`Prepared`], or the result of its application.
    pub stage: S,
}

impl<S> Plan<S> {
    /// Returns whether applying the plan changes an object.
    pub fn writes(&self) -> bool {
        !self.objects.is_empty() || self.actions.iter().any(|action| !matches!(action, Action::Drain { .. }))
    }

    pub(crate) fn with_stage<T>(self, stage: T) -> Plan<T> {
        let Self { objects, actions, status, requeue, .. } = self;
        Plan { objects, actions, status, requeue, stage }
    }
}

impl Plan {
    /// Returns a plan that changes nothing.
    pub(crate) const fn unchanged(status: LearnerClusterStatus, requeue: Duration) -> Self {
        Self { objects: Vec::new(), actions: Vec::new(), status, requeue, stage: Prepared }
    }

    /// Applies an object before everything else.
    pub(crate) fn apply_first(&mut self, object: Option<&ApiObject>) {
        self.objects.splice(0..0, object.cloned());
    }
}

/// An action on exactly the observed object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Deletes an obsolete object of the cluster.
    DeleteObject {
        /// Kind of the object.
        kind: String,
        /// Name of the object.
        name: String,
        /// UID of the object.
        uid: String,
    },
    /// Deletes the StatefulSet and orphans its pods, since its claim template is immutable. The next plan recreates it.
    OrphanSet {
        /// UID of the StatefulSet.
        uid: String,
    },
    /// Transfers a worker's primaries to other workers, and with `evacuate` its replicas too.
    Drain {
        /// Ordinal of the worker.
        ordinal: u32,
        /// UID of its pod.
        uid: String,
        /// Whether its replicas are moved, too.
        evacuate: bool,
    },
    /// Deletes a pod; the StatefulSet recreates it.
    DeletePod {
        /// Ordinal of the worker.
        ordinal: u32,
        /// UID of the pod.
        uid: String,
        /// Whether to skip the grace period: only for a pod of a lost node.
        force: bool,
    },
    /// Deletes a claim and its data.
    DeleteClaim {
        /// Ordinal of the worker.
        ordinal: u32,
        /// UID of the claim.
        uid: String,
    },
    /// Expands a claim.
    GrowClaim {
        /// Ordinal of the worker.
        ordinal: u32,
        /// UID of the claim.
        uid: String,
        /// New size in bytes.
        size_bytes: u64,
    },
    /// Sets or clears the map's suspended flag.
    MarkSuspended {
        /// New value of the flag.
        suspended: bool,
        /// Resource version of the observed map.
        resource_version: String,
    },
    /// Sets or clears the map's owner, so that the map is deleted with the cluster exactly if its data is.
    SetMapOwner {
        /// UID of the map.
        uid: String,
        /// Whether the cluster owns the map.
        is_owned: bool,
    },
    /// Removes the annotation that requested the replacement of a pod.
    ClearReplaceAnnotation,
}

/// Computes the plan for `cluster`. `now` (RFC 3339) is the transition time of changed conditions.
pub fn plan(cluster: &ValidatedCluster, observed: &Observation, offer: &Offer, now: &str) -> Plan {
    if let Some(stalled) = safety::stalled(cluster, observed) {
        let status = cluster_status::stalled_status(cluster, observed, &stalled, now);
        return Plan::unchanged(status, IDLE_REQUEUE);
    }
    let gpu = gpu(cluster, observed);
    let on_gpu = gpu.devices > 0 || cluster.claims_gpu();
    let (worker, update) = revision::choose(cluster, observed.status.worker.as_ref(), offer, on_gpu);
    let copies = cluster.spec.replication_factor;
    let has_copies = observed.map.as_ref().is_some_and(|map| has_copies(map, copies));
    let inputs = Inputs {
        cluster_id: safety::cluster_id(cluster, observed),
        worker,
        replicas: replicas(cluster, observed),
        max_unavailable: has_copies.into(),
        gpus: gpu.devices,
        coordinators: offer.coordinators.clone(),
        pull_secrets: offer.pull_secrets.clone(),
        traces: offer.traces.clone(),
        published: offer.published.clone(),
        bootstrap_workers: bootstrap_workers(cluster, observed),
    };
    let mut step = Step { cluster, observed, inputs: &inputs, objects: Vec::new(), actions: Vec::new() };
    if !cluster.is_paused() {
        step.objects();
        step.map_owner();
    }
    step.suspension();
    let replacing = step.replace_lost();
    if !cluster.is_paused() && !replacing {
        let _ = step.replace_pending_claims()
            || step.replace_unstartable()
            || step.replace_requested()
            || step.shrink()
            || step.roll_out();
    }
    let Step { objects, actions, .. } = step;
    let changing = !objects.is_empty() || !actions.is_empty();
    let summary = PlanSummary { inputs: &inputs, update: update.as_ref(), gpu: &gpu, is_changing: changing };
    let mut status = cluster_status::status(cluster, observed, &summary, now);
    if let Some(workers) = &mut status.workers {
        workers.draining = draining(observed, &actions);
    }
    let requeue = if changing || !cluster_status::is_idle(&status) { CHANGING_REQUEUE } else { IDLE_REQUEUE };
    Plan { objects, actions, status, requeue, stage: Prepared }
}

/// Returns the number of workers that are being drained: whose replicas or primaries the plan moves, or whose pod terminates.
fn draining(observed: &Observation, actions: &[Action]) -> i32 {
    let moving = actions.iter().filter_map(|action| match action {
        Action::Drain { ordinal, .. } => Some(*ordinal),
        _ => None,
    });
    let terminating = observed.pods.iter().filter(|pod| pod.terminating).map(|pod| pod.ordinal);
    let ordinals: BTreeSet<u32> = moving.chain(terminating).collect();
    i32::try_from(ordinals.len()).unwrap_or(i32::MAX)
}

/// Returns the number of pods: the desired number, or more while workers above it hold replicas.
fn replicas(cluster: &ValidatedCluster, observed: &Observation) -> u32 {
    let desired = cluster.spec.workers;
    // While the StatefulSet is recreated, its orphaned pods count.
    let orphans = || observed.pods.iter().map(|pod| pod.ordinal + 1).max();
    let now = observed.set.as_ref().map(|set| set.replicas).or_else(orphans);
    match &observed.map {
        Some(map) if cluster.is_suspended() && map.suspended => 0,
        _ if cluster.is_suspended() => now.unwrap_or(0),
        Some(map) => desired.max(map.highest_replica_holder().map_or(0, |ordinal| ordinal + 1)),
        None => desired.max(now.unwrap_or(0)),
    }
}

/// Returns the number of workers that bootstrap the cluster. It must not change while the workers load their shares of the snapshot, or
/// some partitions would not be loaded.
fn bootstrap_workers(cluster: &ValidatedCluster, observed: &Observation) -> u32 {
    let published = PublishedSettings::find(&observed.objects).and_then(|settings| settings.bootstrap_workers);
    published.unwrap_or(cluster.spec.workers)
}

/// A plan under construction.
struct Step<'a> {
    cluster: &'a ValidatedCluster,
    observed: &'a Observation,
    inputs: &'a Inputs,
    objects: Vec<ApiObject>,
    actions: Vec<Action>,
}

impl Step<'_> {
    /// Applies missing and changed objects, deletes obsolete ones, and expands claims.
    fn objects(&mut self) {
        let desired = build::objects(self.cluster, self.inputs);
        let size =
            self.cluster.spec.storage.as_ref().and_then(|storage| storage.size).map_or(0, |size| size.as_bytes());
        let growing: Vec<_> = self.observed.claims.iter().filter(|claim| claim.size_bytes < size).collect();
        for claim in &growing {
            let (ordinal, uid) = (claim.ordinal, claim.uid.clone());
            self.actions.push(Action::GrowClaim { ordinal, uid, size_bytes: size });
        }
        for object in &desired {
            let found = self.observed.objects.iter().find(|found| found.is_same(object));
            match found {
                Some(found) if found.covers(object) && has_same_claim_templates(found, object) => {}
                // Claim templates are immutable. Claims grow first, so that a crash in between does not lose the expansion.
                Some(found) if !has_same_claim_templates(found, object) => {
                    if growing.is_empty() {
                        self.actions.push(Action::OrphanSet { uid: found.uid().to_owned() });
                    }
                }
                _ => self.objects.push(object.clone()),
            }
        }
        let obsolete = self.observed.objects.iter().filter(|found| !desired.iter().any(|object| found.is_same(object)));
        self.actions.extend(obsolete.map(|found| Action::DeleteObject {
            kind: found.kind().name().to_owned(),
            name: found.name().to_owned(),
            uid: found.uid().to_owned(),
        }));
    }

    /// Sets the map's owner according to the retain policy, which may have changed since the map was created.
    fn map_owner(&mut self) {
        let Some(map) = &self.observed.map else { return };
        let is_owned = self.cluster.is_data_deleted_with_it();
        if map.owner.is_some() != is_owned {
            self.actions.push(Action::SetMapOwner { uid: map.uid.clone(), is_owned });
        }
    }

    /// Sets the map's suspended flag once all replicas are in sync, before pods are deleted; clears it after they are back.
    fn suspension(&mut self) {
        let Some(map) = &self.observed.map else { return };
        let suspended = self.cluster.is_suspended();
        let may = if suspended { map.is_full(self.cluster.spec.replication_factor) } else { self.all_ready() };
        if map.suspended != suspended && may {
            let resource_version = map.resource_version.clone();
            self.actions.push(Action::MarkSuspended { suspended, resource_version });
        }
    }

    fn replace_lost(&mut self) -> bool {
        let lost = safety::lost(self.cluster, self.observed);
        for pod in &lost {
            self.discard(pod, true);
        }
        !lost.is_empty()
    }

    /// Replaces the claims that have no volume yet and ask for another storage class than the spec, with the pods that wait for them.
    fn replace_pending_claims(&mut self) -> bool {
        let class = self.cluster.spec.storage.as_ref().and_then(|storage| storage.storage_class_name.as_deref());
        let set_changes = self.objects.iter().any(|object| object.kind() == SET)
            || self.actions.iter().any(|action| matches!(action, Action::OrphanSet { .. }));
        let (Some(class), Some(_), false) = (class, &self.observed.set, set_changes) else { return false };
        let is_outdated =
            |claim: &&ClaimView| claim.is_pending && claim.storage_class.as_deref().is_some_and(|found| found != class);
        let pods = &self.observed.pods;
        let outdated = self.observed.claims.iter().filter(is_outdated);
        let waiting: Vec<&PodView> =
            outdated.filter_map(|claim| pods.iter().find(|pod| pod.ordinal == claim.ordinal && !pod.ready)).collect();
        for pod in &waiting {
            self.discard(pod, false);
        }
        !waiting.is_empty()
    }

    /// Replaces the pods of an outdated template that cannot start, map or not: they serve nothing and would keep the update from starting.
    fn replace_unstartable(&mut self) -> bool {
        let Some(set) = self.observed.set.as_ref().filter(|_| self.may_update()) else { return false };
        let is_stuck = |pod: &&PodView| {
            pod.start_failure.is_some() && !pod.ready && !pod.terminating && pod.revision != set.update_revision
        };
        let actions = self.observed.pods.iter().filter(is_stuck).map(|pod| Action::DeletePod {
            ordinal: pod.ordinal,
            uid: pod.uid.clone(),
            force: false,
        });
        let before = self.actions.len();
        self.actions.extend(actions);
        self.actions.len() > before
    }

    /// Returns whether the operator may replace pods of an outdated template: the newest revision is known and final.
    fn may_update(&self) -> bool {
        let strategy = self.cluster.spec.update_strategy.as_ref().and_then(|strategy| strategy.strategy);
        let is_known = self.observed.set.as_ref().is_some_and(|set| !set.update_revision.is_empty());
        let template_changes = self.objects.iter().any(|object| object.kind() == SET);
        strategy != Some(UpdateType::OnDelete) && is_known && !template_changes
    }

    /// Replaces the pod that an annotation names; returns whether that is in progress.
    fn replace_requested(&mut self) -> bool {
        let Some(uid) = self.cluster.annotations.get(REPLACE) else { return false };
        let Some(pod) = self.observed.pods.iter().find(|pod| pod.uid == *uid) else {
            self.actions.push(Action::ClearReplaceAnnotation);
            return false;
        };
        let Some(map) = &self.observed.map else { return true };
        let copies = self.cluster.spec.replication_factor;
        // If every worker has a replica of every partition, none can take over this worker's replicas: they are re-replicated afterwards.
        let evacuate = copies == 1 || self.cluster.spec.workers > copies;
        let holds = if evacuate { map.copies(pod.ordinal) } else { map.primaries(pod.ordinal) };
        // A pod that is not running, as one whose volume is on a drained node, gives up nothing.
        if !pod.ready && !pod.terminating && map.is_served_without(pod.ordinal) {
            self.discard(pod, false);
        } else if holds > 0 || (!evacuate && !map.is_full(copies)) {
            self.drain(pod, evacuate);
        } else if !pod.terminating && map.is_full(copies) {
            self.discard(pod, false);
        }
        true
    }

    /// Evacuates the highest surplus worker; returns whether scaling down is in progress.
    fn shrink(&mut self) -> bool {
        let (workers, copies) = (self.cluster.spec.workers, self.cluster.spec.replication_factor);
        let Some(map) = &self.observed.map else { return false };
        if self.cluster.is_suspended() || map.suspended {
            return false;
        }
        if self.inputs.replicas > workers {
            let last = self.observed.pods.iter().find(|pod| pod.ordinal == self.inputs.replicas - 1);
            if let Some(pod) = last {
                self.drain(pod, true);
            }
            return true;
        }
        // Claims of removed workers are deleted once all partitions are fully replicated.
        let mut in_progress = false;
        for claim in self.observed.claims.iter().filter(|claim| claim.ordinal >= workers) {
            in_progress = true;
            let has_pod = self.observed.pods.iter().any(|pod| pod.ordinal == claim.ordinal);
            if !has_pod && map.copies(claim.ordinal) == 0 && map.is_full(copies) {
                self.actions.push(Action::DeleteClaim { ordinal: claim.ordinal, uid: claim.uid.clone() });
            }
        }
        in_progress
    }

    /// Restarts one worker with an outdated template: the one with the fewest primaries, after transferring them.
    fn roll_out(&mut self) -> bool {
        let (Some(map), Some(set)) = (&self.observed.map, &self.observed.set) else { return false };
        if !self.may_update() {
            return false;
        }
        let copies = self.cluster.spec.replication_factor;
        if !self.all_ready() || !has_copies(map, copies) || map.suspended {
            return false;
        }
        let load = |pod: &&PodView| (map.primaries(pod.ordinal), map.copies(pod.ordinal), pod.ordinal);
        let old = self.observed.pods.iter().filter(|pod| pod.revision != set.update_revision);
        let Some(pod) = old.min_by_key(load) else { return false };
        // A transfer deactivates a partition for a moment, so the worker stays drained until it restarts, or its primaries would move back.
        // With a single replica there is no transfer; the pod returns with its disk.
        if copies > 1 && (map.primaries(pod.ordinal) > 0 || !map.is_full(copies)) {
            self.drain(pod, false);
        } else if map.is_full(copies) {
            self.actions.push(Action::DeletePod { ordinal: pod.ordinal, uid: pod.uid.clone(), force: false });
        }
        true
    }

    fn drain(&mut self, pod: &PodView, evacuate: bool) {
        self.actions.push(Action::Drain { ordinal: pod.ordinal, uid: pod.uid.clone(), evacuate });
    }

    /// Deletes a pod and its disk. The claim comes first: it is removed with the pod, and both are recreated together.
    fn discard(&mut self, pod: &PodView, force: bool) {
        if let Some(claim) = self.observed.claims.iter().find(|claim| claim.ordinal == pod.ordinal) {
            self.actions.push(Action::DeleteClaim { ordinal: pod.ordinal, uid: claim.uid.clone() });
        }
        self.actions.push(Action::DeletePod { ordinal: pod.ordinal, uid: pod.uid.clone(), force });
    }

    /// Returns whether every desired pod is ready and not terminating.
    fn all_ready(&self) -> bool {
        let is_up =
            |ordinal: u32| self.observed.pods.iter().any(|pod| pod.ordinal == ordinal && pod.ready && !pod.terminating);
        (0..self.inputs.replicas).all(is_up) && self.inputs.replicas > 0
    }
}

/// Returns whether every partition has `copies` in-sync replicas, activated or not.
fn has_copies(map: &MapView, copies: u32) -> bool {
    map.partitions.iter().all(|partition| partition.in_sync.len() >= copies as usize)
}

/// Returns whether the claim templates of a StatefulSet are the desired ones. The API server fills in no storage class, so one that is not
/// desired was removed from the spec.
fn has_same_claim_templates(found: &ApiObject, desired: &ApiObject) -> bool {
    let templates = |object: &ApiObject| {
        object.read_kind::<StatefulSet>().and_then(|set| set.spec?.volume_claim_templates).unwrap_or_default()
    };
    let (found, desired) = (templates(found), templates(desired));
    let class = |claim: &PersistentVolumeClaim| claim.spec.as_ref().and_then(|spec| spec.storage_class_name.clone());
    if desired.is_empty() {
        return found.is_empty();
    }
    covers(&to_json(&found), &to_json(&desired)) && found.iter().map(class).eq(desired.iter().map(class))
}

/// Counts partitions for the status.
pub(crate) fn partitions_with(map: &MapView, holds: impl Fn(usize, bool) -> bool) -> i32 {
    let count = map.partitions.iter().filter(|partition| holds(partition.in_sync.len(), partition.activated)).count();
    i32::try_from(count).unwrap_or(i32::MAX)
}
