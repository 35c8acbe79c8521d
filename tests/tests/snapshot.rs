//! Snapshots of local clusters: created while serving, restored exactly, rejected when invalid.

use engram_tests::{Cluster, ClusterBuilder, cluster_manifest, engram};
use std::fs;
use std::path::Path;

const SPEC: &str = "  partitions: 16\n  features: { dimension: 2, dtype: F32 }\n";

/// Rows with all fields.
fn rows(count: u32) -> String {
    let row = |id: u32| {
        format!(
            "{{\"key\":\"key {id}\",\"weight\":0.{id},\"group\":{},\"features\":[{id},0.5],\"payload\":\"p{id}\"}}\n",
            id % 3
        )
    };
    (0..count).map(row).collect()
}

fn restore(up: &ClusterBuilder, name: &str, more: &[&str]) -> engram_tests::CommandOutput {
    let state_dir = up.state_dir().display().to_string();
    let line = ["snapshot", "restore", name, "--yes", "--state-dir", &state_dir];
    engram(line.into_iter().chain(more.iter().copied()), "")
}

#[test]
fn snapshots_restore_exactly_to_any_number_of_workers() {
    let cluster = Cluster::up(&cluster_manifest("kept", 3, &format!("{SPEC}  capacity: {{ memories: 1500 }}\n")));
    cluster.engram_with(&["insert", "--file", "-"], &rows(500)).exits_with(0);
    cluster.engram(&["decay", "0.125"]).exits_with(0);
    let before = cluster.digest();
    let made = cluster.engram(&["snapshot", "create", "good", "-o", "json"]).exits_with(0).json();
    assert_eq!((&made["items"][0]["digest"], &made["items"][0]["memories"]), (&before.0.clone().into(), &500.into()));
    cluster.engram(&["snapshot", "create", "good"]).fails_with(2, &["good", "already"]);
    cluster.engram(&["reinforce", "--group", "1", "--quality", "0.9"]).exits_with(0);
    cluster.engram(&["remove", "key 1", "key 2"]).exits_with(0);
    let later = cluster.digest();
    assert_ne!(later, before);
    let state_dir = cluster.state_dir().display().to_string();
    // A running cluster is not replaced.
    cluster.engram(&["snapshot", "restore", "good", "--yes"]).fails_with(5, &["ENG-0401", &state_dir]);

    let (up, _) = cluster.stop();
    let unconfirmed = engram(["snapshot", "restore", "good", "--state-dir", &state_dir], "");
    unconfirmed.fails_with(2, &["kept", "--yes"]);
    // Some of 1024 partitions would exceed their capacity.
    restore(&up, "good", &["--partitions", "1024"]).fails_with(1, &["ENG-0504", "1024", "fewer partitions"]);
    restore(&up, "good", &["-o", "json"]).exits_with(0);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "on the same number of workers");
    let found = cluster.engram(&["get", "key 7", "-o", "json"]).exits_with(0).json();
    assert_eq!(found["items"][0]["payload"], "p7");
    // The restored cluster accepts writes.
    cluster.engram(&["reinforce", "key 7", "--quality", "0.9"]).exits_with(0);

    let (up, _) = cluster.stop();
    restore(&up, "good", &["--workers", "2"]).exits_with(0);
    up.change(&cluster_manifest("kept", 2, SPEC));
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "on fewer workers");
    assert_eq!(cluster.workers(), 2);

    // A copy of the folder restores to a new state directory.
    let copy = cluster.folder().join("copy");
    copy_folder(&cluster.state_dir().join("snapshots/good"), &copy);
    let (old, _) = cluster.stop();
    let new = ClusterBuilder::new(&cluster_manifest("kept", 5, SPEC));
    restore(&new, &copy.display().to_string(), &["--workers", "5"]).exits_with(0);
    let cluster = new.start();
    assert_eq!(cluster.digest(), before, "in another state directory, on more workers");
    cluster.stop();
    drop(old);
}

#[test]
fn invalid_snapshots_are_rejected_without_changes() {
    let cluster = Cluster::up(&cluster_manifest("wary", 2, SPEC));
    cluster.engram_with(&["insert", "--file", "-"], &rows(200)).exits_with(0);
    cluster.engram(&["snapshot", "create", "good"]).exits_with(0);
    let snapshots = cluster.state_dir().join("snapshots");
    let digest = cluster.digest();
    let (up, _) = cluster.stop();
    let copy = |name: &str| {
        let folder = snapshots.join(name);
        copy_folder(&snapshots.join("good"), &folder);
        folder
    };
    let file = fs::read_dir(snapshots.join("good")).unwrap().find_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.ends_with(".snap").then_some(name)
    });
    let file = file.expect("no snapshot file");

    fs::remove_file(copy("unfinished").join("manifest.json")).unwrap();
    restore(&up, "unfinished", &[]).fails_with(1, &["ENG-0509", "is incomplete"]);

    let damaged = copy("damaged").join(&file);
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    restore(&up, "damaged", &[]).fails_with(1, &["ENG-0509", &file, "damaged"]);

    let short = copy("short").join(&file);
    let bytes = fs::read(&short).unwrap();
    fs::write(&short, &bytes[..bytes.len() - 1]).unwrap();
    restore(&up, "short", &[]).fails_with(1, &["ENG-0509", &file]);

    fs::remove_file(copy("missing").join(&file)).unwrap();
    restore(&up, "missing", &[]).fails_with(1, &["ENG-0509", &file]);

    let edited = copy("edited").join("manifest.json");
    let text = fs::read_to_string(&edited).unwrap();
    fs::write(&edited, text.replace("\"memories\": 200", "\"memories\": 201")).unwrap();
    restore(&up, "edited", &[]).fails_with(1, &["ENG-0509", "checksum"]);

    restore(&up, "nothing", &[]).fails_with(1, &["ENG-0509", "nothing"]);
    let listed = engram(["snapshot", "list", "-o", "name", "--state-dir", &up.state_dir().display().to_string()], "");
    let listed = listed.exits_with(0);
    for name in ["good", "damaged", "short", "missing"] {
        assert!(listed.stdout.lines().any(|line| line == "good"), "{name}: {}", listed.stdout);
    }
    assert!(listed.stderr.contains("unfinished"), "{}", listed.stderr);

    // Another cluster's snapshot, intact.
    let other = Cluster::up(&cluster_manifest("other", 1, SPEC));
    other.engram(&["insert", "a"]).exits_with(0);
    other.engram(&["snapshot", "create", "foreign"]).exits_with(0);
    copy_folder(&other.state_dir().join("snapshots/foreign"), &snapshots.join("foreign"));
    other.stop();
    restore(&up, "foreign", &[]).fails_with(1, &["ENG-0509", "other"]);

    let cluster = up.start();
    assert_eq!(cluster.digest(), digest);
    cluster.stop();
}

fn copy_folder(from: &Path, to: &Path) {
    let copied = || -> std::io::Result<()> {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        Ok(())
    };
    copied().expect("failed to copy the snapshot");
}
