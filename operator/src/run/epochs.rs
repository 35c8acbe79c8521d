//! Completed learning epochs of clusters, over all their runs.
//!
//! Queried rarely: during a run every query would change the status, and every status change triggers a reconcile.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use engram_api::{ManifestEnum as _, RunKind};
use engram_proto::v1;

use super::{Context, Key, runs};

/// Minimum time between queries; the status of a run is more current.
const BETWEEN: Duration = Duration::from_secs(60);
/// Deadline of a query, which delays the reconcile; on timeout the old value is kept.
const DEADLINE: Duration = Duration::from_secs(1);

/// Time and result of the last query of each cluster.
#[derive(Default)]
pub(super) struct Epochs(Mutex<BTreeMap<Key, (Instant, Option<i64>)>>);

impl Epochs {
    fn cache(&self) -> MutexGuard<'_, BTreeMap<Key, (Instant, Option<i64>)>> {
        self.0.lock()
    }

    /// Returns the completed epochs of a cluster; `None` if unknown.
    pub(super) async fn of(&self, context: &Context, cluster: &Key) -> Option<i64> {
        let cached = self.cache().get(cluster).copied();
        if let Some((_, done)) = cached.filter(|(queried, _)| queried.elapsed() < BETWEEN) {
            return done;
        }
        let done = tokio::time::timeout(DEADLINE, query(context, cluster)).await.ok().flatten();
        self.cache().insert(cluster.clone(), (Instant::now(), done));
        done
    }

    /// Invalidates the value of a cluster, after a run has ended.
    pub(super) fn invalidate(&self, cluster: &Key) {
        self.cache().remove(cluster);
    }

    /// Removes clusters of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.cache().retain(|key, _| key.stays(scope, &present));
    }
}

async fn query(context: &Context, cluster: &Key) -> Option<i64> {
    let client = runs::client(context, cluster).await.ok()??;
    Some(completed(&client.list_runs().await.ok()?))
}

/// Returns the number of completed epochs of `runs`; the steps of a snapshot are partitions, those of some kinds tasks.
fn completed(runs: &[v1::RunStatus]) -> i64 {
    let kind_of = |run: &&v1::RunStatus| RunKind::ALL.iter().find(|kind| kind.as_str() == run.kind);
    let has_epochs = |kind: &RunKind| !matches!(kind, RunKind::Snapshot | RunKind::Job) && !kind.has_tasks();
    let learning = runs.iter().filter(|run| kind_of(run).is_none_or(has_epochs));
    learning.map(|run| i64::try_from(run.epoch).unwrap_or(i64::MAX)).fold(0, i64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_of_snapshots_are_not_epochs() {
        let run = |kind: &str, epoch| v1::RunStatus { kind: kind.into(), epoch, ..v1::RunStatus::default() };
        assert_eq!(completed(&[run("Memory", 233), run("Snapshot", 32), run("Memory", 2)]), 235);
    }
}
