//! Safety checks: data of unknown origin, lost nodes, mass failures.

use engram_api::kubernetes_only::NodeLossAction;

use crate::cluster::observe::observation::{MapView, Observation, PodView};
use crate::cluster::validate::ValidatedCluster;

/// Why a cluster requires manual intervention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StallReason {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Returns the cluster id: that of the map, which outlives its `LearnerCluster`, else of the status, else a new one.
pub(crate) fn cluster_id(cluster: &ValidatedCluster, observed: &Observation) -> String {
    let existing =
        observed.map.as_ref().map(|map| map.cluster_id.clone()).or_else(|| observed.status.cluster_id.clone());
    existing.unwrap_or_else(|| cluster.new_cluster_id())
}

/// Finds volumes with data of unknown origin. The operator neither starts workers on them nor deletes them.
pub(crate) fn stalled(cluster: &ValidatedCluster, observed: &Observation) -> Option<StallReason> {
    let id = cluster_id(cluster, observed);
    if observed.map.is_none() {
        // A new cluster has claims before it has a map, but never those of another cluster, and no partitions in its status.
        let had_map = observed.status.partitions.is_some();
        let older = observed.claims.iter().find(|claim| claim.cluster_id.as_ref() != Some(&id));
        let claim = older.or(observed.claims.first().filter(|_| had_map))?;
        let name = cluster.names.claim(claim.ordinal);
        let way_out = if is_orphaned(cluster, observed) {
            format!(
                "restore the map, rebuild it (engram -n {} partition rebuild-map --cluster {}), or",
                cluster.namespace, cluster.names.cluster
            )
        } else {
            "restore the map, or".to_owned()
        };
        let message = format!(
            "PartitionMap {} is missing, but claim {name} has data: {way_out} delete the claims to start empty",
            cluster.names.cluster
        );
        return Some(StallReason { reason: "PartitionMapMissing", message });
    }
    if let Some(reason) = observed.map.as_ref().and_then(|map| outlived_map(cluster, observed, map)) {
        return Some(reason);
    }
    let foreign = observed.claims.iter().find(|claim| claim.cluster_id.as_ref().is_some_and(|of| *of != id))?;
    let message = format!(
        "claim {} holds data of cluster {}, not of {id}: delete the claim, or give the cluster another name",
        cluster.names.claim(foreign.ordinal),
        foreign.cluster_id.as_deref().unwrap_or_default()
    );
    Some(StallReason { reason: "ForeignVolume", message })
}

/// Finds a map that an earlier cluster of the same name left without its data.
fn outlived_map(cluster: &ValidatedCluster, observed: &Observation, map: &MapView) -> Option<StallReason> {
    let (namespace, name) = (&cluster.namespace, &cluster.names.cluster);
    let way_out = format!("delete the map to start empty: kubectl -n {namespace} delete partitionmap {name}");
    if map.owner.as_ref().is_some_and(|owner| *owner != cluster.uid) {
        let message = format!(
            "PartitionMap {name} belongs to a deleted LearnerCluster of the same name; if it is not garbage-collected within a \
             minute, {way_out}"
        );
        return Some(StallReason { reason: "PartitionMapOfDeletedCluster", message });
    }
    let is_new = observed.status.cluster_id.is_none() && observed.set.is_none();
    let is_earlier = map.cluster_id != cluster.new_cluster_id();
    if is_new && is_earlier && observed.claims.is_empty() && !map.partitions.is_empty() {
        let message = format!(
            "PartitionMap {name} describes data of an earlier cluster, but none of its claims exists: restore the claims, or {way_out}"
        );
        return Some(StallReason { reason: "VolumesMissing", message });
    }
    None
}

/// Returns whether the map of this cluster is missing and can be rebuilt from its workers: all volumes are its own.
pub(crate) fn is_orphaned(cluster: &ValidatedCluster, observed: &Observation) -> bool {
    let id = cluster_id(cluster, observed);
    let had_map = observed.status.partitions.is_some();
    observed.map.is_none() && had_map && observed.claims.iter().all(|claim| claim.cluster_id.as_ref() == Some(&id))
}

/// Returns the pods to replace because their node has been lost for long enough and all their partitions are fully replicated
/// elsewhere.
///
/// Returns none in a mass failure, whose likelier cause is the network or this operator.
pub(crate) fn lost<'a>(cluster: &ValidatedCluster, observed: &'a Observation) -> Vec<&'a PodView> {
    let Some(map) = &observed.map else { return Vec::new() };
    let policy = cluster.spec.storage.as_ref().and_then(|storage| storage.on_node_loss.as_ref());
    let after = policy.and_then(|policy| policy.after).map_or(300_000, |after| after.as_millis());
    if policy.and_then(|policy| policy.action) == Some(NodeLossAction::Wait) || is_mass_failure(observed) {
        return Vec::new();
    }
    let copies = cluster.spec.replication_factor;
    let holds_nothing = |pod: &&PodView| map.copies(pod.ordinal) == 0 && map.primaries(pod.ordinal) == 0;
    let gone = |pod: &&PodView| pod.node_lost_for_ms.is_some_and(|for_ms| for_ms >= after);
    let is_safe = |pod: &&PodView| map.is_full_without(pod.ordinal, copies);
    observed.pods.iter().filter(gone).filter(holds_nothing).filter(is_safe).collect()
}

/// Returns whether more than one node and more than a third of the workers are unreachable.
pub(crate) fn is_mass_failure(observed: &Observation) -> bool {
    let silent: Vec<&PodView> = observed.pods.iter().filter(|pod| pod.node_lost_for_ms.is_some()).collect();
    let mut nodes: Vec<_> = silent.iter().map(|pod| &pod.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.len() > 1 && silent.len() * 3 > observed.pods.len()
}
