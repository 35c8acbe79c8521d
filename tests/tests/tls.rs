//! `engram up --tls`: who has no certificate is not served, and certificates are replaced while everything goes on.

use engram_client::{Rows, Signals, Updates};
use engram_memory::MemoryId;
use engram_tests::{Cluster, Up, cluster_manifest, engram};
use std::time::{Duration, Instant};

/// How long a certificate is valid here; connections live a third of that.
const LIFETIME: Duration = Duration::from_secs(12);

fn start(name: &str) -> Cluster {
    let lifetime = LIFETIME.as_secs().to_string();
    let manifest = cluster_manifest(name, 2, "  partitions: 4\n  replicationFactor: 2\n");
    Up::of(&manifest).with(&["--tls", "--certificate-lifetime", &lifetime]).start()
}

/// Writes and reads until `lifetimes` of a certificate have passed, and connections of clients from before have ended.
fn goes_on(cluster: &Cluster, lifetimes: u32) {
    let end = LIFETIME * lifetimes + LIFETIME / 3;
    let done = cluster.client(async |client| {
        let (session, began, mut done) = (client.session(), Instant::now(), 0_u64);
        while began.elapsed() < end {
            let ids: Vec<MemoryId> = (0..8).map(|i| MemoryId(done * 8 + i)).collect();
            let rows = Rows { ids: ids.clone(), ..Rows::default() };
            let at = || format!("request {done} after {} ms", began.elapsed().as_millis());
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
    assert_eq!(cluster.digest().1, done * 8, "every write is there");
    let endpoints = cluster.endpoints().expect("the cluster is up");
    let workers = endpoints["workers"].as_array().expect("workers are a list").iter();
    for process in workers.chain([&endpoints["coordinator"]]) {
        assert_eq!(process["restarts"], 0, "nobody had to be started again");
    }
    cluster.engram(&["status"]).ended(0);
}

#[test]
fn certificates_are_replaced_under_load_and_nobody_is_served_without_one() {
    let mut cluster = start("secured");
    goes_on(&cluster, 1);
    // Whoever is new is let in by those who were there, and lets them in: by certificates that none of them had at first.
    let digest = cluster.digest();
    let before = cluster.worker(1).expect("it runs");
    cluster.kill(before);
    cluster.wait_for_restart(1, before);
    cluster.engram(&["insert", "green"]).ended(0);
    assert_ne!(cluster.digest(), digest);
    let endpoints = cluster.endpoints().expect("the cluster is up");
    let worker = endpoints["workers"][0]["client"].as_str().expect("an address").to_owned();
    let refused = engram(["top", "--once", "--address", &worker], "");
    assert_ne!(refused.code, Some(0), "{}", refused.stdout);
    let tls = cluster.state_dir().join("tls");
    let [ca, cert] = ["ca.pem", "client.pem"].map(|name| tls.join(name).display().to_string());
    engram(["rank", "--limit", "3", "--address", &worker, "--ca", &ca, "--cert", &cert], "").ended(0);
    engram(["rank", "--ca", &ca, "--cert", &cert], "").refused(2, &["--address"]);
    cluster.stop();
}

#[test]
#[ignore = "full: three certificates long"]
fn nothing_fails_over_three_lifetimes() {
    let cluster = start("renewed");
    goes_on(&cluster, 3);
    cluster.stop();
}
