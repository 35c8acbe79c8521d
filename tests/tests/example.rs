//! The shipped example, as it is shipped, and with its processes killed under it.

use engram_tests::{Cluster, Up, checkout, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use std::process::Child;
use std::time::Duration;

const RUN: &str = "state-of-the-union";
const DIGEST: &str = "82de3b4850164e2866d319c3c0dab744";
const WORDS: u64 = 23_147;
/// A run of seconds on a quiet machine, and of minutes on a busy one whose workers are killed.
const RUN_DEADLINE: Duration = Duration::from_secs(240);

fn manifest() -> String {
    std::fs::read_to_string(checkout().join("examples/cluster.yaml")).expect("the example is shipped")
}

/// Hits of the rankings out of 212 addresses: of the memory, of the most frequent words, of the most recent.
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
    cluster.engram(&["describe", "run", RUN, "-o", "json"]).ended(0).json()["report"].clone()
}

#[test]
fn the_example_learns_what_it_should_and_is_there_at_the_next_start() {
    let up = Up::of(&manifest()).with(&["--exit-when-done"]);
    up.run().ended(0);
    // The data stays; the run is complete and is not run again.
    let cluster = up.without_arguments().start();
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), WORDS));
    check(&report(&cluster));
    let page = cluster.folder().join("report.html").display().to_string();
    cluster.engram(&["describe", "run", RUN, "--report", &page]).ended(0);
    let page = std::fs::read_to_string(page).expect("the page was written");
    assert!(page.contains("<svg") && page.contains(DIGEST) && !page.contains("src=\"http"));
    let top = cluster.engram(&["rank", "-k", "3", "-o", "json"]).ended(0).json();
    let top = top["items"].as_array().expect("a list").clone();
    assert_eq!(top.len(), 3);
    assert!(top.iter().all(|memory| memory["key"].is_string() && memory["weight"].as_f64() > Some(0.9)), "{top:?}");
    cluster.stop();
}

#[test]
fn workers_killed_during_the_run_change_nothing_of_its_result() {
    let seed: u64 = std::env::var("ENGRAM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    eprintln!("ENGRAM_SEED={seed} replays the choice of workers and moments");
    let mut random = StdRng::seed_from_u64(seed);
    let (cluster_part, run_part) = split(&manifest());
    let mut cluster = Cluster::up(&cluster_part);
    let file = cluster.file("run.yaml", run_part);
    let mut run = cluster.spawn(&["run", &file, "-o", "json"]);
    // A kill early in each fifth of the run, so that all of them fall into it: between two of them the rest of a fifth goes by.
    for kill in 0..5 {
        let epoch = kill * 46 + random.random_range(1..=10);
        let driver = wait_for("the run to come to the epoch of the next kill", RUN_DEADLINE, || {
            let ended = run.try_wait().expect("a child can be waited for");
            assert!(ended.is_none(), "the run ended with {ended:?} before kill {kill}: {}", said(&mut run));
            let (done, driver) = progress(&cluster)?;
            (done >= epoch).then_some(driver)
        });
        let victim = if kill % 2 == 0 { driver } else { random.random_range(0..cluster.workers()) };
        let pid = wait_for("the victim to run", RUN_DEADLINE, || cluster.worker(victim));
        cluster.kill(pid);
        cluster.wait_for_restart(victim, pid);
    }
    let status = wait_for("the run to end", RUN_DEADLINE, || run.try_wait().expect("a child can be waited for"));
    assert!(status.success(), "the run ended with {status}: {}", said(&mut run));
    check(&report(&cluster));
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), WORDS));
    cluster.stop();
}

/// Epochs that the run has done, and the worker that drives it; `None` while nobody says.
fn progress(cluster: &Cluster) -> Option<(u64, usize)> {
    let ran = cluster.engram(&["list", "runs", "-o", "json"]);
    let run = (ran.code == Some(0)).then(|| ran.json()["items"][0].clone())?;
    Some((run["epoch"].as_u64()?, usize::try_from(run["driver"].as_u64()?).ok()?))
}

fn said(child: &mut Child) -> String {
    use std::io::Read as _;
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        // For the message alone.
        let _ = stderr.read_to_string(&mut text);
    }
    text
}

/// The example's cluster and its run, each as a file of its own.
fn split(manifest: &str) -> (String, String) {
    let (cluster, run) = manifest.split_once("\n---\n").expect("a cluster and a run");
    (cluster.to_owned() + "\n", run.to_owned())
}
