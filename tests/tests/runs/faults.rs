//! Faults at random points of trainings: killed and paused workers, drivers among them.
//!
//! `cargo xtask chaos --training` runs the same campaign with more faults.

use crate::has_ended;
use engram_tests::{Cluster, ClusterBuilder, DEADLINE, cluster_manifest, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use std::time::Duration;

/// Steps of a training, and its most faults.
const STEPS: u64 = 1_200;
const FAULTS: u64 = 6;
/// Faults in CI: keep it short.
const DEFAULT_COUNT: u64 = 3;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn manifest(name: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: faults }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dropout: 0.1 }}, {{ dense: 1, \
         activation: Sigmoid }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    \
         steps: {STEPS}\n    order: PartitionInvariant\n    detectAfter: 500ms\n    checkpoint: {{ every: 200 }}\n"
    )
}

fn run(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    let found = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned()).flatten()?;
    found.into_iter().find(|run| run["name"] == name && run["phase"].is_string())
}

/// Trains to the end without a fault, on one worker.
fn undisturbed() -> Value {
    let cluster = Cluster::up(&cluster_manifest("faults", 1, "  partitions: 4\n"));
    let file = cluster.file("run.yaml", manifest("undisturbed"));
    cluster.engram(&["run", &file]).exits_with(0);
    let ended = run(&cluster, "undisturbed").expect("the run is known");
    cluster.stop();
    ended
}

/// Injects one fault into a random worker, and waits until its process runs.
fn inject(cluster: &mut Cluster, workers: usize, random: &mut StdRng) -> String {
    let worker = random.random_range(0..workers);
    let pid = wait_for("a process", DEADLINE, || cluster.worker(worker));
    if random.random_bool(0.6) {
        cluster.kill(pid);
        cluster.wait_for_restart(worker, pid);
        return format!("killed worker {worker}");
    }
    let pause = Duration::from_millis(random.random_range(50..2_500));
    cluster.pause(pid);
    std::thread::sleep(pause);
    cluster.resume(pid);
    format!("paused worker {worker} for {} ms", pause.as_millis())
}

#[test]
fn trainings_lose_no_step_and_no_bit_to_random_faults() {
    let count = number("ENGRAM_TRAINING_FAULTS").unwrap_or(DEFAULT_COUNT);
    let seed = number("ENGRAM_TRAINING_SEED").unwrap_or(7);
    let expected = undisturbed();
    let mut random = StdRng::seed_from_u64(seed);
    let (mut done, mut trainings) = (0, 0);
    while done < count {
        let faults = FAULTS.min(count - done);
        let workers = if count == DEFAULT_COUNT { 3 } else { random.random_range(2..=5) };
        let replay = format!(
            "cargo xtask chaos --training --count {count} --seed {seed}: training {trainings}, {workers} workers"
        );
        println!("{replay}, {faults} faults");
        let builder = ClusterBuilder::new(&cluster_manifest("faults", workers, "  partitions: 8\n"));
        let mut cluster = if trainings % 2 == 1 { builder.with(&["--tls"]) } else { builder }.start();
        let file = cluster.file("run.yaml", manifest("disturbed"));
        cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
        for fault in 0..faults {
            let step = random.random_range(fault * STEPS / (faults + 1)..(fault + 1) * STEPS / (faults + 1));
            let reached = |run: &Value| run["epoch"].as_u64() >= Some(step) || has_ended(run);
            wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(reached));
            println!("  step {step}: {}", inject(&mut cluster, workers as usize, &mut random));
        }
        let ended = wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(has_ended));
        assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS)), "{replay}: {ended}");
        assert_eq!(ended["outputs"]["digest"], expected["outputs"]["digest"], "{replay}: {ended}");
        assert_eq!(ended["updates"], expected["updates"], "{replay}: a step was lost or repeated");
        cluster.stop();
        (done, trainings) = (done + faults, trainings + 1);
    }
    println!(
        "{done} faults in {trainings} trainings: every step counted once, parameters equal to the undisturbed ones"
    );
}
