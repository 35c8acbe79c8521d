//! Reconciles LearnerRuns: submits them to the workers of their cluster and mirrors their progress.
//!
//! Submission is idempotent: a run is identified by its name and the UID of its object, so an object that was deleted and created again
//! is another run, submitted once the previous one has ended. Runs belong to the workers and continue without an operator.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use engram_api::status::{LearnerRunStatus, RunPhase};
use engram_api::{LearnerRunSpec, retry_delay_seconds};
use engram_proto::v1;
use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::reflector::Store;
use tokio::sync::watch;
use tracing::{Instrument as _, debug_span};

use crate::cluster::coordination::worker_client::client;
use crate::context::{Context, Key, SubmittedRun};
use crate::kube::api_request::{WriteError, check_leader, request};
use crate::kube::conditions::now;
use crate::kube::controllers::{controller, deletion_as_success};
use crate::kube::resource_kinds::RUN;
use crate::kube::stored_object::{StoredObject as _, StoredStatus};
use crate::kube::written_statuses::write_status;
use crate::learner_run::cleanup::{adopt_runs, cancel_deleted};
use crate::learner_run::dependency;
use crate::learner_run::error::{AdvanceError, RunError};
use crate::learner_run::jobs;
use crate::learner_run::object::RunObject;
use crate::learner_run::queue::{self, Wait};
use crate::learner_run::submission::submit_and_report;
use crate::learner_run::{
    EndedRun, Retry, RunReport, RunState, is_backing_off, is_over, next_retry, run_event, run_status, validate_run,
};
use crate::telemetry::reconcile_span;

/// Requeue delay of a queued run: polls for its turn, since the end of another run triggers no reconcile of this one.
pub(crate) const QUEUED: Duration = Duration::from_secs(1);
/// Requeue delay of a run that waits for its cluster: polls, since heartbeats of its workers trigger no reconcile.
pub(crate) const WAITING: Duration = Duration::from_secs(5);

/// Shared state of all reconciles of runs.
struct RunContext {
    context: Arc<Context>,
    runs: Store<RunObject>,
}

/// Runs the LearnerRun controller for a namespace, or for all, until `stopped`.
pub(crate) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let controller = controller(&context, scope.as_deref(), concurrency, stopped);
    let cancelling = cancel_deleted(Arc::clone(&context), scope.clone(), controller.store());
    let adopting = adopt_runs(Arc::clone(&context), scope);
    let again = |_: Arc<RunObject>, _: &RunError, _: Arc<RunContext>| Action::requeue(WAITING);
    context.metrics.runs().watch(controller.store());
    let run_context = RunContext { context, runs: controller.store() };
    let reconciling = controller.run(reconcile, again, Arc::new(run_context)).for_each(async |_| {});
    tokio::select! {
        () = reconciling => Ok(()),
        () = cancelling => Ok(()),
        () = adopting => Ok(()),
    }
}

async fn reconcile(object: Arc<RunObject>, run_context: Arc<RunContext>) -> Result<Action, RunError> {
    let key = Key::of(&*object);
    let span = reconcile_span::reconcile_span(RUN, &key, object.metadata.uid.as_deref());
    let reconciling = async {
        let result = deletion_as_success(Box::pin(reconcile_run(&object, &key, &run_context)).await);
        reconcile_span::record_outcome(&result);
        if let Err(error) = &result {
            tracing::warn!(run = %key, %error, "reconcile failed");
        }
        result
    };
    reconciling.instrument(span).await
}

/// Reconciles a run, as the leader, in these steps:
/// 1. one that is *over* is deleted after its time to live, and nothing else happens to it
/// 2. *validate* its spec
/// 3. *advance* it: queue, submit, suspend, resume or retry it; its workers or its Job report its state
/// 4. compute its *status* from its state
/// 5. *write* the status, if it changed, with metrics and events
///
/// # Errors
/// A request to the API server or to the workers failed; the next reconcile continues from there.
async fn reconcile_run(object: &RunObject, key: &Key, run_context: &RunContext) -> Result<Action, RunError> {
    let context = &run_context.context;
    let mut object = object.clone();
    if let Some(written) = context.written_runs.newer(key, &object.metadata) {
        object.status = Some(StoredStatus(written));
    }
    let object = object;
    if !context.leadership.is_leader() || !object.is_managed_here() {
        return Ok(Action::await_change());
    }
    let old = object.status().clone();
    if is_over(&old) {
        let uid = object.uid();
        context.submitted().retain(|run, submitted| run != key || !submitted.is_of(uid));
        track_succeeded(context, key, &object);
        if let Some(ended) = EndedRun::of(&object, &old) {
            context.metrics.runs().record_end(&key.namespace, &ended, false);
        }
        return delete_expired(context, key, &object).await.map_err(RunError::Delete);
    }
    let ((state, again), suspend) = match debug_span!("validate").in_scope(|| validate_run(&object)) {
        Ok(spec) => {
            (advance(run_context, key, &object, &old, &spec).instrument(debug_span!("submit")).await?, spec.suspend)
        }
        Err(refused) => ((RunState::InvalidSpec(refused.message), None), false),
    };
    let status = run_status(&old, (object.generation(), suspend), &state, &now());
    if is_over(&status)
        && let Some(submitted) = context.submitted().get(key)
    {
        context.clusters.with(&submitted.cluster, |state| state.epochs.invalidate());
    }
    if status != old {
        let writing = write_status::<RunObject>(context, key, &status);
        let written = writing.instrument(debug_span!("status")).await.map_err(RunError::Status)?;
        context.written_runs.record(key, &written, Instant::now());
        if let Some(ended) = EndedRun::of(&object, &status) {
            context.metrics.runs().record_end(&key.namespace, &ended, true);
        }
        if let Some(event) = run_event(&old, &status) {
            context.events.publish_run(key, object.uid(), &event).await;
        }
    }
    Ok(again.map_or_else(Action::await_change, Action::requeue))
}

