//! Runs whose objects were deleted: cancelled, or their records removed, also if the object was deleted while no operator was running.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engram_api::MANAGED_BY;
use engram_proto::v1;
use kube::runtime::reflector::{ObjectRef, Store};

use crate::cluster::coordination::worker_client::client;
use crate::context::{Context, Key, SubmittedRun};
use crate::kube::controllers::SWEEP_PERIOD;
use crate::learner_run::error::AdvanceError;
use crate::learner_run::object::RunObject;

/// Deadline for listing the runs of a cluster, and maximum back-off of a cluster that does not respond.
const ADOPT_DEADLINE: Duration = Duration::from_secs(2);
const ADOPT_RETRY_MAX: Duration = Duration::from_secs(60);
/// Attempts to cancel or remove a deleted run whose failures are normal: its cluster may be deleted, too.
const DELETION_ATTEMPTS: u32 = 3;
/// Polling interval for deleted runs: such a run stops within two seconds, apart from an epoch in progress. A deletion is no event of a
/// controller, so the runs are compared with the objects in memory.
const DELETED_PERIOD: Duration = Duration::from_millis(250);

/// Cancels the runs whose objects were deleted, and removes the records of those that had succeeded.
pub(super) async fn cancel_deleted(context: Arc<Context>, scope: Option<String>, store: Store<RunObject>) {
    if store.wait_until_ready().await.is_err() {
        return;
    }
    let mut pause = DELETED_PERIOD;
    let mut failures = 0;
    loop {
        tokio::time::sleep(pause).await;
        failures = if pause == SWEEP_PERIOD { failures + 1 } else { 0 };
        pause = DELETED_PERIOD;
        if !context.leadership.is_leader() {
            continue;
        }
        let is_gone = |key: &Key, submitted: &SubmittedRun| {
            let reference = ObjectRef::new(&key.name).within(&key.namespace);
            let is_watched = scope.as_ref().is_none_or(|scope| key.namespace == *scope);
            let object = store.get(&reference);
            is_watched
                && object.is_none_or(|object| !submitted.is_of(object.metadata.uid.as_deref().unwrap_or_default()))
        };
        let gone_of = |runs: &BTreeMap<Key, SubmittedRun>| -> Vec<(Key, SubmittedRun)> {
            let gone = runs.iter().filter(|(key, submitted)| is_gone(key, submitted));
            gone.map(|(key, submitted)| (key.clone(), submitted.clone())).collect()
        };
        let gone = gone_of(&context.succeeded());
        for (key, run) in gone {
            match remove(&context, &key, &run).await {
                Ok(()) => context.succeeded().retain(|other, kept| *other != key || kept.uid != run.uid),
                Err(error) => {
                    report_deletion_failure(&key, &error, failures, "failed to remove the record of a deleted run");
                    pause = SWEEP_PERIOD;
                }
            }
        }
        let gone = gone_of(&context.submitted());
        for (key, submitted) in gone {
            match cancel(&context, &key, &submitted).await {
                Ok(()) => context.submitted().retain(|run, other| *run != key || other.uid != submitted.uid),
                Err(error) => {
                    report_deletion_failure(&key, &error, failures, "failed to cancel a deleted run");
                    pause = SWEEP_PERIOD;
                }
            }
        }
    }
}

/// Logs that a deleted run could not be cancelled or removed. The first attempts fail while its cluster is deleted with it, until its
/// coordinator stops.
fn report_deletion_failure(run: &Key, error: &AdvanceError, failures: u32, what: &str) {
    if failures < DELETION_ATTEMPTS {
        tracing::debug!(%run, %error, "{what}; retrying");
    } else {
        tracing::warn!(%run, %error, "{what}");
    }
}

/// Lists the runs of each cluster when this replica becomes the leader, so that runs deleted while no operator was running are cancelled.
pub(super) async fn adopt_runs(context: Arc<Context>, scope: Option<String>) {
    // Next attempt and back-off of clusters that did not respond; `None` for clusters that did.
    let mut attempts: BTreeMap<Key, Option<(Instant, Duration)>> = BTreeMap::new();
    loop {
        tokio::time::sleep(SWEEP_PERIOD).await;
        if !context.leadership.is_leader() {
            attempts.clear();
            continue;
        }
        let clusters = context.coordinators.keys(scope.as_deref());
        attempts.retain(|cluster, _| clusters.contains(cluster));
        for cluster in clusters {
            let wait = match attempts.get(&cluster) {
                Some(None) => continue,
                Some(Some((due, _))) if Instant::now() < *due => continue,
                Some(Some((_, wait))) => (*wait * 2).min(ADOPT_RETRY_MAX),
                None => SWEEP_PERIOD,
            };
            let answered =
                tokio::time::timeout(ADOPT_DEADLINE, adopt_runs_of(&context, &cluster)).await == Ok(Some(()));
            attempts.insert(cluster, (!answered).then(|| (Instant::now() + wait, wait)));
        }
    }
}

/// Tracks the runs of a cluster that have or had an object.
async fn adopt_runs_of(context: &Context, cluster: &Key) -> Option<()> {
    let runs = client(context, cluster).await.ok()??.list_runs().await.ok()?;
    for run in runs.into_iter().filter(|run| run.managed_by == MANAGED_BY) {
        let (mut tracked, has_turn) = match run.phase() {
            v1::RunPhase::Queued | v1::RunPhase::Running => (context.submitted(), true),
            v1::RunPhase::Suspended => (context.submitted(), false),
            v1::RunPhase::Succeeded => (context.succeeded(), false),
            _ => continue,
        };
        let key = Key { namespace: cluster.namespace.clone(), name: run.name };
        tracked.entry(key).or_insert_with(|| SubmittedRun { cluster: cluster.clone(), uid: run.uid, has_turn });
    }
    Some(())
}

async fn cancel(context: &Context, key: &Key, submitted: &SubmittedRun) -> Result<(), AdvanceError> {
    let SubmittedRun { cluster, uid, .. } = submitted;
    // The runs of a deleted cluster are gone.
    if context.coordinators.report(cluster).is_none() {
        return Ok(());
    }
    let Some(client) = client(context, cluster).await.map_err(AdvanceError::unreachable)? else {
        return Err(AdvanceError::NotServed);
    };
    match client.cancel_run_as(&key.name, uid).await {
        Ok(_) => tracing::info!(run = %key, cluster = %cluster, "cancelled deleted run"),
        Err(engram_client::Error::Rejected(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
        Err(source) => return Err(AdvanceError::workers("cancel the run")(source)),
    }
    Ok(())
}

/// Removes the record of a run that has succeeded and whose object was deleted.
async fn remove(context: &Context, key: &Key, run: &SubmittedRun) -> Result<(), AdvanceError> {
    // The runs of a deleted cluster are gone, and a run without a uid could be another one.
    if run.uid.is_empty() || context.coordinators.report(&run.cluster).is_none() {
        return Ok(());
    }
    let Some(client) = client(context, &run.cluster).await.map_err(AdvanceError::unreachable)? else {
        return Err(AdvanceError::NotServed);
    };
    match client.remove_run(&key.name, &run.uid).await {
        Ok(_) => tracing::info!(run = %key, cluster = %run.cluster, "removed the record of a deleted run"),
        // Workers of an earlier version keep it.
        Err(engram_client::Error::Rejected(problem)) => {
            tracing::warn!(run = %key, problem = problem.message, "failed to remove the record of a deleted run");
        }
        Err(source) => return Err(AdvanceError::workers("remove the run")(source)),
    }
    Ok(())
}
