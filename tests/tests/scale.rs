//! Scaling and draining: partitions move without losing a memory.

use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};

/// Returns the workers of all in-sync replicas: two per partition, three while one moves.
fn holders(cluster: &Cluster) -> Vec<u64> {
    let listed = cluster.engram(&["list", "partitions", "-o", "json"]).exits_with(0).json();
    let partitions = listed["items"].as_array().expect("items are a list").clone();
    partitions
        .iter()
        .inspect(|partition| {
            assert!(matches!(partition["inSync"].as_array().map(Vec::len), Some(2 | 3)), "{partition}");
        })
        .flat_map(|partition| partition["inSync"].as_array().cloned().unwrap_or_default())
        .filter_map(|ordinal| ordinal.as_u64())
        .collect()
}

#[test]
fn scaling_and_draining_keep_every_memory() {
    let cluster = Cluster::up(&cluster_manifest("scaled", 3, "  partitions: 16\n"));
    let keys: Vec<String> = (0..200).map(|number| format!("memory-{number}")).collect();
    let mut insert = vec!["insert", "--weight", "0.25"];
    insert.extend(keys.iter().map(String::as_str));
    cluster.engram(&insert).exits_with(0);
    let before = cluster.digest();
    assert_eq!(before.1, 200);

    cluster.engram(&["scale", "--workers", "5", "--wait"]).exits_with(0);
    assert_eq!(cluster.workers(), 5);
    let held = holders(&cluster);
    assert!((0..5).all(|ordinal| held.contains(&ordinal)), "every worker has a replica: {held:?}");
    assert_eq!(cluster.digest(), before, "after the scale-up");

    cluster.engram(&["drain", "1", "--wait"]).exits_with(0);
    assert!(!holders(&cluster).contains(&1));
    assert_eq!(cluster.digest(), before, "after the drain");
    cluster.engram(&["drain", "1", "--undo"]).exits_with(0);
    cluster.engram(&["drain", "17"]).exits_with(2);

    // The goal persists until the manifest changes.
    let (up, _) = cluster.stop();
    let cluster = up.start();
    assert_eq!((cluster.workers(), cluster.digest()), (5, before.clone()));

    cluster.engram(&["scale", "--workers", "2", "--wait"]).exits_with(0);
    wait_for("idle workers to stop", DEADLINE, || (cluster.workers() == 2).then_some(()));
    assert_eq!(cluster.digest(), before, "after the scale-down");
    cluster.stop();
}
