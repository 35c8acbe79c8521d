//! Control of a recorded run: suspend, resume, cancel, remove.

use super::RunEndpoint;
use crate::runs::{Runs, credentials, input, record};
use engram_learn::run::{Order, Phase, RunState};
use engram_memory::{Command, RunId};
use engram_proto::v1::{Problem, ProblemKind};
use std::time::SystemTime;

impl RunEndpoint {
    /// Removes the record of a run that has ended.
    pub(super) async fn remove(&self, run: RunId, name: &str, uid: &str) -> Result<bool, Problem> {
        let is_removed = |recorded: &RunState| {
            if !uid.is_empty() && uid != recorded.uid {
                return Ok(false);
            }
            if recorded.phase.is_final() {
                return Ok(true);
            }
            let text = format!("name: run {name:?} has not ended; allowed: runs that have ended (cancel it first)");
            Err(Problem::of(ProblemKind::Invalid, text))
        };
        let removed = Runs::remove_ended(&self.shared, run, is_removed).await?;
        if removed {
            tracing::info!(%run, name, "removed the record of an ended run");
        }
        Ok(removed)
    }

    /// Suspends or resumes a run, directly if no driver is there to do it.
    pub(super) async fn suspend(&self, run: RunId, suspend: bool) -> Result<(), Problem> {
        let order = if suspend { Order::Suspend } else { Order::Continue };
        let has_driver = self.shared.runs.order(run, order);
        let partition = crate::runs::partition(&self.shared, run);
        let Some(entry) = record::load(&self.shared, partition, run).await? else { return Ok(()) };
        let Ok(state) = RunState::of(&entry) else { return Ok(()) };
        let is_done = state.phase.is_final() || state.suspended == suspend;
        if is_done || suspend && has_driver {
            return Ok(());
        }
        let state = RunState { suspended: suspend, ..state };
        let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
        // A concurrent change wins; the client sees the resulting status and may retry.
        if record::write(&self.shared, partition, command).await?.is_ok() && !suspend {
            Runs::resume(&self.shared, run, state, entry.version + 1);
        }
        Ok(())
    }

    /// Cancels a suspended run, which has no driver.
    pub(super) async fn end_suspended(&self, run: RunId) -> Result<(), Problem> {
        let partition = crate::runs::partition(&self.shared, run);
        let Some(entry) = record::load(&self.shared, partition, run).await? else { return Ok(()) };
        let Ok(mut state) = RunState::of(&entry) else { return Ok(()) };
        if state.reported_phase() == Phase::Suspended {
            state.end(Phase::Cancelled, "", "cancelled".into(), SystemTime::now());
            let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
            let written = record::write(&self.shared, partition, command).await?;
            written.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))?;
            credentials::forget(&self.shared, run);
            input::forget(&self.shared, run, state.identity(run)).await?;
        }
        Ok(())
    }
}
