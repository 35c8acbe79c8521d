//! Reconciles LearnerRuns: submits them to the workers of their cluster and mirrors their progress.
//!
//! Submission is idempotent: a run is identified by its name and the UID of its object, so an object that was deleted and created again
//! is another run, submitted once the previous one has ended. Runs belong to the workers and continue without an operator.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use engram_api::status::{LearnerRunStatus, RunPhase};
use engram_api::{LearnerRunSpec, MANAGED_BY, retry_delay_seconds};
use engram_client::{Client, Network, Options};
use engram_identity::{ExpectedPeer, Role};
use engram_proto::v1;
use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, DynamicObject, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use serde_json::Value;
use tokio::sync::watch;
use tracing::{Instrument as _, debug_span};

use crate::cluster::apply;
use crate::cluster::controller::{SWEEP_PERIOD, deletion_as_success, key_of};
use crate::cluster::reconcile::{is_ours, now};
use crate::context::{Context, Key, SubmittedRun};
use crate::kube::api_request::{Error, request};
use crate::kube::controllers::controller;
use crate::kube::resource_kinds::RUN;
use crate::learner_run::dependency;
use crate::learner_run::jobs;
use crate::learner_run::queue::{self, Wait};
use crate::learner_run::submission::submit_and_report;
use crate::learner_run::{
    EndedRun, Retry, RunReport, RunState, is_backing_off, is_over, next_retry, run_event, run_status, validate_run,
};
use crate::telemetry::reconcile_span;

/// Requeue delay of a queued run.
pub(crate) const QUEUED: Duration = Duration::from_secs(1);
/// Requeue delay of a run that waits for its cluster.
pub(crate) const WAITING: Duration = Duration::from_secs(5);
/// Deadline for listing the runs of a cluster, and maximum back-off of a cluster that does not respond.
const ADOPT_DEADLINE: Duration = Duration::from_secs(2);
const ADOPT_RETRY_MAX: Duration = Duration::from_secs(60);
/// Deadline of a request to the workers.
const DEADLINE: Duration = Duration::from_secs(10);

/// Shared state of all reconciles of runs.
struct RunContext {
    context: Arc<Context>,
    runs: Store<DynamicObject>,
}

/// Runs the LearnerRun controller for a namespace, or for all, until `stopped`.
pub(crate) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let controller = controller(&context, RUN, scope.as_deref(), concurrency, stopped);
    let sweeping = cancel_deleted(Arc::clone(&context), scope.clone(), controller.store());
    let asking = adopt_runs(Arc::clone(&context), scope);
    let again = |_: Arc<DynamicObject>, _: &Error, _: Arc<RunContext>| Action::requeue(WAITING);
    context.metrics.runs().watch(controller.store());
    let run_context = RunContext { context, runs: controller.store() };
    let run_context = controller.run(reconcile, again, Arc::new(run_context)).for_each(async |_| {});
    tokio::select! {
        () = run_context => Ok(()),
        () = sweeping => Ok(()),
        () = asking => Ok(()),
    }
}

async fn reconcile(object: Arc<DynamicObject>, run_context: Arc<RunContext>) -> Result<Action, Error> {
    let key = key_of(&object);
    let span = reconcile_span::reconcile_span(RUN, &key, object.metadata.uid.as_deref());
    let run_context = async {
        let result = deletion_as_success(Box::pin(reconcile_run(&object, &key, &run_context)).await);
        reconcile_span::record_outcome(&result);
        if let Err(error) = &result {
            tracing::warn!(run = %key, %error, "reconcile failed");
        }
        result
    };
    run_context.instrument(span).await
}

