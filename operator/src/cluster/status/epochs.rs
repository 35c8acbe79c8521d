//! Completed learning epochs of clusters, over all their runs.
//!
//! Queried rarely: during a run every query would change the status, and every status change triggers a reconcile.

use std::time::{Duration, Instant};

use engram_api::status::LearnerClusterStatus;
use engram_api::{ManifestEnum as _, RunKind};
use engram_proto::v1;

use crate::cluster::coordination::worker_client::client;
use crate::cluster::status::is_idle;
use crate::context::{Context, Key};

/// Minimum time between queries; the status of a run is more current.
const BETWEEN: Duration = Duration::from_secs(60);
/// Deadline of a query, which delays the reconcile; on timeout the old value is kept.
const DEADLINE: Duration = Duration::from_secs(1);

/// Time and result of the last query of a cluster.
#[derive(Clone, Copy, Default)]
pub(crate) struct CachedEpochs(Option<(Instant, Option<i64>)>);

impl CachedEpochs {
    /// Invalidates the value, after a run has ended.
    pub(crate) const fn invalidate(&mut self) {
        self.0 = None;
    }
}

/// Updates the completed epochs in the status of an idle cluster, since a worker that does not respond delays the reconcile.
pub(crate) async fn update_epochs(context: &Context, cluster: &Key, status: &mut LearnerClusterStatus) {
    if is_idle(status) {
        status.epoch = completed_epochs(context, cluster).await.or(status.epoch);
    }
}

/// Returns the completed epochs of a cluster, queried at most once a minute; `None` if unknown.
async fn completed_epochs(context: &Context, cluster: &Key) -> Option<i64> {
    let CachedEpochs(cached) = context.clusters.with(cluster, |state| state.epochs);
    if let Some((_, done)) = cached.filter(|(queried, _)| queried.elapsed() < BETWEEN) {
        return done;
    }
    let done = tokio::time::timeout(DEADLINE, query(context, cluster)).await.ok().flatten();
    context.clusters.with(cluster, |state| state.epochs = CachedEpochs(Some((Instant::now(), done))));
    done
}

async fn query(context: &Context, cluster: &Key) -> Option<i64> {
    let client = client(context, cluster).await.ok()??;
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
