//! Runs on real nodes: one whose driver's node is killed, and one that is deleted.

use super::command::{NAME, NAMESPACE, PODS, engram, read, ready};
use super::helpers::WHILE;
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerruns";
/// What the words of all addresses weigh in the end, wherever they are learned with these settings.
const DIGEST: &str = "82de3b4850164e2866d319c3c0dab744";
/// Of a run that is to be stopped.
const EPOCHS: u64 = 20_000;
/// A run of seconds, and a node that is killed under it.
const RUN: Duration = Duration::from_secs(120);

fn begin(cluster: &Cluster, name: &str, memory: &Value) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "clusterRef": { "name": NAME }, "kind": "Memory", "memory": memory },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

/// A run as its workers report it.
fn describe_run(cluster: &Cluster, name: &str) -> Result<Value> {
    read(&engram(cluster, &["describe", "run", name, "-o", "json"])?)
}

/// Check, on a cluster that holds nothing yet.
pub(super) fn moves(cluster: &Cluster) -> Result<String> {
    let source = json!({ "example": { "name": "StateOfTheUnion" } });
    begin(cluster, "addresses", &json!({ "source": source, "decay": 0.02 }))?;
    let driver = until("the run to learn", WHILE, || {
        let status = cluster.api().get(&format!("{RUNS}/addresses"))?["status"].take();
        ensure!(status["phase"] != "Complete", "it was done before its driver was found");
        let learns = status["progress"]["epoch"].as_u64() > Some(5);
        Ok(status["driver"].as_str().filter(|_| learns).map(str::to_owned))
    })?;
    let pod = cluster.api().get(&format!("{PODS}/{driver}"))?;
    let node = cluster.node_of(&pod)?;
    let before = describe_run(cluster, "addresses")?["status"]["epoch"].as_u64();
    cluster.kill_node(node)?;
    let began = Instant::now();
    // Longer where the operator that leads was on that node too.
    let mut last = Value::Null;
    let ended = until("the run to end", RUN, || {
        last = cluster.api().get(&format!("{RUNS}/addresses"))?["status"].take();
        Ok((last["phase"] == "Complete").then_some(()))
    });
    let took = began.elapsed().as_secs_f64();
    cluster.add_node(node)?;
    ended.with_context(|| format!("its status is {last:#}"))?;
    let ended = until("a worker to report it", RUN, || Ok(describe_run(cluster, "addresses").ok()))?;
    ensure!(ended["report"]["digest"] == DIGEST, "digest {}", ended["report"]["digest"]);
    ensure!(ended["report"]["epochs"].as_array().map(Vec::len) == Some(233), "not every epoch has its row");
    // Its object may say so before anybody has noticed that a node was away.
    ready(cluster)?;
    until("the worker to be back", RUN, || Ok(engram(cluster, &["status", NAME, "-o", "json"]).ok()))?;
    Ok(format!("n{node} killed after {} epochs, all done {took:.1} s later", before.unwrap_or(0)))
}

/// Begins a run of more epochs than anybody waits for, and waits until it learns.
fn begin_long(cluster: &Cluster, name: &str) -> Result<()> {
    let file = json!({ "name": "days", "key": "days.csv" });
    let events = json!({ "configMap": file, "columns": { "key": "word", "epoch": "day" } });
    begin(cluster, name, &json!({ "source": { "events": events } }))?;
    until("the run to learn", WHILE, || {
        let status = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
        ensure!(status["phase"] != "Failed", "{status:#}");
        Ok((status["progress"]["epoch"].as_u64() > Some(0)).then_some(()))
    })
}

/// Deletes a run; how long it took until its workers say that it is called off, and after how many epochs.
fn delete(cluster: &Cluster, name: &str) -> Result<(f64, u64)> {
    let began = Instant::now();
    cluster.api().delete(&format!("{RUNS}/{name}"), None)?;
    let stopped = until("the run to stop", WHILE, || {
        Ok(Some(describe_run(cluster, name)?).filter(|run| run["status"]["phase"] == "Cancelled"))
    })?;
    let learned = stopped["status"]["epoch"].as_u64().context("no epoch")?;
    ensure!(learned < EPOCHS, "it ended by itself");
    Ok((began.elapsed().as_secs_f64(), learned))
}

