//! Submission of runs to their workers, with inputs and credentials; suspending and resuming.

use std::time::Duration;

use engram_api::status::SnapshotResult;
use engram_api::{ConfigMapKey, LearnerRunSpec, MANAGED_BY, ManifestEnum as _, RunKind, Source};
use engram_client::Client;
use engram_proto::v1;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::jiff::Timestamp;

use crate::cluster::coordination::worker_client::client;
use crate::context::{Context, Key};
use crate::kube::api_request::{RequestError, request};
use crate::kube::resource_kinds::built;
use crate::learner_run::error::AdvanceError;
use crate::learner_run::object::RunObject;
use crate::learner_run::reconcile::{QUEUED, WAITING};
use crate::learner_run::{RunReport, RunState};
use crate::names::Names;

/// Polling interval for the progress of a run, which its workers do not publish.
const PROGRESS: Duration = Duration::from_secs(1);
/// Requeue delay of a suspended run, in case a client resumes it.
const SUSPENDED: Duration = Duration::from_secs(30);
/// How long an input may be created after the run that refers to it: files of a directory are applied one by one.
const INPUT_GRACE_SECONDS: i64 = 5;

/// An input of a run that is missing.
struct MissingInput {
    message: String,
    /// Whether the run fails rather than waits.
    is_final: bool,
    /// Machine-readable reason.
    reason: &'static str,
}

/// Submits a run to its cluster unless it is already there, and suspends or resumes it. Returns its state and the requeue delay.
pub(crate) async fn submit_and_report(
    context: &Context,
    key: &Key,
    object: &RunObject,
    spec: &LearnerRunSpec,
    has_started: bool,
) -> Result<(RunState, Option<Duration>), AdvanceError> {
    let cluster = Key { namespace: key.namespace.clone(), name: spec.cluster_ref.name.clone() };
    let waiting = |reason, message| Ok((RunState::Pending { reason, message }, Some(WAITING)));
    let Some(client) = client(context, &cluster).await.map_err(AdvanceError::unreachable)? else {
        let name = &cluster.name;
        let message = format!("LearnerCluster {name} does not exist or does not serve its partitions yet");
        return waiting("ClusterNotReady", message);
    };
    let uid = &*object.attempt_uid();
    let status = match submit(context, &client, key, uid, (spec, has_started)).await? {
        Ok(status) => status,
        Err(SubmitRejection::Input(missing)) if !missing.is_final && is_young(object) => {
            return waiting(missing.reason, missing.message);
        }
        // The submitted run waits for the input.
        Err(SubmitRejection::Input(missing)) if has_started => return waiting(missing.reason, missing.message),
        Err(SubmitRejection::Input(missing)) => {
            return Ok((RunState::Failed { reason: missing.reason, message: missing.message }, None));
        }
        Err(SubmitRejection::Spec(message)) => return Ok((RunState::InvalidSpec(message), None)),
    };
    match name_holder(uid, &status) {
        NameHolder::ThisRun => {}
        NameHolder::PreviousRun => {
            let cancelled = client.cancel_run_as(&key.name, &status.uid).await;
            cancelled.map_err(AdvanceError::workers("cancel the previous run of this name"))?;
            return Ok((RunState::replacing(&key.name, Some(&run_report(&cluster, status))), Some(QUEUED)));
        }
        NameHolder::Client => {
            let (run, cluster) = (&key.name, &cluster.name);
            let message = format!(
                "cluster {cluster} has a run {run} that a client submitted and that has not ended: wait for it, or give this \
                 LearnerRun another name"
            );
            return waiting("NameTaken", message);
        }
    }
    let status = apply_suspend(&client, key, uid, spec.suspend, status).await?;
    let again = if status.phase() == v1::RunPhase::Suspended { SUSPENDED } else { PROGRESS };
    Ok((RunState::Submitted(run_report(&cluster, status)), Some(again)))
}

/// Whose run a cluster has under the name of an object.
#[derive(Debug, PartialEq, Eq)]
enum NameHolder {
    /// That of the object.
    ThisRun,
    /// That of a previous object of this name.
    PreviousRun,
    /// That of a client.
    Client,
}

/// Returns whose run `status` describes, the response to a submission for the object with `uid`.
fn name_holder(uid: &str, status: &v1::RunStatus) -> NameHolder {
    let is_of_object = status.managed_by == MANAGED_BY;
    // Runs that an earlier version submitted have no uid.
    if status.uid == uid || status.uid.is_empty() && is_of_object {
        NameHolder::ThisRun
    } else if is_of_object {
        NameHolder::PreviousRun
    } else {
        NameHolder::Client
    }
}

/// Why a run cannot be submitted.
enum SubmitRejection {
    Input(MissingInput),
    Spec(String),
}

