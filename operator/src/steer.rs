//! What the coordinator of a cluster is told: who shall be emptied, who shall lead nothing.

use std::collections::BTreeSet;

use crate::evidence;
use crate::names::REPLACE;
use crate::observed::Observed;
use crate::plan::{Action, Plan};
use crate::validate::ValidatedCluster;

/// What a coordinator is told. Ordinals of workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steering {
    /// Workers that the cluster shall have: those above are emptied.
    pub workers: u32,
    /// Workers that give up their copies.
    pub emptied: BTreeSet<u32>,
    /// Workers that lead nothing, and keep their copies.
    pub relieved: BTreeSet<u32>,
    /// There was a map: a coordinator that finds none writes no first one, and tells people what can be made of what workers have seen.
    pub had_map: bool,
}

/// Says whether the cluster is coordinated, and how. Every replica of the operator tells its own coordinator the same.
///
/// Nobody is coordinated whose map is missing beside data that may be another's, nor a cluster whose pods are away on purpose: what
/// is silent there has not failed. Where the map of this very cluster is missing the coordinator changes nothing, and judges a person's
/// order to make it anew.
pub fn steer(cluster: &ValidatedCluster, observed: &Observed, plan: &Plan) -> Option<Steering> {
    let is_away = cluster.is_suspended() && observed.map.as_ref().is_some_and(|map| map.suspended);
    if is_away {
        return None;
    }
    // By what is observed: the condition is also that of a cluster that cannot begin from its snapshot yet, whose coordinator tries again.
    if evidence::stalled(cluster, observed).is_some() {
        return evidence::is_orphaned(cluster, observed)
            .then(|| Steering { had_map: true, ..carried_on(cluster, observed) });
    }
    let mut steering = carried_on(cluster, observed);
    for action in &plan.actions {
        match action {
            Action::Drain { ordinal, evacuate: true, .. } => drop(steering.emptied.insert(*ordinal)),
            Action::Drain { ordinal, evacuate: false, .. } | Action::DeletePod { ordinal, .. } => {
                steering.relieved.insert(*ordinal);
            }
            _ => {}
        }
    }
    let chosen = cluster.annotations.get(REPLACE);
    // Until it has gone, or its disk would be filled again before it is taken away.
    let chosen = observed.pods.iter().filter(|pod| chosen == Some(&pod.uid));
    steering.emptied.extend(chosen.map(|pod| pod.ordinal));
    Some(steering)
}

/// Says how a cluster is coordinated whose spec is refused, by what was good last: nothing is changed, and whoever fails is replaced.
/// Nobody is coordinated who has no map, or is suspended, or would be stalled.
pub fn steer_on(cluster: &ValidatedCluster, observed: &Observed) -> Option<Steering> {
    let is_away = observed.map.as_ref().is_none_or(|map| map.suspended);
    (!is_away && evidence::stalled(cluster, observed).is_none()).then(|| carried_on(cluster, observed))
}

/// What holds whatever is planned.
fn carried_on(cluster: &ValidatedCluster, observed: &Observed) -> Steering {
    // They beat still, and are about to stop.
    let stopping = observed.pods.iter().filter(|pod| pod.terminating).map(|pod| pod.ordinal);
    Steering { workers: cluster.spec.workers, relieved: stopping.collect(), ..Steering::default() }
}
