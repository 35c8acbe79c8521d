//! Runs as `LearnerRun` objects, which the operator submits to the workers.

use super::{Cluster, MANAGER, error};
use crate::error::failure;
use anyhow::Context as _;
use engram_api::status::{JobStatus, LearnerRunStatus, RunPhase as ObjectPhase};
use engram_api::{Code, ExitCode, LearnerRun, LearnerRunSpec, parse_object};
use engram_proto::v1::{RunPhase, RunStatus};
use futures::FutureExt as _;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};
use std::time::Duration;

/// Poll interval while waiting for the operator.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

impl Cluster {
    /// Creates the object of a run. Returns `false` if an identical one exists.
    ///
    /// # Errors
    /// The API server rejects it, or another run has the same name.
    pub(crate) async fn create_run(&self, run: &LearnerRun) -> anyhow::Result<bool> {
        let name = &run.metadata.name;
        let spec = serde_json::to_value(&run.spec).context("failed to serialize the run")?;
        let object = json!({
            "apiVersion": engram_api::API_VERSION, "kind": "LearnerRun", "metadata": { "name": name }, "spec": spec,
        });
        let object: DynamicObject = serde_json::from_value(object).context("failed to convert the run to an object")?;
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        match self.runs().create(&parameters, &object).boxed().await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let exists = spec_of(&self.run(name).await?).is_some_and(|existing| is_same(&existing, &run.spec));
                let message = || {
                    format!(
                        "another LearnerRun {name} exists in namespace {}; rename the run, or delete the other one: kubectl delete learnerrun {name}",
                        self.namespace
                    )
                };
                if exists { Ok(false) } else { Err(failure(ExitCode::Conflict, message())) }
            }
            Err(error) => Err(error::describe(&error, "to create the run", "create learnerruns", &self.namespace)),
        }
    }

    /// Creates the object of a run, replacing one of its name that has ended. Returns `true`.
    ///
    /// # Errors
    /// The run of this name has not ended, or the API server rejects a request.
    pub(crate) async fn recreate_run(&self, run: &LearnerRun) -> anyhow::Result<bool> {
        let name = &run.metadata.name;
        let describe =
            |error: kube::Error| error::describe(&error, "to delete the run", "delete learnerruns", &self.namespace);
        let existing = self.runs().get_opt(name).boxed().await.map_err(describe)?;
        if let Some(existing) = existing {
            if existing.data.pointer("/status/completionTime").is_none() {
                let message = format!(
                    "LearnerRun {name} has not ended, so it cannot be run again: wait for it, or delete it: kubectl -n {} delete \
                     learnerrun {name}",
                    self.namespace
                );
                return Err(failure(ExitCode::Conflict, message));
            }
            // Only the object that has ended: another client may have created a new one meanwhile.
            let preconditions = Some(Preconditions { uid: existing.metadata.uid, resource_version: None });
            let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
            self.runs().delete(name, &parameters).boxed().await.map_err(describe)?;
        }
        self.create_run(run).await
    }

    /// Waits until a run is submitted to the workers. Calls `on_wait` whenever the reason to wait changes.
    ///
    /// # Errors
    /// The operator rejects the run, or the API server does not respond.
    pub(crate) async fn wait_for_submission(&self, name: &str, mut on_wait: impl FnMut(&str)) -> anyhow::Result<()> {
        let mut last = String::new();
        loop {
            match stage(&self.run(name).await?) {
                Stage::Submitted => return Ok(()),
                Stage::Rejected(message) => {
                    return Err(failure(ExitCode::Failed, format!("run {name} was rejected: {message}")));
                }
                Stage::Waiting(message) if message == last => {}
                Stage::Waiting(message) => {
                    on_wait(&message);
                    last = message;
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Sets `spec.suspend` of a run.
    ///
    /// # Errors
    /// The API server rejects it, or the run does not exist.
    pub(crate) async fn suspend_run(&self, name: &str, suspend: bool) -> anyhow::Result<()> {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let change = Patch::Merge(json!({ "spec": { "suspend": suspend } }));
        let patched = self.runs().patch(name, &parameters, &change).boxed().await;
        let describe =
            |error: kube::Error| error::describe(&error, "to update the run", "patch learnerruns", &self.namespace);
        patched.map(drop).map_err(describe)
    }

    /// Deletes the object of a run; the operator cancels the run if it has not ended.
    ///
    /// # Errors
    /// The API server rejects it, or the run does not exist.
    pub(crate) async fn delete_run(&self, name: &str) -> anyhow::Result<()> {
        let deleted = self.runs().delete(name, &DeleteParams::background()).boxed().await;
        let describe =
            |error: kube::Error| error::describe(&error, "to delete the run", "delete learnerruns", &self.namespace);
        deleted.map(drop).map_err(describe)
    }

    /// Reads a run; `None` if it does not exist.
    ///
    /// # Errors
    /// The API server rejects the request.
    pub(crate) async fn run_object(&self, name: &str) -> anyhow::Result<Option<RunObject>> {
        let object = self.runs().get_opt(name).boxed().await;
        let object = object
            .map_err(|error| error::describe(&error, "to read the LearnerRun", "get learnerruns", &self.namespace))?;
        let Some(object) = object else { return Ok(None) };
        let object = serde_json::to_value(object).context("failed to serialize the LearnerRun")?;
        Ok(Some(RunObject { state: object_state(&object), spec: spec_of(&object) }))
    }

    /// Reads the runs of kind `Job` of the cluster, with their processes; none without the right to list LearnerRuns, which clients of the
    /// workers need not have.
    ///
    /// # Errors
    /// The API server rejects the request.
    pub(crate) async fn jobs(&self) -> anyhow::Result<Vec<(RunStatus, JobStatus)>> {
        let listed = match self.runs().list(&ListParams::default()).boxed().await {
            Ok(listed) => listed,
            Err(kube::Error::Api(status)) if status.code == 403 => return Ok(Vec::new()),
            Err(error) => {
                return Err(error::describe(&error, "to list the runs", "list learnerruns", &self.namespace));
            }
        };
        let mut jobs = Vec::new();
        for object in listed.items {
            let object = serde_json::to_value(object).context("failed to serialize the LearnerRun")?;
            if object["spec"]["kind"] == "Job" && object["spec"]["clusterRef"]["name"] == self.name {
                jobs.push(job_of(&object));
            }
        }
        Ok(jobs)
    }

    async fn run(&self, name: &str) -> anyhow::Result<Value> {
        let object = self.runs().get(name).boxed().await;
        let object = object
            .map_err(|error| error::describe(&error, "to read the LearnerRun", "get learnerruns", &self.namespace))?;
        serde_json::to_value(object).context("failed to serialize the LearnerRun")
    }

    fn runs(&self) -> Api<DynamicObject> {
        let resource = ApiResource {
            group: "engram.dev".into(),
            version: "v1alpha1".into(),
            api_version: engram_api::API_VERSION.into(),
            kind: "LearnerRun".into(),
            plural: "learnerruns".into(),
        };
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }
}

/// A run as the API server has it.
#[derive(Debug)]
pub(crate) struct RunObject {
    pub(crate) state: ObjectState,
    /// `None` if it is invalid.
    spec: Option<LearnerRunSpec>,
}

impl RunObject {
    /// Returns whether its specification is this one.
    pub(crate) fn is_same(&self, spec: &LearnerRunSpec) -> bool {
        self.spec.as_ref().is_some_and(|existing| is_same(existing, spec))
    }
}

/// State of a run by its status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ObjectState {
    /// Not started.
    Waiting,
    /// Started, with its progress.
    Running(String),
    Complete,
    /// Never started, because a run on which it depends failed.
    Skipped(String),
    /// Failed, with the reason.
    Failed(String),
}

fn object_state(object: &Value) -> ObjectState {
    let status = &object["status"];
    let failed = || status["conditions"].as_array().into_iter().flatten().find(|it| it["type"] == "Failed");
    let text = |field: &str| failed().and_then(|it| it[field].as_str()).unwrap_or_default().to_owned();
    match status["phase"].as_str() {
        Some("Complete") => ObjectState::Complete,
        Some("Failed") if text("reason") == "DependencyFailed" => ObjectState::Skipped(text("message")),
        Some("Failed") => ObjectState::Failed(text("message")),
        Some("Running") => {
            let progress = &status["progress"];
            let total = progress["total"].as_i64().map_or_else(String::new, |total| format!("/{total}"));
            ObjectState::Running(format!("{}{total}", progress["epoch"].as_i64().unwrap_or_default()))
        }
        _ => match stage(object) {
            Stage::Rejected(message) => ObjectState::Failed(message),
            Stage::Submitted | Stage::Waiting(_) => ObjectState::Waiting,
        },
    }
}

/// Returns the status of a run of kind `Job`.
fn job_of(object: &Value) -> (RunStatus, JobStatus) {
    let status: LearnerRunStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    let message = |kind: &str| {
        let condition = status.conditions.iter().find(|condition| condition.kind == kind);
        condition.map_or_else(String::new, |condition| condition.message.clone())
    };
    let (phase, message) = match status.phase {
        Some(ObjectPhase::Running) => (RunPhase::Running, message("Complete")),
        Some(ObjectPhase::Suspended) => (RunPhase::Suspended, message("Complete")),
        Some(ObjectPhase::Complete) => (RunPhase::Succeeded, String::new()),
        Some(ObjectPhase::Failed) => (RunPhase::Failed, message("Failed")),
        Some(ObjectPhase::Pending) | None => (RunPhase::Queued, message("Complete")),
    };
    let time = |text: &Option<String>| text.as_ref().and_then(|time| time.parse::<jiff::Timestamp>().ok());
    let end = time(&status.completion_time).unwrap_or_else(jiff::Timestamp::now);
    let elapsed = time(&status.start_time).map_or(0.0, |start| end.duration_since(start).as_secs_f64());
    let job = status.job.unwrap_or_default();
    let run = RunStatus {
        name: object["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        phase: phase.into(),
        epoch: u64::try_from(job.succeeded).unwrap_or_default(),
        epochs: object["spec"]["job"]["replicas"].as_u64().unwrap_or(1),
        elapsed_seconds: elapsed,
        eta_seconds: -1.0,
        message,
        code: if phase == RunPhase::Failed { Code::RunFailed.id().to_owned() } else { String::new() },
        kind: "Job".into(),
        ..RunStatus::default()
    };
    (run, job)
}

/// Progress of the submission of a run.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// Submitted to the workers.
    Submitted,
    /// Rejected, with the reason.
    Rejected(String),
    /// Not submitted yet, with the reason.
    Waiting(String),
}

fn stage(object: &Value) -> Stage {
    let status = &object["status"];
    if status["startTime"].is_string() {
        return Stage::Submitted;
    }
    // Failed before submission, for example because an input is missing.
    let reason = || {
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let failed = conditions.into_iter().find(|it| it["type"] == "Failed");
        failed.and_then(|it| it["message"].as_str()).unwrap_or_default().to_owned()
    };
    if status["phase"] == "Failed" {
        return Stage::Rejected(reason());
    }
    let conditions = || status["conditions"].as_array().into_iter().flatten();
    let message_of = |kind: &str, value: &str| {
        let condition = conditions().find(|it| it["type"] == kind && it["status"] == value)?;
        Some(condition["message"].as_str().unwrap_or_default().to_owned())
    };
    if let Some(message) = message_of("Accepted", "False") {
        return Stage::Rejected(message);
    }
    Stage::Waiting(match message_of("Complete", "False") {
        Some(message) => message,
        None => "not reconciled by an operator yet".to_owned(),
    })
}

/// Returns the spec of an object.
fn spec_of(object: &Value) -> Option<LearnerRunSpec> {
    Some(parse_object(object).ok()?.runs.pop()?.spec)
}

/// Whether two specs are equal with defaults, ignoring `managedBy`.
fn is_same(existing: &LearnerRunSpec, requested: &LearnerRunSpec) -> bool {
    let normalize = |spec: &LearnerRunSpec| LearnerRunSpec { managed_by: None, ..spec.effective(None) };
    normalize(existing) == normalize(requested)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(spec: &Value, status: &Value) -> Value {
        json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun",
            "metadata": { "name": "r", "namespace": "research", "uid": "1" }, "spec": spec, "status": status,
        })
    }

    #[test]
    fn runs_wait_until_submitted_or_rejected() {
        let of = |status: &Value| stage(&object(&json!({}), status));
        let condition = |kind: &str, message: &str| json!({ "conditions": [{ "type": kind, "status": "False", "message": message }] });
        assert_eq!(of(&json!({})), Stage::Waiting("not reconciled by an operator yet".into()));
        assert_eq!(of(&condition("Complete", "words is not there")), Stage::Waiting("words is not there".into()));
        assert_eq!(of(&condition("Accepted", "no such source")), Stage::Rejected("no such source".into()));
        let gone = json!({ "type": "Failed", "status": "True", "message": "there is no ConfigMap sales" });
        let failed = json!({ "phase": "Failed", "conditions": [gone] });
        assert_eq!(of(&failed), Stage::Rejected("there is no ConfigMap sales".into()));
        let mut queued = condition("Complete", "run a has the turn");
        queued["startTime"] = "2026-11-22T09:00:00Z".into();
        assert_eq!(of(&queued), Stage::Submitted);
    }

    #[test]
    fn specs_are_compared_with_defaults() {
        let spec = |epochs: u64, more: Value| {
            let mut spec = json!({
                "clusterRef": { "name": "words" }, "kind": "Memory",
                "memory": { "source": { "synthetic": { "memories": 500 } }, "epochs": epochs },
            });
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            spec_of(&object(&spec, &json!({}))).unwrap()
        };
        let requested = spec(5, json!({}));
        assert!(is_same(&spec(5, json!({ "suspend": false, "managedBy": "engram.dev/operator" })), &requested));
        assert!(!is_same(&spec(6, json!({})), &requested));
    }
}
