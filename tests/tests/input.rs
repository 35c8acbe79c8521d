//! Invalid input through the command line: reported with its error code, without partial changes.

use engram_memory::{Ordinal, key_id};
use engram_tests::{Cluster, ClusterBuilder, binary, cluster_manifest, engram, run_manifest};
use engram_worker::{Authorizer, HeaderMap, Principal, Worker};
use serde_json::json;

#[test]
fn invalid_manifests_are_rejected_before_anything_starts() {
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
        let up = ClusterBuilder::new(&manifest);
        up.run().fails_with(code, words);
        assert!(!up.state_dir().exists(), "a rejected start leaves no files:\n{manifest}");
    }
}

#[test]
fn commands_without_a_cluster_report_it() {
    engram(["get", "a", "--state-dir", "/nonexistent"], "").fails_with(3, &["ENG-0408", "/nonexistent"]);
    engram(["get", "a", "--address", "127.0.0.1:1"], "").fails_with(6, &["ENG-0601", "127.0.0.1:1"]);
    engram(["get"], "").fails_with(2, &[]);
    engram(["qualty"], "").fails_with(2, &["'quality'"]);
    engram(["reinforce", "a", "--quality", "0.5", "--delta", "0.5"], "").fails_with(2, &["--delta"]);
    engram(["explain", "ENG-9999"], "").exits_with(3);
}

#[test]
fn a_low_limit_of_open_files_is_reported_as_such() {
    let up = ClusterBuilder::new(&cluster_manifest("c", 4, ""));
    let line = r#"ulimit -n 16; exec "$0" up "$1" --state-dir "$2" --port-base 0"#;
    let manifest = up.state_dir().with_file_name("cluster.yaml");
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", line]).arg(binary()).args([manifest, up.state_dir()]).output().expect("sh runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("16 files") && text.contains("ulimit -n") && !text.contains("no free port"), "{text}");
}

#[test]
fn unresponsive_workers_time_out_without_delaying_others() {
    let cluster = Cluster::up(&cluster_manifest("slow", 2, "  replicationFactor: 1\n  partitions: 2\n"));
    let map = cluster.client(async |client| client.map().expect("the client has a map"));
    let key_of = |ordinal| {
        let owner = |key: &String| map.owner(map.partition_of(key_id(key.as_bytes())));
        let found = (0..).map(|number| format!("key-{number}")).find(|key| owner(key) == Some(Ordinal(ordinal)));
        found.expect("each worker has a partition")
    };
    let (paused, other) = (key_of(1), key_of(0));
    cluster.engram(&["insert", &paused, &other]).exits_with(0);
    let worker = cluster.worker(1).expect("the process is running");
    cluster.pause(worker);
    cluster.engram(&["get", &paused]).fails_with(4, &["ENG-0602", "30.0 s"]);
    cluster.engram(&["get", &other]).exits_with(0);
    cluster.resume(worker);
    cluster.engram(&["get", &paused]).exits_with(0);
    cluster.stop();
}

/// Denies every request.
struct DenyAll;

impl Authorizer for DenyAll {
    fn identify(&self, _headers: &HeaderMap) -> Principal {
        Principal { name: "guest".into() }
    }

    fn allows(&self, _principal: &Principal, _method: &str) -> bool {
        false
    }
}

#[test]
fn denied_requests_are_reported() {
    let home = tempfile::tempdir().expect("failed to create a temporary folder");
    let runtime = tokio::runtime::Runtime::new().expect("failed to create a runtime");
    let options = json!({
        "cluster": "0".repeat(31) + "1", "clusterName": "guarded", "ordinal": 0, "stateDir": home.path(), "coordinators": [],
        "listen": {"client": "127.0.0.1:0", "peer": "127.0.0.1:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0"},
        "spec": {"workers": 1},
    });
    let options = serde_json::from_value(options).expect("the options are valid");
    let worker = runtime.block_on(Worker::build(options)).expect("failed to start the worker").authorized_by(DenyAll);
    let address = worker.addresses().client.to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = runtime.spawn(worker.run(async { drop(stopped.await) }));
    for command in [&["get", "a"][..], &["insert", "a"], &["quality"]] {
        let command = command.iter().copied().chain(["--address", address.as_str()]);
        engram(command, "").fails_with(7, &["ENG-0607", "guest may not call"]);
    }
    stop.send(()).expect("the process is running");
    runtime.block_on(running).expect("the worker panicked").expect("the worker failed to stop");
}

