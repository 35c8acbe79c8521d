//! What the claims, the nodes and the map prove, and what they do not.

use engram_api::kubernetes_only::NodeLossAction;

use crate::observed::{Observed, PodView};
use crate::validate::ValidatedCluster;

/// Why nothing may go on until a person acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Returns whose data this cluster's is: that of the map, which outlives its `LearnerCluster`, else what the status says,
/// else a new one.
pub(crate) fn cluster_id(cluster: &ValidatedCluster, observed: &Observed) -> String {
    let known = observed.map.as_ref().map(|map| map.cluster_id.clone()).or_else(|| observed.status.cluster_id.clone());
    known.unwrap_or_else(|| cluster.new_cluster_id())
}

/// Finds disks whose data nobody can vouch for. Nothing is started on them and nothing is deleted.
pub(crate) fn stalled(cluster: &ValidatedCluster, observed: &Observed) -> Option<Stalled> {
    let id = cluster_id(cluster, observed);
    if observed.map.is_none() {
        // A new cluster has claims before it has a map, but never claims of another, and no partitions in its status.
        let had_map = observed.status.partitions.is_some();
        let older = observed.claims.iter().find(|claim| claim.cluster_id.as_ref() != Some(&id));
        let claim = older.or(observed.claims.first().filter(|_| had_map))?;
        let name = cluster.names.claim(claim.ordinal);
        let way_out = if is_orphaned(cluster, observed) {
            format!(
                "restore the map, make it anew (engram -n {} partition rebuild-map --cluster {}), or",
                cluster.namespace, cluster.names.cluster
            )
        } else {
            "restore the map, or".to_owned()
        };
        let message = format!(
            "PartitionMap {} is missing, but claim {name} has data: {way_out} delete the claims to start empty",
            cluster.names.cluster
        );
        return Some(Stalled { reason: "MapMissing", message });
    }
    let foreign = observed.claims.iter().find(|claim| claim.cluster_id.as_ref().is_some_and(|of| *of != id))?;
    let message = format!(
        "claim {} holds data of cluster {}, not of {id}: delete the claim, or give the cluster another name",
        cluster.names.claim(foreign.ordinal),
        foreign.cluster_id.as_deref().unwrap_or_default()
    );
    Some(Stalled { reason: "ForeignVolume", message })
}

/// Whether the map of this cluster is gone, and its workers may still tell what it was: all disks are its own.
pub(crate) fn is_orphaned(cluster: &ValidatedCluster, observed: &Observed) -> bool {
    let id = cluster_id(cluster, observed);
    let had_map = observed.status.partitions.is_some();
    observed.map.is_none() && had_map && observed.claims.iter().all(|claim| claim.cluster_id.as_ref() == Some(&id))
}

/// Finds the pods that are replaced because their node is lost: long enough, with all their copies elsewhere.
///
/// Nobody is, when more than one node and more than a third of the workers are silent: then the network or this operator
/// is the likelier culprit.
pub(crate) fn lost<'a>(cluster: &ValidatedCluster, observed: &'a Observed) -> Vec<&'a PodView> {
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

/// Whether more than one node and more than a third of the workers are silent.
pub(crate) fn is_mass_failure(observed: &Observed) -> bool {
    let silent: Vec<&PodView> = observed.pods.iter().filter(|pod| pod.node_lost_for_ms.is_some()).collect();
    let mut nodes: Vec<_> = silent.iter().map(|pod| &pod.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.len() > 1 && silent.len() * 3 > observed.pods.len()
}
