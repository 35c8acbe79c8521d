//! Runs that learn from a file in a storage for objects: as from the same file of a disk, or told why not.

use engram_tests::{Cluster, DEADLINE, Storage, Up, cluster_manifest, run_manifest, wait_for};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::io::Write as _;

const SPEC: &str = "  partitions: 4\n  learning: { initialWeight: 0.0, decay: 0.01 }\n";

/// Events of forty days, some thousands in all.
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
    gzip.write_all(text.as_bytes()).expect("there is memory");
    gzip.finish().expect("there is memory")
}

fn run(name: &str, source: &str) -> String {
    let events = format!("    source: {{ events: {{ {source}, columns: {{ key: word, epoch: day }} }} }}\n");
    run_manifest(name, "kept", &events)
}

fn submit(cluster: &Cluster, name: &str, source: &str) -> engram_tests::Ran {
    let file = cluster.file(&format!("{name}.yaml"), run(name, source));
    cluster.engram(&["run", &file, "-o", "json"])
}

fn status(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    let items = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned())??;
    items.into_iter().find(|run| run["name"] == name)
}

/// The digest after a run that learns from a file of the disk, by a cluster that does nothing else.
fn undisturbed(text: &str) -> (String, u64) {
    let cluster = Cluster::up(&cluster_manifest("kept", 2, SPEC));
    let path = cluster.file("events.csv", text);
    submit(&cluster, "local", &format!("path: {path}")).ended(0);
    let found = cluster.digest();
    cluster.stop();
    found
}

#[test]
fn a_run_learns_from_a_storage_what_it_learns_from_a_disk_and_fails_alone_where_it_cannot() {
    let Some(storage) = Storage::start() else { return };
    let text = events();
    let expected = undisturbed(&text);
    let environment = storage.environment();
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let cluster = Up::of(&cluster_manifest("kept", 2, SPEC)).within(&environment).start();
    let folder = cluster.folder().to_owned();
    let credentials = storage.credentials(&folder.join("secret"), &storage.text("secretAccessKey"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let bucket = storage.bucket("s3://backups/events", &credentials);
    let put = |name: &str, bytes: Vec<u8>| runtime.block_on(bucket.put(name, bytes)).expect("it is put");
    let packed = gzip(&text);
    let cut = packed[..packed.len() / 2].to_vec();
    let mut flipped = packed.clone();
    flipped[packed.len() / 2] ^= 4;
    put("days.csv.gz", packed);
    put("cut.csv.gz", cut);
    put("flipped.csv.gz", flipped);
    put("row.csv", b"word,day\nred,never\n".to_vec());
    put("days.parquet", text.into_bytes());
    put("empty.csv", Vec::new());

    // What is not there, or is not what it should be: the run fails by the name of the object, and nothing else does.
    let nothing = cluster.digest();
    let of = |name: &str| format!("s3: {{ url: s3://backups/events/{name} }}");
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).refused(code, words);
    };
    fails("absent", &of("absent.csv"), 3, &["ENG-0302", "s3://backups/events/absent.csv", "it is not there"]);
    fails(
        "nowhere",
        "s3: { url: s3://nowhere/a.csv }",
        3,
        &["ENG-0302", "s3://nowhere/a.csv", "bucket nowhere is not there"],
    );
    fails("no-parquet", &of("days.parquet"), 3, &["ENG-0302", "s3://backups/events/days.parquet"]);
    fails("empty", &of("empty.csv"), 2, &["ENG-0303", "s3://backups/events/empty.csv", "word"]);
    fails("row", &of("row.csv"), 1, &["ENG-0304", "s3://backups/events/row.csv, line 2, day", "never"]);
    assert_eq!(cluster.digest(), nothing, "nothing was learned");
    let closed = "s3: { url: s3://backups/events/days.csv.gz, endpoint: \"http://127.0.0.1:1\" }";
    fails("closed", closed, 1, &["ENG-0510", "s3://backups/events/days.csv.gz"]);

    // The same by the same events, by a driver that is killed while the storage is silent: another one fetches anew.
    storage.pause(true);
    let file = cluster.file("days.yaml", run("days", &of("days.csv.gz")));
    cluster.engram(&["run", &file, "--no-wait"]).ended(0);
    let fetching = wait_for("the run to be fetched", DEADLINE, || {
        status(&cluster, "days").filter(|run| run["message"].as_str().is_some_and(|it| it.starts_with("fetches s3://")))
    });
    assert_eq!(fetching["phase"], "Running", "{fetching}");
    let mut cluster = cluster;
    cluster.kill_in_turn(0..2);
    storage.pause(false);
    let ended = wait_for("the run to end", DEADLINE * 3, || {
        status(&cluster, "days").filter(|run| run["phase"] == "Succeeded" || run["phase"] == "Failed")
    });
    assert_eq!((&ended["phase"], cluster.digest()), (&"Succeeded".into(), expected), "{ended}");

    // What shows at its end has been learned from up to there, as from a file of the disk.
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).refused(code, words);
    };
    fails("cut", &of("cut.csv.gz"), 3, &["s3://backups/events/cut.csv.gz"]);
    // Rows that a flipped bit makes wrong, or the checksum at the end: what shows first.
    let flipped = submit(&cluster, "flipped", &of("flipped.csv.gz"));
    assert!(flipped.code != Some(0) && flipped.stderr.contains("s3://backups/events/flipped.csv.gz"), "{flipped:?}");
    assert_eq!(cluster.workers(), 2, "all of them live");

    // One that is called off while it is fetched ends at once, and gives its turn to the next.
    storage.pause(true);
    let file = cluster.file("called-off.yaml", run("called-off", &of("days.csv.gz")));
    cluster.engram(&["run", &file, "--no-wait"]).ended(0);
    wait_for("the run to be fetched", DEADLINE, || {
        status(&cluster, "called-off").filter(|run| run["phase"] == "Running")
    });
    cluster.client(async |client| client.cancel_run("called-off").await.expect("it is told"));
    wait_for("the run to be called off", DEADLINE, || {
        status(&cluster, "called-off").filter(|run| run["phase"] == "Cancelled")
    });
    storage.pause(false);
    submit(&cluster, "again", &of("days.csv.gz")).ended(0);
    let (up, _) = cluster.stop();

    // Who asks is refused by the storage, in its words.
    let cluster = up.within(&[("AWS_SECRET_ACCESS_KEY", "another")]).start();
    let fails = |name: &str, source: &str, code: i32, words: &[&str]| {
        submit(&cluster, name, source).refused(code, words);
    };
    fails("refused", &of("days.csv.gz"), 1, &["ENG-0510", "s3://backups/events/days.csv.gz", "403"]);
    cluster.stop();
}
