//! Removal of runs that have ended: by command, when another run takes their name, and beyond the number that the cluster keeps.

use crate::runs::{Runs, credentials, federated, input, record, turns};
use crate::shared::Shared;
use engram_learn::run::RunState;
use engram_memory::{Command, Record, RunId};
use engram_proto::v1::{self, Problem, ProblemKind, RunPhase};
use std::sync::Arc;
use std::time::Duration;

/// How long the driver of an ended run may take to release the turn and the files of the run.
const DRIVER_DEADLINE: Duration = Duration::from_secs(5);
/// Longest interval between checks whether more runs are kept than allowed: each lists the runs of the cluster.
const HISTORY_CHECK_INTERVAL: Duration = Duration::from_secs(600);

impl Runs {
    /// Removes the record of a run that has ended, if `is_removed` accepts it. Returns whether it was removed.
    pub(in crate::runs) async fn remove_ended(
        shared: &Arc<Shared>,
        run: RunId,
        is_removed: impl Fn(&RunState) -> Result<bool, Problem>,
    ) -> Result<bool, Problem> {
        let _replacing = shared.runs.replacing.lock().await;
        let partition = crate::runs::partition(shared, run);
        let Some(entry) = record::load(shared, partition, run).await? else { return Ok(false) };
        // A record that cannot be read has no driver, and nothing else can remove it.
        let recorded = RunState::of(&entry).ok();
        if !recorded.as_ref().map_or(Ok(true), &is_removed)? {
            return Ok(false);
        }
        Self::await_driver(shared, run).await?;
        let identity = recorded.map_or(run, |recorded| recorded.identity(run));
        shared.runs.active().remove(&run);
        credentials::forget(shared, run);
        input::forget(shared, run, identity).await?;
        federated::forget_contents(shared, run, identity).await?;
        let removed = record::write(shared, partition, Command::RunRemove { run }).await?;
        removed.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))?;
        shared.runs.recorded.lock().await.remove(&identity);
        // In an earlier version the identity was the id of the record, and the next run of this name may have it.
        if identity != run {
            let peers = shared.client.clone();
            tokio::spawn(async move {
                // Entries that are left are evicted when a partition has too many.
                if let Err(error) = peers.forget_run(identity).await {
                    tracing::debug!(%identity, %error, "failed to forget the epochs of a removed run");
                }
            });
        }
        Ok(true)
    }

    /// Waits until a run that has ended has no driver.
    pub(in crate::runs) async fn await_driver(shared: &Shared, run: RunId) -> Result<(), Problem> {
        let ended = shared.runs.wait_for_driver(run);
        let is_late = |_| Problem::of(ProblemKind::Unavailable, "the driver of the ended run has not stopped yet");
        tokio::time::timeout(DRIVER_DEADLINE, ended).await.map_err(is_late)
    }

    /// Removes the epochs of a removed run from the partitions served here.
    pub(in crate::runs) async fn forget_epochs(shared: &Shared, run: RunId) -> Result<(), Problem> {
        let forget = |partition| (partition, Record::bare(Command::RunRemove { run }));
        // Refused by each partition, since none has the record.
        shared.engine.write(shared.served().into_iter().map(forget).collect()).await.map(drop)
    }

    /// Removes the runs that ended first while more than `spec.maintenance.runHistoryLimit` are kept. The primary of the turn's
    /// partition does it for the cluster.
    pub(crate) async fn limit_history(shared: Arc<Shared>) {
        let limit = shared.setup.options.spec.maintenance.run_history_limit as usize;
        loop {
            // A run that ends releases the turn.
            let _ = tokio::time::timeout(HISTORY_CHECK_INTERVAL, shared.runs.released.notified()).await;
            if shared.engine.position(turns::TURN_PARTITION).is_none() {
                continue;
            }
            let Ok(runs) = shared.client.list_runs().await else { continue };
            for run in surplus(runs, limit) {
                match shared.client.remove_run(&run.name, &run.uid).await {
                    Ok(_) => tracing::info!(name = run.name, limit, "removed the record of an ended run"),
                    Err(error) => tracing::warn!(name = run.name, %error, "failed to remove an ended run; retrying"),
                }
            }
        }
    }
}

/// Returns the ended runs that are not among the last `limit` to end.
fn surplus(mut runs: Vec<v1::RunStatus>, limit: usize) -> Vec<v1::RunStatus> {
    runs.retain(|run| matches!(run.phase(), RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled));
    runs.sort_by(|a, b| (b.ended_ms, &b.name).cmp(&(a.ended_ms, &a.name)));
    runs.split_off(limit.min(runs.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_that_ended_last_are_kept_and_none_that_has_not_ended_is_removed() {
        let run = |name: &str, phase: RunPhase, ended_ms| v1::RunStatus {
            name: name.into(),
            phase: phase.into(),
            ended_ms,
            ..v1::RunStatus::default()
        };
        let runs = vec![
            run("old", RunPhase::Succeeded, 10),
            run("running", RunPhase::Running, 0),
            run("newest", RunPhase::Failed, 30),
            run("suspended", RunPhase::Suspended, 0),
            run("new", RunPhase::Cancelled, 20),
            run("unknown", RunPhase::Succeeded, 0),
        ];
        let names = |limit| surplus(runs.clone(), limit).into_iter().map(|run| run.name).collect::<Vec<_>>();
        assert_eq!(names(2), ["old", "unknown"]);
        assert_eq!(names(0), ["newest", "new", "old", "unknown"]);
        assert_eq!(names(9), [""; 0]);
    }
}
