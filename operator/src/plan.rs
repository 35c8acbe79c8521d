//! The one place with decisions: from a cluster and what was found to what is done next.
//!
//! One thing that takes a worker away happens at a time, in this order: a lost node's worker is replaced, a chosen one is
//! replaced, the cluster shrinks, a change is rolled out. Each waits until every partition has all its copies in sync.

use std::time::Duration;

use engram_api::kubernetes_only::UpdateType;
use engram_api::status::LearnerClusterStatus;
use serde_json::Value;

use crate::build::{self, Inputs};
use crate::names::REPLACE;
use crate::observed::{MapView, Observed, PodView};
use crate::revision::{self, Offer};
use crate::validate::ValidatedCluster;
use crate::{evidence, report};

/// How soon a cluster that is changing is looked at again.
const BUSY: Duration = Duration::from_secs(2);
/// How soon a cluster at rest is looked at again: a safety net for a watch that was deaf.
const AT_REST: Duration = Duration::from_secs(60);

/// What is done next.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Objects that are missing or differ, in the order in which they are applied.
    pub objects: Vec<Value>,
    /// What else is done, in order, after the objects.
    pub actions: Vec<Action>,
    /// What the cluster's status becomes.
    pub status: LearnerClusterStatus,
    /// When to look again if nothing is heard before.
    pub requeue: Duration,
}

impl Plan {
    /// Whether carrying it out changes an object.
    pub fn writes(&self) -> bool {
        !self.objects.is_empty() || self.actions.iter().any(|action| !matches!(action, Action::Drain { .. }))
    }
}

/// Something that is done to exactly the object that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An object of ours that is no longer wanted goes.
    DeleteObject {
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
        /// Its UID.
        uid: String,
    },
    /// The StatefulSet goes and leaves its pods: its claim template cannot be changed. The next plan makes it anew.
    OrphanSet {
        /// Its UID.
        uid: String,
    },
    /// A worker hands over what it serves, and with `evacuate` its copies too.
    Drain {
        /// The worker.
        ordinal: u32,
        /// UID of its pod.
        uid: String,
        /// Whether it gives up its copies.
        evacuate: bool,
    },
    /// A pod goes; the StatefulSet makes it anew.
    DeletePod {
        /// The worker.
        ordinal: u32,
        /// UID of the pod.
        uid: String,
        /// Whether its kubelet is not waited for: only for a pod of a lost node.
        force: bool,
    },
    /// A claim goes, and its data.
    DeleteClaim {
        /// The worker.
        ordinal: u32,
        /// UID of the claim.
        uid: String,
    },
    /// A claim grows.
    GrowClaim {
        /// The worker.
        ordinal: u32,
        /// UID of the claim.
        uid: String,
        /// What it grows to.
        size_bytes: u64,
    },
    /// The map is marked as suspended, or no longer so.
    MarkSuspended {
        /// The mark.
        suspended: bool,
        /// The map that was looked at.
        resource_version: String,
    },
    /// The request to replace a pod is done.
    ForgetReplace,
}

/// Decides what is done for `cluster`. `now` (RFC 3339) is the time of conditions that change.
pub fn plan(cluster: &ValidatedCluster, observed: &Observed, offer: &Offer, now: &str) -> Plan {
    if let Some(stalled) = evidence::stalled(cluster, observed) {
        let status = report::stalled(cluster, observed, &stalled, now);
        return Plan { objects: Vec::new(), actions: Vec::new(), status, requeue: AT_REST };
    }
    let gpu = report::gpu(cluster, observed);
    let on_gpu = gpu.devices > 0 || cluster.claims_gpu();
    let (worker, update) = revision::choose(cluster, observed.status.worker.as_ref(), offer, on_gpu);
    let copies = cluster.spec.replication_factor;
    let has_copies = observed.map.as_ref().is_some_and(|map| has_copies(map, copies));
    let inputs = Inputs {
        cluster_id: evidence::cluster_id(cluster, observed),
        worker,
        replicas: replicas(cluster, observed),
        max_unavailable: has_copies.into(),
        gpus: gpu.devices,
        coordinators: offer.coordinators.clone(),
        pull_secrets: offer.pull_secrets.clone(),
        published: offer.published.clone(),
        bootstrap_workers: bootstrap_workers(cluster, observed),
    };
    let mut step = Step { cluster, observed, inputs: &inputs, objects: Vec::new(), actions: Vec::new() };
    if !cluster.is_paused() {
        step.objects();
    }
    step.suspension();
    let busy = step.replace_lost();
    if !cluster.is_paused() && !busy {
        let _ = step.replace_chosen() || step.shrink() || step.roll_out();
    }
    let Step { objects, actions, .. } = step;
    let changing = !objects.is_empty() || !actions.is_empty();
    let status = report::status(cluster, observed, &inputs, update.as_ref(), &gpu, changing, now);
    let requeue = if changing || !report::is_at_rest(&status) { BUSY } else { AT_REST };
    Plan { objects, actions, status, requeue }
}

