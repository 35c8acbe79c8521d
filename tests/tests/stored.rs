//! Runs with a source in object storage: same result as with a local file, and errors by object name.

use engram_tests::{Cluster, ClusterBuilder, DEADLINE, Storage, cluster_manifest, run_manifest, wait_for};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::io::Write as _;

const SPEC: &str = "  partitions: 4\n  learning: { initialWeight: 0.0, decay: 0.01 }\n";

/// Returns 4,000 events over forty days.
fn events() -> String {
    let mut text = String::from("word,day\n");
    for day in 0..40_u32 {
        for number in 0..100_u32 {
            let word = number.wrapping_mul(2_654_435_761).wrapping_add(day.wrapping_mul(40_503)) >> 23;
            text.push_str(&format!("word-{word},{day}\n"));
        }
    }
    text
}

fn gzip(text: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(text.as_bytes()).expect("writing to memory cannot fail");
    gzip.finish().expect("writing to memory cannot fail")
}

fn run(name: &str, source: &str) -> String {
    let events = format!("    source: {{ events: {{ {source}, columns: {{ key: word, epoch: day }} }} }}\n");
    run_manifest(name, "kept", &events)
}

fn submit(cluster: &Cluster, name: &str, source: &str) -> engram_tests::CommandOutput {
    let file = cluster.file(&format!("{name}.yaml"), run(name, source));
    cluster.engram(&["run", &file, "-o", "json"])
}

fn status(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    let items = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned())??;
    items.into_iter().find(|run| run["name"] == name)
}

/// Returns the digest after a run with a local file.
fn digest_of_local_run(text: &str) -> (String, u64) {
    let cluster = Cluster::up(&cluster_manifest("kept", 2, SPEC));
    let path = cluster.file("events.csv", text);
    submit(&cluster, "local", &format!("path: {path}")).exits_with(0);
    let digest = cluster.digest();
    cluster.stop();
    digest
}

fn training(name: &str, steps: u64, location: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: kept }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 30, samples: 500, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 30 }}]\n      layers: [{{ dense: 8, activation: Relu }}, {{ dense: 1 }}]\n      loss: {{ kind: \
         Mse, target: score }}\n    optimizer: {{ rate: 0.01 }}\n    batch: 64\n    steps: {steps}\n    order: PartitionInvariant\n    \
         checkpoint: {{ every: 20, keep: 1{location} }}\n"
    )
}

/// A fresh cluster continues a training with the checkpoint that another cluster has copied to object storage.
fn continue_training(storage: &Storage, environment: &[(&str, &str)]) {
    let location = ", location: { url: \"s3://backups/models/{name}\" }";
    let train = |cluster: &Cluster, manifest: String| {
        cluster.engram(&["run", &cluster.file("training.yaml", manifest)]).exits_with(0);
    };
    let up = || ClusterBuilder::new(&cluster_manifest("kept", 2, SPEC)).with_environment(environment).start();
    let first = up();
    train(&first, training("model", 50, location));
    let credentials = storage.credentials(&first.folder().join("secret"), &storage.text("secretAccessKey"));
    let bucket = storage.bucket("s3://backups/models/model", &credentials);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to create a runtime");
    let (objects, folders) = runtime.block_on(bucket.list()).expect("failed to list");
    assert!(objects.iter().any(|object| object.name == "LATEST"), "{objects:?}");
    assert!(folders.len() == 1 && folders[0].starts_with("step-50-"), "older copies are removed: {folders:?}");

    first.stop();
    let second = up();
    train(&second, training("model", 70, location));
    train(&second, training("undisturbed", 70, ""));
    let digest = |name: &str| status(&second, name).expect("it ran")["outputs"]["digest"].clone();
    assert!(digest("model").is_string() && digest("model") == digest("undisturbed"), "{}", digest("model"));
    let logs = std::fs::read_dir(second.state_dir().join("logs")).expect("a folder").flatten();
    let has_restored =
        |path: &std::path::Path| std::fs::read_to_string(path).is_ok_and(|it| it.contains("restored a checkpoint"));
    assert!(logs.into_iter().any(|entry| has_restored(&entry.path())), "the second cluster started from step 0");
    let short = second.file("short.yaml", training("model", 60, location));
    second.engram(&["run", &short, "--rerun"]).fails_with(1, &["spec.replay.steps is 60", "step 70"]);
    let other = training("other", 70, location).replace("{name}", "model").replace("dense: 8", "dense: 9");
    second
        .engram(&["run", &second.file("other.yaml", other)])
        .fails_with(1, &["checkpoint is of another model: it has", "\"dense\":9"]);
    second.stop();
}

