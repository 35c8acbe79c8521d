//! Identity of submissions: a name identifies one run at a time, and a submission with another uid replaces a run that has ended.

use crate::runs::Runs;
use crate::shared::Shared;
use engram_api::MANAGED_BY;
use engram_learn::run::RunState;
use engram_memory::RunId;
use engram_proto::v1::{Problem, ProblemKind};
use std::sync::Arc;

/// Maximum length of a uid in bytes: that of a Kubernetes object has 36.
const MAX_UID_BYTES: usize = 64;

/// How a submission relates to the recorded run of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::runs) enum Relation {
    /// It is that run.
    Same,
    /// It is another run, and the recorded one has ended.
    Replaces,
    /// It is another run, and the recorded one has not ended.
    Blocked,
}

/// Returns how `submitted` relates to the run `recorded` under its name.
pub(in crate::runs) fn relation(recorded: &RunState, submitted: &RunState) -> Relation {
    let is_of_operator = |state: &RunState| state.spec["managedBy"] == MANAGED_BY;
    // Recorded by a version in which runs had no uid.
    let has_lost_uid = recorded.uid.is_empty() && is_of_operator(recorded) && is_of_operator(submitted);
    if submitted.uid.is_empty() || submitted.uid == recorded.uid || has_lost_uid {
        Relation::Same
    } else if recorded.phase.is_final() {
        Relation::Replaces
    } else {
        Relation::Blocked
    }
}

/// Checks the uid of a submission.
pub(in crate::runs) fn check(uid: &str) -> Result<(), Problem> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if uid.len() <= MAX_UID_BYTES && uid.bytes().all(is_allowed) {
        return Ok(());
    }
    let text = format!("uid: {uid:?} is not allowed; allowed: up to {MAX_UID_BYTES} characters a-z A-Z 0-9 -");
    Err(Problem::of(ProblemKind::Invalid, text))
}

impl Runs {
    /// Removes the record of an ended run that `submitted` replaces, unless another submission has done so.
    pub(in crate::runs) async fn make_room(
        shared: &Arc<Shared>,
        run: RunId,
        submitted: &RunState,
    ) -> Result<(), Problem> {
        let is_replaced = |recorded: &RunState| Ok(relation(recorded, submitted) == Relation::Replaces);
        if Self::remove_ended(shared, run, is_replaced).await? {
            tracing::info!(%run, name = submitted.name, uid = submitted.uid, "replacing an ended run");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_learn::run::Phase;
    use serde_json::json;

    fn run(uid: &str, managed_by: &str, phase: Phase) -> RunState {
        let state = RunState::new("nightly", json!({ "managedBy": managed_by }));
        RunState { uid: uid.to_owned(), phase, ..state }
    }

    #[test]
    fn a_submission_with_another_uid_replaces_an_ended_run_only() {
        let (object, client) = (MANAGED_BY, "");
        let submitted = run("b", object, Phase::Queued);
        for (recorded, expected) in [
            (run("b", object, Phase::Succeeded), Relation::Same),
            (run("a", object, Phase::Succeeded), Relation::Replaces),
            (run("a", object, Phase::Failed), Relation::Replaces),
            (run("a", object, Phase::Running), Relation::Blocked),
            (run("", client, Phase::Cancelled), Relation::Replaces),
            (run("", client, Phase::Queued), Relation::Blocked),
            (run("", object, Phase::Succeeded), Relation::Same),
        ] {
            assert_eq!(relation(&recorded, &submitted), expected, "{recorded:?}");
        }
        let suspended = RunState { suspended: true, ..run("a", object, Phase::Running) };
        assert_eq!(relation(&suspended, &submitted), Relation::Blocked, "it can be resumed");
        assert_eq!(relation(&run("a", object, Phase::Failed), &run("", client, Phase::Queued)), Relation::Same);
    }

    #[test]
    fn uids_are_checked_and_give_runs_of_one_name_different_identities() {
        assert!(check("").is_ok() && check("0b1c2d3e-0b1c-4d3e-8f00-0123456789ab").is_ok());
        assert!(check("a\nb").is_err() && check(&"a".repeat(65)).is_err());
        let identity = |uid: &str| run(uid, "", Phase::Queued).identity(RunId(7));
        assert_eq!(identity(""), RunId(7));
        assert_ne!(identity("a"), identity("b"));
        assert_ne!(identity("a"), RunId(7));
    }
}
