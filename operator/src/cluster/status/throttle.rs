//! Rate limit of status writes that change only counters.
//!
//! During re-replication counters change with every write of the map, many times a second. Each status write costs the API server as much as
//! one of the map, and triggers a reconcile in every replica.

use std::time::{Duration, Instant};

use engram_api::status::LearnerClusterStatus;

/// Minimum time between writes that change only counters.
const BETWEEN: Duration = Duration::from_millis(500);

/// Time of the last status write of a cluster, by this replica.
#[derive(Default)]
pub(crate) struct StatusThrottle(Option<Instant>);

impl StatusThrottle {
    /// Returns how long to delay the write of `now`; `None` to write it immediately.
    pub(crate) fn wait(&self, old: &LearnerClusterStatus, now: &LearnerClusterStatus, at: Instant) -> Option<Duration> {
        let left = BETWEEN.checked_sub(at.saturating_duration_since(self.0?)).filter(|left| !left.is_zero())?;
        (now != old && without_counters(now) == without_counters(old)).then_some(left)
    }

    /// Records a status write.
    pub(crate) const fn wrote(&mut self, at: Instant) {
        self.0 = Some(at);
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
        let mut throttle = StatusThrottle::default();
        let partitions = |healthy| Some(PartitionCounts { healthy, ..PartitionCounts::default() });
        let old = LearnerClusterStatus { partitions: partitions(1), ..LearnerClusterStatus::default() };
        let figures = LearnerClusterStatus { partitions: partitions(2), ..old.clone() };
        let phase = LearnerClusterStatus { phase: Some(ClusterPhase::Ready), ..figures.clone() };
        let (start, ms) = (Instant::now(), Duration::from_millis);
        assert_eq!(throttle.wait(&old, &figures, start), None, "nothing was written yet");

        throttle.wrote(start);
        assert_eq!(throttle.wait(&old, &figures, start + ms(200)), Some(ms(300)));
        assert_eq!(throttle.wait(&old, &old, start + ms(200)), None, "there is nothing to wait for");
        assert_eq!(throttle.wait(&old, &phase, start + ms(200)), None);
        assert_eq!(throttle.wait(&old, &figures, start + BETWEEN), None);
    }
}
