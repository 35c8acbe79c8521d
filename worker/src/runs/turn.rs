//! The turn: one run at a time changes a cluster. Who has it is recorded in partition 0.

use super::record;
use crate::shared::Shared;
use engram_memory::{Command, PartitionId, RunId};
use engram_proto::v1::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// The partition that keeps the turn.
const KEEPER: PartitionId = PartitionId(0);

/// Who has the turn.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Turn {
    holder: Option<Holder>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    run: String,
    name: String,
}

/// Why a run does not have the turn.
pub(super) struct Held {
    /// Who has it, or is to have it next.
    pub(super) by: String,
    /// Runs that wait and came before.
    pub(super) before: u32,
}

/// Gives the turn to a run if nobody else has it or came before; else says who.
pub(super) async fn take(
    shared: &Shared,
    run: RunId,
    (submitted_ms, name): (u64, &str),
) -> Result<Result<(), Held>, Problem> {
    let mut waiting = shared.runs.turn.lock().await;
    let (turn, version) = read(shared).await?;
    match turn.holder {
        Some(holder) if holder.run == run.to_string() => Ok(Ok(())),
        Some(holder) => {
            let (before, _) = waiting.ask(run, (submitted_ms, name.to_owned()), Instant::now());
            Ok(Err(Held { by: holder.name, before }))
        }
        None => {
            if let (before, Some(by)) = waiting.ask(run, (submitted_ms, name.to_owned()), Instant::now()) {
                return Ok(Err(Held { by, before: before - 1 }));
            }
            let holder = Some(Holder { run: run.to_string(), name: name.to_owned() });
            write(shared, version, &Turn { holder }).await?;
            waiting.leave(run);
            Ok(Ok(()))
        }
    }
}

/// Takes the turn back from a run, if it has it.
pub(super) async fn give_back(shared: &Shared, run: RunId) -> Result<(), Problem> {
    let mut waiting = shared.runs.turn.lock().await;
    waiting.leave(run);
    let (turn, version) = read(shared).await?;
    match turn.holder {
        Some(holder) if holder.run == run.to_string() => write(shared, version, &Turn::default()).await,
        _ => Ok(()),
    }
}

async fn read(shared: &Shared) -> Result<(Turn, u64), Problem> {
    let Some(entry) = record::load(shared, KEEPER, record::TURN).await? else { return Ok((Turn::default(), 0)) };
    let turn = serde_json::from_slice(&entry.state)
        .map_err(|error| Problem::of(ProblemKind::DataCorruption, format!("the record of the turn: {error}")))?;
    Ok((turn, entry.version))
}

async fn write(shared: &Shared, expected: u64, turn: &Turn) -> Result<(), Problem> {
    let state = serde_json::to_vec(turn).expect("a turn has string keys only");
    let command = Command::RunRecord { run: record::TURN, expected, state, row: None };
    let written = record::write(shared, KEEPER, command).await?;
    // Another process was faster, which can only be one that no longer serves the partition: ask again.
    written.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))
}