async fn reconcile_run(object: &DynamicObject, key: &Key, run_context: &RunContext) -> Result<Action, Error> {
    let context = &run_context.context;
    let mut object = RUN.value(object);
    context.written_runs.apply(key, &mut object);
    if !context.leadership.is_leader() || !is_ours(&object) {
        return Ok(Action::await_change());
    }
    let old: LearnerRunStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    if is_over(&old) {
        let uid = uid_of(&object);
        context.submitted().retain(|run, submitted| run != key || !submitted.is_of(uid));
        track_succeeded(context, key, &object, &old);
        if let Some(ended) = EndedRun::of(&object, &old) {
            context.metrics.runs().record_end(&key.namespace, &ended, false);
        }
        return delete_expired(context, key, &object, &old).await;
    }
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
    let ((state, again), suspend) = match debug_span!("validate").in_scope(|| validate_run(&object)) {
        Ok(spec) => {
            (advance(run_context, key, &object, &old, &spec).instrument(debug_span!("submit")).await?, spec.suspend)
        }
        Err(refused) => ((RunState::InvalidSpec(refused.message), None), false),
    };
    let status = run_status(&old, (generation, suspend), &state, &now());
    if is_over(&status)
        && let Some(submitted) = context.submitted().get(key)
    {
        context.clusters.with(&submitted.cluster, |state| state.epochs.invalidate());
    }
    if status != old {
        let written = apply::write_status(context, RUN, key, &status).instrument(debug_span!("status")).await?;
        context.written_runs.record(key, &written, Instant::now());
        if let Some(ended) = EndedRun::of(&object, &status) {
            context.metrics.runs().record_end(&key.namespace, &ended, true);
        }
        if let Some(event) = run_event(&old, &status) {
            context.events.publish_run(key, uid_of(&object), &event).await;
        }
    }
    Ok(again.map_or_else(Action::await_change, Action::requeue))
}

