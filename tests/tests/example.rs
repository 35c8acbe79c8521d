//! The example of the repository, undisturbed and with killed workers.

use engram_tests::{Cluster, ClusterBuilder, checkout, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use std::process::Child;
use std::time::Duration;

const RUN: &str = "state-of-the-union";
const DIGEST: &str = "82de3b4850164e2866d319c3c0dab744";
const WORDS: u64 = 23_147;
/// Deadline of a run with killed workers, on a machine that executes other tests.
const RUN_DEADLINE: Duration = Duration::from_secs(240);

fn manifest() -> String {
    std::fs::read_to_string(checkout().join("examples/cluster.yaml")).expect("failed to read the example")
}

/// Checks the report: hits of the rankings by weight, frequency and recency over 212 epochs.
fn check(report: &Value) {
    assert_eq!(report["digest"], DIGEST);
    let hits = |k: u64| {
        let rates = report["prediction"].as_array().expect("hit rates");
        let rate = rates.iter().find(|rate| rate["k"] == k).expect("a rate for every k");
        assert_eq!(rate["epochs"], 212);
        ["memory", "frequent", "recent"].map(|ranking| rate[ranking].as_u64().expect("whole hits"))
    };
    assert_eq!(hits(500), [82_767, 78_036, 49_914]);
    assert_eq!(hits(1_000), [134_694, 128_113, 98_630]);
    let epochs = report["epochs"].as_array().expect("a row per epoch");
    assert_eq!(epochs.len(), 233);
    let events: u64 = epochs.iter().map(|row| row["events"].as_u64().expect("events per epoch")).sum();
    assert_eq!(events, 368_457);
}

fn report(cluster: &Cluster) -> Value {
    cluster.engram(&["describe", "run", RUN, "-o", "json"]).exits_with(0).json()["report"].clone()
}

#[test]
fn the_example_gives_the_expected_result_and_survives_a_restart() {
    let up = ClusterBuilder::new(&manifest()).with(&["--exit-when-done"]);
    up.run().exits_with(0);
    // A finished run is not executed again.
    let cluster = up.without_arguments().start();
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), WORDS));
    check(&report(&cluster));
    let page = cluster.folder().join("report.html").display().to_string();
    cluster.engram(&["describe", "run", RUN, "--report", &page]).exits_with(0);
    let page = std::fs::read_to_string(page).expect("failed to read the page");
    assert!(page.contains("<svg") && page.contains(DIGEST) && !page.contains("src=\"http"));
    let top = cluster.engram(&["rank", "-k", "3", "-o", "json"]).exits_with(0).json();
    let top = top["items"].as_array().expect("a list").clone();
    assert_eq!(top.len(), 3);
    assert!(top.iter().all(|memory| memory["key"].is_string() && memory["weight"].as_f64() > Some(0.9)), "{top:?}");
    cluster.stop();
}

#[test]
fn killed_workers_do_not_change_the_result() {
    let seed: u64 = std::env::var("ENGRAM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    eprintln!("ENGRAM_SEED={seed} repeats the choice of workers and times");
    let mut random = StdRng::seed_from_u64(seed);
    let (cluster_part, run_part) = split(&manifest());
    let mut cluster = Cluster::up(&cluster_part);
    let file = cluster.file("run.yaml", run_part);
    let mut run = cluster.spawn(&["run", &file, "-o", "json"]);
    // One kill early in each fifth of the run, so that all kills happen during the run.
    for kill in 0..5 {
        let epoch = kill * 46 + random.random_range(1..=10);
        let driver = wait_for("the run to reach the epoch of the next kill", RUN_DEADLINE, || {
            let status = run.try_wait().expect("failed to wait for the command");
            assert!(status.is_none(), "the run exited with {status:?} before kill {kill}: {}", stderr(&mut run));
            let (done, driver) = progress(&cluster)?;
            (done >= epoch).then_some(driver)
        });
        let victim = if kill % 2 == 0 { driver } else { random.random_range(0..cluster.workers()) };
        let pid = wait_for("the victim to be running", RUN_DEADLINE, || cluster.worker(victim));
        cluster.kill(pid);
        cluster.wait_for_restart(victim, pid);
    }
    let status =
        wait_for("the run to finish", RUN_DEADLINE, || run.try_wait().expect("failed to wait for the command"));
    assert!(status.success(), "the run exited with {status}: {}", stderr(&mut run));
    check(&report(&cluster));
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), WORDS));
    cluster.stop();
}

/// Returns the finished epochs of the run and its driver; `None` while unknown.
fn progress(cluster: &Cluster) -> Option<(u64, usize)> {
    let ran = cluster.engram(&["list", "runs", "-o", "json"]);
    let run = (ran.code == Some(0)).then(|| ran.json()["items"][0].clone())?;
    Some((run["epoch"].as_u64()?, usize::try_from(run["driver"].as_u64()?).ok()?))
}

fn stderr(child: &mut Child) -> String {
    use std::io::Read as _;
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        // Used in messages only.
        let _ = stderr.read_to_string(&mut text);
    }
    text
}

/// Splits the example into the manifest of the cluster and that of the run.
fn split(manifest: &str) -> (String, String) {
    let (cluster, run) = manifest.split_once("\n---\n").expect("a cluster and a run");
    (cluster.to_owned() + "\n", run.to_owned())
}
