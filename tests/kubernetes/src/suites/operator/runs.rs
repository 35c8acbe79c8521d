//! Learning runs: handed over, mirrored, called off.

use super::{CLUSTERS, HAND_OVER, REPLICAS, condition, start_replica, wait_for_status};
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::time::Instant;

const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerruns";

/// Applies a run.
fn begin_run(cluster: &Cluster, name: &str, source: &Value, epochs: u64) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name },
        "spec": {
            "clusterRef": { "name": "words" }, "kind": "Memory", "memory": { "source": source, "epochs": epochs },
        },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

/// Waits for its status.
fn wait_for_run(cluster: &Cluster, name: &str, what: &str, holds: fn(&Value) -> bool) -> Result<Value> {
    let mut last = Value::Null;
    let found = until(&format!("run {name} to be {what}"), HAND_OVER, || {
        last = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
        Ok(holds(&last).then(|| last.clone()))
    });
    found.with_context(|| format!("its status is {last:#}"))
}

fn is_learning(status: &Value) -> bool {
    status["phase"] == "Running" && status["progress"]["epoch"].as_u64() > Some(0)
}

pub(super) fn learns(cluster: &Cluster) -> Result<String> {
    begin_run(cluster, "long", &json!({ "synthetic": { "memories": 500 } }), 1_000_000)?;
    let running = wait_for_run(cluster, "long", "on its way", is_learning)?;
    ensure!(running["driver"].as_str().is_some_and(|pod| pod.starts_with("words-worker-")), "{running:#}");
    ensure!(running["progress"]["total"] == 1_000_000, "{running:#}");
    // One run at a time changes a cluster: the next one waits until the first is called off, here by operators that never saw it.
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
    // Whoever lists clusters sees what they have learned, of runs that were called off too; looked at here since somebody touched it.
    let touch = json!({ "metadata": { "annotations": { "touched": "after the runs" } } });
    cluster.api().patch(&format!("{CLUSTERS}/words"), MERGE, &touch)?;
    wait_for_status(cluster, "words", "known to have learned", |it| (it["epoch"].as_u64()? > 5).then_some(()))?;
    // What pods cannot read is refused before anybody waits for it.
    let refused =
        begin_run(cluster, "git", &json!({ "git": { "path": "/src" } }), 5).expect_err("pods have no repository");
    let refused = format!("{refused:#}");
    ensure!(refused.contains("spec.memory.source.git is not supported yet"), "{refused}");
    Ok(format!("done {:.1} s after operators were told to start", took.as_secs_f64()))
}
