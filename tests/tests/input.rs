//! Bad input through the command line: each a clear error under its code, and no half-done state.

use engram_memory::{Ordinal, key_id};
use engram_tests::{Cluster, Up, cluster_manifest, engram, run_manifest};
use engram_worker::{Authorizer, HeaderMap, Principal, Worker};
use serde_json::json;

#[test]
fn a_manifest_is_refused_before_anything_starts() {
    let synthetic = run_manifest("r", "c", "    source: { synthetic: {} }\n");
    let two_sources = run_manifest("r", "c", "    source: { synthetic: {}, git: { path: . } }\n");
    let no_file = run_manifest("r", "c", "    source: { events: { path: none.csv, columns: { key: k, epoch: e } } }\n");
    let with = |run: &str| format!("{}---\n{run}", cluster_manifest("c", 1, ""));
    let cases: [(String, i32, &[&str]); 12] = [
        (cluster_manifest("c", 1, "  wrokers: 5\n"), 2, &["ENG-0101", "wrokers", "workers"]),
        (cluster_manifest("c", 0, ""), 2, &["ENG-0103", "workers", "1 to 100"]),
        (cluster_manifest("c", 1, "").replace("workers: 1", "workers: \"5\""), 2, &["ENG-0102", "workers"]),
        (cluster_manifest("c", 2, "  replicationFactor: 3\n"), 2, &["ENG-0106", "replicationFactor: 2"]),
        (cluster_manifest("c", 1, "  learning: { rate: .nan }\n"), 2, &["ENG-0103", "rate"]),
        (cluster_manifest("c", 1, "  capacity: { policy: evict }\n"), 2, &["ENG-0104", "did you mean Evict"]),
        (cluster_manifest("c", 1, "  gpu: { mode: Required }\n"), 5, &["ENG-0201"]),
        ("a: [".into(), 2, &["ENG-0109"]),
        (synthetic, 2, &["ENG-0109"]),
        (with(&two_sources), 2, &["ENG-0106"]),
        (with(&no_file), 3, &["ENG-0302", "none.csv"]),
        (with(&run_manifest("r", "c", "    source: { synthetic: { rewarded: 1.5 } }\n")), 2, &["ENG-0103", "rewarded"]),
    ];
    for (manifest, code, words) in cases {
        let up = Up::of(&manifest);
        up.run().refused(code, words);
        assert!(!up.state_dir().exists(), "nothing is left of a start that was refused:\n{manifest}");
    }
}

#[test]
fn a_command_without_a_cluster_says_so() {
    engram(["get", "a", "--state-dir", "/nonexistent"], "").refused(3, &["ENG-0408", "/nonexistent"]);
    engram(["get", "a", "--address", "127.0.0.1:1"], "").refused(6, &["ENG-0601", "127.0.0.1:1"]);
    engram(["get"], "").refused(2, &[]);
    engram(["qualty"], "").refused(2, &["'quality'"]);
    engram(["reinforce", "a", "--quality", "0.5", "--delta", "0.5"], "").refused(2, &["--delta"]);
    engram(["explain", "ENG-9999"], "").ended(3);
}

#[test]
fn a_worker_that_does_not_answer_is_out_of_time_and_no_other_is_held_up() {
    let cluster = Cluster::up(&cluster_manifest("slow", 2, "  replicationFactor: 1\n  partitions: 2\n"));
    let map = cluster.client(async |client| client.map().expect("it is known"));
    let key_of = |ordinal| {
        let owner = |key: &String| map.owner(map.partition_of(key_id(key.as_bytes())));
        let found = (0..).map(|number| format!("key-{number}")).find(|key| owner(key) == Some(Ordinal(ordinal)));
        found.expect("each of two partitions has a worker")
    };
    let (paused, other) = (key_of(1), key_of(0));
    cluster.engram(&["insert", &paused, &other]).ended(0);
    let worker = cluster.worker(1).expect("it runs");
    cluster.pause(worker);
    cluster.engram(&["get", &paused]).refused(4, &["ENG-0602", "30.0 s"]);
    cluster.engram(&["get", &other]).ended(0);
    cluster.resume(worker);
    cluster.engram(&["get", &paused]).ended(0);
    cluster.stop();
}

/// Lets nobody do anything.
struct Nobody;

impl Authorizer for Nobody {
    fn identify(&self, _headers: &HeaderMap) -> Principal {
        Principal { name: "somebody".into() }
    }

    fn allows(&self, _principal: &Principal, _method: &str) -> bool {
        false
    }
}

#[test]
fn who_may_not_is_told_so() {
    let home = tempfile::tempdir().expect("a temporary folder can be made");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    let options = json!({
        "cluster": "0".repeat(31) + "1", "clusterName": "guarded", "ordinal": 0, "stateDir": home.path(), "coordinators": [],
        "listen": {"client": "127.0.0.1:0", "peer": "127.0.0.1:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0"},
        "spec": {"workers": 1},
    });
    let options = serde_json::from_value(options).expect("these are a worker's options");
    let worker = runtime.block_on(Worker::build(options)).expect("the worker starts").authorized_by(Nobody);
    let address = worker.addresses().client.to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = runtime.spawn(worker.run(async { drop(stopped.await) }));
    for command in [&["get", "a"][..], &["insert", "a"], &["quality"]] {
        let command = command.iter().copied().chain(["--address", address.as_str()]);
        engram(command, "").refused(7, &["ENG-0607", "somebody may not call"]);
    }
    stop.send(()).expect("it runs");
    runtime.block_on(running).expect("it does not panic").expect("it stops in order");
}

