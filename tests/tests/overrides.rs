//! Manual overrides of the partition map with real processes: a lost map is rebuilt without data loss; a replica that is not in sync
//! is promoted when all others are lost, and recorded; both are rejected while automatic recovery is possible.

use engram_tests::{Cluster, ClusterBuilder, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;
use std::fs;

const MEMORIES: u64 = 2_000;

fn manifest(workers: u32) -> String {
    cluster_manifest("demo", workers, "  replicationFactor: 2\n  partitions: 4\n")
}

/// Inserts memories `from` to `to` - 1.
fn write(cluster: &Cluster, from: u64, to: u64) {
    let rows: String = (from..to).map(|id| format!("{{\"id\":{id}}}\n")).collect();
    cluster.engram_with(&["insert", "--file", "-"], &rows).exits_with(0);
}

/// Waits until the log of `up` contains a text.
fn wait_for_log(cluster: &Cluster, text: &str) {
    wait_for(text, DEADLINE, || {
        fs::read_to_string(cluster.folder().join("up.log")).is_ok_and(|log| log.contains(text)).then_some(())
    });
}

/// Waits until all workers have reported their state.
fn wait_for_workers(cluster: &Cluster, refusal: &str) -> engram_tests::CommandOutput {
    wait_for("all workers to report", DEADLINE, || {
        let output = cluster.engram(&["partition", "rebuild-map"]);
        (output.code == Some(0) || (!refusal.is_empty() && output.stderr.contains(refusal))).then_some(output)
    })
}

fn lose_map(up: &ClusterBuilder) {
    fs::remove_file(up.state_dir().join("map.json")).expect("the map exists");
}

#[test]
fn lost_or_damaged_maps_are_rebuilt_without_data_loss() {
    let cluster = Cluster::up(&manifest(3));
    write(&cluster, 0, MEMORIES);
    cluster.wait_until_replicated(2);
    let before = cluster.digest();
    assert_eq!(before.1, MEMORIES);
    cluster.engram(&["partition", "rebuild-map", "--yes"]).fails_with(5, &["ENG-0411", "the partition map is intact"]);
    let (up, _) = cluster.stop();

    lose_map(&up);
    let script = up.with(&["--exit-when-done"]);
    script.run().fails_with(4, &["ENG-0409", "engram partition rebuild-map"]);
    assert!(!script.state_dir().join("map.json").exists(), "no empty map is created");
    let mut cluster = script.without_arguments().launch();
    wait_for_log(&cluster, "engram partition rebuild-map");
    let preview = wait_for_workers(&cluster, "");
    assert!(preview.stderr.contains("nothing was written"), "{}", preview.stderr);
    assert!(!cluster.state_dir().join("map.json").exists(), "the map is shown, not written");
    let written = cluster.engram(&["partition", "rebuild-map", "--yes", "-o", "json"]).exits_with(0);
    let rows = written.json()["items"].as_array().expect("a list").clone();
    assert!(rows.len() == 4 && rows.iter().all(|row| row["proven"] == true), "{}", written.stdout);
    cluster.wait_until_ready();
    cluster.wait_until_replicated(2);
    assert_eq!(cluster.digest(), before);

    // A damaged map and a lost worker: unproven entries are written only with --accept-data-loss.
    let (up, _) = cluster.stop();
    fs::write(up.state_dir().join("map.json"), "{\"format\":1}").unwrap();
    fs::rename(up.state_dir().join("workers/2"), up.state_dir().join("gone")).unwrap();
    let mut cluster = up.launch();
    wait_for_log(&cluster, "is damaged");
    wait_for_workers(&cluster, "worker 2 reported store");
    cluster.engram(&["partition", "rebuild-map", "--yes"]).fails_with(5, &["ENG-0410", "are not proven", "worker 2"]);
    cluster.engram(&["partition", "rebuild-map", "--yes", "--accept-data-loss", "worker 2 lost"]).exits_with(0);
    cluster.wait_until_ready();
    let rows = cluster.wait_until_replicated(2);
    let overrides = rows.iter().flat_map(|row| row["overrides"].as_array().unwrap());
    assert!(overrides.clone().next().is_some() && overrides.clone().all(|it| it["reason"] == "worker 2 lost"));
    assert_eq!(cluster.digest(), before, "each partition had a second replica");
    assert!(cluster.state_dir().join("map.json.damaged").exists());
    cluster.stop();
}

#[test]
fn outdated_replicas_are_promoted_only_by_override_and_the_override_is_recorded() {
    let cluster = Cluster::up(&manifest(3));
    write(&cluster, 0, MEMORIES);
    cluster.wait_until_replicated(2);
    cluster
        .engram(&["partition", "force-promote", "0", "--accept-data-loss", "test"])
        .fails_with(5, &["ENG-0411", "serves it"]);
    cluster.engram(&["partition", "force-promote", "9"]).fails_with(2, &["partition 9 does not exist"]);
    // Worker 2 keeps its data but has no in-sync replica.
    cluster.engram(&["drain", "2", "--wait"]).exits_with(0);
    let partitions: Vec<Value> = cluster.wait_until_replicated(2);
    assert!(partitions.iter().all(|it| it["inSync"].as_array().unwrap().iter().all(|ordinal| *ordinal != 2)));
    write(&cluster, MEMORIES, 2 * MEMORIES);
    let (up, _) = cluster.stop();
    for worker in ["0", "1"] {
        fs::remove_dir_all(up.state_dir().join("workers").join(worker)).unwrap();
    }

    let mut cluster = up.launch();
    let rejected = wait_for("the coordinator to detect the loss", DEADLINE, || {
        let output = cluster.engram(&["partition", "force-promote", "0"]);
        output.stderr.contains("ENG-0410").then_some(output)
    });
    assert!(
        rejected.stderr.contains("worker 2 holds everything up to lsn") && rejected.code == Some(5),
        "{}",
        rejected.stderr
    );
    for partition in ["0", "1", "2", "3"] {
        let arguments = ["partition", "force-promote", partition, "--accept-data-loss", "both disks failed"];
        cluster.engram(&arguments).exits_with(0);
    }
    cluster.wait_until_ready();
    let rows = cluster.wait_until_replicated(2);
    let (_, memories) = cluster.digest();
    assert!(memories > 0 && memories <= MEMORIES, "the memories of worker 2 are back: {memories}");
    for row in &rows {
        let overrides = row["overrides"].as_array().unwrap();
        assert_eq!((overrides.len(), &overrides[0]["reason"]), (1, &Value::from("both disks failed")));
    }
    write(&cluster, 2 * MEMORIES, 2 * MEMORIES + 10);
    let (up, _) = cluster.stop();
    let cluster = up.start();
    let status = cluster.engram(&["status"]);
    assert!(status.stdout.contains("force-promote of partition 3") && status.stdout.contains("both disks failed"));
    cluster.stop();
}