/// A run that is deleted after its end and created again is another run, which learns.
fn runs_again(cluster: &Cluster) -> Result<()> {
    let mut digests = Vec::new();
    for epochs in [3, 2] {
        let file = json!({ "name": "days", "key": "days.csv" });
        let events = json!({ "configMap": file, "columns": { "key": "word", "epoch": "day" } });
        begin(cluster, "again", &json!({ "source": { "events": events }, "epochs": epochs }))?;
        let status = until("the run to be complete", WHILE, || {
            let status = cluster.api().get(&format!("{RUNS}/again"))?["status"].take();
            ensure!(status["phase"] != "Failed", "{status:#}");
            Ok((status["phase"] == "Complete").then_some(status))
        })?;
        ensure!(status["progress"]["epoch"] == epochs, "{status:#}");
        ensure!(status["progress"]["metrics"]["memories"].is_string(), "{status:#}");
        digests.push(status["outputs"]["digest"].as_str().context("no digest")?.to_owned());
        cluster.api().delete(&format!("{RUNS}/again"), None)?;
    }
    ensure!(digests[0] != digests[1], "the second run has learned nothing");
    Ok(())
}

/// Runs are created in the reverse of their order: each starts when those before it are complete, and ends when one of them fails.
fn in_order(cluster: &Cluster) -> Result<()> {
    let learns = |map: &str| {
        let events =
            json!({ "configMap": { "name": map, "key": "days.csv" }, "columns": { "key": "word", "epoch": "day" } });
        json!({ "source": { "events": events }, "epochs": 2 })
    };
    for (name, on, map) in [
        ("third", "second", "days"),
        ("lost", "fails", "days"),
        ("second", "first", "days"),
        ("fails", "first", "no-map"),
        ("first", "", "days"),
    ] {
        let depends_on = if on.is_empty() { json!([]) } else { json!([{ "run": on }]) };
        let object = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": { "clusterRef": { "name": NAME }, "kind": "Memory", "memory": learns(map), "dependsOn": depends_on },
        });
        cluster.api().create(RUNS, &object)?;
        if name == "third" {
            until("the run to wait for another one", WHILE, || {
                let status = cluster.api().get(&format!("{RUNS}/third"))?["status"].take();
                let waits = |it: &Value| {
                    it["reason"] == "WaitingForDependencies" && it["message"] == "waits for run second (does not exist)"
                };
                Ok(status["conditions"].as_array().is_some_and(|all| all.iter().any(waits)).then_some(()))
            })?;
        }
    }
    let ended = |name: &str, phase: &str| {
        until("the run to end", WHILE, || {
            let status = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
            ensure!(!status["completionTime"].is_string() || status["phase"] == phase, "{name}: {status:#}");
            Ok((status["phase"] == phase).then_some(status))
        })
    };
    let started = |status: &Value| status["startTime"].as_str().map(str::to_owned).context("no start");
    let (first, second, third) =
        (ended("first", "Complete")?, ended("second", "Complete")?, ended("third", "Complete")?);
    let first_end = first["completionTime"].as_str().context("no end")?;
    ensure!(
        first_end <= started(&second)?.as_str() && started(&second)? <= started(&third)?,
        "{first:#} {second:#} {third:#}"
    );
    ended("fails", "Failed")?;
    let lost = ended("lost", "Failed")?;
    let names_it = |it: &Value| {
        it["reason"] == "DependencyFailed" && it["message"].as_str().is_some_and(|text| text.contains("run fails"))
    };
    ensure!(
        lost["startTime"].is_null() && lost["conditions"].as_array().is_some_and(|all| all.iter().any(names_it)),
        "{lost:#}"
    );
    for name in ["third", "lost", "second", "fails", "first"] {
        cluster.api().delete(&format!("{RUNS}/{name}"), None)?;
    }
    Ok(())
}

/// Check: a run learns from a ConfigMap, and stops when it is deleted, also where it stood still.
pub(super) fn stops(cluster: &Cluster) -> Result<String> {
    let lines: String = (0..EPOCHS).map(|day| format!("{day},run-{}\n", day % 50)).collect();
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "days", "namespace": NAMESPACE },
        "data": { "days.csv": format!("day,word\n{lines}") },
    });
    cluster.api().create(&format!("/api/v1/namespaces/{NAMESPACE}/configmaps"), &map)?;
    begin_long(cluster, "days")?;
    let (took, learned) = delete(cluster, "days")?;

    begin_long(cluster, "paused")?;
    cluster.api().patch(&format!("{RUNS}/paused"), MERGE, &json!({ "spec": { "suspend": true } }))?;
    until("the run to stand still", WHILE, || {
        let status = cluster.api().get(&format!("{RUNS}/paused"))?["status"].take();
        Ok((status["phase"] == "Suspended").then_some(()))
    })?;
    let (took_paused, _) = delete(cluster, "paused")?;
    runs_again(cluster)?;
    in_order(cluster)?;
    Ok(format!(
        "stopped after {learned} epochs, seen {took:.1} s after its deletion; one that stood still {took_paused:.1} s"
    ))
}
