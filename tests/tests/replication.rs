//! Replication with real processes: runs continue without a worker, data survives a restart in every durability mode, and workers are
//! added and removed while clients write.

use engram_client::{Client, Signals, Updates};
use engram_memory::{MemoryId, OnMissing};
use engram_tests::{Cluster, DEADLINE, cluster_manifest, run_manifest, wait_for};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Deadline of a run, on a machine that executes other tests.
const RUN_DEADLINE: Duration = Duration::from_secs(240);
const MEMORIES: u64 = 100_000;
/// Digest of the experiment with [`MEMORIES`] memories.
const DIGEST: &str = "0569a0a6cd4901dddad8e5e7fe77534e";

fn cluster(workers: u32, more: &str) -> Cluster {
    Cluster::up(&cluster_manifest("demo", workers, &format!("  replicationFactor: 2\n{more}")))
}

fn in_sync(partition: &Value) -> Vec<u64> {
    partition["inSync"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

#[test]
fn losing_a_worker_during_a_run_does_not_change_its_result() {
    let mut cluster = cluster(5, "");
    let source = format!("    source: {{ synthetic: {{ memories: {MEMORIES} }} }}\n");
    let file = cluster.file("run.yaml", run_manifest("two-groups", "demo", &source));
    let mut run = cluster.spawn(&["run", &file, "-o", "json"]);
    let epoch = |cluster: &Cluster| {
        let output = cluster.engram(&["list", "runs", "-o", "json"]);
        (output.code == Some(0)).then(|| output.json()["items"][0]["epoch"].as_u64()).flatten()
    };
    wait_for("the run to be half complete", RUN_DEADLINE, || {
        let is_finished = run.try_wait().expect("failed to wait for the command").is_some();
        (is_finished || epoch(&cluster)? >= 20).then_some(())
    });
    let victim = 1;
    let pid = wait_for("the victim to be running", DEADLINE, || cluster.worker(victim));
    cluster.kill(pid);
    let status =
        wait_for("the run to finish", RUN_DEADLINE, || run.try_wait().expect("failed to wait for the command"));
    assert!(status.success(), "the run exited with {status}");
    let report =
        cluster.engram(&["describe", "run", "two-groups", "-o", "json"]).exits_with(0).json()["report"].clone();
    assert_eq!(report["digest"], DIGEST);
    let factor = report["experiment"]["convergenceFactor"].as_f64().expect("a factor");
    assert!((factor - 12.5).abs() < 1e-6, "convergence factor {factor}");
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), MEMORIES));
    cluster.wait_until_replicated(2);
    assert_eq!(cluster.digest(), (DIGEST.to_owned(), MEMORIES));
    cluster.stop();
}

#[test]
fn mode_replicated_survives_a_restart_of_all_processes() {
    let cluster = cluster(3, "  durability: { mode: Replicated }\n");
    let source = "    source: { synthetic: { memories: 10000 } }\n    epochs: 5\n";
    let file = cluster.file("run.yaml", run_manifest("few", "demo", source));
    cluster.engram(&["run", &file]).exits_with(0);
    let before = cluster.digest();
    let (up, _) = cluster.stop();
    let mut cluster = up.start();
    assert_eq!(cluster.digest(), before, "after a graceful stop");
    cluster.wait_until_replicated(2);
    // SIGKILL of all processes: the kernel keeps what was written.
    let (up, before) = {
        let before = cluster.digest();
        for worker in 0..cluster.workers() {
            let pid = wait_for("a worker to be running", DEADLINE, || cluster.worker(worker));
            cluster.kill(pid);
        }
        (cluster.kill_all(DEADLINE), before)
    };
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after every process was killed");
    cluster.wait_until_replicated(2);
    cluster.stop();
}

/// Reinforces memories one after another until `done`. Returns the number of requests, the longest latency, and all errors.
async fn load(client: Client, done: &AtomicBool) -> (u64, Duration, Vec<String>) {
    let (mut requests, mut longest, mut errors) = (0, Duration::ZERO, Vec::new());
    let session = client.session();
    while !done.load(Ordering::Relaxed) {
        let started = Instant::now();
        let ids = vec![MemoryId(requests % 10_000)];
        let updates = Updates { ids, signals: Signals::Quality(0.6), on_missing: OnMissing::Create, keys: None };
        match session.reinforce(updates).await {
            Ok(_) => requests += 1,
            Err(error) => errors.push(error.to_string()),
        }
        longest = longest.max(started.elapsed());
    }
    (requests, longest, errors)
}

/// Runs `action` while a client writes, and asserts that no request fails.
fn without_client_errors<T>(cluster: &Cluster, what: &str, action: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| cluster.client(async |client| load(client, &done).await));
        let result = action();
        done.store(true, Ordering::Relaxed);
        let (requests, longest, errors) = client.join().expect("the client panicked");
        println!("{what}: {requests} requests, longest latency {} ms", longest.as_millis());
        assert_eq!(errors, Vec::<String>::new(), "{what}");
        assert!(requests > 0, "{what}: no request was sent");
        result
    })
}

#[test]
fn scaling_under_load_moves_a_minimal_number_of_replicas() {
    let cluster = cluster(3, "  partitions: 64\n");
    let before = cluster.wait_until_replicated(2);
    without_client_errors(&cluster, "scaling from 3 to 4 workers", || {
        cluster.engram(&["scale", "--workers", "4", "--wait"]).exits_with(0);
    });
    let after = cluster.wait_until_replicated(2);
    let moved = |before: &Value, after: &Value| {
        let previous = in_sync(before);
        in_sync(after).iter().filter(|ordinal| !previous.contains(ordinal)).count()
    };
    let replicas: usize = before.iter().zip(&after).map(|(before, after)| moved(before, after)).sum();
    println!("{replicas} of {} replicas moved", 2 * before.len());
    assert!(replicas > 0, "the new worker has no replica");
    assert!(replicas as f64 <= 0.30 * 2.0 * before.len() as f64, "{replicas} replicas moved");

    without_client_errors(&cluster, "draining worker 1", || {
        cluster.engram(&["drain", "1", "--wait"]).exits_with(0);
    });
    let drained = cluster.wait_until_replicated(2);
    assert!(drained.iter().all(|it| !in_sync(it).contains(&1) && it["primary"] != 1), "worker 1 is empty");
    cluster.engram(&["drain", "1", "--undo"]).exits_with(0);

    without_client_errors(&cluster, "scaling from 4 to 3 workers", || {
        cluster.engram(&["scale", "--workers", "3", "--wait"]).exits_with(0);
    });
    let remaining = cluster.wait_until_replicated(2);
    assert!(remaining.iter().all(|it| !in_sync(it).contains(&3)), "worker 3 is gone");
    cluster.stop();
}

#[test]
fn restarted_workers_serve_their_partitions_without_a_coordinator() {
    let mut cluster = cluster(3, "");
    cluster.wait_until_replicated(2);
    let coordinator = cluster.coordinator().expect("the process is running");
    cluster.pause(coordinator);
    let pid = wait_for("a worker to be running", DEADLINE, || cluster.worker(1));
    cluster.kill(pid);
    // The new process has an incarnation that the map does not name, and must not depend on the coordinator.
    cluster.wait_for_restart(1, pid);
    cluster.client(async |client| {
        let ids = (0..10_000).map(MemoryId).collect();
        let updates = Updates { ids, signals: Signals::Quality(0.6), on_missing: OnMissing::Create, keys: None };
        client.session().reinforce(updates).await.expect("a partition is not served");
    });
    cluster.resume(coordinator);
    cluster.wait_until_replicated(2);
    cluster.stop();
}
