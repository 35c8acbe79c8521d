//! Two copies of everything on real processes: learning goes on without a worker, all of it is there after a stop in every mode,
//! and workers come and go while clients write.

use engram_client::{Client, Signals, Updates};
use engram_memory::{MemoryId, OnMissing};
use engram_tests::{Cluster, DEADLINE, cluster_manifest, run_manifest, wait_for};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A run of seconds, on a machine that is busy with other tests.
const RUN_DEADLINE: Duration = Duration::from_secs(240);
const MEMORIES: u64 = 100_000;
/// Of the experiment with so many memories, whatever happens to its workers.
const DIGEST: &str = "0569a0a6cd4901dddad8e5e7fe77534e";

fn cluster(workers: u32, more: &str) -> Cluster {
    Cluster::up(&cluster_manifest("demo", workers, &format!("  replicationFactor: 2\n{more}")))
}

/// The partitions as `engram partition list` shows them; `None` while nobody answers.
fn partitions(cluster: &Cluster) -> Option<Vec<Value>> {
    let ran = cluster.engram(&["partition", "list", "-o", "json"]);
    (ran.code == Some(0)).then(|| ran.json()["items"].as_array().expect("a list").clone())
}

fn in_sync(partition: &Value) -> Vec<u64> {
    partition["inSync"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

fn wait_until_whole(cluster: &Cluster) -> Vec<Value> {
    wait_for("every partition to have its copies", RUN_DEADLINE, || {
        let all = partitions(cluster)?;
        let whole = all
            .iter()
            .all(|it| in_sync(it).len() == 2 && it["activated"] == true && it["learners"] == Value::Array(vec![]));
        whole.then_some(all)
    })
}

#[test]
fn a_worker_that_is_lost_in_the_middle_of_a_run_changes_nothing_of_its_result() {
    let mut cluster = cluster(5, "");
    let source = format!("    source: {{ synthetic: {{ memories: {MEMORIES} }} }}\n");
    let file = cluster.file("run.yaml", run_manifest("two-groups", "demo", &source));
    let mut run = cluster.spawn(&["run", &file, "-o", "json"]);
    let epoch = |cluster: &Cluster| {
        let ran = cluster.engram(&["list", "runs", "-o", "json"]);
        (ran.code == Some(0)).then(|| ran.json()["items"][0]["epoch"].as_u64()).flatten()
    };
    wait_for("the run to be half done, or over", RUN_DEADLINE, || {
        let over = run.try_wait().expect("a child can be waited for").is_some();
        (over || epoch(&cluster)? >= 20).then_some(())
    });
    let victim = 1;
    let pid = wait_for("the victim to run", DEADLINE, || cluster.worker(victim));
    cluster.kill(pid);
    let status = wait_for("the run to end", RUN_DEADLINE, || run.try_wait().expect("a child can be waited for"));
    assert!(status.success(), "the run ended with {status}");
    let report = cluster.engram(&["describe", "run", "two-groups", "-o", "json"]).ended(0).json()["report"].clone();
    assert_eq!(report["digest"], DIGEST);
    let factor = report["experiment"]["convergenceFactor"].as_f64().expect("a factor");
    assert!((factor - 12.5).abs() < 1e-6, "convergence factor {factor}");
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), MEMORIES));
    wait_until_whole(&cluster);
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), MEMORIES));
    cluster.stop();
}

#[test]
fn everything_is_there_after_down_and_up_in_mode_replicated_and_nobody_is_needed() {
    let cluster = cluster(3, "  durability: { mode: Replicated }\n");
    let source = "    source: { synthetic: { memories: 10000 } }\n    epochs: 5\n";
    let file = cluster.file("run.yaml", run_manifest("few", "demo", source));
    cluster.engram(&["run", &file]).ended(0);
    let before = cluster.digest();
    let (up, _) = cluster.stop();
    let mut cluster = up.start();
    assert_eq!(cluster.digest(), before, "after an orderly stop");
    wait_until_whole(&cluster);
    // All processes at once, without a word: under the same kernel nothing that was written is lost.
    let (up, before) = {
        let before = cluster.digest();
        for worker in 0..cluster.workers() {
            let pid = wait_for("a worker to run", DEADLINE, || cluster.worker(worker));
            cluster.kill(pid);
        }
        (cluster.kill_all(DEADLINE), before)
    };
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after every process was killed");
    wait_until_whole(&cluster);
    cluster.stop();
}

