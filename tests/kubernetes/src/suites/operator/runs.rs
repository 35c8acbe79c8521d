//! Learning runs: submission, progress, cancellation.

use super::{CLUSTERS, REPLICAS, TAKEOVER, condition, start_replica, wait_for_status};
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

pub(super) const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerruns";
const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";
/// Epochs of a run that does not finish during the test.
pub(super) const MANY: u32 = 20_000;

/// Applies a run.
pub(super) fn begin_run(cluster: &Cluster, name: &str, source: &Value, epochs: u64) -> Result<()> {
    begin_run_with(cluster, name, source, epochs, &json!({}))
}

/// Applies a run with additional fields in its spec.
fn begin_run_with(cluster: &Cluster, name: &str, source: &Value, epochs: u64, more: &Value) -> Result<()> {
    let mut object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name },
        "spec": {
            "clusterRef": { "name": "words" }, "kind": "Memory", "memory": { "source": source, "epochs": epochs },
        },
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        object["spec"][field] = value.clone();
    }
    cluster.api().create(RUNS, &object).map(drop)
}

/// Events of a file in a ConfigMap.
pub(super) fn in_config_map(name: &str, key: &str) -> Value {
    json!({ "events": { "configMap": { "name": name, "key": key }, "columns": { "key": "word", "epoch": "day" } } })
}

/// A file of `epochs` epochs with one event each.
fn events(epochs: u32) -> String {
    let lines = (0..epochs).map(|day| format!("{day},word-{}\n", day % 50));
    ["day,word\n".to_owned()].into_iter().chain(lines).collect()
}

fn make_config_map(cluster: &Cluster, name: &str, data: &Value) -> Result<()> {
    let object = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": data });
    cluster.api().create(CONFIG_MAPS, &object).map(drop)
}

pub(super) fn run_of(cluster: &Cluster, name: &str) -> Result<Value> {
    cluster.api().get(&format!("{RUNS}/{name}"))
}

pub(super) fn suspend(cluster: &Cluster, name: &str, suspend: bool) -> Result<()> {
    let change = json!({ "spec": { "suspend": suspend } });
    cluster.api().patch(&format!("{RUNS}/{name}"), MERGE, &change).map(drop)
}

pub(super) fn delete(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.api().delete(&format!("{RUNS}/{name}"), None).map(drop)
}

/// Waits for its status.
pub(super) fn wait_for_run(cluster: &Cluster, name: &str, what: &str, holds: fn(&Value) -> bool) -> Result<Value> {
    let mut last = Value::Null;
    let found = until(&format!("run {name} to be {what}"), TAKEOVER, || {
        last = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
        Ok(holds(&last).then(|| last.clone()))
    });
    found.with_context(|| format!("its status is {last:#}"))
}

/// Directory of the volumes that runs may name as `input`.
pub(super) fn inputs(cluster: &Cluster) -> PathBuf {
    cluster.path("volumes").join("inputs")
}

fn is_learning(status: &Value) -> bool {
    status["phase"] == "Running" && status["progress"]["epoch"].as_u64() > Some(0)
}

