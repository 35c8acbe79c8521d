//! Texts of a cluster's conditions: what is in progress, which pods cannot start, and what to do about it.

use k8s_openapi::jiff::Timestamp;

use engram_api::kubernetes_only::UpdateType;

use crate::cluster::build::Inputs;
use crate::cluster::observe::observation::{ClaimView, Observation, PodView, StartFailure, StartFailureCause};
use crate::cluster::validate::ValidatedCluster;

/// How long a pod may be unschedulable before the cluster is stalled: volumes are provisioned and nodes are added meanwhile.
const SCHEDULING_GRACE_SECONDS: i64 = 60;
/// How long the first pods of a StatefulSet may be missing before the cluster is stalled: the API server refuses them.
const CREATION_GRACE_SECONDS: i64 = 60;
/// Maximum number of pods that a message lists.
const MAX_LISTED_PODS: usize = 4;

/// Pods that cannot be created or cannot start.
pub(crate) struct StuckPods {
    /// Reason of the conditions: that of the first pod.
    pub(crate) reason: &'static str,
    /// Pods with causes, and what to do.
    pub(crate) message: String,
    /// Whether they do not start by themselves.
    pub(crate) is_stalled: bool,
}

/// Finds the pods that cannot start, except those that the operator replaces itself. `now` is RFC 3339.
pub(crate) fn stuck_pods(cluster: &ValidatedCluster, observed: &Observation, now: &str) -> Option<StuckPods> {
    let newest = observed.set.as_ref().map(|set| set.update_revision.as_str()).unwrap_or_default();
    let strategy = cluster.spec.update_strategy.as_ref().and_then(|strategy| strategy.strategy);
    let is_updated = !cluster.is_paused() && strategy != Some(UpdateType::OnDelete);
    let is_replaced = |pod: &PodView| is_updated && pod.revision != newest;
    let mut pods: Vec<(&PodView, &StartFailure)> = observed
        .pods
        .iter()
        .filter(|pod| !pod.ready && !pod.terminating && !is_replaced(pod))
        .filter_map(|pod| Some((pod, pod.start_failure.as_ref()?)))
        .collect();
    pods.sort_by_key(|(pod, _)| pod.ordinal);
    let Some((first, failure)) = pods.first().copied() else { return refused_pods(cluster, observed, now) };
    let listed = listed_failures(cluster, &pods);
    let is_halted = observed.map.is_some() && observed.pods.iter().any(|pod| pod.revision != newest);
    let halted = if is_halted { "the update is halted: " } else { "" };
    let is_stalled = pods.iter().any(|(_, failure)| !is_within_grace(failure, now));
    let claim = observed.claims.iter().find(|claim| claim.ordinal == first.ordinal);
    let message = format!("{halted}{listed}; {}", advice(cluster, first, failure, claim));
    Some(StuckPods { reason: failure.cause.reason(), message, is_stalled })
}

/// Lists pods with their failures; pods that fail for the same reason are listed together.
fn listed_failures(cluster: &ValidatedCluster, pods: &[(&PodView, &StartFailure)]) -> String {
    let mut groups: Vec<(&str, Vec<&PodView>)> = Vec::new();
    for (pod, failure) in pods {
        match groups.iter_mut().find(|(detail, _)| *detail == failure.detail) {
            Some((_, group)) => group.push(pod),
            None => groups.push((&failure.detail, vec![pod])),
        }
    }
    listed(groups.iter().map(|(detail, group)| {
        let noun = if group.len() == 1 { "pod" } else { "pods" };
        let names = listed(group.iter().map(|pod| {
            let node = pod.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
            format!("{}{node}", cluster.names.pod(pod.ordinal))
        }));
        format!("{noun} {names} cannot start: {detail}")
    }))
}

