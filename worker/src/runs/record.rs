//! Records of runs in this worker's store.

use crate::engine::write_problem;
use crate::groups::is_group;
use crate::shared::Shared;
use engram_learn::run::{ClusterError, LogError, RunLog};
use engram_memory::{Command, PartitionId, Record, Refusal, Reply, RunId, run::Entry};
use engram_proto::v1::{Problem, ProblemKind};
use std::sync::Arc;

/// Pseudo run id of the turn's record; ids of runs are hashes.
pub(in crate::runs) const TURN: RunId = RunId(0);

/// Writes and reads records of runs.
pub(in crate::runs) struct Recorder {
    pub(in crate::runs) shared: Arc<Shared>,
}

/// Returns every run recorded in the partitions that are served here and readable now, without its rows, and whether all served partitions were
/// readable: a partition that was just activated may not have applied its log yet.
pub(in crate::runs) async fn all(shared: &Shared) -> Result<(Vec<(RunId, Entry)>, bool), Problem> {
    let mut readable = shared.served();
    let served = readable.len();
    loop {
        let partitions_to_read = readable.clone();
        let read = move |partitions: &mut engram_store::Partitions| {
            let ledgers = partitions_to_read.into_iter().filter_map(|partition| partitions.ledger(partition));
            let runs = ledgers.flat_map(|ledger| ledger.runs.iter());
            let is_run = |state: &[u8]| {
                !crate::runs::input::is_content(state) && !crate::runs::federated::is_content(state) && !is_group(state)
            };
            runs.filter(|(run, entry)| *run != TURN && is_run(&entry.state))
                .map(|(run, entry)| (run, entry.without_rows()))
                .collect()
        };
        match shared.engine.read_leased_now(readable.clone(), read).await? {
            Ok(runs) => return Ok((runs, readable.len() == served)),
            Err(unreadable) => readable.retain(|partition| *partition != unreadable),
        }
    }
}

/// Returns the record of one run, if it exists.
pub(crate) async fn load(shared: &Shared, partition: PartitionId, run: RunId) -> Result<Option<Entry>, Problem> {
    if shared.engine.position(partition).is_none() {
        return Err(shared.not_primary(partition));
    }
    let read = move |partitions: &mut engram_store::Partitions| {
        partitions.ledger(partition).and_then(|ledger| ledger.runs.get(run).cloned())
    };
    shared.engine.read_leased(vec![partition], read).await
}

/// Writes a record; a rejection by the partition is the inner error.
pub(crate) async fn write(
    shared: &Shared,
    partition: PartitionId,
    command: Command,
) -> Result<Result<(), Refusal>, Problem> {
    let answers = shared.engine.write(vec![(partition, Record::bare(command))]).await?;
    let answer = answers.into_iter().next().expect("one answer per record");
    match answer.map_err(|error| write_problem(&error))?.reply {
        Reply::Applied(_) => Ok(Ok(())),
        Reply::Refused(refusal) => Ok(Err(refusal)),
    }
}

impl RunLog for Recorder {
    async fn load(&self, run: RunId) -> Result<Option<Entry>, LogError> {
        let partition = crate::runs::partition(&self.shared, run);
        load(&self.shared, partition, run).await.map_err(problem)
    }

    async fn record(&self, run: RunId, expected: u64, state: Vec<u8>, row: Option<Vec<u8>>) -> Result<(), LogError> {
        let partition = crate::runs::partition(&self.shared, run);
        let command = Command::RunRecord { run, expected, state, row };
        match write(&self.shared, partition, command).await.map_err(problem)? {
            Ok(()) => Ok(()),
            Err(Refusal::RunConflict { .. }) => Err(LogError::Superseded),
            Err(refusal) => {
                Err(ClusterError::Permanent { code: "ENG-0308", message: format!("failed to record: {refusal}") }
                    .into())
            }
        }
    }
}

fn problem(problem: Problem) -> LogError {
    let code = match problem.kind() {
        ProblemKind::DataCorruption => "ENG-0503",
        ProblemKind::Invalid => "ENG-0308",
        _ => return ClusterError::Temporary(problem.message).into(),
    };
    ClusterError::Permanent { code, message: problem.message }.into()
}
