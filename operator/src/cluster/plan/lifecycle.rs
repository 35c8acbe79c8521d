//! Events in the life of a cluster: updates of its workers and changes of their number, derived from successive statuses.

use engram_api::status::{ClusterPhase, LearnerClusterStatus, condition};
use std::collections::BTreeSet;

/// What is in progress in a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifecycle {
    is_updating: bool,
    is_scaling: bool,
}

/// Reason and note of an event, and the pod that it is about, if any.
pub type LifecycleEvent = (&'static str, String, Option<String>);

impl Lifecycle {
    /// Returns whether nothing is in progress.
    pub fn is_idle(self) -> bool {
        self == Self::default()
    }

    /// Observes a change of the status, and returns the events to publish.
    pub fn observe(&mut self, old: &LearnerClusterStatus, new: &LearnerClusterStatus) -> Vec<LifecycleEvent> {
        let mut events = Vec::new();
        self.observe_update(old, new, &mut events);
        self.observe_scaling(old, new, &mut events);
        events
    }

    fn observe_update(
        &mut self,
        old: &LearnerClusterStatus,
        new: &LearnerClusterStatus,
        events: &mut Vec<LifecycleEvent>,
    ) {
        let outdated = |status: &LearnerClusterStatus| {
            status.workers.as_ref().map_or(0, |workers| workers.total - workers.up_to_date)
        };
        let total = new.workers.as_ref().map_or(0, |workers| workers.total);
        if outdated(new) > 0 {
            if !self.is_updating && outdated(old) == 0 {
                let image = new.worker.as_ref().map_or("", |worker| worker.image.as_str());
                let note = format!("replacing {} of {total} workers one by one; image {image}", outdated(new));
                events.push(("UpdateStarted", note, None));
            }
            self.is_updating = true;
        } else if self.is_updating && new.phase == Some(ClusterPhase::Ready) {
            self.is_updating = false;
            events.push(("UpdateFinished", format!("all {total} workers have the current pod template"), None));
        }
    }

    fn observe_scaling(
        &mut self,
        old: &LearnerClusterStatus,
        new: &LearnerClusterStatus,
        events: &mut Vec<LifecycleEvent>,
    ) {
        let is_scaling = |status: &LearnerClusterStatus| status.phase == Some(ClusterPhase::Scaling);
        if is_scaling(new) && !self.is_scaling {
            self.is_scaling = true;
            if !is_scaling(old) {
                let reconciling = new.conditions.iter().find(|entry| entry.kind == condition::RECONCILING);
                let note = reconciling.map_or_else(String::new, |entry| entry.message.clone());
                events.push(("ScalingStarted", note, None));
            }
        }
        if self.is_scaling {
            let names = |status: &LearnerClusterStatus| {
                status.members.iter().map(|member| member.name.clone()).collect::<BTreeSet<String>>()
            };
            let (before, after) = (names(old), names(new));
            let event = |reason, verb: &str, pod: &String| (reason, format!("{verb} pod {pod}"), Some(pod.clone()));
            events.extend(after.difference(&before).map(|pod| event("WorkerAdded", "added", pod)));
            events.extend(before.difference(&after).map(|pod| event("WorkerRemoved", "removed", pod)));
        }
        if self.is_scaling && new.phase == Some(ClusterPhase::Ready) {
            self.is_scaling = false;
            let workers = new.workers.as_ref().map_or(0, |workers| workers.total);
            events.push(("ScalingFinished", format!("{workers} workers serve all partitions"), None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_api::status::{Member, WorkerCounts};

    fn status(phase: ClusterPhase, total: i32, up_to_date: i32) -> LearnerClusterStatus {
        let member = |ordinal| Member {
            name: format!("words-worker-{ordinal}"),
            store: None,
            node: None,
            primaries: 0,
            backups: 0,
        };
        LearnerClusterStatus {
            phase: Some(phase),
            workers: Some(WorkerCounts { total, up_to_date, ready: total, draining: 0 }),
            members: (0..total).map(member).collect(),
            ..LearnerClusterStatus::default()
        }
    }

    /// Returns the reasons of all events of a series of statuses.
    fn reasons(series: &[LearnerClusterStatus]) -> Vec<&'static str> {
        let mut lifecycle = Lifecycle::default();
        let events = series.windows(2).flat_map(|pair| lifecycle.observe(&pair[0], &pair[1]));
        let reasons = events.map(|(reason, ..)| reason).collect();
        assert!(lifecycle.is_idle());
        reasons
    }

    #[test]
    fn an_update_starts_and_finishes_once_though_pods_are_replaced_one_by_one() {
        use ClusterPhase::{Degraded, Ready, Updating};
        let series = [
            status(Ready, 3, 3),
            status(Updating, 3, 0),
            status(Degraded, 2, 0),
            status(Updating, 3, 1),
            status(Degraded, 2, 2),
            status(Degraded, 3, 3),
            status(Ready, 3, 3),
        ];
        assert_eq!(reasons(&series), ["UpdateStarted", "UpdateFinished"]);
    }

    #[test]
    fn scaling_names_the_workers_that_are_added_and_removed() {
        use ClusterPhase::{Degraded, Ready, Scaling, Starting};
        let up = [status(Ready, 3, 3), status(Scaling, 3, 3), status(Scaling, 4, 4), status(Ready, 4, 4)];
        assert_eq!(reasons(&up), ["ScalingStarted", "WorkerAdded", "ScalingFinished"]);
        let down = [status(Ready, 4, 4), status(Scaling, 4, 4), status(Scaling, 3, 3), status(Ready, 3, 3)];
        assert_eq!(reasons(&down), ["ScalingStarted", "WorkerRemoved", "ScalingFinished"]);
        let first_start = [status(Starting, 0, 0), status(Starting, 3, 3), status(Ready, 3, 3)];
        assert!(reasons(&first_start).is_empty());
        let lost_pod = [status(Ready, 3, 3), status(Degraded, 2, 2), status(Ready, 3, 3)];
        assert!(reasons(&lost_pod).is_empty());
    }
}
