//! Runs of kind `Job`: creates the Job of a run, suspends and resumes it, and reports its state.

pub mod object;
pub mod status;

use std::time::Duration;

use engram_api::status::LearnerRunStatus;
use engram_api::{JobRun, LearnerRunSpec};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;

use crate::context::{Context, Key};
use crate::kube::api_object::is_owned;
use crate::kube::api_request::{check_leader, request};
use crate::kube::resource_kinds::RUN;
use crate::learner_run::RunState;
use crate::learner_run::error::AdvanceError;
use crate::learner_run::jobs::object::{JobOwner, RUN_LABEL, SUSPENDED_BY_RUN, job};
use crate::learner_run::jobs::status::{is_suspended, job_report};
use crate::learner_run::object::RunObject;
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
    object: &RunObject,
    old: &LearnerRunStatus,
    (spec, run): (&LearnerRunSpec, &JobRun),
) -> Result<(RunState, Option<Duration>), AdvanceError> {
    let waiting = |reason, message, again| Ok((RunState::Pending { reason, message }, Some(again)));
    if spec.suspend && old.start_time.is_none() {
        return Ok((RunState::Suspended, None));
    }
    let Some(owner) = JobOwner::of(object) else { return waiting("NotReady", "no UID".into(), WAITING) };
    let api = jobs(context, key);
    let existing = request(|| format!("read Job {}", key.name), api.get_opt(&key.name)).await?;
    let Some(existing) = existing else {
        return create(context, key, &owner, (spec, run)).await;
    };
    if !is_owned(&existing.metadata, &owner.uid) {
        if existing.owner_references().iter().any(|owner| owner.kind == RUN.name) {
            return Ok((RunState::replacing(&key.name, None), Some(QUEUED)));
        }
        let message =
            format!("a Job {} exists that does not belong to this run: delete it, or rename the run", key.name);
        return waiting("NameTaken", message, WAITING);
    }
    apply_suspend(context, key, &existing, spec.suspend).await?;
    let of_run = ListParams::default().labels(&format!("{RUN_LABEL}={}", key.name));
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    let pods = request(|| format!("list the pods of Job {}", key.name), pods.list(&of_run)).await?;
    let job_uid = existing.metadata.uid.as_deref().unwrap_or_default();
    let pods: Vec<Pod> = pods.items.into_iter().filter(|pod| is_owned(&pod.metadata, job_uid)).collect();
    let again = if is_suspended(&existing) { SUSPENDED } else { PROGRESS };
    Ok((RunState::Submitted(job_report(&existing, &pods)), Some(again)))
}

fn jobs(context: &Context, key: &Key) -> Api<Job> {
    Api::namespaced(context.client.clone(), &key.namespace)
}

/// Creates the Job, once its cluster serves.
async fn create(
    context: &Context,
    key: &Key,
    owner: &JobOwner,
    (spec, run): (&LearnerRunSpec, &JobRun),
) -> Result<(RunState, Option<Duration>), AdvanceError> {
    let name = &spec.cluster_ref.name;
    let cluster = Key { namespace: key.namespace.clone(), name: name.clone() };
    let report = context.coordinators.report(&cluster);
    let Some((id, _)) = report.filter(|(_, report)| report.map.is_some() && !report.alive.is_empty()) else {
        let message = format!("LearnerCluster {name} does not exist or does not serve its partitions yet");
        return Ok((RunState::Pending { reason: "ClusterNotReady", message }, Some(WAITING)));
    };
    let id = id.to_string();
    let id = context.coordinators.operator_keys(&cluster).is_some().then_some(id.as_str());
    let job = job(owner, spec, run, id);
    check_leader(context)?;
    let api = jobs(context, key);
    let patch = Patch::Apply(&job);
    let parameters = PatchParams::apply(MANAGER);
    match request(|| format!("create Job {}", key.name), api.patch(&key.name, &parameters, &patch)).await {
        Ok(created) => {
            tracing::info!(run = %key, cluster = name, "created Job");
            Ok((RunState::Submitted(job_report(&created, &[])), Some(PROGRESS)))
        }
        // The API server does not accept the template, which only it knows completely.
        Err(error) => match error.status().filter(|status| matches!(status.code, 400 | 422)) {
            Some(status) => {
                let message = format!("the API server rejected the Job: {}", status.message);
                Ok((RunState::Failed { reason: "JobRejected", message }, None))
            }
            None => Err(error.into()),
        },
    }
}

/// Suspends the Job of a run that is suspended, and resumes one that was suspended that way: a Job that a queue has suspended is left to
/// the queue.
async fn apply_suspend(context: &Context, key: &Key, job: &Job, suspend: bool) -> Result<(), AdvanceError> {
    let is_by_run = job.annotations().contains_key(SUSPENDED_BY_RUN);
    let mark = match (suspend, is_suspended(job), is_by_run) {
        (true, false, _) => Some("true"),
        (false, true, true) => None,
        _ => return Ok(()),
    };
    check_leader(context)?;
    let change = json!({
        "metadata": { "uid": job.metadata.uid, "annotations": { SUSPENDED_BY_RUN: mark } },
        "spec": { "suspend": suspend },
    });
    let api = jobs(context, key);
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&change));
    request(|| format!("patch Job {}", key.name), api.patch(&key.name, &parameters, &patch)).await?;
    Ok(())
}
