//! Looks after learning runs: hands them to the workers of their cluster, and mirrors what these say.
//!
//! A name stands for one run of a cluster for ever, so that handing over again finds the run: whoever leads just does it. The run
//! itself belongs to the workers; without an operator it goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use engram_api::status::LearnerRunStatus;
use engram_api::{LearnerRunSpec, MANAGED_BY};
use engram_client::{Client, Network, Options};
use engram_identity::{Expected, Role};
use engram_proto::v1;
use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, DynamicObject, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use serde_json::Value;
use tokio::sync::watch;
use tracing::{Instrument as _, debug_span};

use super::asking::{Error, ask};
use super::hand_over::hand_over;
use super::kinds::RUN;
use super::reconcile::{SWEEP, is_ours, key_of, now};
use super::watching::controller;
use super::{Context, Handed, Key, apply, traced};
use crate::learner_run::{Told, is_over, run_status, validate_run};
use crate::queue::{self, Wait};

/// How often a run that waits for others is looked at.
const QUEUED: Duration = Duration::from_secs(1);
/// How often a run that waits for its cluster is looked at.
pub(super) const WAITING: Duration = Duration::from_secs(5);
/// Longest time that a cluster's answer about its runs is waited for, and between questions to one that does not answer.
const STOCK_DEADLINE: Duration = Duration::from_secs(2);
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Longest request to the workers.
const DEADLINE: Duration = Duration::from_secs(10);

/// What every look at a run needs: the whole, and the other runs.
struct Looking {
    context: Arc<Context>,
    runs: Store<DynamicObject>,
}

/// Looks after the runs of a namespace, or of all, until `stopped`.
pub(super) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let controller = controller(&context, RUN, scope.as_deref(), concurrency, stopped);
    let sweeping = sweep(Arc::clone(&context), scope.clone(), controller.store());
    let asking = take_stock(Arc::clone(&context), scope);
    let again = |_: Arc<DynamicObject>, _: &Error, _: Arc<Looking>| Action::requeue(WAITING);
    let looking = Looking { context, runs: controller.store() };
    let looking = controller.run(look, again, Arc::new(looking)).for_each(async |_| {});
    tokio::select! {
        () = looking => Ok(()),
        () = sweeping => Ok(()),
        () = asking => Ok(()),
    }
}

async fn look(object: Arc<DynamicObject>, looking: Arc<Looking>) -> Result<Action, Error> {
    let key = key_of(&object);
    let span = traced::look(RUN, &key, object.metadata.uid.as_deref());
    let looking = async {
        let result = look_at(&object, &key, &looking).await;
        traced::ended(&result);
        if let Err(error) = &result {
            tracing::warn!(run = %key, %error, "a look at a run failed");
        }
        result
    };
    looking.instrument(span).await
}

async fn look_at(object: &DynamicObject, key: &Key, looking: &Looking) -> Result<Action, Error> {
    let context = &looking.context;
    let object = RUN.value(object);
    if !context.leadership.leads() || !is_ours(&object) {
        return Ok(Action::await_change());
    }
    let old: LearnerRunStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    if is_over(&old) {
        context.handed().remove(key);
        return end(context, key, &object, &old).await;
    }
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
    let ((told, again), suspend) = match debug_span!("validate").in_scope(|| validate_run(&object)) {
        Ok(spec) => {
            (stand(looking, key, &object, &old, &spec).instrument(debug_span!("hand over")).await?, spec.suspend)
        }
        Err(refused) => ((Told::Refused(refused.message), None), false),
    };
    let status = run_status(&old, (generation, suspend), &told, &now());
    if is_over(&status)
        && let Some(handed) = context.handed().get(key)
    {
        context.epochs.forget(&handed.cluster);
    }
    if status != old {
        apply::write_status(context, RUN, key, &status).instrument(debug_span!("status")).await?;
    }
    Ok(again.map_or_else(Action::await_change, Action::requeue))
}

