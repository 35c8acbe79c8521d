//! Backups: created under load, consistent per partition, restored to other workers and partitions, in folders and object storage.

use engram_client::{Client, GetOptions, Rows, Signals, Updates};
use engram_memory::{MemoryId, OnMissing, PartitionId, partition_of};
use engram_tests::{Cluster, ClusterBuilder, Storage, cluster_manifest, engram};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PARTITIONS: u32 = 16;
/// First id of the memories that are created during a backup.
const FIRST: u64 = 1_000_000;

fn spec(partitions: u32) -> String {
    format!("  partitions: {partitions}\n  features: {{ dimension: 2, dtype: F16 }}\n")
}

fn rows(count: u32) -> String {
    let row = |id: u32| format!("{{\"id\":{id},\"weight\":0.{id},\"features\":[{id},0.5],\"payload\":\"p{id}\"}}\n");
    (1..=count).map(row).collect()
}

/// Returns all ids of a cluster.
fn ids(cluster: &Cluster) -> BTreeSet<u64> {
    cluster.client(async |client| {
        let mut scan = client.scan(GetOptions::default()).await.expect("failed to start a scan");
        let mut ids = BTreeSet::new();
        while let Some(page) = scan.next().await.expect("failed to continue a scan") {
            ids.extend(page.iter().map(|memory| memory.id.0));
        }
        ids
    })
}

/// Restores a snapshot to a new state directory and starts the cluster.
fn start_restored(name: &str, from: &[&str], snapshot: &str, workers: u32, partitions: u32) -> Cluster {
    let up = ClusterBuilder::new(&cluster_manifest(name, workers, &spec(partitions)));
    let (state_dir, counts) = (up.state_dir().display().to_string(), [workers.to_string(), partitions.to_string()]);
    let line = ["snapshot", "restore", snapshot, "--state-dir", &state_dir, "--workers", &counts[0]];
    engram(line.iter().chain(&["--partitions", &counts[1]]).chain(from), "").exits_with(0);
    up.start()
}

#[test]
fn backups_under_load_are_consistent_per_partition() {
    let cluster = Cluster::up(&cluster_manifest("busy", 3, &spec(PARTITIONS)));
    cluster.engram_with(&["insert", "--file", "-"], &rows(900)).exits_with(0);
    cluster.engram(&["decay", "0.125"]).exits_with(0);
    let (done, acknowledged) = (AtomicBool::new(false), AtomicU64::new(0));
    let place = cluster.folder().join("backups").display().to_string();
    let (before, made) = std::thread::scope(|scope| {
        // Sequential ids: a consistent partition has a prefix of its ids.
        let writing = || {
            cluster.client(async |client| {
                let session = client.session();
                while !done.load(Ordering::Relaxed) {
                    let ids = vec![MemoryId(FIRST + acknowledged.load(Ordering::Relaxed))];
                    let signals = Signals::Quality(0.75);
                    let updates = Updates { ids, signals, on_missing: OnMissing::Create, keys: None };
                    session.reinforce(updates).await.expect("writes succeed during a backup");
                    acknowledged.fetch_add(1, Ordering::Relaxed);
                }
            });
        };
        let writer = scope.spawn(writing);
        while acknowledged.load(Ordering::Relaxed) < 50 {
            std::thread::yield_now();
        }
        let before = acknowledged.load(Ordering::Relaxed);
        let made = cluster.engram(&["snapshot", "create", "online", "--to", &place, "-o", "json"]);
        // Continues writing, so that the backup is not the final state.
        let after = acknowledged.load(Ordering::Relaxed);
        while acknowledged.load(Ordering::Relaxed) < after + 50 {
            std::thread::yield_now();
        }
        done.store(true, Ordering::Relaxed);
        writer.join().expect("the writer panicked");
        (before, made.exits_with(0).json()["items"][0].clone())
    });
    let written = acknowledged.load(Ordering::Relaxed);
    let (up, _) = cluster.stop();
    let memories = made["memories"].as_u64().expect("memories are a number");
    assert!((900 + before..900 + written).contains(&memories), "{memories}: {before} before, {written} in the end");
    for (workers, partitions) in [(1, 64), (5, 7), (2, PARTITIONS)] {
        let cluster = start_restored("busy", &["--from", &place], "online", workers, partitions);
        let (digest, count) = cluster.digest();
        assert_eq!((&made["digest"], memories), (&digest.into(), count), "{workers} workers, {partitions} partitions");
        assert_eq!(cluster.workers(), workers as usize);
        let found = ids(&cluster);
        assert!(
            (1..=900).chain(FIRST..FIRST + before).all(|id| found.contains(&id)),
            "acknowledged memories are missing"
        );
        let mut first_missing = BTreeMap::<PartitionId, u64>::new();
        for id in FIRST..FIRST + written {
            let partition = partition_of(MemoryId(id), PARTITIONS);
            match (found.contains(&id), first_missing.get(&partition)) {
                (true, Some(first)) => panic!("partition {partition} has {id} but not the earlier {first}"),
                (true, None) => {}
                (false, _) => drop(first_missing.entry(partition).or_insert(id)),
            }
        }
        // The restored cluster accepts writes and backups.
        cluster.engram(&["decay", "0.01"]).exits_with(0);
        cluster.engram(&["snapshot", "create", "again"]).exits_with(0);
        cluster.stop();
    }
    drop(up);
}