#[test]
fn requests_are_rejected_completely_or_reported_by_row() {
    let spec = "  partitions: 4\n  features: { dimension: 2 }\n  learning: { initialWeight: 0.5, rate: 0.05 }\n";
    let cluster = Cluster::up(&cluster_manifest("strict", 2, spec));
    let nothing = cluster.digest();

    // Invalid values are rejected, never clamped, and nothing of the request is applied.
    for value in ["NaN", "inf", "1.5", "-0.1"] {
        let quality = format!("--quality={value}");
        cluster.engram(&["reinforce", "a", "--create", &quality]).fails_with(2, &["ENG-0507", "quality"]);
        let weight = format!("--weight={value}");
        cluster.engram(&["insert", "a", &weight]).fails_with(2, &["ENG-0507", "weight"]);
        cluster.engram(&["decay", value]).fails_with(2, &["ENG-0507", "amount"]);
    }
    cluster.engram(&["insert", "a", "--features", "1,2,3"]).fails_with(2, &["dimension"]);
    cluster.engram(&["insert", "a", "--payload", &"x".repeat(70_000)]).fails_with(2, &["payload"]);
    cluster.engram(&["insert", &"k".repeat(1_025)]).fails_with(2, &["1 to 1024"]);
    assert_eq!(cluster.digest(), nothing);

    // An unknown id is reported, the rest applied; duplicates are applied in order.
    cluster.engram(&["insert", "a", "b"]).exits_with(0);
    let ran = cluster.engram(&["reinforce", "a", "missing", "b", "--delta=0.25", "-o", "json"]);
    let ran = ran.fails_with(3, &["missing: memory not found"]);
    assert_eq!((&ran.json()["applied"], &ran.json()["rejected"]), (&2.into(), &1.into()));
    let rows = "{\"key\":\"a\",\"delta\":0.5}\n{\"key\":\"a\",\"delta\":-0.5}\n{\"key\":\"b\",\"delta\":-0.5}\n{\"key\":\"b\",\"delta\":0.5}\n";
    cluster.engram_with(&["reinforce", "--file", "-"], rows).exits_with(0);
    let weight = |key: &str| {
        let found = cluster.engram(&["get", key, "-o", "json"]).exits_with(0).json();
        found["items"][0]["weight"].as_f64().expect("a weight")
    };
    // 0.75 + 0.5 is clamped to 1, then -0.5; 0.75 - 0.5, then + 0.5: the order matters.
    assert_eq!((weight("a"), weight("b")), (0.5, 0.75));

    // Invalid rows of a file are reported, and nothing of the file is applied.
    cluster.engram(&["insert", "--id", "14598278634844962250"]).exits_with(0);
    let before = cluster.digest();
    let file = cluster.file("rows.csv", "key,weight\nc,0.5\nd,2\n");
    cluster.engram(&["insert", "--file", &file]).fails_with(2, &["ENG-0507", "rows.csv, line 3", "weight is 2"]);
    let file = cluster.file("rows.jsonl", "{\"key\":\"c\"}\n{\"key\":\"d\",\"wieght\":1}\n");
    cluster.engram(&["insert", "--file", &file]).fails_with(2, &["line 2", "wieght"]);
    assert_eq!(cluster.digest(), before);
    cluster.engram(&["get", "a", "zz"]).fails_with(3, &["zz: memory not found", "ENG-0508"]);
    cluster.engram(&["describe", "run", "missing"]).fails_with(3, &["ENG-0307", "missing"]);
    cluster.stop();
}

#[test]
fn full_partitions_reject_new_memories() {
    let spec = "  partitions: 1\n  capacity: { memories: 100, policy: Refuse }\n";
    let cluster = Cluster::up(&cluster_manifest("full", 1, spec));
    // The limit of a partition is 5 % above its share.
    let rows = |ids: std::ops::Range<u32>| ids.map(|id| format!("{{\"id\":{id}}}\n")).collect::<String>();
    cluster.engram_with(&["insert", "--file", "-"], &rows(0..105)).exits_with(0);
    let before = cluster.digest();
    assert_eq!(before.1, 105);
    cluster.engram(&["insert", "--id", "105"]).fails_with(1, &["ENG-0504"]);
    cluster.engram(&["insert", "--id", "7", "--weight", "0.5"]).exits_with(0);
    assert_eq!(cluster.digest(), before, "existing memories can be updated");
    cluster.stop();
}

#[test]
fn invalid_events_fail_the_run_and_keep_earlier_epochs() {
    let cluster = Cluster::up(&cluster_manifest("events", 2, "  partitions: 4\n  learning: { initialWeight: 0.0 }\n"));
    let file = cluster.file("events.csv", "word,day\nred,0\ngreen,0\nred,1\nblue,never\n");
    let run = ["import", "events", &file, "--key", "word", "--epoch", "day", "--name", "broken"];
    cluster.engram(&run).fails_with(1, &["ENG-0304", "line 5"]);
    assert_eq!(cluster.digest().1, 2, "only the first epoch is applied");
    let runs = cluster.engram(&["list", "runs", "-o", "json"]).exits_with(0).json();
    assert_eq!((&runs["items"][0]["phase"], &runs["items"][0]["code"]), (&"Failed".into(), &"ENG-0304".into()));
    // Errors of the whole file are found before the run is created.
    let run = ["import", "events", &file, "--key", "wrod", "--epoch", "day", "--name", "misspelt"];
    cluster.engram(&run).fails_with(2, &["ENG-0303", "wrod", "word, day"]);
    assert_eq!(cluster.engram(&["list", "runs", "-o", "name"]).exits_with(0).stdout, "broken\n");
    cluster.stop();
}
