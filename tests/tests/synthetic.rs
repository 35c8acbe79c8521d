//! The two-group experiment: exact results and one digest per size, for any number of workers and partitions.

use engram_tests::{Cluster, cluster_manifest, run_manifest};
use serde_json::Value;

/// Runs the experiment on a new cluster and checks its exact results.
fn experiment(memories: u64, workers: u32, partitions: u32, digest: &str) {
    // Ids are distributed unevenly: small partitions need spare capacity to avoid eviction.
    let capacity = (2 * memories).max(1_000_000);
    let spec = format!("  partitions: {partitions}\n  capacity: {{ memories: {capacity} }}\n");
    let cluster = Cluster::up(&cluster_manifest("demo", workers, &spec));
    let run = run_manifest("two-groups", "demo", &format!("    source: {{ synthetic: {{ memories: {memories} }} }}\n"));
    let file = cluster.file("run.yaml", run);
    let lines = cluster.engram(&["run", &file, "-o", "json"]).exits_with(0).json_lines();
    let context = format!("{memories} memories, {workers} workers, {partitions} partitions");

    let (result, epochs) = lines.split_last().expect("a run prints lines");
    assert_eq!(epochs.len(), 50, "{context}: a line per epoch");
    assert_eq!(
        (&result["kind"], &result["phase"]),
        (&Value::from("RunResult"), &Value::from("succeeded")),
        "{context}"
    );
    assert_eq!(result["digest"], digest, "{context}");
    let experiment = &result["experiment"];
    let factor = experiment["convergenceFactor"].as_f64().expect("a factor");
    assert!((factor - 12.5).abs() < 1e-6, "{context}: convergence factor {factor}");
    assert_eq!(experiment["separation"], 1.0, "{context}");
    assert_eq!(experiment["inversionRatio"], 1.0, "{context}");
    for group in experiment["coverage"].as_array().expect("coverage per group") {
        assert_eq!(group["complete"], memories / 2, "{context}: every memory was reached in every epoch");
        assert_eq!(group["memories"], memories / 2, "{context}");
    }
    // Exact separation of the groups per epoch.
    let separation = |epoch: usize| epochs[epoch]["separation"].as_f64().expect("a separation per epoch");
    let units = |value: f64| (value * f64::from(1 << 30)).round() as u64;
    assert_eq!(
        [0, 1, 9, 16, 49].map(|epoch| units(separation(epoch))),
        [85_899_345, 171_798_690, 858_993_450, 1 << 30, 1 << 30]
    );
    assert_eq!(cluster.digest(), (digest.to_owned(), memories), "{context}: the store holds what the run reports");
    cluster.stop();
}

#[test]
fn a_thousand_memories_give_one_digest_on_any_topology() {
    for (workers, partitions) in [(1, 1), (5, 256), (3, 7)] {
        experiment(1_000, workers, partitions, "81614da90c4f4be97e63ff0b5f2fb1ce");
    }
}

#[test]
fn a_hundred_thousand_memories_give_one_digest_on_one_and_five_workers() {
    for (workers, partitions) in [(1, 7), (5, 256)] {
        experiment(100_000, workers, partitions, "0569a0a6cd4901dddad8e5e7fe77534e");
    }
}

#[test]
fn a_million_memories_give_one_digest_on_one_and_five_workers() {
    for (workers, partitions) in [(1, 256), (5, 1_000)] {
        experiment(1_000_000, workers, partitions, "f8d8e5f6d0cf7eb8d9666555ede0f0dd");
    }
}

#[test]
#[ignore = "full: ten million memories take minutes and 2 GiB"]
fn ten_million_memories_give_their_digest() {
    experiment(10_000_000, 5, 256, "01af3c1067d74ba8fa7f9c0b33cb367c");
}