/// Finds the pods of a new cluster that the API server refuses to create: by a quota, a limit range, or an admission policy. Later pods have
/// no such deadline, since a pod that is replaced is missing for a moment.
fn refused_pods(cluster: &ValidatedCluster, observed: &Observation, now: &str) -> Option<StuckPods> {
    let set = observed.set.as_ref().filter(|_| observed.map.is_none() && !cluster.is_suspended())?;
    let is_there = |ordinal: u32| observed.pods.iter().any(|pod| pod.ordinal == ordinal);
    let missing: Vec<u32> = (0..set.replicas).filter(|ordinal| !is_there(*ordinal)).collect();
    let age = seconds_between(set.created.as_deref()?, now)?;
    if missing.is_empty() || age < CREATION_GRACE_SECONDS {
        return None;
    }
    let (namespace, set) = (&cluster.namespace, cluster.names.worker());
    let message = format!(
        "pods {} do not exist {CREATION_GRACE_SECONDS} s after the creation of StatefulSet {set}; `kubectl -n {namespace} describe \
         statefulset {set}` shows why: a quota, a limit range, Pod Security or an admission policy refuses them. Correct it; the \
         StatefulSet controller retries within 17 minutes, or at once after `kubectl -n {namespace} annotate statefulset {set} \
         --overwrite engram.dev/retry=$(date +%s)`",
        listed(missing.iter().map(|ordinal| cluster.names.pod(*ordinal)))
    );
    Some(StuckPods { reason: "PodsNotCreated", message, is_stalled: true })
}

impl StartFailureCause {
    /// Returns the reason of conditions.
    pub(crate) const fn reason(self) -> &'static str {
        match self {
            Self::Unschedulable => "PodUnschedulable",
            Self::Rejected => "PodRejected",
            Self::ImagePull => "ImagePullFailed",
            Self::Configuration => "ContainerConfigInvalid",
            Self::CrashLoop => "PodCrashLooping",
        }
    }
}

fn is_within_grace(failure: &StartFailure, now: &str) -> bool {
    let since = failure.since.as_deref().and_then(|since| seconds_between(since, now));
    since.is_some_and(|seconds| seconds < SCHEDULING_GRACE_SECONDS)
}

/// Returns the seconds between two RFC 3339 times; `None` if one is invalid.
fn seconds_between(start: &str, end: &str) -> Option<i64> {
    let seconds = |time: &str| time.parse::<Timestamp>().ok().map(Timestamp::as_second);
    Some(seconds(end)?.saturating_sub(seconds(start)?))
}

/// Returns what to do about a pod that cannot start.
fn advice(cluster: &ValidatedCluster, pod: &PodView, failure: &StartFailure, claim: Option<&ClaimView>) -> String {
    let (namespace, name) = (&cluster.namespace, &cluster.names.cluster);
    let pod_name = cluster.names.pod(pod.ordinal);
    match failure.cause {
        StartFailureCause::ImagePull => "correct spec.image or spec.version, or make the image and its pull secret available; \
             the operator replaces the pod once its template changes"
            .into(),
        StartFailureCause::Configuration => {
            "create the object that the message names, or correct spec.podTemplate; the operator replaces the pod once its \
             template changes"
                .into()
        }
        StartFailureCause::CrashLoop if failure.detail.contains("no space left on device") => {
            "raise spec.storage.size, which grows the volume if its StorageClass allows it, or free space on the node".into()
        }
        StartFailureCause::CrashLoop => format!(
            "read `kubectl -n {namespace} logs {pod_name} -c worker --previous` and correct the spec; the operator replaces the \
             pod once its template changes"
        ),
        StartFailureCause::Rejected => {
            "free resources on the node, or correct spec.resources or spec.scheduling; the StatefulSet controller recreates the pod"
                .into()
        }
        // The scheduler's text for a claim without a volume: the StorageClass is missing, or its provisioner fails.
        StartFailureCause::Unschedulable if failure.detail.contains("unbound") => {
            let desired = cluster.spec.storage.as_ref().and_then(|storage| storage.storage_class_name.as_deref());
            // That of the claim may differ: the spec was changed.
            let class = claim.and_then(|claim| claim.storage_class.as_deref()).or(desired);
            let class = class.map_or_else(|| "the default StorageClass".to_owned(), |class| format!("StorageClass {class}"));
            format!(
                "`kubectl -n {namespace} describe pvc {}` shows why the claim has no volume: create {class} or repair its \
                 provisioner, or set spec.storage.storageClassName to an existing one",
                cluster.names.claim(pod.ordinal)
            )
        }
        StartFailureCause::Unschedulable if cluster.is_ephemeral() || claim.is_some_and(|claim| claim.is_pending) => {
            "add or uncordon a node that fits, or correct spec.resources or spec.scheduling".into()
        }
        StartFailureCause::Unschedulable => format!(
            "add or uncordon a node that fits, or correct spec.resources or spec.scheduling; if the volume of claim {} is on a \
             node that does not return, replace the worker with an empty disk: kubectl -n {namespace} annotate learnercluster \
             {name} engram.dev/replace={}",
            cluster.names.claim(pod.ordinal),
            pod.uid
        ),
    }
}

