//! Six runs that depend on each other, executed by `engram run` through the API server.

use super::command::{NAME, NAMESPACE, admin, read, started};
use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerruns";
const LOAD: &str = "graph-load";
/// How `engram` ends when a run fails.
const FAILED: i32 = 1;

/// `load` leads to `left` and `broken`; `report` needs both ways.
fn manifest(broken_map: &str, left_epochs: u32) -> String {
    let run = |name: &str, on: &[&str], map: &str, epochs: u32| {
        let depends_on: Vec<Value> = on.iter().map(|on| json!({ "run": format!("graph-{on}") })).collect();
        let events =
            json!({ "configMap": { "name": map, "key": "days.csv" }, "columns": { "key": "word", "epoch": "day" } });
        json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun",
            "metadata": { "name": format!("graph-{name}"), "namespace": NAMESPACE },
            "spec": {
                "clusterRef": { "name": NAME }, "kind": "Memory", "dependsOn": depends_on,
                "memory": { "source": { "events": events }, "epochs": epochs },
            },
        })
    };
    let runs = [
        run("report", &["left", "after-broken"], "days", 2),
        run("load", &[], "days", 2),
        run("left", &["load"], "days", left_epochs),
        run("right", &["left"], "days", 2),
        run("broken", &["load"], broken_map, 2),
        run("after-broken", &["broken"], "days", 2),
    ];
    runs.map(|run| run.to_string()).join("\n---\n")
}

/// Runs `engram run` with a manifest until all runs have ended; returns their states by name.
fn execute(cluster: &Cluster, manifest: &str, status: i32) -> Result<BTreeMap<String, String>> {
    let path = cluster.path("graph.yaml");
    fs::write(&path, manifest)?;
    let path = path.to_string_lossy();
    let ended = started(cluster, "engram", &admin(cluster)?, &["-n", NAMESPACE, "run", &path, "-o", "json"])?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.code() == Some(status), "engram run ended with {}: {said}", ended.status);
    let listed = read(&String::from_utf8(ended.stdout)?)?;
    let items = listed["items"].as_array().with_context(|| format!("no list: {listed}"))?;
    let text = |item: &Value, field: &str| Some(item[field].as_str()?.trim_start_matches("graph-").to_owned());
    Ok(items.iter().filter_map(|item| Some((text(item, "run")?, text(item, "state")?))).collect())
}

fn expected(list: [(&str, &str); 6]) -> BTreeMap<String, String> {
    list.into_iter().map(|(run, state)| (run.to_owned(), state.to_owned())).collect()
}

/// Check: what depends on a failed run ends with it, the rest completes; executed again, only what has changed is repeated.
pub(super) fn executes(cluster: &Cluster) -> Result<String> {
    let uid = || cluster.api().get(&format!("{RUNS}/{LOAD}")).map(|mut run| run["metadata"]["uid"].take());
    let first = execute(cluster, &manifest("no-map", 2), FAILED)?;
    let outcome = expected([
        ("load", "Succeeded"),
        ("left", "Succeeded"),
        ("right", "Succeeded"),
        ("broken", "Failed"),
        ("after-broken", "Skipped"),
        ("report", "Skipped"),
    ]);
    ensure!(first == outcome, "{first:?}");
    let before = uid()?;
    let again = execute(cluster, &manifest("days", 3), 0)?;
    let outcome = expected([
        ("load", "Unchanged"),
        ("left", "Succeeded"),
        ("right", "Succeeded"),
        ("broken", "Succeeded"),
        ("after-broken", "Succeeded"),
        ("report", "Succeeded"),
    ]);
    ensure!(again == outcome, "{again:?}");
    ensure!(uid()? == before, "a run that had not changed was created again");
    for name in ["report", "after-broken", "broken", "right", "left", "load"] {
        cluster.api().delete(&format!("{RUNS}/graph-{name}"), None)?;
    }
    Ok(String::new())
}