async fn submit(
    context: &Context,
    client: &Client,
    key: &Key,
    uid: &str,
    (spec, has_started): (&LearnerRunSpec, bool),
) -> Result<Result<v1::RunStatus, SubmitRejection>, AdvanceError> {
    // Marks the run as one that has an object, for adoption by another replica.
    let spec = LearnerRunSpec { managed_by: Some(MANAGED_BY.to_owned()), ..spec.without_order() };
    let text = serde_json::to_string(&spec).expect("a spec has string keys only");
    let file = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(events)) => events.config_map.as_ref(),
        _ => spec.data_file().and_then(|file| file.config_map.as_ref()),
    };
    // A submitted run already has its input.
    let mut input = None;
    if let Some(file) = file.filter(|_| !has_started) {
        match read_input(context, &key.namespace, file).await? {
            Ok(content) => input = Some(content),
            Err(missing) => return Ok(Err(SubmitRejection::Input(missing))),
        }
    }
    let secret = secret_of(&spec);
    let mut credentials = None;
    if let Some(name) = secret.filter(|_| !has_started) {
        match read_credentials(context, &key.namespace, name).await? {
            Ok(object) => credentials = Some(object),
            Err(missing) => return Ok(Err(SubmitRejection::Input(missing))),
        }
    }
    let had_credentials = credentials.is_some();
    // An object that is applied again after its run failed or was cancelled continues that run.
    let message = v1::SubmitRunRequest {
        name: key.name.clone(),
        uid: uid.to_owned(),
        spec_json: text.clone(),
        input: input.map(Into::into),
        credentials,
        resume: v1::ResumeMode::Unfinished.into(),
        ..v1::SubmitRunRequest::default()
    };
    match client.submit(message).await {
        // A new driver of the run has no credentials, which are never stored.
        Ok(v1::SubmitRunResponse { status: Some(status), .. }) if status.needs_credentials && !had_credentials => {
            let Some(name) = secret else { return Ok(Ok(status)) };
            match read_credentials(context, &key.namespace, name).await? {
                Ok(object) => {
                    let again = client.submit_run_as(&key.name, uid, &text, None, Some(object)).await;
                    let again = again.map_err(AdvanceError::workers("submit the credentials"))?;
                    Ok(Ok(again.status.unwrap_or(status)))
                }
                Err(missing) => Ok(Err(SubmitRejection::Input(missing))),
            }
        }
        Ok(reply) => {
            if reply.created {
                tracing::info!(run = %key, cluster = spec.cluster_ref.name, "submitted run");
            }
            Ok(Ok(reply.status.unwrap_or_default()))
        }
        Err(engram_client::Error::Rejected(problem)) if problem.kind() == v1::ProblemKind::Invalid => {
            Ok(Err(SubmitRejection::Spec(problem.message)))
        }
        Err(source) => Err(AdvanceError::workers("submit the run")(source)),
    }
}

/// Suspends or resumes a run to match its spec.
pub(crate) async fn apply_suspend(
    client: &Client,
    key: &Key,
    uid: &str,
    suspend: bool,
    status: v1::RunStatus,
) -> Result<v1::RunStatus, AdvanceError> {
    use v1::RunPhase::{Queued, Running, Suspended};
    let is_as_asked = match status.phase() {
        Suspended => suspend,
        Queued | Running => !suspend,
        _ => true,
    };
    if is_as_asked {
        return Ok(status);
    }
    let action = if suspend { "suspend the run" } else { "resume the run" };
    let result = client.suspend_run_as(&key.name, uid, suspend).await;
    result.map_err(AdvanceError::workers(action))
}

/// Reads the input file of a run from its ConfigMap.
async fn read_input(
    context: &Context,
    namespace: &str,
    file: &ConfigMapKey,
) -> Result<Result<Vec<u8>, MissingInput>, RequestError> {
    let ConfigMapKey { name, key } = file;
    let api = built("ConfigMap").of(&context.client, namespace);
    let object = request(|| format!("read ConfigMap {name}"), api.get_opt(name)).await?;
    let missing =
        |message: String, for_good| Ok(Err(MissingInput { message, is_final: for_good, reason: "InputNotFound" }));
    let Some(object) = object else { return missing(format!("ConfigMap {name} not found"), false) };
    let map: ConfigMap = match object.try_parse() {
        Ok(map) => map,
        Err(error) => return missing(format!("ConfigMap {name} cannot be read: {error}"), true),
    };
    let binary = map.binary_data.unwrap_or_default().remove(key).map(|ByteString(bytes)| bytes);
    match map.data.unwrap_or_default().remove(key).map(String::into_bytes).or(binary) {
        Some(content) => Ok(Ok(content)),
        None => missing(format!("ConfigMap {name} has no key {key}"), true),
    }
}

