//! `engram up --tls`: clients need a certificate, and certificates are renewed without interruption.

use engram_client::{Rows, Signals, Updates};
use engram_memory::MemoryId;
use engram_tests::{Cluster, ClusterBuilder, cluster_manifest, engram};
use std::time::{Duration, Instant};

/// Certificate lifetime in this test; connections live a third of that.
const LIFETIME: Duration = Duration::from_secs(12);

fn start(name: &str) -> Cluster {
    let lifetime = LIFETIME.as_secs().to_string();
    let manifest = cluster_manifest(name, 2, "  partitions: 4\n  replicationFactor: 2\n");
    ClusterBuilder::new(&manifest).with(&["--tls", "--certificate-lifetime", &lifetime]).start()
}

/// Writes and reads for a number of certificate lifetimes, until older connections have been replaced.
fn run_load(cluster: &Cluster, lifetimes: u32) {
    let end = LIFETIME * lifetimes + LIFETIME / 3;
    let done = cluster.client(async |client| {
        let (session, started, mut done) = (client.session(), Instant::now(), 0_u64);
        while started.elapsed() < end {
            let ids: Vec<MemoryId> = (0..8).map(|i| MemoryId(done * 8 + i)).collect();
            let rows = Rows { ids: ids.clone(), ..Rows::default() };
            let at = || format!("request {done} after {} ms", started.elapsed().as_millis());
            session.upsert(rows).await.unwrap_or_else(|error| panic!("{}: {error}", at()));
            let updates = Updates { ids, signals: Signals::Quality(0.5), ..Updates::default() };
            session.reinforce(updates).await.unwrap_or_else(|error| panic!("{}: {error}", at()));
            client.top(3, None).await.unwrap_or_else(|error| panic!("{}: {error}", at()));
            done += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        done
    });
    assert!(done > 0);
    assert_eq!(cluster.digest().1, done * 8, "a write is missing");
    let endpoints = cluster.endpoints().expect("the cluster is up");
    let workers = endpoints["workers"].as_array().expect("workers are a list").iter();
    for process in workers.chain([&endpoints["coordinator"]]) {
        assert_eq!(process["restarts"], 0, "a process was restarted");
    }
    cluster.engram(&["status"]).exits_with(0);
}

#[test]
fn certificates_are_renewed_under_load_and_required() {
    let mut cluster = start("secured");
    run_load(&cluster, 1);
    // A restarted worker and the others authenticate each other with renewed certificates.
    let digest = cluster.digest();
    let before = cluster.worker(1).expect("the process is running");
    cluster.kill(before);
    cluster.wait_for_restart(1, before);
    cluster.engram(&["insert", "green"]).exits_with(0);
    assert_ne!(cluster.digest(), digest);
    let endpoints = cluster.endpoints().expect("the cluster is up");
    let worker = endpoints["workers"][0]["client"].as_str().expect("an address").to_owned();
    let refused = engram(["top", "--once", "--address", &worker], "");
    assert_ne!(refused.code, Some(0), "{}", refused.stdout);
    let tls = cluster.state_dir().join("tls");
    let [ca, cert] = ["ca.pem", "client.pem"].map(|name| tls.join(name).display().to_string());
    engram(
        ["rank", "--limit", "3", "--address", &worker, "--certificate-authority", &ca, "--client-certificate", &cert],
        "",
    )
    .exits_with(0);
    engram(["rank", "--certificate-authority", &ca, "--client-certificate", &cert], "").fails_with(2, &["--address"]);
    cluster.stop();
}

#[test]
#[ignore = "full: three certificate lifetimes"]
fn requests_succeed_over_three_lifetimes() {
    let cluster = start("renewed");
    run_load(&cluster, 3);
    cluster.stop();
}
