//! Replay runs: workers train together, survive the death of each, and predict.

use super::runs;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;

const STEPS: u64 = 1_500;

fn manifest(name: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: train }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dropout: 0.1 }}, {{ dense: 1, \
         activation: Sigmoid }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    \
         steps: {STEPS}\n    order: PartitionInvariant\n    checkpoint: {{ every: 500 }}\n"
    )
}

fn run(cluster: &Cluster) -> Option<Value> {
    let ran = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    (ran.code == Some(0)).then(|| ran.json()["items"][0].clone()).filter(|run| run["phase"].is_string())
}

fn wait_for_step(cluster: &Cluster, step: u64) -> Value {
    wait_for("the run to train", DEADLINE, || run(cluster).filter(|run| run["epoch"].as_u64() >= Some(step)))
}

fn wait_for_end(cluster: &Cluster) -> Value {
    let ended = wait_for("the run to end", DEADLINE, || run(cluster).filter(|run| run["phase"] != "Running"));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS)), "{ended}");
    ended
}

fn predictions(cluster: &Cluster) -> Value {
    let input = "0,1,2,3,4\n50,51\n";
    cluster.engram_with(&["predict", "model", "--input", "-", "-o", "json"], input).exits_with(0).json()["items"]
        .clone()
}

#[test]
fn killed_workers_cost_a_training_no_step_and_no_bit() {
    let cluster = Cluster::up(&cluster_manifest("train", 1, "  partitions: 4\n"));
    let file = cluster.file("run.yaml", manifest("model"));
    let wrong = cluster.file("wrong.yaml", manifest("wrong").replace("dim: 60", "dim: 61"));
    cluster.engram(&["run", &wrong]).fails_with(2, &["inputs[0].dim is 61", "60"]);
    cluster.engram(&["run", &file]).exits_with(0);
    let undisturbed = runs(&cluster)[0].clone();
    assert!(undisturbed["metrics"]["held_out_correlation"].as_f64() > Some(0.8), "{undisturbed}");
    let predicted = predictions(&cluster);
    assert!(predicted[0]["prediction"].as_f64() > predicted[1]["prediction"].as_f64(), "{predicted}");
    cluster.engram_with(&["predict", "model", "--input", "-"], "60\n").fails_with(2, &["feature 60", "0 to 59"]);
    cluster.stop();

    let mut cluster = Cluster::up(&cluster_manifest("train", 3, "  partitions: 8\n"));
    let file = cluster.file("run.yaml", manifest("model"));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let driver = |run: &Value| run["driver"].as_u64().expect("a running run has a driver") as usize;
    let training = wait_for_step(&cluster, 100);
    let member = (driver(&training) + 1) % 3;
    let pid = cluster.worker(member).expect("the worker runs");
    cluster.kill(pid);
    cluster.wait_for_restart(member, pid);
    let training = wait_for_step(&cluster, 300);
    let driver = driver(&training);
    let pid = cluster.worker(driver).expect("the worker runs");
    cluster.kill(pid);
    cluster.wait_for_restart(driver, pid);
    let ended = wait_for_end(&cluster);
    assert_eq!(ended["outputs"]["digest"], undisturbed["outputs"]["digest"], "{ended}");
    assert_eq!(ended["updates"], undisturbed["updates"], "{ended}");
    assert_eq!(predictions(&cluster), predicted);
    cluster.stop();
}