/// Returns the name of the Secret with the storage credentials of a run.
fn secret_of(spec: &LearnerRunSpec) -> Option<&str> {
    let events = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(events)) => events.s3.as_ref(),
        _ => None,
    };
    let snapshot = spec.snapshot.as_ref().and_then(|place| place.secret_ref.as_ref());
    let secret = snapshot.or_else(|| events?.secret_ref.as_ref());
    secret.map(|secret| secret.name.as_str())
}

/// Reads storage credentials. The operator needs an explicit grant to read a Secret.
async fn read_credentials(
    context: &Context,
    namespace: &str,
    name: &str,
) -> Result<Result<v1::ObjectCredentials, MissingInput>, RequestError> {
    let api: kube::Api<Secret> = kube::Api::namespaced(context.client.clone(), namespace);
    let missing =
        |message: String, for_good| Ok(Err(MissingInput { message, is_final: for_good, reason: "SecretNotFound" }));
    let object = match request(|| format!("read Secret {name}"), api.get_opt(name)).await {
        Ok(object) => object,
        Err(error) if error.is_rejected_with(&[403]) => {
            let message = format!(
                "the operator is not allowed to read Secret {name}: grant its ServiceAccount get on it by a Role in this namespace \
                 (docs/backup.md)"
            );
            return Ok(Err(MissingInput { message, is_final: false, reason: "SecretForbidden" }));
        }
        Err(error) => return Err(error),
    };
    let Some(object) = object else { return missing(format!("Secret {name} does not exist"), false) };
    let mut data = object.data.unwrap_or_default();
    let mut read = |key: &str| {
        let text = data.remove(key).and_then(|ByteString(bytes)| String::from_utf8(bytes).ok());
        text.map(|text| text.trim().to_owned()).filter(|text| text.chars().all(|it| it.is_ascii_graphic()))
    };
    let (id, secret, token) = (read("accessKeyId"), read("secretAccessKey"), read("sessionToken"));
    match (id.filter(|id| !id.is_empty()), secret.filter(|secret| !secret.is_empty())) {
        (Some(access_key_id), Some(secret_access_key)) => {
            Ok(Ok(v1::ObjectCredentials { access_key_id, secret_access_key, session_token: token.unwrap_or_default() }))
        }
        _ => missing(format!("Secret {name} lacks accessKeyId or secretAccessKey"), false),
    }
}

/// Returns whether the run is so young that a missing input may still be created.
fn is_young(run: &RunObject) -> bool {
    let created = run.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| Timestamp::now().as_second() - created.0.as_second() < INPUT_GRACE_SECONDS)
}

fn run_report(cluster: &Key, status: v1::RunStatus) -> RunReport {
    let phase = status.phase();
    let code = if status.code.is_empty() { String::new() } else { format!("{}: ", status.code) };
    let names = Names { cluster: cluster.name.clone() };
    let mut metrics: Vec<(String, f64)> = status.metrics.into_iter().collect();
    metrics.sort_by(|a, b| a.0.cmp(&b.0));
    RunReport {
        phase,
        epoch: status.epoch,
        epochs: status.epochs,
        eta_seconds: status.eta_seconds,
        driver: status.driver.map(|ordinal| names.pod(ordinal)),
        metrics,
        outputs: status.outputs.into_iter().collect(),
        message: format!("{code}{}", status.message),
        kind: RunKind::ALL.iter().copied().find(|kind| kind.as_str() == status.kind),
        written: status.snapshot.map(|written| SnapshotResult {
            url: written.url,
            digest: written.digest,
            memories: i64::try_from(written.memories).unwrap_or(i64::MAX),
            bytes: i64::try_from(written.bytes).unwrap_or(i64::MAX),
            partitions: i32::try_from(written.partitions).unwrap_or(i32::MAX),
        }),
        job: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_the_object_with_the_uid_of_the_run() {
        let status = |uid: &str, managed_by: &str| v1::RunStatus {
            uid: uid.to_owned(),
            managed_by: managed_by.to_owned(),
            ..v1::RunStatus::default()
        };
        assert_eq!(name_holder("b", &status("b", MANAGED_BY)), NameHolder::ThisRun);
        assert_eq!(name_holder("b", &status("a", MANAGED_BY)), NameHolder::PreviousRun);
        assert_eq!(name_holder("b", &status("", MANAGED_BY)), NameHolder::ThisRun, "submitted by an earlier version");
        assert_eq!(name_holder("b", &status("", "")), NameHolder::Client);
        assert_eq!(name_holder("b", &status("c", "")), NameHolder::Client, "a client ran it again");
    }
}
