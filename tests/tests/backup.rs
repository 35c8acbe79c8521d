//! Backups: made while clients write, consistent per partition, restored to other workers and partitions; in a storage for objects.

use engram_client::{Client, GetOptions, Rows, Signals, Updates};
use engram_memory::{MemoryId, OnMissing, PartitionId, partition_of};
use engram_tests::{Cluster, Storage, Up, cluster_manifest, engram};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PARTITIONS: u32 = 16;
/// Ids that a client creates one after another begin here.
const FIRST: u64 = 1_000_000;

fn spec(partitions: u32) -> String {
    format!("  partitions: {partitions}\n  features: {{ dimension: 2, dtype: F16 }}\n")
}

fn rows(count: u32) -> String {
    let row = |id: u32| format!("{{\"id\":{id},\"weight\":0.{id},\"features\":[{id},0.5],\"payload\":\"p{id}\"}}\n");
    (1..=count).map(row).collect()
}

/// All ids of a cluster.
fn ids(cluster: &Cluster) -> BTreeSet<u64> {
    cluster.client(async |client| {
        let mut scan = client.scan(GetOptions::default()).await.expect("a scan begins");
        let mut ids = BTreeSet::new();
        while let Some(page) = scan.next().await.expect("it goes on") {
            ids.extend(page.iter().map(|memory| memory.id.0));
        }
        ids
    })
}

/// Restores a snapshot into a new state directory and starts it.
fn restored(name: &str, from: &[&str], snapshot: &str, workers: u32, partitions: u32) -> Cluster {
    let up = Up::of(&cluster_manifest(name, workers, &spec(partitions)));
    let (state_dir, counts) = (up.state_dir().display().to_string(), [workers.to_string(), partitions.to_string()]);
    let line = ["snapshot", "restore", snapshot, "--state-dir", &state_dir, "--workers", &counts[0]];
    engram(line.iter().chain(&["--partitions", &counts[1]]).chain(from), "").ended(0);
    up.start()
}