/// Advances a run: queues, submits, suspends or resumes it. Returns its state and the requeue delay.
async fn advance(
    run_context: &RunContext,
    key: &Key,
    object: &RunObject,
    old: &LearnerRunStatus,
    spec: &LearnerRunSpec,
) -> Result<(RunState, Option<Duration>), AdvanceError> {
    let context = &run_context.context;
    let cluster = Key { namespace: key.namespace.clone(), name: spec.cluster_ref.name.clone() };
    let (has_started, uid) = (old.start_time.is_some() && !is_backing_off(old), object.uid());
    if context.submitted().get(key).is_some_and(|submitted| !submitted.is_of(uid)) {
        return Ok((RunState::replacing(&key.name, None), Some(QUEUED)));
    }
    if let Some(job) = &spec.job {
        let held = if old.start_time.is_none() { held_back(run_context, object) } else { None };
        return match held {
            Some(held) if !spec.suspend => Ok((held, Some(QUEUED))),
            _ => jobs::advance(context, key, object, old, (spec, job)).await,
        };
    }
    if spec.suspend && !has_started && !context.submitted().get(key).is_some_and(|submitted| submitted.has_turn) {
        return hold_suspended(context, key, uid, &cluster).await;
    }
    if old.start_time.is_none()
        && let Some(held) = held_back(run_context, object)
    {
        return Ok((held, Some(QUEUED)));
    }
    if let Some(left) = back_off(old) {
        let number = old.retries.unwrap_or_default();
        let time = old.retry_time.clone().unwrap_or_default();
        return Ok((RunState::BackOff(Retry { number, time, message: back_off_message(old) }), Some(left)));
    }
    // A suspended run does not queue.
    if !spec.suspend
        && object.needs_turn()
        && let Some(wait) = claim_turn(run_context, key, object, &cluster)
    {
        return Ok((RunState::Queued(wait), Some(QUEUED)));
    }
    let (mut state, mut again) = submit_and_report(context, key, object, spec, has_started).await?;
    if let RunState::Submitted(report) = &state
        && let Some(number) = next_retry(old, spec.backoff_limit, report)
    {
        let delay = Duration::from_secs(retry_delay_seconds(number));
        (state, again) = (RunState::BackOff(retry(number, delay, spec.backoff_limit, report)), Some(delay));
    }
    match &state {
        RunState::Submitted(report) => {
            let has_turn = report.phase != v1::RunPhase::Suspended;
            context.submitted().insert(key.clone(), SubmittedRun { cluster, uid: object.attempt_uid(), has_turn });
        }
        // Submitted, but its workers are unreachable: it keeps its turn, and is cancelled if its object is deleted.
        RunState::Pending { .. } if has_started => {}
        _ => drop(context.submitted().remove(key)),
    }
    Ok((state, again))
}