/// Describes what keeps the cluster from matching its spec. Never empty.
pub(crate) fn in_progress(
    cluster: &ValidatedCluster,
    observed: &Observation,
    inputs: &Inputs,
    changing: bool,
) -> String {
    let mut parts = Vec::new();
    let pod_of = |ordinal: u32| observed.pods.iter().find(|pod| pod.ordinal == ordinal);
    let missing: Vec<u32> = (0..inputs.replicas).filter(|ordinal| pod_of(*ordinal).is_none()).collect();
    if !missing.is_empty() {
        parts.push(format!(
            "pods that do not exist yet: {} (`kubectl -n {} describe statefulset {}` shows why, if they are refused)",
            listed(missing.iter().map(|ordinal| cluster.names.pod(*ordinal))),
            cluster.namespace,
            cluster.names.worker()
        ));
    }
    let mut late: Vec<&PodView> = observed.pods.iter().filter(|pod| !pod.ready || pod.terminating).collect();
    late.sort_by_key(|pod| pod.ordinal);
    if !late.is_empty() {
        let described = late.iter().map(|pod| {
            let state = if pod.terminating { "terminating" } else { "not ready" };
            let node = pod.node.as_deref().unwrap_or("no node");
            format!("{} ({state}, {node})", cluster.names.pod(pod.ordinal))
        });
        parts.push(format!("pods: {}", listed(described)));
    }
    let newest = observed.set.as_ref().map(|set| set.update_revision.as_str()).unwrap_or_default();
    let outdated = observed.pods.iter().filter(|pod| pod.revision != newest).count();
    if outdated > 0 && !newest.is_empty() {
        parts.push(format!("{outdated} of {} pods have an outdated template", observed.pods.len()));
    }
    let surplus: Vec<&PodView> = observed.pods.iter().filter(|pod| pod.ordinal >= cluster.spec.workers).collect();
    if !surplus.is_empty() && !cluster.is_suspended() {
        parts.push(format!("{} workers are drained for removal", surplus.len()));
    }
    if let Some(text) = under_replicated(cluster, observed) {
        parts.push(text);
    }
    if parts.is_empty() {
        let of_objects = if changing { "objects are being changed" } else { "claims or objects are being changed" };
        parts.push(of_objects.into());
    }
    parts.join("; ")
}

/// Describes the partitions with too few in-sync replicas, if any.
pub(crate) fn under_replicated(cluster: &ValidatedCluster, observed: &Observation) -> Option<String> {
    let copies = cluster.spec.replication_factor;
    let Some(map) = &observed.map else { return Some("the PartitionMap does not exist yet".into()) };
    let few = |count: usize| count < copies as usize;
    let count = map.partitions.iter().filter(|partition| few(partition.in_sync.len())).count();
    let all = map.partitions.len();
    (count > 0).then(|| format!("{count} of {all} partitions have fewer than {copies} in-sync replicas"))
}

/// Describes the partitions that are not served, with the pods of their primaries.
pub(crate) fn unavailable(cluster: &ValidatedCluster, observed: &Observation) -> Option<String> {
    let map = observed.map.as_ref()?;
    let inactive: Vec<_> = map.partitions.iter().filter(|partition| !partition.activated).collect();
    let mut primaries: Vec<u32> = inactive.iter().map(|partition| partition.primary).collect();
    primaries.sort_unstable();
    primaries.dedup();
    let names = primaries.into_iter().map(|ordinal| match ordinal {
        u32::MAX => "a replaced disk".into(),
        ordinal => cluster.names.pod(ordinal),
    });
    let (count, all) = (inactive.len(), map.partitions.len());
    (count > 0).then(|| format!("{count} of {all} partitions are not served; their primaries: {}", listed(names)))
}

/// Joins the first items and counts the others.
fn listed(items: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = items.collect();
    let first = all.iter().take(MAX_LISTED_PODS).map(String::as_str).collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MAX_LISTED_PODS) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
