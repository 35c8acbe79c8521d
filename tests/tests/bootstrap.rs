//! Snapshot runs, and clusters that bootstrap from a snapshot in object storage.

use engram_tests::{Cluster, ClusterBuilder, DEADLINE, Storage, cluster_manifest, wait_for};
use serde_json::Value;

const PARTITIONS: u32 = 16;

fn spec(partitions: u32, more: &str) -> String {
    format!("  partitions: {partitions}\n  features: {{ dimension: 2, dtype: F16 }}\n{more}")
}

fn bootstrap(url: &str) -> String {
    format!("  bootstrap: {{ snapshot: {{ url: \"{url}\" }} }}\n")
}

fn snapshot_run(name: &str, url: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: kept }}\n  \
         kind: Snapshot\n  snapshot: {{ url: \"{url}\" }}\n"
    )
}

fn rows(count: u32) -> String {
    let row = |id: u32| format!("{{\"id\":{id},\"weight\":0.{id},\"features\":[{id},0.5],\"payload\":\"p{id}\"}}\n");
    (1..=count).map(row).collect()
}

/// Returns the status of a run.
fn run_of(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    let items = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned())??;
    items.into_iter().find(|run| run["name"] == name)
}

fn as_str_pairs<'a>(environment: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    environment.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

#[test]
fn clusters_bootstrap_from_snapshots_of_runs() {
    let Some(storage) = Storage::start() else { return };
    let environment = storage.environment();
    let environment = as_str_pairs(&environment);
    let cluster =
        ClusterBuilder::new(&cluster_manifest("kept", 2, &spec(PARTITIONS, ""))).with_environment(&environment).start();
    cluster.engram_with(&["insert", "--file", "-"], &rows(300)).exits_with(0);
    cluster.engram(&["decay", "0.125"]).exits_with(0);
    let (digest, _) = cluster.digest();
    let run = |name: &str, url: &str| {
        let file = cluster.file(&format!("{name}.yaml"), snapshot_run(name, url));
        cluster.engram(&["run", &file, "-o", "json"])
    };
    let url = "s3://backups/begin/nightly-1";
    let result = run("nightly-1", "s3://backups/begin/{name}").exits_with(0).json();
    assert_eq!((&result["digest"], &result["memories"]), (&digest.clone().into(), &300.into()), "{result}");
    assert_eq!((&result["snapshot"], &result["partitions"]), (&url.into(), &PARTITIONS.into()));
    run("again", url).fails_with(2, &["ENG-0106", url, "a location of its own"]);
    run("nowhere", "s3://nowhere/words").fails_with(1, &["ENG-0510", "NoSuchBucket"]);
    cluster.engram(&["describe", "run", "nightly-1"]).fails_with(2, &["is a snapshot, which has no report"]);

    // Drivers are killed one after another while the storage does not respond: another one takes over.
    storage.pause(true);
    let file = cluster.file("late.yaml", snapshot_run("late", "s3://backups/begin/{name}"));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let mut cluster = cluster;
    cluster.kill_in_turn(0..2);
    storage.pause(false);
    let ended = wait_for("the run to finish", DEADLINE * 3, || {
        run_of(&cluster, "late").filter(|run| run["phase"] == "Succeeded" || run["phase"] == "Failed")
    });
    assert_eq!(ended["phase"], "Succeeded", "{ended}");
    // No incomplete snapshots and no unreferenced files are left.
    let listed = cluster.engram(&[
        "snapshot",
        "list",
        "--from",
        "s3://backups/begin",
        "--s3-endpoint",
        &storage.text("endpoint"),
        "--s3-credentials",
        &storage.credentials(&cluster.folder().join("secret"), &storage.text("secretAccessKey")),
        "-o",
        "json",
    ]);
    let listed = listed.exits_with(0).json();
    let items: Vec<(&str, &str)> = listed["items"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| (it["name"].as_str().unwrap_or_default(), it["digest"].as_str().unwrap_or_default()))
        .collect();
    assert_eq!(items, [("nightly-1", &*digest), ("late", &*digest)]);
    let (old, _) = cluster.stop();
    drop(old);

    for (workers, partitions) in [(3, 7), (1, PARTITIONS)] {
        let manifest = cluster_manifest("fresh", workers, &spec(partitions, &bootstrap(url)));
        let cluster = ClusterBuilder::new(&manifest).with_environment(&environment).start();
        assert_eq!(cluster.digest(), (digest.clone(), 300), "{workers} workers, {partitions} partitions");
        assert_eq!(
            cluster.engram(&["list", "runs", "-o", "json"]).exits_with(0).json()["items"],
            Value::Array(Vec::new())
        );
        // A restart keeps later changes and does not load the snapshot again.
        cluster.engram(&["decay", "0.01"]).exits_with(0);
        let (later, _) = cluster.digest();
        assert_ne!(later, digest);
        let cluster = cluster.stop().0.start();
        assert_eq!(cluster.digest(), (later, 300));
        cluster.stop();
    }
}

