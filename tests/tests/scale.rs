//! More workers, fewer workers, a worker emptied: partitions move, and nobody who reads or writes can tell.

use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};

/// Copies that each worker holds, as the command lists them: two of each partition, and a third while one moves. Whoever is drained is empty before
/// the others have shared what it held.
fn holders(cluster: &Cluster) -> Vec<u64> {
    let listed = cluster.engram(&["partition", "list", "-o", "json"]).ended(0).json();
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
fn workers_come_and_go_and_every_memory_stays() {
    let cluster = Cluster::up(&cluster_manifest("scaled", 3, "  partitions: 16\n"));
    let keys: Vec<String> = (0..200).map(|number| format!("memory-{number}")).collect();
    let mut insert = vec!["insert", "--weight", "0.25"];
    insert.extend(keys.iter().map(String::as_str));
    cluster.engram(&insert).ended(0);
    let before = cluster.digest();
    assert_eq!(before.1, 200);

    cluster.engram(&["scale", "--workers", "5", "--wait"]).ended(0);
    assert_eq!(cluster.workers(), 5);
    let held = holders(&cluster);
    assert!((0..5).all(|ordinal| held.contains(&ordinal)), "everybody has a share: {held:?}");
    assert_eq!(cluster.digest(), before, "after the scale-up");

    cluster.engram(&["drain", "1", "--wait"]).ended(0);
    assert!(!holders(&cluster).contains(&1));
    assert_eq!(cluster.digest(), before, "after the drain");
    cluster.engram(&["drain", "1", "--undo"]).ended(0);
    cluster.engram(&["drain", "17"]).ended(2);

    // The number that was ordered holds until the manifest says something new.
    let (up, _) = cluster.stop();
    let cluster = up.start();
    assert_eq!((cluster.workers(), cluster.digest()), (5, before.clone()));

    cluster.engram(&["scale", "--workers", "2", "--wait"]).ended(0);
    wait_for("empty workers to be stopped", DEADLINE, || (cluster.workers() == 2).then_some(()));
    assert_eq!(cluster.digest(), before, "after the scale-down");
    cluster.stop();
}
