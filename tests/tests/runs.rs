//! Learning runs through the command line: submitted once, followed, stopped, reported.

use engram_tests::{Cluster, DEADLINE, checkout, cluster_manifest, run_manifest, wait_for};
use serde_json::Value;

fn runs(cluster: &Cluster) -> Vec<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]).ended(0).json();
    listed["items"].as_array().expect("a list").clone()
}

#[test]
fn ctrl_c_stops_a_run_after_its_epoch_and_what_it_learned_stays() {
    let cluster = Cluster::up(&cluster_manifest("demo", 2, "  partitions: 16\n"));
    let endless = "    source: { synthetic: { memories: 1000 } }\n    epochs: 1000000\n";
    let file = cluster.file("run.yaml", run_manifest("endless", "demo", endless));
    let mut run = cluster.spawn(&["run", &file]);
    wait_for("the run to learn", DEADLINE, || (runs(&cluster).first()?["epoch"].as_u64()? >= 3).then_some(()));
    Cluster::interrupt(&run);
    let status = wait_for("the command to end", DEADLINE, || run.try_wait().expect("a child can be waited for"));
    assert_eq!(status.code(), Some(130));
    let stopped = &runs(&cluster)[0];
    assert_eq!(stopped["phase"], "Cancelled");
    assert!(stopped["epoch"].as_u64() >= Some(3));
    assert_eq!(cluster.digest().1, 1_000);
    // A name stands for one run for ever; the turn is free for another.
    cluster.engram(&["run", &file]).refused(130, &["endless is on the cluster already"]);
    cluster.stop();
}

#[test]
fn events_are_learned_once_under_a_name_whatever_way_they_come() {
    let cluster = Cluster::up(&cluster_manifest("shop", 2, "  partitions: 16\n  learning: { initialWeight: 0.0 }\n"));
    let events = checkout().join("examples/own-events.csv").display().to_string();
    let page = cluster.folder().join("report.html").display().to_string();
    let import = ["import", "events", &events, "--key", "product", "--time", "sold_at", "--quality-column", "quality"];
    cluster.engram(&[&import[..], &["--report", &page]].concat()).ended(0);
    assert!(std::fs::read_to_string(&page).expect("the page is written").contains("<svg"));
    let learned = cluster.digest();
    assert!(learned.1 > 0);
    // The name comes from the file, so that a second time does not count twice.
    let again = cluster.engram(&import).refused(0, &["import-own-events is on the cluster already"]);
    assert!(again.stdout.contains(&learned.0), "{}", again.stdout);
    assert_eq!(cluster.digest(), learned);
    cluster.stop();

    // The same file under a manifest, as the example shows it: the same memories.
    let cluster = Cluster::up(&cluster_manifest("shop", 1, "  partitions: 3\n  learning: { initialWeight: 0.0 }\n"));
    let example = std::fs::read_to_string(checkout().join("examples/own-events.yaml")).expect("the example is shipped");
    let (_, run) = example.split_once("\n---\n").expect("a cluster and a run");
    let file = cluster.file("run.yaml", run.replace("own-events.csv", &events));
    cluster.engram(&["run", &file, "--no-wait"]).ended(0);
    wait_for("the run to end", DEADLINE, || (runs(&cluster).first()?["phase"] == "Succeeded").then_some(()));
    assert_eq!(cluster.digest(), learned);
    let wrong = cluster.file("wrong.yaml", run.replace("name: shop", "name: chop"));
    cluster.engram(&["run", &wrong]).refused(3, &["ENG-0301", "chop", "shop"]);
    cluster.stop();
}
