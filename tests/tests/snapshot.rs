//! Snapshots of a whole cluster: made while it serves, restored to the bit, refused by name when they cannot be trusted.

use engram_tests::{Cluster, Up, cluster_manifest, engram};
use std::fs;
use std::path::Path;

const SPEC: &str = "  partitions: 16\n  features: { dimension: 2, dtype: F32 }\n";

/// Memories with everything that a memory may have.
fn rows(count: u32) -> String {
    let row = |id: u32| {
        format!(
            "{{\"key\":\"key {id}\",\"weight\":0.{id},\"group\":{},\"features\":[{id},0.5],\"payload\":\"p{id}\"}}\n",
            id % 3
        )
    };
    (0..count).map(row).collect()
}

fn restore(up: &Up, name: &str, more: &[&str]) -> engram_tests::Ran {
    let state_dir = up.state_dir().display().to_string();
    let line = ["snapshot", "restore", name, "--yes", "--state-dir", &state_dir];
    engram(line.into_iter().chain(more.iter().copied()), "")
}

#[test]
fn a_snapshot_brings_back_what_was_there_on_any_number_of_workers() {
    let cluster = Cluster::up(&cluster_manifest("kept", 3, &format!("{SPEC}  capacity: {{ memories: 1500 }}\n")));
    cluster.engram_with(&["insert", "--file", "-"], &rows(500)).ended(0);
    cluster.engram(&["decay", "0.125"]).ended(0);
    let before = cluster.digest();
    let made = cluster.engram(&["snapshot", "create", "good", "-o", "json"]).ended(0).json();
    assert_eq!((&made["items"][0]["digest"], &made["items"][0]["memories"]), (&before.0.clone().into(), &500.into()));
    cluster.engram(&["snapshot", "create", "good"]).refused(2, &["good", "already"]);
    cluster.engram(&["reinforce", "--group", "1", "--quality", "0.9"]).ended(0);
    cluster.engram(&["remove", "key 1", "key 2"]).ended(0);
    let later = cluster.digest();
    assert_ne!(later, before);
    let state_dir = cluster.state_dir().display().to_string();
    // A cluster that runs is not pulled out from under anybody.
    cluster.engram(&["snapshot", "restore", "good", "--yes"]).refused(5, &["ENG-0401", &state_dir]);

    let (up, _) = cluster.stop();
    let unasked = engram(["snapshot", "restore", "good", "--state-dir", &state_dir], "");
    unasked.refused(2, &["kept", "--yes"]);
    // Some of so many partitions would be over their share of the capacity, and evict.
    restore(&up, "good", &["--partitions", "1024"]).refused(1, &["ENG-0504", "1024", "fewer partitions"]);
    restore(&up, "good", &["-o", "json"]).ended(0);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "on as many workers");
    let found = cluster.engram(&["get", "key 7", "-o", "json"]).ended(0).json();
    assert_eq!(found["items"][0]["payload"], "p7");
    // What is restored is a cluster like any other.
    cluster.engram(&["reinforce", "key 7", "--quality", "0.9"]).ended(0);

    let (up, _) = cluster.stop();
    restore(&up, "good", &["--workers", "2"]).ended(0);
    up.change(&cluster_manifest("kept", 2, SPEC));
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "on fewer workers");
    assert_eq!(cluster.workers(), 2);

    // A copy of the folder restores to a state directory that has never seen the cluster.
    let copy = cluster.folder().join("copy");
    copy_folder(&cluster.state_dir().join("snapshots/good"), &copy);
    let (old, _) = cluster.stop();
    let new = Up::of(&cluster_manifest("kept", 5, SPEC));
    restore(&new, &copy.display().to_string(), &["--workers", "5"]).ended(0);
    let cluster = new.start();
    assert_eq!(cluster.digest(), before, "elsewhere, on more workers");
    cluster.stop();
    drop(old);
}

#[test]
fn a_snapshot_that_cannot_be_trusted_is_refused_and_the_cluster_is_as_it_was() {
    let cluster = Cluster::up(&cluster_manifest("wary", 2, SPEC));
    cluster.engram_with(&["insert", "--file", "-"], &rows(200)).ended(0);
    cluster.engram(&["snapshot", "create", "good"]).ended(0);
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
    let file = file.expect("a file per partition");

    fs::remove_file(copy("unfinished").join("manifest.json")).unwrap();
    restore(&up, "unfinished", &[]).refused(1, &["ENG-0509", "never finished"]);

    let damaged = copy("damaged").join(&file);
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    restore(&up, "damaged", &[]).refused(1, &["ENG-0509", &file, "damaged"]);

    let short = copy("short").join(&file);
    let bytes = fs::read(&short).unwrap();
    fs::write(&short, &bytes[..bytes.len() - 1]).unwrap();
    restore(&up, "short", &[]).refused(1, &["ENG-0509", &file]);

    fs::remove_file(copy("missing").join(&file)).unwrap();
    restore(&up, "missing", &[]).refused(1, &["ENG-0509", &file]);

    let edited = copy("edited").join("manifest.json");
    let text = fs::read_to_string(&edited).unwrap();
    fs::write(&edited, text.replace("\"memories\": 200", "\"memories\": 201")).unwrap();
    restore(&up, "edited", &[]).refused(1, &["ENG-0509", "checksum"]);

    restore(&up, "nothing", &[]).refused(1, &["ENG-0509", "nothing"]);
    let listed = engram(["snapshot", "list", "-o", "name", "--state-dir", &up.state_dir().display().to_string()], "");
    let listed = listed.ended(0);
    for name in ["good", "damaged", "short", "missing"] {
        assert!(listed.stdout.lines().any(|line| line == "good"), "{name}: {}", listed.stdout);
    }
    assert!(listed.stderr.contains("unfinished"), "{}", listed.stderr);

    // Another cluster's snapshot, intact.
    let other = Cluster::up(&cluster_manifest("other", 1, SPEC));
    other.engram(&["insert", "a"]).ended(0);
    other.engram(&["snapshot", "create", "foreign"]).ended(0);
    copy_folder(&other.state_dir().join("snapshots/foreign"), &snapshots.join("foreign"));
    other.stop();
    restore(&up, "foreign", &[]).refused(1, &["ENG-0509", "other"]);

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
    copied().expect("a snapshot is a folder of files that can be copied");
}