/// Returns the number of pods: what is asked for, but none goes, or stays away, that still holds something.
fn replicas(cluster: &ValidatedCluster, observed: &Observed) -> u32 {
    let wanted = cluster.spec.workers;
    // A StatefulSet that is being made anew has left its pods: they count as much.
    let orphans = || observed.pods.iter().map(|pod| pod.ordinal + 1).max();
    let now = observed.set.as_ref().map(|set| set.replicas).or_else(orphans);
    match &observed.map {
        Some(map) if cluster.is_suspended() && map.suspended => 0,
        _ if cluster.is_suspended() => now.unwrap_or(0),
        Some(map) => wanted.max(map.highest_holder().map_or(0, |ordinal| ordinal + 1)),
        None => wanted.max(now.unwrap_or(0)),
    }
}

/// Returns what the workers were told first: each loads its share before it knows of another, and a number that changed meanwhile would
/// leave partitions to nobody.
fn bootstrap_workers(cluster: &ValidatedCluster, observed: &Observed) -> u32 {
    let told = observed.objects.iter().find_map(|object| {
        let settings = object.pointer("/data")?.get(build::CONFIG_FILE)?.as_str()?;
        let settings: Value = serde_json::from_str(settings).ok()?;
        u32::try_from(settings[build::BOOTSTRAP_WORKERS].as_u64()?).ok()
    });
    told.unwrap_or(cluster.spec.workers)
}

/// A plan while it is made.
struct Step<'a> {
    cluster: &'a ValidatedCluster,
    observed: &'a Observed,
    inputs: &'a Inputs,
    objects: Vec<Value>,
    actions: Vec<Action>,
}

