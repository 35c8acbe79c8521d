//! What a person orders when nothing automatic is safe, on real processes: a lost map is made anew and nothing is lost; a copy that
//! was left behind leads again when all others are gone, on record; and neither is done while something safe is left.

use engram_tests::{Cluster, DEADLINE, Up, cluster_manifest, wait_for};
use serde_json::Value;
use std::fs;

const MEMORIES: u64 = 2_000;

fn manifest(workers: u32) -> String {
    cluster_manifest("demo", workers, "  replicationFactor: 2\n  partitions: 4\n")
}

/// Makes memories `from` to `to` - 1, each of them acknowledged.
fn write(cluster: &Cluster, from: u64, to: u64) {
    let rows: String = (from..to).map(|id| format!("{{\"id\":{id}}}\n")).collect();
    cluster.engram_with(&["insert", "--file", "-"], &rows).ended(0);
}

fn list(cluster: &Cluster) -> Option<Vec<Value>> {
    let ran = cluster.engram(&["partition", "list", "-o", "json"]);
    (ran.code == Some(0)).then(|| ran.json()["items"].as_array().expect("a list").clone())
}

fn wait_until_whole(cluster: &Cluster) -> Vec<Value> {
    wait_for("every partition to have its copies", DEADLINE, || {
        let all = list(cluster)?;
        let whole = |it: &Value| it["inSync"].as_array().is_some_and(|it| it.len() == 2) && it["activated"] == true;
        all.iter().all(whole).then_some(all)
    })
}

/// Waits until `up` has said something.
fn wait_for_words(cluster: &Cluster, words: &str) {
    wait_for(words, DEADLINE, || {
        fs::read_to_string(cluster.folder().join("up.log")).is_ok_and(|log| log.contains(words)).then_some(())
    });
}

/// Waits until every worker that has to answer does.
fn wait_for_workers(cluster: &Cluster, refusal: &str) -> engram_tests::Ran {
    wait_for("all workers to answer", DEADLINE, || {
        let ran = cluster.engram(&["partition", "rebuild-map"]);
        (ran.code == Some(0) || (!refusal.is_empty() && ran.stderr.contains(refusal))).then_some(ran)
    })
}

fn lost(up: &Up) {
    fs::remove_file(up.state_dir().join("map.json")).expect("there is a map");
}

#[test]
fn a_lost_or_damaged_map_is_made_anew_from_what_workers_have_seen_and_nothing_is_lost() {
    let cluster = Cluster::up(&manifest(3));
    write(&cluster, 0, MEMORIES);
    wait_until_whole(&cluster);
    let before = cluster.digest();
    assert_eq!(before.1, MEMORIES);
    cluster.engram(&["partition", "rebuild-map", "--yes"]).refused(5, &["ENG-0411", "the partition map is there"]);
    let (up, _) = cluster.stop();

    lost(&up);
    let script = up.with(&["--exit-when-done"]);
    script.run().refused(4, &["ENG-0409", "engram partition rebuild-map"]);
    assert!(!script.state_dir().join("map.json").exists(), "no empty map takes its place");
    let mut cluster = script.without_arguments().launch();
    wait_for_words(&cluster, "engram partition rebuild-map");
    let shown = wait_for_workers(&cluster, "");
    assert!(shown.stderr.contains("nothing was written"), "{}", shown.stderr);
    assert!(!cluster.state_dir().join("map.json").exists(), "it is shown, not written");
    let written = cluster.engram(&["partition", "rebuild-map", "--yes", "-o", "json"]).ended(0);
    let rows = written.json()["items"].as_array().expect("a list").clone();
    assert!(rows.len() == 4 && rows.iter().all(|row| row["proven"] == true), "{}", written.stdout);
    cluster.wait_until_ready();
    wait_until_whole(&cluster);
    assert_eq!(cluster.digest(), before);

    // A damaged map, and a worker that does not come back: guessed, and only on somebody's word.
    let (up, _) = cluster.stop();
    fs::write(up.state_dir().join("map.json"), "{\"format\":1}").unwrap();
    fs::rename(up.state_dir().join("workers/2"), up.state_dir().join("gone")).unwrap();
    let mut cluster = up.launch();
    wait_for_words(&cluster, "is damaged");
    wait_for_workers(&cluster, "worker 2 came with store");
    cluster.engram(&["partition", "rebuild-map", "--yes"]).refused(5, &["ENG-0410", "guessed, not proven", "worker 2"]);
    cluster.engram(&["partition", "rebuild-map", "--yes", "--accept-data-loss", "worker 2 burnt"]).ended(0);
    cluster.wait_until_ready();
    let rows = wait_until_whole(&cluster);
    let ordered = rows.iter().flat_map(|row| row["orders"].as_array().unwrap());
    assert!(ordered.clone().next().is_some() && ordered.clone().all(|it| it["reason"] == "worker 2 burnt"));
    assert_eq!(cluster.digest(), before, "each partition had a second copy");
    assert!(cluster.state_dir().join("map.json.damaged").exists());
    cluster.stop();
}

#[test]
fn a_copy_that_was_left_behind_leads_by_order_alone_and_the_order_stays_on_record() {
    let cluster = Cluster::up(&manifest(3));
    write(&cluster, 0, MEMORIES);
    wait_until_whole(&cluster);
    cluster
        .engram(&["partition", "force-promote", "0", "--accept-data-loss", "why not"])
        .refused(5, &["ENG-0411", "serves it"]);
    cluster.engram(&["partition", "force-promote", "9"]).refused(2, &["partition 9 does not exist"]);
    // Worker 2 keeps what it had, and is in sync with nothing any more.
    cluster.engram(&["drain", "2", "--wait"]).ended(0);
    let held: Vec<Value> = wait_until_whole(&cluster);
    assert!(held.iter().all(|it| it["inSync"].as_array().unwrap().iter().all(|copy| *copy != 2)));
    write(&cluster, MEMORIES, 2 * MEMORIES);
    let (up, _) = cluster.stop();
    for worker in ["0", "1"] {
        fs::remove_dir_all(up.state_dir().join("workers").join(worker)).unwrap();
    }

    let mut cluster = up.launch();
    let refused = wait_for("the cluster to know what is gone", DEADLINE, || {
        let ran = cluster.engram(&["partition", "force-promote", "0"]);
        ran.stderr.contains("ENG-0410").then_some(ran)
    });
    assert!(refused.stderr.contains("worker 2 holds all up to lsn") && refused.code == Some(5), "{}", refused.stderr);
    for partition in ["0", "1", "2", "3"] {
        let order = ["partition", "force-promote", partition, "--accept-data-loss", "both disks burnt"];
        cluster.engram(&order).ended(0);
    }
    cluster.wait_until_ready();
    let rows = wait_until_whole(&cluster);
    let (_, memories) = cluster.digest();
    assert!(memories > 0 && memories <= MEMORIES, "what worker 2 had is back: {memories}");
    for row in &rows {
        let orders = row["orders"].as_array().unwrap();
        assert_eq!((orders.len(), &orders[0]["reason"]), (1, &Value::from("both disks burnt")));
    }
    write(&cluster, 2 * MEMORIES, 2 * MEMORIES + 10);
    let (up, _) = cluster.stop();
    let cluster = up.start();
    let status = cluster.engram(&["status"]);
    assert!(status.stdout.contains("force-promote of partition 3") && status.stdout.contains("both disks burnt"));
    cluster.stop();
}