#[test]
fn a_backup_made_while_clients_write_is_a_moment_of_each_partition_on_any_workers_and_partitions() {
    let cluster = Cluster::up(&cluster_manifest("busy", 3, &spec(PARTITIONS)));
    cluster.engram_with(&["insert", "--file", "-"], &rows(900)).ended(0);
    cluster.engram(&["decay", "0.125"]).ended(0);
    let (done, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let place = cluster.folder().join("backups").display().to_string();
    let (before, made) = std::thread::scope(|scope| {
        // One memory after another, so that what a partition has of them is known by the last one.
        let writing = || {
            cluster.client(async |client| {
                let session = client.session();
                while !done.load(Ordering::Relaxed) {
                    let ids = vec![MemoryId(FIRST + answered.load(Ordering::Relaxed))];
                    let signals = Signals::Quality(0.75);
                    let updates = Updates { ids, signals, on_missing: OnMissing::Create, keys: None };
                    session.reinforce(updates).await.expect("nobody notices a backup");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        };
        let writer = scope.spawn(writing);
        while answered.load(Ordering::Relaxed) < 50 {
            std::thread::yield_now();
        }
        let before = answered.load(Ordering::Relaxed);
        let made = cluster.engram(&["snapshot", "create", "online", "--to", &place, "-o", "json"]);
        // And on for a while, so that none of it is the last moment of the cluster.
        let after = answered.load(Ordering::Relaxed);
        while answered.load(Ordering::Relaxed) < after + 50 {
            std::thread::yield_now();
        }
        done.store(true, Ordering::Relaxed);
        writer.join().expect("the writer does not panic");
        (before, made.ended(0).json()["items"][0].clone())
    });
    let written = answered.load(Ordering::Relaxed);
    let (up, _) = cluster.stop();
    let memories = made["memories"].as_u64().expect("memories are a number");
    assert!((900 + before..900 + written).contains(&memories), "{memories}: {before} before, {written} in the end");
    for (workers, partitions) in [(1, 64), (5, 7), (2, PARTITIONS)] {
        let cluster = restored("busy", &["--from", &place], "online", workers, partitions);
        let (digest, count) = cluster.digest();
        assert_eq!((&made["digest"], memories), (&digest.into(), count), "{workers} workers, {partitions} partitions");
        assert_eq!(cluster.workers(), workers as usize);
        let found = ids(&cluster);
        assert!((1..=900).chain(FIRST..FIRST + before).all(|id| found.contains(&id)), "what was acknowledged before");
        let mut ended = BTreeMap::<PartitionId, u64>::new();
        for id in FIRST..FIRST + written {
            let partition = partition_of(MemoryId(id), PARTITIONS);
            match (found.contains(&id), ended.get(&partition)) {
                (true, Some(first)) => panic!("partition {partition} has {id} and not {first}, which came before"),
                (true, None) => {}
                (false, _) => drop(ended.entry(partition).or_insert(id)),
            }
        }
        // It is a cluster like any other, and learns on.
        cluster.engram(&["decay", "0.01"]).ended(0);
        cluster.engram(&["snapshot", "create", "again"]).ended(0);
        cluster.stop();
    }
    drop(up);
}

/// Ends a writer, also where what it writes during fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Latencies of single reinforcements, one after another, until told to stop.
async fn latencies(client: &Client, done: &AtomicBool) -> Vec<Duration> {
    let (session, mut took) = (client.session(), Vec::new());
    while !done.load(Ordering::Relaxed) {
        let ids = vec![MemoryId(took.len() as u64 % 1_000_000)];
        let updates = Updates { ids, signals: Signals::Quality(0.75), on_missing: OnMissing::Report, keys: None };
        let begun = Instant::now();
        session.reinforce(updates).await.expect("nobody notices a backup");
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    took
}

#[test]
#[ignore = "full: a million memories; prints what writes took without a backup and during one"]
fn a_million_memories_are_backed_up_while_a_client_writes_and_come_back_on_other_partitions() {
    let manifest = |workers, partitions| cluster_manifest("large", workers, &format!("  partitions: {partitions}\n"));
    let cluster = Cluster::up(&manifest(3, 64));
    cluster.client(async |client| {
        let session = client.session();
        for first in (0..1_000_000).step_by(10_000) {
            let ids: Vec<MemoryId> = (first..first + 10_000).map(MemoryId).collect();
            let weights = ids.iter().map(|id| (id.0 % 997) as f32 / 997.0).collect();
            session.upsert(Rows { ids, weights, ..Rows::default() }).await.expect("they are taken");
        }
    });
    let measured = |what: &str, during: &dyn Fn()| {
        let done = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let writer = scope.spawn(|| cluster.client(async |client| latencies(&client, &done).await));
            let stop = Stop(&done);
            during();
            drop(stop);
            writer.join().expect("the writer does not panic")
        });
        let of = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        println!("{what}: {} writes, p50 {:.2} ms, p99 {:.2} ms", took.len(), of(0.5), of(0.99));
    };
    measured("without a backup", &|| std::thread::sleep(Duration::from_secs(5)));
    let made = std::cell::RefCell::new(Value::Null);
    let (place, begun) = (cluster.folder().join("backups").display().to_string(), Instant::now());
    // One after another, since one takes a moment only.
    measured("during ten backups", &|| {
        for number in 0..10 {
            let name = format!("large-{number}");
            let ran = cluster.engram(&["snapshot", "create", &name, "--to", &place, "-o", "json"]);
            *made.borrow_mut() = ran.ended(0).json()["items"][0].clone();
        }
    });
    println!("they took {:.1} s; the last has {} bytes", begun.elapsed().as_secs_f64(), made.borrow()["bytes"]);
    let (up, _) = cluster.stop();
    let new = Up::of(&manifest(2, 100));
    let state_dir = new.state_dir().display().to_string();
    let begun = Instant::now();
    let line = ["snapshot", "restore", "large-9", "--from", &place, "--state-dir", &state_dir];
    engram(line.into_iter().chain(["--workers", "2", "--partitions", "100"]), "").ended(0);
    println!("the restore took {:.1} s", begun.elapsed().as_secs_f64());
    let cluster = new.start();
    let (digest, memories) = cluster.digest();
    assert_eq!((made.borrow()["digest"].as_str(), memories), (Some(&*digest), 1_000_000));
    cluster.stop();
    drop(up);
}

#[test]
fn a_backup_in_a_storage_for_objects_comes_back_elsewhere_and_a_damaged_one_is_refused_by_name() {
    let Some(storage) = Storage::start() else { return };
    let cluster = Cluster::up(&cluster_manifest("kept", 2, &spec(PARTITIONS)));
    cluster.engram_with(&["insert", "--file", "-"], &rows(300)).ended(0);
    let (digest, _) = cluster.digest();
    let credentials = storage.credentials(&cluster.folder().join("secret"), &storage.text("secretAccessKey"));
    let wrong = storage.credentials(&cluster.folder().join("wrong"), "another");
    let endpoint = storage.text("endpoint");
    let reached = |credentials: &str| ["--s3-endpoint", &endpoint, "--s3-credentials", credentials].map(str::to_owned);
    let there = |verb: &str, place: &str, credentials: &str, more: &[&str]| -> Vec<String> {
        let way = if verb == "create" { "--to" } else { "--from" };
        let line = ["snapshot", verb, way, place].into_iter().chain(more.iter().copied()).map(str::to_owned);
        line.chain(reached(credentials)).collect()
    };
    let run = |line: &[String]| cluster.engram(&line.iter().map(String::as_str).collect::<Vec<_>>());

    run(&there("create", "s3://backups/words", &wrong, &["nightly"]))
        .refused(1, &["ENG-0510", "SignatureDoesNotMatch"]);
    run(&there("create", "s3://backups/words", &credentials, &["nightly"])).ended(0);
    run(&there("create", "s3://backups/words", &credentials, &["nightly"])).refused(2, &["nightly", "already"]);
    run(&there("create", "s3://nowhere/words", &credentials, &["nightly"])).refused(1, &["ENG-0510", "NoSuchBucket"]);
    let listed = run(&there("list", "s3://backups/words", &credentials, &["-o", "json"])).ended(0).json();
    assert_eq!(
        (&listed["items"][0]["name"], &listed["items"][0]["digest"]),
        (&"nightly".into(), &digest.clone().into())
    );

    // What goes wrong in a storage, or on the way: a bit, an end, a file, the manifest, another cluster's name.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let damaged = runtime.block_on(async {
        let good = storage.bucket("s3://backups/words/nightly", &credentials);
        let (objects, _) = good.list().await.expect("it is listed");
        let file =
            objects.iter().find(|object| object.name.ends_with(".snap")).expect("a file per partition").name.clone();
        assert_eq!(objects.len(), PARTITIONS as usize + 1);
        for what in ["flipped", "cut", "long", "missing", "unfinished"] {
            let copy = storage.bucket(&format!("s3://backups/words/{what}"), &credentials);
            for object in &objects {
                let mut bytes = good.get(&object.name, object.bytes).await.expect("it is read").expect("it is there");
                let middle = bytes.len() / 2;
                match what {
                    "flipped" if object.name == file => bytes[middle] ^= 4,
                    "cut" if object.name == file => bytes.truncate(middle),
                    "long" if object.name == file => bytes.push(0),
                    "missing" if object.name == file => continue,
                    "unfinished" if object.name == "manifest.json" => continue,
                    _ => {}
                }
                copy.put(&object.name, bytes).await.expect("it is put");
            }
        }
        // In parts, each with a signature of its own.
        let large: Vec<u8> = (0..20_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (path, back) = (cluster.folder().join("large"), cluster.folder().join("back"));
        std::fs::write(&path, &large).expect("it can be written");
        let place = storage.bucket("s3://backups/large", &credentials);
        assert_eq!(place.put_file("file", &path).await.expect("it goes up"), large.len() as u64);
        place.get_file("file", &back, large.len() as u64).await.expect("it comes down");
        assert!(std::fs::read(&back).expect("it was written") == large);
        place.remove("file").await.expect("it is removed");
        file
    });
    let (up, _) = cluster.stop();
    let state_dir = up.state_dir().display().to_string();
    let restore = |name: &str| {
        let line = ["snapshot", "restore", name, "--from", "s3://backups/words", "--state-dir", &state_dir, "--yes"];
        engram(line.map(str::to_owned).into_iter().chain(reached(&credentials)), "")
    };
    for name in ["flipped", "cut", "long", "missing"] {
        let place = format!("s3://backups/words/{name}/{damaged}");
        restore(name).refused(1, &["ENG-0509", &place]);
    }
    restore("unfinished").refused(1, &["ENG-0509", "never finished"]);
    restore("nothing").refused(1, &["ENG-0509", "there is no snapshot nothing"]);
    let cluster = up.start();
    assert_eq!(cluster.digest(), (digest.clone(), 300), "what was refused changed nothing");
    let (old, _) = cluster.stop();

    let from: Vec<String> =
        ["--from", "s3://backups/words"].map(str::to_owned).into_iter().chain(reached(&credentials)).collect();
    let from: Vec<&str> = from.iter().map(String::as_str).collect();
    let cluster = restored("kept", &from, "nightly", 3, 5);
    assert_eq!(cluster.digest(), (digest, 300), "elsewhere, on other workers and partitions");
    cluster.stop();
    drop(old);
}