/// Reinforces one memory after another until told to stop: how many times, the longest wait, and every error.
async fn load(client: Client, done: &AtomicBool) -> (u64, Duration, Vec<String>) {
    let (mut answered, mut longest, mut errors) = (0, Duration::ZERO, Vec::new());
    let session = client.session();
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let ids = vec![MemoryId(answered % 10_000)];
        let updates = Updates { ids, signals: Signals::Quality(0.6), on_missing: OnMissing::Create, keys: None };
        match session.reinforce(updates).await {
            Ok(_) => answered += 1,
            Err(error) => errors.push(error.to_string()),
        }
        longest = longest.max(begun.elapsed());
    }
    (answered, longest, errors)
}

/// Runs `during` while a client writes, which must not notice.
fn unnoticed<T>(cluster: &Cluster, what: &str, during: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| cluster.client(async |client| load(client, &done).await));
        let result = during();
        done.store(true, Ordering::Relaxed);
        let (answered, longest, errors) = client.join().expect("the client does not panic");
        println!("{what}: {answered} requests answered, the longest wait {} ms", longest.as_millis());
        assert_eq!(errors, Vec::<String>::new(), "{what}");
        assert!(answered > 0, "{what}: nothing was asked meanwhile");
        result
    })
}

#[test]
fn workers_come_and_go_while_clients_write_and_no_more_moves_than_must() {
    let cluster = cluster(3, "  partitions: 64\n");
    let before = wait_until_whole(&cluster);
    unnoticed(&cluster, "scaling from 3 to 4 workers", || {
        cluster.engram(&["scale", "--workers", "4", "--wait"]).ended(0);
    });
    let after = wait_until_whole(&cluster);
    let moved = |before: &Value, after: &Value| {
        let held = in_sync(before);
        in_sync(after).iter().filter(|copy| !held.contains(copy)).count()
    };
    let copies: usize = before.iter().zip(&after).map(|(before, after)| moved(before, after)).sum();
    println!("{copies} of {} copies moved", 2 * before.len());
    assert!(copies > 0, "the new worker holds nothing");
    assert!(copies as f64 <= 0.30 * 2.0 * before.len() as f64, "{copies} copies moved");

    unnoticed(&cluster, "draining worker 1", || {
        cluster.engram(&["drain", "1", "--wait"]).ended(0);
    });
    let drained = wait_until_whole(&cluster);
    assert!(drained.iter().all(|it| !in_sync(it).contains(&1) && it["primary"] != 1), "worker 1 is empty");
    cluster.engram(&["drain", "1", "--undo"]).ended(0);

    unnoticed(&cluster, "scaling from 4 to 3 workers", || {
        cluster.engram(&["scale", "--workers", "3", "--wait"]).ended(0);
    });
    let left = wait_until_whole(&cluster);
    assert!(left.iter().all(|it| !in_sync(it).contains(&3)), "worker 3 is gone");
    cluster.stop();
}

#[test]
fn what_a_worker_led_that_is_started_again_is_served_while_no_coordinator_answers() {
    let mut cluster = cluster(3, "");
    wait_until_whole(&cluster);
    let coordinator = cluster.coordinator().expect("it runs");
    cluster.pause(coordinator);
    let pid = wait_for("a worker to run", DEADLINE, || cluster.worker(1));
    cluster.kill(pid);
    // It beats again as another process, which the map does not name: nobody may wait for the coordinator to say who leads.
    cluster.wait_for_restart(1, pid);
    cluster.client(async |client| {
        let ids = (0..10_000).map(MemoryId).collect();
        let updates = Updates { ids, signals: Signals::Quality(0.6), on_missing: OnMissing::Create, keys: None };
        client.session().reinforce(updates).await.expect("every partition is served");
    });
    cluster.resume(coordinator);
    wait_until_whole(&cluster);
    cluster.stop();
}
