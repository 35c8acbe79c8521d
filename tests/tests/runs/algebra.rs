//! Runs of kinds Tropical and Fisher.

use std::collections::BTreeMap;

use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;

use super::runs;

/// Runs of kinds Tropical and Fisher, small enough for a debug build.
const ALGEBRA: &str = "apiVersion: engram.dev/v1alpha1
kind: LearnerRun
metadata: { name: max-plus }
spec:
  clusterRef: { name: demo }
  kind: Tropical
  tropical:
    decode: { source: { synthetic: { states: 6, symbols: 8, length: 3000 } } }
    classify: { hidden: 40, epochs: 6, starts: 1, learningRates: [0.01] }
---
apiVersion: engram.dev/v1alpha1
kind: LearnerRun
metadata: { name: information }
spec:
  clusterRef: { name: demo }
  kind: Fisher
  fisher: { hidden: 12, form: Empirical, epochs: 4, steps: 6, naturalRates: [0.3], sgdRates: [3] }
";

#[test]
fn max_plus_and_fisher_runs_give_the_same_bits_on_one_worker_and_on_two_that_are_killed() {
    let outputs: Vec<Value> = [1, 2]
        .map(|workers| {
            let mut cluster = Cluster::up(&cluster_manifest("demo", workers, "  partitions: 4\n"));
            let file = cluster.file("algebra.yaml", ALGEBRA);
            if workers == 1 {
                cluster.engram(&["run", &file]).exits_with(0);
            } else {
                cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
                kill_in_the_middle(&mut cluster, workers);
            }
            let outputs: BTreeMap<String, Value> =
                runs(&cluster).into_iter().map(|run| (run["name"].to_string(), run["outputs"].clone())).collect();
            check_profile(&cluster, workers);
            cluster.stop();
            serde_json::to_value(outputs).expect("names are strings")
        })
        .into();
    assert_eq!(outputs[0], outputs[1]);
    for name in ["decodeDigest", "classifyWinner", "fisherDigest", "digest"] {
        assert!(outputs[0].to_string().contains(&format!("\"{name}\":")), "{name} is missing: {}", outputs[0]);
    }
}

/// Kills each worker once tasks are done, and waits until both runs have succeeded.
fn kill_in_the_middle(cluster: &mut Cluster, workers: u32) {
    let done = |cluster: &Cluster| runs(cluster).iter().map(|run| run["epoch"].as_u64().unwrap_or(0)).sum::<u64>();
    wait_for("a task to be done", DEADLINE, || (done(cluster) > 0).then_some(()));
    cluster.kill_in_turn(0..workers as usize);
    wait_for("the runs to succeed", DEADLINE, || {
        let listed = cluster.engram(&["list", "runs", "-o", "json"]);
        let runs = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned()).flatten()?;
        assert!(runs.iter().all(|run| run["phase"] != "Failed"), "{runs:?}");
        (runs.len() == 2 && runs.iter().all(|run| run["phase"] == "Succeeded")).then_some(())
    });
}

/// The timeline of a run names the workers, the driver and a bottleneck.
fn check_profile(cluster: &Cluster, workers: u32) {
    let file = |name: &str| cluster.folder().join(name).display().to_string();
    let profile = cluster.engram(&["profile", "information", "--to", &file("run.html"), "-o", "json"]).exits_with(0);
    let profile = profile.json();
    let devices: Vec<&str> =
        profile["devices"].as_array().expect("a list").iter().filter_map(|it| it["device"].as_str()).collect();
    assert!(devices.contains(&"driver") && devices.len() <= workers as usize + 1, "{profile}");
    assert!(devices.iter().any(|device| device.starts_with("worker ")), "{profile}");
    assert!(profile["bottleneck"].is_string() && (profile["lost"] == 0 || workers > 1), "{profile}");
    let computed = profile["hardware"].as_array().expect("a list");
    let tasks: u64 = computed.iter().filter_map(|it| it["tasks"].as_u64()).sum();
    assert!(tasks > 1 && computed.iter().all(|it| it["device"].as_str().is_some_and(|it| it.starts_with("CPU, "))));
    let page = std::fs::read_to_string(file("run.html")).expect("a page");
    assert!(page.contains("<h2>Devices</h2>") && page.contains("<td>CPU, "), "{page}");
    assert!(page.contains("train the classifier") && page.contains("spectrum") && page.contains("bottleneck: "));

    let text = cluster.engram(&["profile", "max-plus", "--to", &file("run.json")]).exits_with(0);
    assert!(text.stdout.contains("driver") && text.stdout.contains("bottleneck: "), "{}", text.stdout);
    let trace = std::fs::read_to_string(file("run.json")).expect("a trace");
    let trace: Value = serde_json::from_str(&trace).expect("JSON");
    let named =
        |name: &str| trace["traceEvents"].as_array().expect("events").iter().any(|it| it["args"]["name"] == name);
    assert!(named("driver"), "{trace}");
    cluster.engram(&["profile", "max-plus", "--seconds", "1"]).fails_with(2, &["--seconds is for workers"]);
    cluster.engram(&["profile", "missing"]).fails_with(3, &["run missing not found"]);
}