/// Holds a run that is suspended before its start. Suspends it on the workers, too, in case a previous leader has submitted it.
async fn hold_suspended(
    context: &Context,
    key: &Key,
    uid: &str,
    cluster: &Key,
) -> Result<(RunState, Option<Duration>), AdvanceError> {
    if let Some(client) = client(context, cluster).await.map_err(AdvanceError::unreachable)? {
        match client.suspend_run_as(&key.name, uid, true).await {
            Ok(_) => {}
            Err(engram_client::Error::Rejected(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
            Err(source) => return Err(AdvanceError::workers("suspend the run")(source)),
        }
    }
    Ok((RunState::Suspended, None))
}

/// Remembers a run that succeeded, so that its record is removed with its object. Those of other runs are kept within the limit of the
/// cluster: an object that is applied again continues them.
fn track_succeeded(context: &Context, key: &Key, object: &RunObject) {
    if object.cluster().is_empty() || object.status().phase != Some(RunPhase::Complete) {
        return;
    }
    let cluster = Key { namespace: key.namespace.clone(), name: object.cluster().to_owned() };
    let run = SubmittedRun { cluster, uid: object.attempt_uid(), has_turn: false };
    context.succeeded().insert(key.clone(), run);
}

/// Returns the time until the next retry of a run; `None` if it is due, or there is none.
fn back_off(status: &LearnerRunStatus) -> Option<Duration> {
    let time: Timestamp = status.retry_time.as_ref()?.parse().ok()?;
    let left = time.as_millisecond() - Timestamp::now().as_millisecond();
    u64::try_from(left).ok().filter(|left| *left > 0).map(Duration::from_millis)
}

fn back_off_message(status: &LearnerRunStatus) -> String {
    let complete = status.conditions.iter().find(|condition| condition.kind == "Complete");
    complete.map_or_else(String::new, |condition| condition.message.clone())
}

/// Returns a retry that starts after `delay`.
fn retry(number: u32, delay: Duration, limit: u32, report: &RunReport) -> Retry {
    let time = Timestamp::now() + delay;
    let message = format!("failed: {}; retry {number} of {limit} after {} s", report.message, delay.as_secs());
    Retry { number, time: time.to_string(), message }
}

/// Returns the runs of a namespace.
fn runs_of(run_context: &RunContext, namespace: &str) -> Vec<Arc<RunObject>> {
    let mut all = run_context.runs.state();
    all.retain(|run| run.namespace() == namespace);
    all
}

/// Returns the state of a run that its dependencies hold back.
fn held_back(run_context: &RunContext, object: &RunObject) -> Option<RunState> {
    if object.head().depends_on.is_empty() {
        return None;
    }
    dependency::held_back(object, &by_name(&runs_of(run_context, object.namespace())))
}

fn by_name(objects: &[Arc<RunObject>]) -> BTreeMap<&str, &RunObject> {
    objects.iter().map(|object| (object.name(), &**object)).collect()
}

/// Returns whether a run does not queue yet: it waits for other runs, or for its next retry.
fn is_held(run: &RunObject, runs: &BTreeMap<&str, &RunObject>) -> bool {
    let is_waiting = run.status().start_time.is_none() && dependency::held_back(run, runs).is_some();
    is_waiting || back_off(run.status()).is_some()
}

/// Returns why a run must wait; otherwise marks it as submitted, so that no other run is submitted at the same time.
fn claim_turn(run_context: &RunContext, key: &Key, object: &RunObject, cluster: &Key) -> Option<Wait> {
    let mut submitted = run_context.context.submitted();
    if submitted.get(key).is_some_and(|of| of.has_turn && of.cluster == *cluster) {
        return None;
    }
    let taken = SubmittedRun { cluster: cluster.clone(), uid: object.uid().to_owned(), has_turn: true };
    // A running run has the turn already, as a restarted operator finds it.
    if object.status().phase == Some(RunPhase::Running) {
        submitted.insert(key.clone(), taken);
        return None;
    }
    let has_turn = |run: &RunObject| {
        let key = Key { namespace: key.namespace.clone(), name: run.name().to_owned() };
        submitted.get(&key).is_some_and(|submitted| submitted.has_turn && submitted.is_of(run.uid()))
    };
    let objects = runs_of(run_context, &key.namespace);
    let names = by_name(&objects);
    let runs: Vec<queue::Run> = objects
        .iter()
        .map(Arc::as_ref)
        .filter(|run| run.cluster() == cluster.name)
        .map(|run| (run, has_turn(run)))
        .filter(|(run, has_turn)| *has_turn || !is_held(run, &names))
        .filter_map(|(run, has_turn)| queue::Run::of(run, has_turn))
        .collect();
    let wait = queue::wait(&runs, &cluster.name, &queue::QueueOrder::of(object));
    if wait.is_none() {
        submitted.insert(key.clone(), taken);
    }
    wait
}

/// Deletes a finished run after its `ttlSecondsAfterFinished`.
async fn delete_expired(context: &Context, key: &Key, object: &RunObject) -> Result<Action, WriteError> {
    let kept_seconds = object.head().ttl_seconds_after_finished;
    let ended = object.status().completion_time.as_ref().and_then(|time| time.parse::<Timestamp>().ok());
    let (Some(kept_seconds), Some(ended)) = (kept_seconds, ended) else { return Ok(Action::await_change()) };
    let gone_for = Timestamp::now().as_second().saturating_sub(ended.as_second());
    let left = kept_seconds.saturating_sub(u64::try_from(gone_for).unwrap_or(0));
    if left > 0 {
        return Ok(Action::requeue(Duration::from_secs(left)));
    }
    check_leader(context)?;
    let preconditions = Some(Preconditions { uid: object.metadata.uid.clone(), resource_version: None });
    let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
    let api = RUN.of(&context.client, &key.namespace);
    request(|| format!("delete LearnerRun {}", key.name), api.delete(&key.name, &parameters)).await?;
    tracing::info!(run = %key, "deleted finished run");
    Ok(Action::await_change())
}
