//! The turn: only one run at a time changes a cluster. Its holder is recorded in partition 0.

pub(super) mod queue;

use crate::runs::record;
use crate::shared::Shared;
use engram_memory::{Command, PartitionId, RunId};
use engram_proto::answers;
use engram_proto::v1::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// Partition with the record of the turn.
pub(in crate::runs) const TURN_PARTITION: PartitionId = PartitionId(0);

/// Record of the turn.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Turn {
    holder: Option<Holder>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    /// Identity of the run.
    run: String,
    name: String,
}

/// A run does not have the turn.
pub(in crate::runs) struct TurnDenied {
    /// Name of the run that has it, or gets it next.
    pub(in crate::runs) holder: String,
    /// Number of runs ahead in the queue.
    pub(in crate::runs) ahead: u32,
}

/// Gives the turn to a run if it is free and no other run is ahead.
pub(in crate::runs) async fn acquire(
    shared: &Arc<Shared>,
    run: RunId,
    (submitted_ms, name): (u64, &str),
) -> Result<Result<(), TurnDenied>, Problem> {
    let mut queue = shared.runs.turn.lock().await;
    let (turn, version) = read(shared).await?;
    match turn.holder {
        Some(holder) if holder.run == run.to_string() => Ok(Ok(())),
        Some(holder) => {
            if queue.is_holder_check_due(Instant::now()) {
                tokio::spawn(release_unrecorded(Arc::clone(shared), holder.clone()));
            }
            let (ahead, _) = queue.enqueue(run, (submitted_ms, name.to_owned()), Instant::now());
            Ok(Err(TurnDenied { holder: holder.name, ahead }))
        }
        None => {
            if let (ahead, Some(by)) = queue.enqueue(run, (submitted_ms, name.to_owned()), Instant::now()) {
                return Ok(Err(TurnDenied { holder: by, ahead: ahead - 1 }));
            }
            let holder = Some(Holder { run: run.to_string(), name: name.to_owned() });
            write(shared, version, &Turn { holder }).await?;
            queue.remove(run);
            Ok(Ok(()))
        }
    }
}

/// Releases the turn of a run, if it has it.
pub(in crate::runs) async fn release(shared: &Shared, run: RunId) -> Result<(), Problem> {
    let mut queue = shared.runs.turn.lock().await;
    queue.remove(run);
    shared.runs.released.notify_one();
    let (turn, version) = read(shared).await?;
    match turn.holder {
        Some(holder) if holder.run == run.to_string() => write(shared, version, &Turn::default()).await,
        _ => Ok(()),
    }
}

/// Releases the turn of a run that is not recorded, or was replaced by another one of its name: it has no driver that would release
/// it, and would stop all learning.
async fn release_unrecorded(shared: Arc<Shared>, holder: Holder) {
    let is_recorded = match shared.client.watch_run(&holder.name).next().await {
        Ok(Some(status)) => answers::run_id(&status.run).is_ok_and(|run| run.to_string() == holder.run),
        Ok(None) => true,
        Err(error) => error.kind() != ProblemKind::RunUnknown,
    };
    if is_recorded {
        return;
    }
    let Holder { run, name } = &holder;
    let _queue = shared.runs.turn.lock().await;
    let released = async {
        let (turn, version) = read(&shared).await?;
        match turn.holder {
            Some(current) if current == holder => write(&shared, version, &Turn::default()).await,
            _ => Ok(()),
        }
    };
    match released.await {
        Ok(()) => tracing::warn!(run, name, "released the turn of a run that is not recorded"),
        // The next check repeats it.
        Err(problem) => tracing::warn!(run, name, problem = problem.message, "failed to release the turn of a run"),
    }
}

async fn read(shared: &Shared) -> Result<(Turn, u64), Problem> {
    let Some(entry) = record::load(shared, TURN_PARTITION, record::TURN).await? else {
        return Ok((Turn::default(), 0));
    };
    let turn = serde_json::from_slice(&entry.state)
        .map_err(|error| Problem::of(ProblemKind::DataCorruption, format!("the record of the turn: {error}")))?;
    Ok((turn, entry.version))
}

async fn write(shared: &Shared, expected: u64, turn: &Turn) -> Result<(), Problem> {
    let state = serde_json::to_vec(turn).expect("a turn has string keys only");
    let command = Command::RunRecord { run: record::TURN, expected, state, row: None };
    let written = record::write(shared, TURN_PARTITION, command).await?;
    // Only a process that no longer serves the partition can have been faster; the client retries.
    written.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))
}