impl Step<'_> {
    /// Applies what is missing or differs, removes what is no longer wanted, and lets claims grow.
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
            let found = self.observed.objects.iter().find(|found| same(found, object));
            match found {
                Some(found) if covers(found, object) => {}
                // The template of claims cannot change. Claims first: a crash in between finds them smaller than asked.
                Some(found) if !covers_field(found, object, "/spec/volumeClaimTemplates") => {
                    if growing.is_empty() {
                        self.actions.push(Action::OrphanSet { uid: text(found, "/metadata/uid") });
                    }
                }
                _ => self.objects.push(object.clone()),
            }
        }
        let unwanted = self.observed.objects.iter().filter(|found| !desired.iter().any(|object| same(found, object)));
        self.actions.extend(unwanted.map(|found| Action::DeleteObject {
            kind: text(found, "/kind"),
            name: text(found, "/metadata/name"),
            uid: text(found, "/metadata/uid"),
        }));
    }

    /// Marks the map: before the pods go when all copies are in sync, and after they are back.
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
        let lost = evidence::lost(self.cluster, self.observed);
        for pod in &lost {
            self.discard(pod, true);
        }
        !lost.is_empty()
    }

    /// Replaces the pod that an annotation names; tells whether that is still going on.
    fn replace_chosen(&mut self) -> bool {
        let Some(uid) = self.cluster.annotations.get(REPLACE) else { return false };
        let Some(pod) = self.observed.pods.iter().find(|pod| pod.uid == *uid) else {
            self.actions.push(Action::ForgetReplace);
            return false;
        };
        let Some(map) = &self.observed.map else { return true };
        let copies = self.cluster.spec.replication_factor;
        // Where every worker has a copy of everything, nobody can take over this one's: the others make it again afterwards.
        let evacuate = copies == 1 || self.cluster.spec.workers > copies;
        let holds = if evacuate { map.copies(pod.ordinal) } else { map.primaries(pod.ordinal) };
        if holds > 0 || (!evacuate && !map.is_full(copies)) {
            self.drain(pod, evacuate);
        } else if !pod.terminating && map.is_full(copies) {
            self.discard(pod, false);
        }
        true
    }

    /// Empties the highest worker that is too many; tells whether that is still going on.
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
        // The claims of those that went, when nothing can need them any more.
        let mut over = false;
        for claim in self.observed.claims.iter().filter(|claim| claim.ordinal >= workers) {
            over = true;
            let has_pod = self.observed.pods.iter().any(|pod| pod.ordinal == claim.ordinal);
            if !has_pod && map.copies(claim.ordinal) == 0 && map.is_full(copies) {
                self.actions.push(Action::DeleteClaim { ordinal: claim.ordinal, uid: claim.uid.clone() });
            }
        }
        over
    }

    /// Takes one worker with an old template away: the one that serves least, emptied of what it serves.
    fn roll_out(&mut self) -> bool {
        let (Some(map), Some(set)) = (&self.observed.map, &self.observed.set) else { return false };
        let strategy = self.cluster.spec.update_strategy.as_ref().and_then(|strategy| strategy.strategy);
        let template_changes = self.objects.iter().any(|object| object["kind"] == "StatefulSet");
        if strategy == Some(UpdateType::OnDelete) || set.update_revision.is_empty() || template_changes {
            return false;
        }
        let copies = self.cluster.spec.replication_factor;
        if !self.all_ready() || !has_copies(map, copies) || map.suspended {
            return false;
        }
        let load = |pod: &&PodView| (map.primaries(pod.ordinal), map.copies(pod.ordinal), pod.ordinal);
        let old = self.observed.pods.iter().filter(|pod| pod.revision != set.update_revision);
        let Some(pod) = old.min_by_key(load) else { return false };
        // Each hand-over leaves a partition not activated for a moment: whoever is being emptied stays so until it goes, or what it
        // has given away would come back. With one copy there is nobody to hand it to; the pod comes back with its disk.
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

    /// Takes a pod and its disk away. The claim first: it goes when the pod has gone, and both are made anew together.
    fn discard(&mut self, pod: &PodView, force: bool) {
        if let Some(claim) = self.observed.claims.iter().find(|claim| claim.ordinal == pod.ordinal) {
            self.actions.push(Action::DeleteClaim { ordinal: pod.ordinal, uid: claim.uid.clone() });
        }
        self.actions.push(Action::DeletePod { ordinal: pod.ordinal, uid: pod.uid.clone(), force });
    }

    /// Whether every pod that is wanted is there, ready and staying.
    fn all_ready(&self) -> bool {
        let is_up =
            |ordinal: u32| self.observed.pods.iter().any(|pod| pod.ordinal == ordinal && pod.ready && !pod.terminating);
        (0..self.inputs.replicas).all(is_up) && self.inputs.replicas > 0
    }
}

/// Whether every partition has `copies` copies in sync, whether or not somebody is just taking it over.
fn has_copies(map: &MapView, copies: u32) -> bool {
    map.partitions.iter().all(|partition| partition.in_sync.len() >= copies as usize)
}

/// Whether `found` is the object that `desired` describes.
fn same(found: &Value, desired: &Value) -> bool {
    ["/kind", "/metadata/name"].iter().all(|path| found.pointer(path) == desired.pointer(path))
}

fn covers_field(found: &Value, desired: &Value, path: &str) -> bool {
    match (found.pointer(path), desired.pointer(path)) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(found), Some(desired)) => covers(found, desired),
    }
}

/// Whether `found` has everything that `desired` says; it may have more, which others or defaults wrote.
pub(crate) fn covers(found: &Value, desired: &Value) -> bool {
    match (found, desired) {
        (Value::Object(found), Value::Object(desired)) => desired.iter().all(|(name, value)| {
            let empty = matches!(value, Value::Object(fields) if fields.is_empty())
                || matches!(value, Value::Array(items) if items.is_empty());
            found.get(name).map_or(empty, |found| covers(found, value))
        }),
        (Value::Array(found), Value::Array(desired)) => {
            found.len() == desired.len() && found.iter().zip(desired).all(|(found, desired)| covers(found, desired))
        }
        (found, desired) => found == desired,
    }
}

fn text(object: &Value, path: &str) -> String {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Counts partitions for the status.
pub(crate) fn partitions_with(map: &MapView, holds: impl Fn(usize, bool) -> bool) -> i32 {
    let count = map.partitions.iter().filter(|partition| holds(partition.in_sync.len(), partition.activated)).count();
    i32::try_from(count).unwrap_or(i32::MAX)
}
