//! Rate limit of status writes that change only counters.
//!
//! During re-replication counters change with every write of the map, many times a second. Each status write costs the API server as much as
//! one of the map, and triggers a reconcile in every replica.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use engram_api::status::LearnerClusterStatus;

use super::Key;

/// Minimum time between writes that change only counters.
const BETWEEN: Duration = Duration::from_millis(500);

/// Time of the last status write of each cluster, by this replica.
#[derive(Default)]
pub(super) struct Statuses(Mutex<BTreeMap<Key, Instant>>);

impl Statuses {
    fn written(&self) -> MutexGuard<'_, BTreeMap<Key, Instant>> {
        self.0.lock()
    }

    /// Returns how long to delay the write of `now`; `None` to write it immediately.
    pub(super) fn wait(
        &self,
        cluster: &Key,
        old: &LearnerClusterStatus,
        now: &LearnerClusterStatus,
        at: Instant,
    ) -> Option<Duration> {
        let written = *self.written().get(cluster)?;
        let left = BETWEEN.checked_sub(at.saturating_duration_since(written)).filter(|left| !left.is_zero())?;
        (now != old && without_counters(now) == without_counters(old)).then_some(left)
    }

    /// Records a status write.
    pub(super) fn wrote(&self, cluster: &Key, at: Instant) {
        self.written().insert(cluster.clone(), at);
    }

    /// Removes clusters of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.written().retain(|key, _| key.stays(scope, &present));
    }
}

/// Returns a status without counters, including those in condition messages.
fn without_counters(status: &LearnerClusterStatus) -> LearnerClusterStatus {
    let mut status = LearnerClusterStatus { partitions: None, epoch: None, members: Vec::new(), ..status.clone() };
    status.conditions.iter_mut().for_each(|condition| condition.message.clear());
    status
}

#[cfg(test)]
mod tests {
    use engram_api::status::{ClusterPhase, PartitionCounts};

    use super::*;

    #[test]
    fn counter_changes_are_delayed_and_other_changes_are_not() {
        let statuses = Statuses::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        let partitions = |healthy| Some(PartitionCounts { healthy, ..PartitionCounts::default() });
        let old = LearnerClusterStatus { partitions: partitions(1), ..LearnerClusterStatus::default() };
        let figures = LearnerClusterStatus { partitions: partitions(2), ..old.clone() };
        let phase = LearnerClusterStatus { phase: Some(ClusterPhase::Ready), ..figures.clone() };
        let (start, ms) = (Instant::now(), Duration::from_millis);
        assert_eq!(statuses.wait(&key, &old, &figures, start), None, "nothing was written yet");

        statuses.wrote(&key, start);
        assert_eq!(statuses.wait(&key, &old, &figures, start + ms(200)), Some(ms(300)));
        assert_eq!(statuses.wait(&key, &old, &old, start + ms(200)), None, "there is nothing to wait for");
        assert_eq!(statuses.wait(&key, &old, &phase, start + ms(200)), None);
        assert_eq!(statuses.wait(&key, &old, &figures, start + BETWEEN), None);

        statuses.keep_only(Some("elsewhere"), |_| false);
        assert!(statuses.wait(&key, &old, &figures, start).is_some());
        statuses.keep_only(None, |_| false);
        assert_eq!(statuses.wait(&key, &old, &figures, start), None);
    }
}