/// Stops a writer on drop, also on failure.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Measures latencies of sequential reinforcements until `done`.
async fn measure_latencies(client: &Client, done: &AtomicBool) -> Vec<Duration> {
    let (session, mut latencies) = (client.session(), Vec::new());
    while !done.load(Ordering::Relaxed) {
        let ids = vec![MemoryId(latencies.len() as u64 % 1_000_000)];
        let updates = Updates { ids, signals: Signals::Quality(0.75), on_missing: OnMissing::Report, keys: None };
        let started = Instant::now();
        session.reinforce(updates).await.expect("writes succeed during a backup");
        latencies.push(started.elapsed());
    }
    latencies.sort_unstable();
    latencies
}

#[test]
#[ignore = "full: a million memories; prints write latencies with and without a backup"]
fn a_million_memories_are_backed_up_under_load_and_restored() {
    let manifest = |workers, partitions| cluster_manifest("large", workers, &format!("  partitions: {partitions}\n"));
    let cluster = Cluster::up(&manifest(3, 64));
    cluster.client(async |client| {
        let session = client.session();
        for first in (0..1_000_000).step_by(10_000) {
            let ids: Vec<MemoryId> = (first..first + 10_000).map(MemoryId).collect();
            let weights = ids.iter().map(|id| (id.0 % 997) as f32 / 997.0).collect();
            session.upsert(Rows { ids, weights, ..Rows::default() }).await.expect("failed to insert");
        }
    });
    let measure = |what: &str, action: &dyn Fn()| {
        let done = AtomicBool::new(false);
        let latencies = std::thread::scope(|scope| {
            let writer = scope.spawn(|| cluster.client(async |client| measure_latencies(&client, &done).await));
            let stop = StopOnDrop(&done);
            action();
            drop(stop);
            writer.join().expect("the writer panicked")
        });
        let quantile =
            |quantile: f64| latencies[((latencies.len() - 1) as f64 * quantile) as usize].as_secs_f64() * 1e3;
        println!("{what}: {} writes, p50 {:.2} ms, p99 {:.2} ms", latencies.len(), quantile(0.5), quantile(0.99));
    };
    measure("without a backup", &|| std::thread::sleep(Duration::from_secs(5)));
    let made = std::cell::RefCell::new(Value::Null);
    let (place, started) = (cluster.folder().join("backups").display().to_string(), Instant::now());
    // Ten backups, because one is too short to measure.
    measure("during ten backups", &|| {
        for number in 0..10 {
            let name = format!("large-{number}");
            let ran = cluster.engram(&["snapshot", "create", &name, "--to", &place, "-o", "json"]);
            *made.borrow_mut() = ran.exits_with(0).json()["items"][0].clone();
        }
    });
    println!(
        "ten backups took {:.1} s; the last has {} bytes",
        started.elapsed().as_secs_f64(),
        made.borrow()["bytes"]
    );
    let (up, _) = cluster.stop();
    let new = ClusterBuilder::new(&manifest(2, 100));
    let state_dir = new.state_dir().display().to_string();
    let started = Instant::now();
    let line = ["snapshot", "restore", "large-9", "--from", &place, "--state-dir", &state_dir];
    engram(line.into_iter().chain(["--workers", "2", "--partitions", "100"]), "").exits_with(0);
    println!("the restore took {:.1} s", started.elapsed().as_secs_f64());
    let cluster = new.start();
    let (digest, memories) = cluster.digest();
    assert_eq!((made.borrow()["digest"].as_str(), memories), (Some(&*digest), 1_000_000));
    cluster.stop();
    drop(up);
}