/// How a run stands, after what is to be done for it; also when to look again.
async fn stand(
    looking: &Looking,
    key: &Key,
    object: &Value,
    old: &LearnerRunStatus,
    spec: &LearnerRunSpec,
) -> Result<(Told, Option<Duration>), Error> {
    let context = &looking.context;
    let cluster = Key { namespace: key.namespace.clone(), name: spec.cluster_ref.name.clone() };
    let has_started = old.start_time.is_some();
    if spec.suspend && !has_started && !context.handed().get(key).is_some_and(|handed| handed.has_turn) {
        return hold(context, key, &cluster).await;
    }
    // One that is to be suspended asks for nothing.
    if !spec.suspend
        && queue::needs_turn(object)
        && let Some(wait) = claim(looking, key, object, &cluster)
    {
        return Ok((Told::Queued(wait), Some(QUEUED)));
    }
    let (told, again) = hand_over(context, key, object, spec, has_started).await?;
    match &told {
        Told::Seen(seen) => {
            let has_turn = seen.phase != v1::RunPhase::Suspended;
            context.handed().insert(key.clone(), Handed { cluster, has_turn });
        }
        // The workers have it, though nobody reaches them now: it keeps its turn, and is called off if its object goes.
        Told::Waiting { .. } if has_started => {}
        _ => drop(context.handed().remove(key)),
    }
    Ok((told, again))
}

