//! Settings of a cluster's coordinator: which workers to evacuate, and which must not be primaries.

use std::collections::BTreeSet;

use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::safety;
use crate::cluster::plan::{Action, Plan};
use crate::cluster::validate::ValidatedCluster;
use crate::names::REPLACE;

/// Settings of a coordinator. Workers are identified by ordinals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoordinatorGoal {
    /// Desired number of workers; workers above it are evacuated.
    pub workers: u32,
    /// Workers that give up their replicas.
    pub evacuating: BTreeSet<u32>,
    /// Workers that must not be primaries but keep their replicas.
    pub without_primaries: BTreeSet<u32>,
    /// Whether the cluster had a map before: a coordinator that finds none does not create an initial one, and reports what can be rebuilt
    /// from the workers.
    pub had_map: bool,
}

/// Returns the coordinator's settings; `None` if the cluster must not be coordinated. All operator replicas compute the same.
///
/// A cluster is not coordinated if its map is missing while volumes hold data of unknown origin, or if it is suspended: its unreachable
/// workers have not failed. If its own map is missing, the coordinator changes nothing except for rebuilding the map on request.
pub fn coordinator_goal(cluster: &ValidatedCluster, observed: &Observation, plan: &Plan) -> Option<CoordinatorGoal> {
    let is_away = cluster.is_suspended() && observed.map.as_ref().is_some_and(|map| map.suspended);
    if is_away {
        return None;
    }
    // Not by condition Stalled, which also covers a failed bootstrap, which the coordinator retries.
    if safety::stalled(cluster, observed).is_some() {
        return safety::is_orphaned(cluster, observed)
            .then(|| CoordinatorGoal { had_map: true, ..base_goal(cluster, observed) });
    }
    let mut steering = base_goal(cluster, observed);
    for action in &plan.actions {
        match action {
            Action::Drain { ordinal, evacuate: true, .. } => drop(steering.evacuating.insert(*ordinal)),
            Action::Drain { ordinal, evacuate: false, .. } | Action::DeletePod { ordinal, .. } => {
                steering.without_primaries.insert(*ordinal);
            }
            _ => {}
        }
    }
    let chosen = cluster.annotations.get(REPLACE);
    // Until the pod is deleted, since its disk would be filled again before it is removed.
    let chosen = observed.pods.iter().filter(|pod| chosen == Some(&pod.uid));
    steering.evacuating.extend(chosen.map(|pod| pod.ordinal));
    Some(steering)
}

/// Returns the coordinator's settings for a cluster with an invalid spec, from its last valid one: only failover takes place. `None` for a
/// cluster that has no map, is suspended, or is stalled.
pub fn coordinator_goal_of_invalid_spec(cluster: &ValidatedCluster, observed: &Observation) -> Option<CoordinatorGoal> {
    let is_away = observed.map.as_ref().is_none_or(|map| map.suspended);
    (!is_away && safety::stalled(cluster, observed).is_none()).then(|| base_goal(cluster, observed))
}

/// Returns the settings that do not depend on the plan.
fn base_goal(cluster: &ValidatedCluster, observed: &Observation) -> CoordinatorGoal {
    // Terminating workers still send heartbeats and are about to stop.
    let stopping = observed.pods.iter().filter(|pod| pod.terminating).map(|pod| pod.ordinal);
    CoordinatorGoal {
        workers: cluster.spec.workers,
        without_primaries: stopping.collect(),
        ..CoordinatorGoal::default()
    }
}