#[test]
fn object_storage_backups_are_restored_and_damaged_ones_rejected() {
    let Some(storage) = Storage::start() else { return };
    let cluster = Cluster::up(&cluster_manifest("kept", 2, &spec(PARTITIONS)));
    cluster.engram_with(&["insert", "--file", "-"], &rows(300)).exits_with(0);
    let (digest, _) = cluster.digest();
    let credentials = storage.credentials(&cluster.folder().join("secret"), &storage.text("secretAccessKey"));
    let wrong = storage.credentials(&cluster.folder().join("wrong"), "another");
    let endpoint = storage.text("endpoint");
    let storage_options =
        |credentials: &str| ["--s3-endpoint", &endpoint, "--s3-credentials", credentials].map(str::to_owned);
    let line = |verb: &str, place: &str, credentials: &str, more: &[&str]| -> Vec<String> {
        let option = if verb == "create" { "--to" } else { "--from" };
        let arguments = ["snapshot", verb, option, place].into_iter().chain(more.iter().copied()).map(str::to_owned);
        arguments.chain(storage_options(credentials)).collect()
    };
    let run = |line: &[String]| cluster.engram(&line.iter().map(String::as_str).collect::<Vec<_>>());

    run(&line("create", "s3://backups/words", &wrong, &["nightly"]))
        .fails_with(1, &["ENG-0510", "SignatureDoesNotMatch"]);
    run(&line("create", "s3://backups/words", &credentials, &["nightly"])).exits_with(0);
    run(&line("create", "s3://backups/words", &credentials, &["nightly"])).fails_with(2, &["nightly", "already"]);
    run(&line("create", "s3://nowhere/words", &credentials, &["nightly"])).fails_with(1, &["ENG-0510", "NoSuchBucket"]);
    let listed = run(&line("list", "s3://backups/words", &credentials, &["-o", "json"])).exits_with(0).json();
    assert_eq!(
        (&listed["items"][0]["name"], &listed["items"][0]["digest"]),
        (&"nightly".into(), &digest.clone().into())
    );

    // Damaged copies: a flipped bit, wrong lengths, a missing file, a missing manifest.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to create a runtime");
    let damaged = runtime.block_on(async {
        let good = storage.bucket("s3://backups/words/nightly", &credentials);
        let (objects, _) = good.list().await.expect("failed to list objects");
        let file = objects.iter().find(|object| object.name.ends_with(".snap")).expect("no snapshot file").name.clone();
        assert_eq!(objects.len(), PARTITIONS as usize + 1);
        for what in ["flipped", "cut", "long", "missing", "unfinished"] {
            let copy = storage.bucket(&format!("s3://backups/words/{what}"), &credentials);
            for object in &objects {
                let mut bytes = good
                    .get(&object.name, object.bytes)
                    .await
                    .expect("failed to read an object")
                    .expect("the object exists");
                let middle = bytes.len() / 2;
                match what {
                    "flipped" if object.name == file => bytes[middle] ^= 4,
                    "cut" if object.name == file => bytes.truncate(middle),
                    "long" if object.name == file => bytes.push(0),
                    "missing" if object.name == file => continue,
                    "unfinished" if object.name == "manifest.json" => continue,
                    _ => {}
                }
                copy.put(&object.name, bytes).await.expect("failed to write an object");
            }
        }
        // Multipart upload.
        let large: Vec<u8> = (0..20_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (path, back) = (cluster.folder().join("large"), cluster.folder().join("back"));
        std::fs::write(&path, &large).expect("failed to write a file");
        let place = storage.bucket("s3://backups/large", &credentials);
        assert_eq!(place.put_file("file", &path).await.expect("failed to upload"), large.len() as u64);
        place.get_file("file", &back, large.len() as u64).await.expect("failed to download");
        assert!(std::fs::read(&back).expect("failed to read the file") == large);
        place.remove("file").await.expect("failed to remove an object");
        file
    });
    let (up, _) = cluster.stop();
    let state_dir = up.state_dir().display().to_string();
    let restore = |name: &str| {
        let line = ["snapshot", "restore", name, "--from", "s3://backups/words", "--state-dir", &state_dir, "--yes"];
        engram(line.map(str::to_owned).into_iter().chain(storage_options(&credentials)), "")
    };
    for name in ["flipped", "cut", "long", "missing"] {
        let place = format!("s3://backups/words/{name}/{damaged}");
        restore(name).fails_with(1, &["ENG-0509", &place]);
    }
    restore("unfinished").fails_with(1, &["ENG-0509", "is incomplete"]);
    restore("nothing").fails_with(1, &["ENG-0509", "snapshot nothing not found"]);
    let cluster = up.start();
    assert_eq!(cluster.digest(), (digest.clone(), 300), "rejected restores change nothing");
    let (old, _) = cluster.stop();

    let from: Vec<String> =
        ["--from", "s3://backups/words"].map(str::to_owned).into_iter().chain(storage_options(&credentials)).collect();
    let from: Vec<&str> = from.iter().map(String::as_str).collect();
    let cluster = start_restored("kept", &from, "nightly", 3, 5);
    assert_eq!(cluster.digest(), (digest, 300), "restored to other workers and partitions");
    cluster.stop();
    drop(old);
}