#[test]
fn invalid_bootstrap_snapshots_are_rejected_by_name() {
    let Some(storage) = Storage::start() else { return };
    let environment = storage.environment();
    let environment = as_str_pairs(&environment);
    let cluster =
        ClusterBuilder::new(&cluster_manifest("kept", 1, &spec(3, ""))).with_environment(&environment).start();
    cluster.engram_with(&["insert", "--file", "-"], &rows(90)).exits_with(0);
    let file = cluster.file("run.yaml", snapshot_run("good", "s3://backups/bad/good"));
    cluster.engram(&["run", &file]).exits_with(0);
    let credentials = storage.credentials(&cluster.folder().join("secret"), &storage.text("secretAccessKey"));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to create a runtime");
    let damaged = runtime.block_on(async {
        let good = storage.bucket("s3://backups/bad/good", &credentials);
        let (manifest, folders) = good.list().await.expect("failed to list objects");
        assert_eq!((manifest.len(), folders.len()), (1, 1), "expected a manifest and one folder");
        let files = good.join(&folders[0]).list().await.expect("failed to list objects").0;
        assert_eq!(files.len(), 3);
        for what in ["flipped", "cut", "long", "missing", "unfinished"] {
            let copy = storage.bucket(&format!("s3://backups/bad/{what}"), &credentials);
            let names = files.iter().map(|file| format!("{}/{}", folders[0], file.name));
            for (number, name) in names.chain(["manifest.json".to_owned()]).enumerate() {
                let mut bytes =
                    good.get(&name, 1 << 20).await.expect("failed to read an object").expect("the object exists");
                let middle = bytes.len() / 2;
                match (what, number) {
                    ("flipped", 0) => bytes[middle] ^= 4,
                    ("cut", 0) => bytes.truncate(middle),
                    ("long", 0) => bytes.push(0),
                    ("missing", 0) | ("unfinished", 3) => continue,
                    _ => {}
                }
                copy.put(&name, bytes).await.expect("failed to write an object");
            }
        }
        format!("{}/{}", folders[0], files[0].name)
    });
    cluster.stop();
    let begin = |spec: &str| {
        let up = ClusterBuilder::new(&cluster_manifest("fresh", 2, spec)).with_environment(&environment);
        let ran = up.run();
        assert!(!up.state_dir().join("map.json").exists(), "no map is created");
        ran
    };
    for what in ["flipped", "cut", "long", "missing"] {
        let url = format!("s3://backups/bad/{what}");
        begin(&spec(5, &bootstrap(&url))).fails_with(1, &["ENG-0509", &format!("{url}/{damaged}")]);
    }
    begin(&spec(5, &bootstrap("s3://backups/bad/unfinished"))).fails_with(1, &["ENG-0509", "no manifest.json"]);
    begin(&spec(5, &bootstrap("s3://nowhere/words"))).fails_with(1, &["ENG-0509", "there is no snapshot"]);
    let good = bootstrap("s3://backups/bad/good");
    let unauthorized =
        ClusterBuilder::new(&cluster_manifest("fresh", 1, &spec(5, &good))).with_environment(&environment);
    unauthorized
        .with_environment(&[("AWS_SECRET_ACCESS_KEY", "another")])
        .run()
        .fails_with(1, &["ENG-0510", "SignatureDoesNotMatch"]);
    begin(&format!("  partitions: 5\n{good}")).fails_with(1, &["ENG-0509", "feature dimension 2, the cluster has 0"]);
    begin(&spec(5, &format!("  capacity: {{ memories: 89 }}\n{good}"))).fails_with(1, &["ENG-0504", "90 memories"]);
}