pub(super) fn learns(cluster: &Cluster) -> Result<String> {
    begin_run(cluster, "long", &json!({ "synthetic": { "memories": 500 } }), 1_000_000)?;
    let running = wait_for_run(cluster, "long", "on its way", is_learning)?;
    ensure!(running["driver"].as_str().is_some_and(|pod| pod.starts_with("words-worker-")), "{running:#}");
    ensure!(running["progress"]["total"] == 1_000_000, "{running:#}");
    // One run at a time changes a cluster: the next one waits until the first is cancelled, here by operators that never saw it.
    begin_run(cluster, "next", &json!({ "example": { "name": "StateOfTheUnion" } }), 5)?;
    wait_for_run(cluster, "next", "queued", |it| condition(it, "Complete").is_some_and(|it| it.1 == "Queued"))?;
    for (replica, ..) in REPLICAS {
        cluster.end_daemon(1, replica, Signal::SIGTERM)?;
    }
    cluster.api().delete(&format!("{RUNS}/long"), None)?;
    ensure!(cluster.api().find(&format!("{RUNS}/long"))?.is_none(), "its deletion waits for an operator");
    let began = Instant::now();
    for replica in REPLICAS {
        start_replica(cluster, replica)?;
    }
    let done = wait_for_run(cluster, "next", "Complete", |it| it["phase"] == "Complete")?;
    let took = began.elapsed();
    ensure!(done["progress"]["epoch"] == 5 && done["completionTime"].is_string(), "{done:#}");
    // Deleted and created again under its name, it is another run, which may have another spec: it learns again.
    delete(cluster, "next")?;
    begin_run(cluster, "next", &json!({ "example": { "name": "StateOfTheUnion" } }), 3)?;
    let again = wait_for_run(cluster, "next", "Complete again", |it| it["phase"] == "Complete")?;
    ensure!(again["progress"]["epoch"] == 3, "{again:#}");
    ensure!(again["outputs"]["digest"].as_str().is_some_and(|digest| digest.len() == 32), "{again:#}");
    ensure!(again["outputs"]["digest"] != done["outputs"]["digest"], "{again:#}");
    // The status counts the epochs of all runs, including cancelled ones; the annotation triggers a reconcile.
    let touch = json!({ "metadata": { "annotations": { "touched": "after the runs" } } });
    cluster.api().patch(&format!("{CLUSTERS}/words"), MERGE, &touch)?;
    wait_for_status(cluster, "words", "with completed epochs", |it| (it["epoch"].as_u64()? > 5).then_some(()))?;
    // A source that pods cannot read is rejected.
    let refused =
        begin_run(cluster, "git", &json!({ "git": { "path": "/src" } }), 5).expect_err("pods have no repository");
    let refused = format!("{refused:#}");
    ensure!(refused.contains("spec.memory.source.git is not supported yet"), "{refused}");
    Ok(format!("done {:.1} s after the operators' start", took.as_secs_f64()))
}

fn is_complete(status: &Value) -> bool {
    status["phase"] == "Complete"
}

fn is_failed(status: &Value) -> bool {
    status["phase"] == "Failed" && status["completionTime"].is_string()
}

/// Waits until a run has this position in the queue, behind the run `first`.
fn wait_for_place(cluster: &Cluster, name: &str, position: usize, first: &str) -> Result<()> {
    let mut last = Value::Null;
    let found = until(&format!("run {name} to be number {position} behind {first}"), TAKEOVER, || {
        last = run_of(cluster, name)?["status"].take();
        let is_behind = condition(&last, "Complete")
            .is_some_and(|it| it.1 == "Queued" && format!("{} ", it.2).contains(&format!("run {first} ")));
        Ok((last["queuePosition"] == position && is_behind && last["startTime"].is_null()).then_some(()))
    });
    found.with_context(|| format!("its status is {last:#}"))
}

pub(super) fn waits(cluster: &Cluster) -> Result<String> {
    make_config_map(cluster, "many", &json!({ "events.csv": events(MANY) }))?;
    let many = in_config_map("many", "events.csv");
    begin_run(cluster, "first", &many, MANY.into())?;
    wait_for_run(cluster, "first", "on its way", is_learning)?;
    // In the order of their creation; two of one second in that of their names.
    for name in ["z", "m", "a"] {
        begin_run(cluster, name, &many, MANY.into())?;
    }
    let mut order = Vec::new();
    for name in ["z", "m", "a"] {
        let created = run_of(cluster, name)?["metadata"]["creationTimestamp"].as_str().context("no time")?.to_owned();
        order.push((created, name));
    }
    order.sort_unstable();
    let [second, third, fourth] = [0, 1, 2].map(|at| order[at].1);
    for (at, name) in [second, third, fourth].into_iter().enumerate() {
        wait_for_place(cluster, name, at + 1, "first")?;
    }
    // A deleted run leaves the queue.
    delete(cluster, third)?;
    wait_for_place(cluster, fourth, 2, "first")?;

    // A suspended run keeps its progress exactly and lets the next one run.
    suspend(cluster, "first", true)?;
    let stopped = wait_for_run(cluster, "first", "suspended", |it| it["phase"] == "Suspended")?;
    let epoch = stopped["progress"]["epoch"].as_u64().context("no epoch")?;
    wait_for_run(cluster, second, "on its way", is_learning)?;
    wait_for_place(cluster, fourth, 1, second)?;
    suspend(cluster, "first", false)?;
    let until_resumed = || -> Result<Value> {
        let status = run_of(cluster, "first")?["status"].take();
        ensure!(status["progress"]["epoch"] == epoch, "it learns while it waits: {status:#}");
        Ok(status)
    };
    until("the first to wait again", TAKEOVER, || Ok((until_resumed()?["queuePosition"] == 1).then_some(())))?;
    let began = Instant::now();
    delete(cluster, second)?;
    wait_for_run(cluster, "first", "on its way again", is_learning)?;
    let took = began.elapsed().as_secs_f64();
    let goes_on = wait_for_run(cluster, "first", "further", |it| it["progress"]["epoch"].as_u64() > Some(0))?;
    ensure!(goes_on["progress"]["epoch"].as_u64() >= Some(epoch), "it restarted: {epoch} epochs, then {goes_on:#}");
    // A run that is suspended before its submission has no start time.
    begin_run_with(cluster, "held", &many, 3, &json!({ "suspend": true }))?;
    let held = wait_for_run(cluster, "held", "suspended", |it| it["phase"] == "Suspended")?;
    ensure!(held["startTime"].is_null() && held["queuePosition"].is_null(), "{held:#}");
    for name in ["first", fourth, "held"] {
        delete(cluster, name)?;
    }
    Ok(format!("stopped after {epoch} epochs; the next one learned {took:.1} s after the deletion of the one before"))
}

