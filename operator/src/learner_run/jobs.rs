//! Runs of kind `Job`: creates the Job of a run, suspends and resumes it, and reports its state.

use std::time::Duration;

use engram_api::status::LearnerRunStatus;
use engram_api::{JobRun, LearnerRunSpec};
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::apply;
use crate::cluster::build::{JobOwner, RUN_LABEL, SUSPENDED_BY_RUN, job};
use crate::cluster::observe::is_owned;
use crate::context::{Context, Key};
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::{JOB, POD};
use crate::learner_run::RunState;
use crate::learner_run::job_status::job_report;
use crate::learner_run::reconcile::{QUEUED, WAITING};

/// Polling interval of a Job and its pods: the operator watches neither, since pods of users may be many.
const PROGRESS: Duration = Duration::from_secs(1);
/// Requeue delay of a suspended Job, which a queue may start.
const SUSPENDED: Duration = Duration::from_secs(2);
/// Field manager of Jobs.
const MANAGER: &str = "engram-operator";

/// Advances a run of kind `Job`. Returns its state and the requeue delay.
pub(crate) async fn advance(
    context: &Context,
    key: &Key,
    object: &Value,
    old: &LearnerRunStatus,
    (spec, run): (&LearnerRunSpec, &JobRun),
) -> Result<(RunState, Option<Duration>), Error> {
    let waiting = |reason, message, again| Ok((RunState::Pending { reason, message }, Some(again)));
    if spec.suspend && old.start_time.is_none() {
        return Ok((RunState::Suspended, None));
    }
    let Some(owner) = JobOwner::of(object) else { return waiting("NotReady", "no UID".into(), WAITING) };
    let api = JOB.of(&context.client, &key.namespace);
    let existing = request(|| format!("read Job {}", key.name), api.get_opt(&key.name)).await?;
    let Some(existing) = existing.map(|existing| JOB.value(&existing)) else {
        return create(context, key, &owner, (spec, run)).await;
    };
    if !is_owned(&existing, &owner.uid) {
        let owners = existing.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        let is_previous = owners.is_some_and(|owners| owners.iter().any(|it| it["kind"] == "LearnerRun"));
        if is_previous {
            return Ok((RunState::replacing(&key.name, None), Some(QUEUED)));
        }
        let message =
            format!("a Job {} exists that does not belong to this run: delete it, or rename the run", key.name);
        return waiting("NameTaken", message, WAITING);
    }
    apply_suspend(context, key, &existing, spec.suspend).await?;
    let of_run = ListParams::default().labels(&format!("{RUN_LABEL}={}", key.name));
    let pods = POD.of(&context.client, &key.namespace);
    let pods = request(|| format!("list the pods of Job {}", key.name), pods.list(&of_run)).await?;
    let job_uid = existing["metadata"]["uid"].as_str().unwrap_or_default();
    let pods = pods.items.iter().map(|pod| POD.value(pod)).filter(|pod| is_owned(pod, job_uid));
    let report = job_report(&existing, &pods.collect::<Vec<_>>());
    let again = if existing["spec"]["suspend"] == true { SUSPENDED } else { PROGRESS };
    Ok((RunState::Submitted(report), Some(again)))
}

/// Creates the Job, once its cluster serves.
async fn create(
    context: &Context,
    key: &Key,
    owner: &JobOwner,
    (spec, run): (&LearnerRunSpec, &JobRun),
) -> Result<(RunState, Option<Duration>), Error> {
    let name = &spec.cluster_ref.name;
    let cluster = Key { namespace: key.namespace.clone(), name: name.clone() };
    let report = context.coordinators.report(&cluster);
    let Some((id, _)) = report.filter(|(_, report)| report.map.is_some() && !report.alive.is_empty()) else {
        let message = format!("LearnerCluster {name} does not exist or does not serve its partitions yet");
        return Ok((RunState::Pending { reason: "ClusterNotReady", message }, Some(WAITING)));
    };
    let id = id.to_string();
    let id = context.coordinators.operator_keys(&cluster).is_some().then_some(id.as_str());
    let object = job(owner, spec, run, id);
    apply::check_leader(context)?;
    let api = JOB.of(&context.client, &key.namespace);
    let patch = Patch::Apply(&object);
    let parameters = PatchParams::apply(MANAGER);
    match request(|| format!("create Job {}", key.name), api.patch(&key.name, &parameters, &patch)).await {
        Ok(created) => {
            tracing::info!(run = %key, cluster = name, "created Job");
            Ok((RunState::Submitted(job_report(&JOB.value(&created), &[])), Some(PROGRESS)))
        }
        // The API server does not accept the template, which only it knows completely.
        Err(Error::Api { source: kube::Error::Api(status), .. }) if matches!(status.code, 400 | 422) => {
            let message = format!("the API server rejected the Job: {}", status.message);
            Ok((RunState::Failed { reason: "JobRejected", message }, None))
        }
        Err(error) => Err(error),
    }
}

/// Suspends the Job of a run that is suspended, and resumes one that was suspended that way: a Job that a queue has suspended is left to
/// the queue.
async fn apply_suspend(context: &Context, key: &Key, job: &Value, suspend: bool) -> Result<(), Error> {
    let is_suspended = job["spec"]["suspend"] == true;
    let is_by_run = job["metadata"]["annotations"].get(SUSPENDED_BY_RUN).is_some();
    let mark = match (suspend, is_suspended, is_by_run) {
        (true, false, _) => json!("true"),
        (false, true, true) => Value::Null,
        _ => return Ok(()),
    };
    apply::check_leader(context)?;
    let change = json!({
        "metadata": { "uid": job["metadata"]["uid"], "annotations": { SUSPENDED_BY_RUN: mark } },
        "spec": { "suspend": suspend },
    });
    let api = JOB.of(&context.client, &key.namespace);
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&change));
    request(|| format!("patch Job {}", key.name), api.patch(&key.name, &parameters, &patch)).await.map(drop)
}