/// Advances a run: queues, submits, suspends or resumes it. Returns its state and the requeue delay.
async fn advance(
    run_context: &RunContext,
    key: &Key,
    object: &Value,
    old: &LearnerRunStatus,
    spec: &LearnerRunSpec,
) -> Result<(RunState, Option<Duration>), Error> {
    let context = &run_context.context;
    let cluster = Key { namespace: key.namespace.clone(), name: spec.cluster_ref.name.clone() };
    let (has_started, uid) = (old.start_time.is_some() && !is_backing_off(old), uid_of(object));
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
        && queue::needs_turn(object)
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
            context.submitted().insert(key.clone(), SubmittedRun { cluster, uid: attempt_uid(object), has_turn });
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
) -> Result<(RunState, Option<Duration>), Error> {
    if let Some(client) = client(context, cluster).await? {
        match client.suspend_run_as(&key.name, uid, true).await {
            Ok(_) => {}
            Err(engram_client::Error::Rejected(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
            Err(source) => return Err(Error::Workers { action: "suspend the run", source: Box::new(source) }),
        }
    }
    Ok((RunState::Suspended, None))
}

/// Remembers a run that succeeded, so that its record is removed with its object. Those of other runs are kept within the limit of the
/// cluster: an object that is applied again continues them.
fn track_succeeded(context: &Context, key: &Key, object: &Value, status: &LearnerRunStatus) {
    let cluster = object.pointer("/spec/clusterRef/name").and_then(Value::as_str);
    let (Some(cluster), Some(RunPhase::Complete)) = (cluster, status.phase) else { return };
    let cluster = Key { namespace: key.namespace.clone(), name: cluster.to_owned() };
    let run = SubmittedRun { cluster, uid: attempt_uid(object), has_turn: false };
    context.succeeded().insert(key.clone(), run);
}

/// Returns the UID of an object.
pub(crate) fn uid_of(object: &Value) -> &str {
    object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default()
}

/// Returns the identity of a run for the workers: the UID of its object, and the number of the retry, which is another submission.
pub(crate) fn attempt_uid(object: &Value) -> String {
    let uid = uid_of(object);
    match object.pointer("/status/retries").and_then(Value::as_u64) {
        Some(retry) => format!("{uid}-{retry}"),
        None => uid.to_owned(),
    }
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

/// Returns the state of a run that its dependencies hold back.
fn held_back(run_context: &RunContext, object: &Value) -> Option<RunState> {
    object.pointer("/spec/dependsOn")?;
    let namespace = object.pointer("/metadata/namespace").and_then(Value::as_str);
    let all = run_context.runs.state();
    let of_namespace = all.iter().filter(|run| run.metadata.namespace.as_deref() == namespace);
    let objects: Vec<Value> = of_namespace.map(|run| RUN.value(run)).collect();
    dependency::held_back(object, &by_name(&objects))
}

fn by_name(objects: &[Value]) -> BTreeMap<&str, &Value> {
    let name = |object| Value::pointer(object, "/metadata/name").and_then(Value::as_str);
    objects.iter().filter_map(|object| Some((name(object)?, object))).collect()
}

/// Returns whether a run does not queue yet: it waits for other runs, or for its next retry.
fn is_held(object: &Value, runs: &BTreeMap<&str, &Value>) -> bool {
    let status: LearnerRunStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    let is_waiting = status.start_time.is_none() && dependency::held_back(object, runs).is_some();
    is_waiting || back_off(&status).is_some()
}

/// Returns why a run must wait; otherwise marks it as submitted, so that no other run is submitted at the same time.
fn claim_turn(run_context: &RunContext, key: &Key, object: &Value, cluster: &Key) -> Option<Wait> {
    let mut submitted = run_context.context.submitted();
    if submitted.get(key).is_some_and(|of| of.has_turn && of.cluster == *cluster) {
        return None;
    }
    let taken = SubmittedRun { cluster: cluster.clone(), uid: uid_of(object).to_owned(), has_turn: true };
    // A running run has the turn already, as a restarted operator finds it.
    if object.pointer("/status/phase").is_some_and(|phase| phase == "Running") {
        submitted.insert(key.clone(), taken);
        return None;
    }
    let has_turn = |run: &DynamicObject| {
        let uid = run.metadata.uid.as_deref().unwrap_or_default();
        submitted.get(&key_of(run)).is_some_and(|submitted| submitted.has_turn && submitted.is_of(uid))
    };
    let all = run_context.runs.state();
    let of_namespace = all.iter().filter(|run| run.metadata.namespace.as_ref() == Some(&key.namespace));
    let objects: Vec<(Value, bool)> = of_namespace.map(|run| (RUN.value(run), has_turn(run))).collect();
    let names = objects.iter().filter_map(|(run, _)| Some((run.pointer("/metadata/name")?.as_str()?, run))).collect();
    let runs: Vec<queue::Run> = objects
        .iter()
        .filter(|(run, _)| run.pointer("/spec/clusterRef/name").is_some_and(|name| *name == *cluster.name))
        .filter(|(run, has_turn)| *has_turn || !is_held(run, &names))
        .filter_map(|(run, has_turn)| queue::Run::of(run, *has_turn))
        .collect();
    let wait = queue::wait(&runs, &cluster.name, &queue::QueueOrder::of(object));
    if wait.is_none() {
        submitted.insert(key.clone(), taken);
    }
    wait
}

/// Returns a client of a cluster, by the addresses in its workers' heartbeats; `None` without a map or without workers.
pub(crate) async fn client(context: &Context, cluster: &Key) -> Result<Option<Client>, Error> {
    let Some((id, report)) = context.coordinators.report(cluster) else { return Ok(None) };
    let endpoints: Vec<String> =
        report.alive.into_iter().map(|(_, address)| address).filter(|address| !address.is_empty()).collect();
    if report.map.is_none() || endpoints.is_empty() {
        return Ok(None);
    }
    let mut options =
        Options { write_deadline: DEADLINE, read_deadline: DEADLINE, ..Options::new(endpoints).with_cluster(id) };
    if let Some(keys) = context.coordinators.operator_keys(cluster) {
        options.network = Network::with_tls(keys, ExpectedPeer::any(Role::Worker));
    }
    let connected = Client::connect(options).await;
    connected.map(Some).map_err(|source| Error::Workers { action: "reach the workers", source: Box::new(source) })
}

/// Deletes a finished run after its `ttlSecondsAfterFinished`.
async fn delete_expired(
    context: &Context,
    key: &Key,
    object: &Value,
    status: &LearnerRunStatus,
) -> Result<Action, Error> {
    let kept_seconds = object.pointer("/spec/ttlSecondsAfterFinished").and_then(Value::as_u64);
    let ended = status.completion_time.as_ref().and_then(|time| time.parse::<Timestamp>().ok());
    let (Some(kept_seconds), Some(ended)) = (kept_seconds, ended) else { return Ok(Action::await_change()) };
    let gone_for = Timestamp::now().as_second().saturating_sub(ended.as_second());
    let left = kept_seconds.saturating_sub(u64::try_from(gone_for).unwrap_or(0));
    if left > 0 {
        return Ok(Action::requeue(Duration::from_secs(left)));
    }
    apply::check_leader(context)?;
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned);
    let preconditions = Some(Preconditions { uid, resource_version: None });
    let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
    let api = RUN.of(&context.client, &key.namespace);
    request(|| format!("delete LearnerRun {}", key.name), api.delete(&key.name, &parameters)).await?;
    tracing::info!(run = %key, "deleted finished run");
    Ok(Action::await_change())
}

/// Attempts to cancel or remove a deleted run whose failures are normal: its cluster may be deleted, too.
const DELETION_ATTEMPTS: u32 = 3;
/// Polling interval for deleted runs: such a run stops within two seconds, apart from an epoch in progress.
const DELETED_PERIOD: Duration = Duration::from_millis(250);

/// Cancels the runs whose objects were deleted, and removes the records of those that had succeeded.
async fn cancel_deleted(context: Arc<Context>, scope: Option<String>, store: Store<DynamicObject>) {
    if store.wait_until_ready().await.is_err() {
        return;
    }
    let mut pause = DELETED_PERIOD;
    let mut failures = 0;
    loop {
        tokio::time::sleep(pause).await;
        failures = if pause == SWEEP_PERIOD { failures + 1 } else { 0 };
        pause = DELETED_PERIOD;
        if !context.leadership.is_leader() {
            continue;
        }
        let is_gone = |key: &Key, submitted: &SubmittedRun| {
            let reference = ObjectRef::new_with(&key.name, RUN.resource()).within(&key.namespace);
            let is_watched = scope.as_ref().is_none_or(|scope| key.namespace == *scope);
            let object = store.get(&reference);
            is_watched
                && object.is_none_or(|object| !submitted.is_of(object.metadata.uid.as_deref().unwrap_or_default()))
        };
        let gone_of = |runs: &BTreeMap<Key, SubmittedRun>| -> Vec<(Key, SubmittedRun)> {
            let gone = runs.iter().filter(|(key, submitted)| is_gone(key, submitted));
            gone.map(|(key, submitted)| (key.clone(), submitted.clone())).collect()
        };
        let gone = gone_of(&context.succeeded());
        for (key, run) in gone {
            match remove(&context, &key, &run).await {
                Ok(()) => context.succeeded().retain(|other, kept| *other != key || kept.uid != run.uid),
                Err(error) => {
                    report_deletion_failure(&key, &error, failures, "failed to remove the record of a deleted run");
                    pause = SWEEP_PERIOD;
                }
            }
        }
        let gone = gone_of(&context.submitted());
        for (key, submitted) in gone {
            match cancel(&context, &key, &submitted).await {
                Ok(()) => context.submitted().retain(|run, other| *run != key || other.uid != submitted.uid),
                Err(error) => {
                    report_deletion_failure(&key, &error, failures, "failed to cancel a deleted run");
                    pause = SWEEP_PERIOD;
                }
            }
        }
    }
}

/// Logs that a deleted run could not be cancelled or removed. The first attempts fail while its cluster is deleted with it, until its
/// coordinator stops.
fn report_deletion_failure(run: &Key, error: &Error, failures: u32, what: &str) {
    if failures < DELETION_ATTEMPTS {
        tracing::debug!(%run, %error, "{what}; retrying");
    } else {
        tracing::warn!(%run, %error, "{what}");
    }
}

/// Lists the runs of each cluster when this replica becomes the leader, so that runs deleted while no operator was running are cancelled.
async fn adopt_runs(context: Arc<Context>, scope: Option<String>) {
    // Next attempt and back-off of clusters that did not respond; `None` for clusters that did.
    let mut attempts: BTreeMap<Key, Option<(Instant, Duration)>> = BTreeMap::new();
    loop {
        tokio::time::sleep(SWEEP_PERIOD).await;
        if !context.leadership.is_leader() {
            attempts.clear();
            continue;
        }
        let clusters = context.coordinators.keys(scope.as_deref());
        attempts.retain(|cluster, _| clusters.contains(cluster));
        for cluster in clusters {
            let wait = match attempts.get(&cluster) {
                Some(None) => continue,
                Some(Some((due, _))) if Instant::now() < *due => continue,
                Some(Some((_, wait))) => (*wait * 2).min(ADOPT_RETRY_MAX),
                None => SWEEP_PERIOD,
            };
            let answered =
                tokio::time::timeout(ADOPT_DEADLINE, adopt_runs_of(&context, &cluster)).await == Ok(Some(()));
            attempts.insert(cluster, (!answered).then(|| (Instant::now() + wait, wait)));
        }
    }
}

/// Tracks the runs of a cluster that have or had an object.
async fn adopt_runs_of(context: &Context, cluster: &Key) -> Option<()> {
    let runs = client(context, cluster).await.ok()??.list_runs().await.ok()?;
    for run in runs.into_iter().filter(|run| run.managed_by == MANAGED_BY) {
        let (mut tracked, has_turn) = match run.phase() {
            v1::RunPhase::Queued | v1::RunPhase::Running => (context.submitted(), true),
            v1::RunPhase::Suspended => (context.submitted(), false),
            v1::RunPhase::Succeeded => (context.succeeded(), false),
            _ => continue,
        };
        let key = Key { namespace: cluster.namespace.clone(), name: run.name };
        tracked.entry(key).or_insert_with(|| SubmittedRun { cluster: cluster.clone(), uid: run.uid, has_turn });
    }
    Some(())
}

async fn cancel(context: &Context, key: &Key, submitted: &SubmittedRun) -> Result<(), Error> {
    let SubmittedRun { cluster, uid, .. } = submitted;
    // The runs of a deleted cluster are gone.
    if context.coordinators.report(cluster).is_none() {
        return Ok(());
    }
    let Some(client) = client(context, cluster).await? else {
        return Err(Error::Coordinator("no worker serves the cluster".into()));
    };
    match client.cancel_run_as(&key.name, uid).await {
        Ok(_) => tracing::info!(run = %key, cluster = %cluster, "cancelled deleted run"),
        Err(engram_client::Error::Rejected(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
        Err(source) => return Err(Error::Workers { action: "cancel the run", source: Box::new(source) }),
    }
    Ok(())
}

/// Removes the record of a run that has succeeded and whose object was deleted.
async fn remove(context: &Context, key: &Key, run: &SubmittedRun) -> Result<(), Error> {
    // The runs of a deleted cluster are gone, and a run without a uid could be another one.
    if run.uid.is_empty() || context.coordinators.report(&run.cluster).is_none() {
        return Ok(());
    }
    let Some(client) = client(context, &run.cluster).await? else {
        return Err(Error::Coordinator("no worker serves the cluster".into()));
    };
    match client.remove_run(&key.name, &run.uid).await {
        Ok(_) => tracing::info!(run = %key, cluster = %run.cluster, "removed the record of a deleted run"),
        // Workers of an earlier version keep it.
        Err(engram_client::Error::Rejected(problem)) => {
            tracing::warn!(run = %key, problem = problem.message, "failed to remove the record of a deleted run");
        }
        Err(source) => return Err(Error::Workers { action: "remove the run", source: Box::new(source) }),
    }
    Ok(())
}