pub(super) fn reads(cluster: &Cluster) -> Result<String> {
    let data = json!({ "good.csv": events(7), "damaged.csv": "day,word\n1,a\n2,b\nthird,c\n" });
    make_config_map(cluster, "sales", &data)?;
    let inputs = inputs(cluster).join("corpus");
    std::fs::create_dir_all(&inputs)?;
    std::fs::write(inputs.join("days.csv"), events(9))?;
    let in_volume = |path: &str| json!({ "events": { "input": "corpus", "path": path, "columns": { "key": "word", "epoch": "day" } } });
    let foreign = json!({ "managedBy": "kueue.x-k8s.io/multikueue" });
    begin_run_with(cluster, "foreign", &in_config_map("sales", "good.csv"), 9, &foreign)?;
    begin_run_with(
        cluster,
        "brief",
        &in_config_map("sales", "good.csv"),
        100,
        &json!({ "ttlSecondsAfterFinished": 1 }),
    )?;
    begin_run(cluster, "volume", &in_volume("days.csv"), 100)?;
    // It is deleted soon after its end, so that its final status may be missed.
    until("the run that is kept for a second to go", TAKEOVER, || {
        let found = cluster.api().find(&format!("{RUNS}/brief"))?;
        ensure!(found.as_ref().is_none_or(|it| it["status"]["phase"] != "Failed"), "{:#}", found.unwrap_or_default());
        Ok(found.is_none().then_some(()))
    })?;
    let done = wait_for_run(cluster, "volume", "Complete", is_complete)?;
    ensure!(done["progress"]["epoch"] == 9, "{done:#}");
    for (name, source, reason, said) in [
        (
            "damaged",
            in_config_map("sales", "damaged.csv"),
            "RunFailed",
            "ENG-0304: ConfigMap sales, key damaged.csv, line 4, day",
        ),
        ("keyless", in_config_map("sales", "absent.csv"), "InputNotFound", "ConfigMap sales has no key absent.csv"),
        ("mapless", in_config_map("purchases", "a.csv"), "InputNotFound", "ConfigMap purchases not found"),
        ("fileless", in_volume("absent.csv"), "RunFailed", "corpus/absent.csv: No such file"),
    ] {
        begin_run(cluster, name, &source, 100)?;
        let failed = wait_for_run(cluster, name, "Failed", is_failed)?;
        let (_, why, message) = condition(&failed, "Failed").context("no condition")?;
        ensure!(why == reason && message.contains(said), "{name}: {failed:#}");
    }
    // The workers are unaffected, and the run of another controller is untouched.
    wait_for_status(cluster, "words", "Ready", super::is_ready_cluster)?;
    ensure!(run_of(cluster, "foreign")?["status"].is_null(), "a run of another controller has a status");
    Ok(String::new())
}