/// A run that shall not start. One that was handed over a moment before, by an operator that could not say so any more, is suspended.
async fn hold(context: &Context, key: &Key, cluster: &Key) -> Result<(Told, Option<Duration>), Error> {
    if let Some(client) = client(context, cluster).await? {
        match client.suspend_run(&key.name, true).await {
            Ok(_) => {}
            Err(engram_client::Error::Refused(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
            Err(source) => return Err(Error::Workers { action: "suspend the run", source: Box::new(source) }),
        }
    }
    Ok((Told::Suspended, None))
}

/// Why a run is not to be handed over now; else it counts as handed over, so that no other is at the same time.
fn claim(looking: &Looking, key: &Key, object: &Value, cluster: &Key) -> Option<Wait> {
    let mut handed = looking.context.handed();
    if handed.get(key).is_some_and(|of| of.has_turn && of.cluster == *cluster) {
        return None;
    }
    let taken = Handed { cluster: cluster.clone(), has_turn: true };
    // One that learns has the turn already: an operator that was started anew finds it so.
    if object.pointer("/status/phase").is_some_and(|phase| phase == "Running") {
        handed.insert(key.clone(), taken);
        return None;
    }
    let has_turn = |run: &Key| handed.get(run).is_some_and(|handed| handed.has_turn);
    let known = looking.runs.state();
    let of_namespace = known.iter().filter(|run| run.metadata.namespace.as_ref() == Some(&key.namespace));
    let runs: Vec<queue::Run> = of_namespace
        .filter(|run| run.data.pointer("/spec/clusterRef/name").is_some_and(|name| *name == *cluster.name))
        .filter_map(|run| queue::Run::of(&RUN.value(run), has_turn(&key_of(run))))
        .collect();
    let wait = queue::wait(&runs, &cluster.name, &queue::Place::of(object));
    if wait.is_none() {
        handed.insert(key.clone(), taken);
    }
    wait
}

/// A client of a cluster, by the addresses that its workers beat with; `None` where no map or worker is known.
pub(super) async fn client(context: &Context, cluster: &Key) -> Result<Option<Client>, Error> {
    let Some((id, report)) = context.coordinators.report(cluster) else { return Ok(None) };
    let endpoints: Vec<String> =
        report.alive.into_iter().map(|(_, address)| address).filter(|address| !address.is_empty()).collect();
    if report.map.is_none() || endpoints.is_empty() {
        return Ok(None);
    }
    let mut options =
        Options { write_deadline: DEADLINE, read_deadline: DEADLINE, ..Options::new(endpoints).of_cluster(id) };
    if let Some(keys) = context.coordinators.own_keys(cluster) {
        options.network = Network::secured(keys, Expected::any(Role::Worker));
    }
    let connected = Client::connect(options).await;
    connected.map(Some).map_err(|source| Error::Workers { action: "reach the workers", source: Box::new(source) })
}

/// Deletes a run whose time after its end is over, where its spec says so.
async fn end(context: &Context, key: &Key, object: &Value, status: &LearnerRunStatus) -> Result<Action, Error> {
    let kept_seconds = object.pointer("/spec/ttlSecondsAfterFinished").and_then(Value::as_u64);
    let ended = status.completion_time.as_ref().and_then(|time| time.parse::<Timestamp>().ok());
    let (Some(kept_seconds), Some(ended)) = (kept_seconds, ended) else { return Ok(Action::await_change()) };
    let gone_for = Timestamp::now().as_second().saturating_sub(ended.as_second());
    let left = kept_seconds.saturating_sub(u64::try_from(gone_for).unwrap_or(0));
    if left > 0 {
        return Ok(Action::requeue(Duration::from_secs(left)));
    }
    apply::check_lead(context)?;
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned);
    let preconditions = Some(Preconditions { uid, resource_version: None });
    let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
    let api = RUN.of(&context.client, &key.namespace);
    ask(|| format!("delete LearnerRun {}", key.name), api.delete(&key.name, &parameters)).await?;
    tracing::info!(run = %key, "deleted: its time after its end is over");
    Ok(Action::await_change())
}

/// How often it is looked whether the object of a run is gone: such a run stops within two seconds, but for an epoch in progress.
const GONE: Duration = Duration::from_millis(250);

/// Calls off the runs whose objects are gone.
async fn sweep(context: Arc<Context>, scope: Option<String>, store: Store<DynamicObject>) {
    if store.wait_until_ready().await.is_err() {
        return;
    }
    let mut pause = GONE;
    loop {
        tokio::time::sleep(pause).await;
        pause = GONE;
        if !context.leadership.leads() {
            continue;
        }
        let is_gone = |key: &Key| {
            let reference = ObjectRef::new_with(&key.name, RUN.resource()).within(&key.namespace);
            scope.as_ref().is_none_or(|scope| key.namespace == *scope) && store.get(&reference).is_none()
        };
        let handed: Vec<(Key, Key)> = context
            .handed()
            .iter()
            .filter(|(key, _)| is_gone(key))
            .map(|(key, handed)| (key.clone(), handed.cluster.clone()))
            .collect();
        for (key, cluster) in handed {
            match call_off(&context, &key, &cluster).await {
                Ok(()) => drop(context.handed().remove(&key)),
                Err(error) => {
                    tracing::warn!(run = %key, %error, "a run whose object is gone was not called off yet");
                    pause = SWEEP;
                }
            }
        }
    }
}

/// Asks each cluster once, when this replica begins to lead, which runs it was handed: one whose object was deleted while no operator was
/// there is called off as any other.
async fn take_stock(context: Arc<Context>, scope: Option<String>) {
    // When to ask who did not answer, and how long to wait then; nothing more of who did.
    let mut asked: BTreeMap<Key, Option<(Instant, Duration)>> = BTreeMap::new();
    loop {
        tokio::time::sleep(SWEEP).await;
        if !context.leadership.leads() {
            asked.clear();
            continue;
        }
        let clusters = context.coordinators.keys(scope.as_deref());
        asked.retain(|cluster, _| clusters.contains(cluster));
        for cluster in clusters {
            let wait = match asked.get(&cluster) {
                Some(None) => continue,
                Some(Some((due, _))) if Instant::now() < *due => continue,
                Some(Some((_, wait))) => (*wait * 2).min(ASK_AGAIN),
                None => SWEEP,
            };
            let answered = tokio::time::timeout(STOCK_DEADLINE, adopt(&context, &cluster)).await == Ok(Some(()));
            asked.insert(cluster, (!answered).then(|| (Instant::now() + wait, wait)));
        }
    }
}

/// Looks after the runs of a cluster that have an object, or had one.
async fn adopt(context: &Context, cluster: &Key) -> Option<()> {
    let runs = client(context, cluster).await.ok()??.list_runs().await.ok()?;
    let mut handed = context.handed();
    for run in runs.into_iter().filter(|run| run.managed_by == MANAGED_BY) {
        let has_turn = match run.phase() {
            v1::RunPhase::Queued | v1::RunPhase::Running => true,
            v1::RunPhase::Suspended => false,
            _ => continue,
        };
        let key = Key { namespace: cluster.namespace.clone(), name: run.name };
        handed.entry(key).or_insert_with(|| Handed { cluster: cluster.clone(), has_turn });
    }
    Some(())
}

async fn call_off(context: &Context, key: &Key, cluster: &Key) -> Result<(), Error> {
    // A cluster that is gone has taken its runs along.
    if context.coordinators.report(cluster).is_none() {
        return Ok(());
    }
    let Some(client) = client(context, cluster).await? else {
        return Err(Error::Coordinator("nobody serves the cluster now".into()));
    };
    match client.cancel_run(&key.name).await {
        Ok(_) => tracing::info!(run = %key, cluster = %cluster, "called off: its object is gone"),
        Err(engram_client::Error::Refused(problem)) if problem.kind() == v1::ProblemKind::RunUnknown => {}
        Err(source) => return Err(Error::Workers { action: "call the run off", source: Box::new(source) }),
    }
    Ok(())
}