#[test]
fn a_request_is_refused_whole_or_reported_row_by_row() {
    let spec = "  partitions: 4\n  features: { dimension: 2 }\n  learning: { initialWeight: 0.5, rate: 0.05 }\n";
    let cluster = Cluster::up(&cluster_manifest("strict", 2, spec));
    let nothing = cluster.digest();

    // Values are refused, never clamped, and nothing of the request is applied.
    for value in ["NaN", "inf", "1.5", "-0.1"] {
        let quality = format!("--quality={value}");
        cluster.engram(&["reinforce", "a", "--create", &quality]).refused(2, &["ENG-0507", "quality"]);
        let weight = format!("--weight={value}");
        cluster.engram(&["insert", "a", &weight]).refused(2, &["ENG-0507", "weight"]);
        cluster.engram(&["decay", value]).refused(2, &["ENG-0507", "amount"]);
    }
    cluster.engram(&["insert", "a", "--features", "1,2,3"]).refused(2, &["dimension"]);
    cluster.engram(&["insert", "a", "--payload", &"x".repeat(70_000)]).refused(2, &["payload"]);
    cluster.engram(&["insert", &"k".repeat(1_025)]).refused(2, &["1 to 1024"]);
    assert_eq!(cluster.digest(), nothing);

    // An unknown id is reported, the rest applied; duplicates are applied in order.
    cluster.engram(&["insert", "a", "b"]).ended(0);
    let ran = cluster.engram(&["reinforce", "a", "nobody", "b", "--delta=0.25", "-o", "json"]);
    let ran = ran.refused(3, &["nobody: no such memory"]);
    assert_eq!((&ran.json()["applied"], &ran.json()["rejected"]), (&2.into(), &1.into()));
    let rows = "{\"key\":\"a\",\"delta\":0.5}\n{\"key\":\"a\",\"delta\":-0.5}\n{\"key\":\"b\",\"delta\":-0.5}\n{\"key\":\"b\",\"delta\":0.5}\n";
    cluster.engram_with(&["reinforce", "--file", "-"], rows).ended(0);
    let weight = |key: &str| {
        let found = cluster.engram(&["get", key, "-o", "json"]).ended(0).json();
        found["items"][0]["weight"].as_f64().expect("a weight")
    };
    // 0.75 + 0.5 stops at 1, then -0.5; 0.75 - 0.5, then + 0.5: the order shows.
    assert_eq!((weight("a"), weight("b")), (0.5, 0.75));

    // A key whose id is another memory's is a collision; a wrong row of a file is named, and nothing of the file applied.
    cluster.engram(&["insert", "--id", "14598278634844962250"]).ended(0);
    let before = cluster.digest();
    let file = cluster.file("rows.csv", "key,weight\nc,0.5\nd,2\n");
    cluster.engram(&["insert", "--file", &file]).refused(2, &["ENG-0507", "rows.csv, line 3", "weight is 2"]);
    let file = cluster.file("rows.jsonl", "{\"key\":\"c\"}\n{\"key\":\"d\",\"wieght\":1}\n");
    cluster.engram(&["insert", "--file", &file]).refused(2, &["line 2", "wieght"]);
    assert_eq!(cluster.digest(), before);
    cluster.engram(&["get", "a", "zz"]).refused(3, &["zz: no such memory", "ENG-0508"]);
    cluster.engram(&["describe", "run", "nobody"]).refused(3, &["ENG-0307", "nobody"]);
    cluster.stop();
}

#[test]
fn a_full_cluster_refuses_new_memories_and_keeps_the_old() {
    let spec = "  partitions: 1\n  capacity: { memories: 100, policy: Refuse }\n";
    let cluster = Cluster::up(&cluster_manifest("full", 1, spec));
    // The limit of a partition is 5 % above its share.
    let rows = |ids: std::ops::Range<u32>| ids.map(|id| format!("{{\"id\":{id}}}\n")).collect::<String>();
    cluster.engram_with(&["insert", "--file", "-"], &rows(0..105)).ended(0);
    let before = cluster.digest();
    assert_eq!(before.1, 105);
    cluster.engram(&["insert", "--id", "105"]).refused(1, &["ENG-0504"]);
    cluster.engram(&["insert", "--id", "7", "--weight", "0.5"]).ended(0);
    assert_eq!(cluster.digest(), before, "an old memory is not a new one");
    cluster.stop();
}

#[test]
fn a_corrupt_event_file_fails_at_its_line_and_keeps_the_epochs_before() {
    let cluster = Cluster::up(&cluster_manifest("events", 2, "  partitions: 4\n  learning: { initialWeight: 0.0 }\n"));
    let file = cluster.file("events.csv", "word,day\nred,0\ngreen,0\nred,1\nblue,never\n");
    let run = ["import", "events", &file, "--key", "word", "--epoch", "day", "--name", "broken"];
    cluster.engram(&run).refused(1, &["ENG-0304", "line 5", "never"]);
    assert_eq!(cluster.digest().1, 2, "the first epoch was applied, nothing of the broken one");
    let runs = cluster.engram(&["list", "runs", "-o", "json"]).ended(0).json();
    assert_eq!((&runs["items"][0]["phase"], &runs["items"][0]["code"]), (&"Failed".into(), &"ENG-0304".into()));
    // What is wrong with the whole file is found before the run takes its name.
    let run = ["import", "events", &file, "--key", "wrod", "--epoch", "day", "--name", "misspelt"];
    cluster.engram(&run).refused(2, &["ENG-0303", "wrod", "word, day"]);
    assert_eq!(cluster.engram(&["list", "runs", "-o", "name"]).ended(0).stdout, "broken\n");
    cluster.stop();
}
