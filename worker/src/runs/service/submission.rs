//! Submission of a run: it is recorded, replaces or continues a recorded run, or is the same.

use super::RunEndpoint;
use super::status::status_to_wire;
use crate::runs::identity::{self, Relation};
use crate::runs::{Runs, credentials, input, record, specification};
use engram_api::MANAGED_BY;
use engram_learn::run::{Phase, RunState};
use engram_memory::run::{MAX_PARTITION_BYTES, MAX_RUNS};
use engram_memory::{Command, Refusal, RunId};
use engram_proto::v1::{self, Problem, ProblemKind};
use std::time::{SystemTime, UNIX_EPOCH};

impl RunEndpoint {
    pub(super) async fn submit(
        &self,
        run: RunId,
        mut message: v1::SubmitRunRequest,
    ) -> Result<v1::SubmitRunResponse, Problem> {
        let (spec, is_supplied) = self.check_spec(&message)?;
        identity::check(&message.uid)?;
        let mut state = RunState::new(message.name.clone(), spec);
        state.uid.clone_from(&message.uid);
        state.suspended = state.spec["suspend"] == true;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        state.submitted_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let partition = crate::runs::partition(&self.shared, run);
        let mut recorded = record::load(&self.shared, partition, run).await?;
        // An unreadable record is reported below.
        let previous = recorded.as_ref().and_then(|entry| RunState::of(entry).ok());
        match previous.map(|previous| (identity::relation(&previous, &state), previous)) {
            Some((Relation::Same | Relation::Replaces, previous)) if resumes(&message, &previous, &state) => {
                return self.resume_ended(run, message, is_supplied).await;
            }
            Some((Relation::Same, previous)) => specification::check_same(&message.name, &previous.spec, &state.spec)?,
            Some((Relation::Blocked, _)) => {
                let overview = self.overview(run, &message.name).await?;
                let status = Some(status_to_wire(&self.shared, &overview));
                return Ok(v1::SubmitRunResponse { status, created: false, resumed: false });
            }
            Some((Relation::Replaces, _)) => {
                Runs::make_room(&self.shared, run, &state).await?;
                recorded = record::load(&self.shared, partition, run).await?;
            }
            None => {}
        }
        if let Some(supplied) = message.credentials.take() {
            credentials::keep(&self.shared, run, supplied);
        }
        let is_new = recorded.is_none();
        if is_new && state.uid.is_empty() && state.spec["managedBy"] != MANAGED_BY {
            // A run that is submitted after its record was removed must not continue the epochs of its predecessor.
            state.uid = format!("{:032x}", rand::random::<u128>());
        }
        if is_new && is_supplied {
            input::keep(&self.shared, run, state.identity(run), supplied_input(&message)?).await?;
        }
        let created = is_new && self.create(run, &state).await?;
        if created && !state.suspended {
            Runs::drive(&self.shared, run, state, 1);
        }
        let overview = self.overview(run, &message.name).await?;
        let status = Some(status_to_wire(&self.shared, &overview));
        Ok(v1::SubmitRunResponse { status, created, resumed: false })
    }

    /// Records a new run. Returns whether no other call has recorded it meanwhile.
    async fn create(&self, run: RunId, state: &RunState) -> Result<bool, Problem> {
        let partition = crate::runs::partition(&self.shared, run);
        let command = Command::RunRecord { run, expected: 0, state: state.encode(), row: None };
        match record::write(&self.shared, partition, command).await? {
            Ok(()) => Ok(true),
            Err(Refusal::RunFull { .. }) => {
                let text = format!(
                    "partition {} has no room for the record of run {:?}: a partition keeps {MAX_RUNS} runs of {} MiB together; remove \
                     runs that have ended (engram list runs, engram delete run NAME), or lower spec.maintenance.runHistoryLimit",
                    partition.0,
                    state.name,
                    MAX_PARTITION_BYTES >> 20
                );
                Err(Problem::of(ProblemKind::RunFull, text))
            }
            Err(_) => Ok(false),
        }
    }

    /// Continues a run that has ended with its next epoch.
    async fn resume_ended(
        &self,
        run: RunId,
        mut message: v1::SubmitRunRequest,
        is_supplied: bool,
    ) -> Result<v1::SubmitRunResponse, Problem> {
        let partition = crate::runs::partition(&self.shared, run);
        Runs::await_driver(&self.shared, run).await?;
        let mut resumed = false;
        if let Some(entry) = record::load(&self.shared, partition, run).await?
            && let Ok(previous) = RunState::of(&entry)
            && previous.phase.is_final()
        {
            let state = previous.resume(&message.uid, SystemTime::now());
            if let Some(supplied) = message.credentials.take() {
                credentials::keep(&self.shared, run, supplied);
            }
            if is_supplied {
                input::keep(&self.shared, run, state.identity(run), supplied_input(&message)?).await?;
            }
            let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
            // Of two submissions one resumes it.
            resumed = record::write(&self.shared, partition, command).await?.is_ok();
            if resumed {
                tracing::info!(%run, name = state.name, epochs = state.done, "resuming a run that had ended");
                Runs::drive(&self.shared, run, state, entry.version + 1);
            }
        }
        let overview = self.overview(run, &message.name).await?;
        let status = Some(status_to_wire(&self.shared, &overview));
        Ok(v1::SubmitRunResponse { status, created: false, resumed })
    }
}

/// Returns whether a submission continues the recorded run, which has ended. The runs that learn epochs can.
fn resumes(message: &v1::SubmitRunRequest, recorded: &RunState, submitted: &RunState) -> bool {
    let is_resumed = match message.resume() {
        v1::ResumeMode::Unspecified => false,
        v1::ResumeMode::Unfinished => matches!(recorded.phase, Phase::Failed | Phase::Cancelled),
        v1::ResumeMode::Always => recorded.phase.is_final(),
    };
    // The operator repeats the submission of an object, and an object is resumed by another one.
    let is_repeated = !message.uid.is_empty() && message.uid == recorded.uid;
    is_resumed
        && !is_repeated
        && !submitted.suspended
        && recorded.spec["kind"] == "Memory"
        && specification::check_same(&recorded.name, &recorded.spec, &submitted.spec).is_ok()
}

/// Returns the content that the specification requires with the submission.
fn supplied_input(message: &v1::SubmitRunRequest) -> Result<&[u8], Problem> {
    message.input.as_deref().ok_or_else(|| {
        let text = "input: missing; the content of the ConfigMap in the specification must be supplied";
        Problem::of(ProblemKind::Invalid, text)
    })
}