#[test]
fn runs_read_sources_from_object_storage() {
    let Some(storage) = Storage::start() else { return };
    let text = events();
    let expected = digest_of_local_run(&text);
    let environment = storage.environment();
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    continue_training(&storage, &environment);
    let cluster = ClusterBuilder::new(&cluster_manifest("kept", 2, SPEC)).with_environment(&environment).start();
    let folder = cluster.folder().to_owned();
    let credentials = storage.credentials(&folder.join("secret"), &storage.text("secretAccessKey"));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to create a runtime");
    let bucket = storage.bucket("s3://backups/events", &credentials);
    let put =
        |name: &str, bytes: Vec<u8>| runtime.block_on(bucket.put(name, bytes)).expect("failed to write an object");
    let compressed = gzip(&text);
    let cut = compressed[..compressed.len() / 2].to_vec();
    let mut flipped = compressed.clone();
    flipped[compressed.len() / 2] ^= 4;
    put("days.csv.gz", compressed);
    put("cut.csv.gz", cut);
    put("flipped.csv.gz", flipped);
    put("row.csv", b"word,day\nred,never\n".to_vec());
    put("days.parquet", text.into_bytes());
    put("empty.csv", Vec::new());

    // Missing or invalid objects fail the run with the name of the object.
    let nothing = cluster.digest();
    let of = |name: &str| format!("s3: {{ url: s3://backups/events/{name} }}");
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).fails_with(code, words);
    };
    fails("absent", &of("absent.csv"), 3, &["ENG-0302", "s3://backups/events/absent.csv", "not found"]);
    fails(
        "nowhere",
        "s3: { url: s3://nowhere/a.csv }",
        3,
        &["ENG-0302", "s3://nowhere/a.csv", "bucket nowhere not found"],
    );
    fails("no-parquet", &of("days.parquet"), 3, &["ENG-0302", "s3://backups/events/days.parquet"]);
    fails("empty", &of("empty.csv"), 2, &["ENG-0303", "s3://backups/events/empty.csv", "word"]);
    fails("row", &of("row.csv"), 1, &["ENG-0304", "s3://backups/events/row.csv, line 2, day"]);
    assert_eq!(cluster.digest(), nothing, "nothing was applied");
    let closed = "s3: { url: s3://backups/events/days.csv.gz, endpoint: \"http://127.0.0.1:1\" }";
    fails("closed", closed, 1, &["ENG-0510", "http://127.0.0.1:1", "spec.storageEndpoints"]);

    // The driver is killed while the storage does not respond: another one downloads again.
    storage.pause(true);
    let file = cluster.file("days.yaml", run("days", &of("days.csv.gz")));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let fetching = wait_for("the download to start", DEADLINE, || {
        status(&cluster, "days")
            .filter(|run| run["message"].as_str().is_some_and(|it| it.starts_with("fetching s3://")))
    });
    assert_eq!(fetching["phase"], "Running", "{fetching}");
    let mut cluster = cluster;
    cluster.kill_in_turn(0..2);
    storage.pause(false);
    let ended = wait_for("the run to finish", DEADLINE * 3, || {
        status(&cluster, "days").filter(|run| run["phase"] == "Succeeded" || run["phase"] == "Failed")
    });
    assert_eq!((&ended["phase"], cluster.digest()), (&"Succeeded".into(), expected), "{ended}");

    // A truncated file fails at its end.
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).fails_with(code, words);
    };
    fails("cut", &of("cut.csv.gz"), 3, &["s3://backups/events/cut.csv.gz"]);
    // A flipped bit fails at an invalid row or at the checksum.
    let flipped = submit(&cluster, "flipped", &of("flipped.csv.gz"));
    assert!(flipped.code != Some(0) && flipped.stderr.contains("s3://backups/events/flipped.csv.gz"), "{flipped:?}");
    assert_eq!(cluster.workers(), 2, "all workers are running");

    // A run that is cancelled during the download finishes at once, and the next run starts.
    storage.pause(true);
    let file = cluster.file("cancelled.yaml", run("cancelled", &of("days.csv.gz")));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    wait_for("the download to start", DEADLINE, || {
        status(&cluster, "cancelled").filter(|run| run["phase"] == "Running")
    });
    cluster.client(async |client| client.cancel_run("cancelled").await.expect("failed to cancel the run"));
    wait_for("the run to be cancelled", DEADLINE, || {
        status(&cluster, "cancelled").filter(|run| run["phase"] == "Cancelled")
    });
    storage.pause(false);
    submit(&cluster, "again", &of("days.csv.gz")).exits_with(0);
    let (up, _) = cluster.stop();

    // Invalid credentials are reported with the response of the storage.
    let cluster = up.with_environment(&[("AWS_SECRET_ACCESS_KEY", "another")]).start();
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).fails_with(code, words);
    };
    fails("refused", &of("days.csv.gz"), 1, &["ENG-0510", "s3://backups/events/days.csv.gz", "403"]);
    cluster.stop();
}
