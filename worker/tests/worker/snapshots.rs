//! Snapshots in a shared volume: created, rejected, cancelled, and used to bootstrap clusters.

use crate::harness::{CLUSTER, Cluster, spec, until};
use engram_api::{Bootstrap, LearnerClusterSpec, SnapshotLocation};
use engram_client::{Client, Rows};
use engram_learn::run::RunState;
use engram_memory::MemoryId;
use engram_proto::v1::{ProblemKind, RunPhase, RunStatus};
use engram_snapshot::{Folder, Location, Manifest, shape_of};
use serde_json::json;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Few enough that all partitions of one of two workers are uploaded at once.
const PARTITIONS: u32 = 6;

fn snapshot(volume: &str, path: &str) -> String {
    let location = json!({ "volume": volume, "path": path });
    json!({ "clusterRef": { "name": "test" }, "kind": "Snapshot", "snapshot": location }).to_string()
}

/// Submits a run and waits until it ends.
async fn run_to_end(client: &Client, name: &str, spec: &str) -> RunStatus {
    client.submit_run(name, spec, None, None).await.unwrap();
    let (mut watch, mut last) = (client.watch_run(name), RunStatus::default());
    while let Some(status) = watch.next().await.unwrap() {
        last = status;
    }
    last
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the folders of a snapshot's attempts, if there are any.
fn attempts(folder: &Path) -> Vec<String> {
    if folder.exists() { names(folder) } else { Vec::new() }
}

fn bootstrap_spec(path: &str, workers: u32, partitions: u32) -> LearnerClusterSpec {
    let volume = Some("backups".to_owned());
    let snapshot = SnapshotLocation { volume, path: Some(path.into()), ..SnapshotLocation::default() };
    LearnerClusterSpec { bootstrap: Some(Bootstrap { snapshot }), ..spec(workers, partitions) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_in_a_volume_is_complete_or_absent_and_bootstraps_clusters() {
    let volumes = tempfile::tempdir().unwrap();
    let (backups, outside) = (volumes.path().join("backups"), tempfile::tempdir().unwrap());
    std::fs::create_dir(&backups).unwrap();
    symlink(outside.path(), backups.join("out")).unwrap();
    let mut cluster = Cluster::start_with(spec(2, PARTITIONS), volumes.path()).await;
    let client = cluster.client().await;
    let ids: Vec<_> = (0..300).map(MemoryId).collect();
    client.session().upsert(Rows { ids, weights: vec![0.25; 300], ..Rows::default() }).await.unwrap();
    let digest = client.digest().await.unwrap().digest;

    let run = run_to_end(&client, "monday", &snapshot("backups", "words/{name}")).await;
    assert_eq!((run.phase(), run.epoch), (RunPhase::Succeeded, PARTITIONS.into()), "{run:?}");
    let written = run.snapshot.unwrap();
    assert_eq!((written.url.as_str(), written.memories), ("volume://backups/words/monday", 300));
    let monday = backups.join("words/monday");
    let [attempt, manifest] = &names(&monday)[..] else { panic!("{:?}", names(&monday)) };
    assert_eq!((manifest.as_str(), names(&monday.join(attempt)).len()), ("manifest.json", PARTITIONS as usize));
    // Under another mount path the volume is a folder like any other.
    let location = Location::Folder(Folder::local(backups.join("words")));
    assert_eq!(location.names().await.unwrap(), ["monday"]);
    let manifest: Manifest = location.join("monday").manifest().await.unwrap().unwrap();
    manifest.verify(&monday, "monday", CLUSTER, shape_of(&spec(2, PARTITIONS)), |_| {}).unwrap();
    assert_eq!(manifest.digest.as_ref(), Some(&written.digest));

    for (name, location, code, message) in [
        ("again", snapshot("backups", "words/monday"), "ENG-0106", "volume://backups/words/monday is not empty"),
        (
            "nowhere",
            snapshot("tapes", "a"),
            "ENG-0510",
            r#"no volume "tapes"; allowed: those of spec.snapshotVolumes (backups)"#,
        ),
        ("escapes", snapshot("backups", "out/{name}"), "ENG-0510", "symbolic link points outside the volume"),
    ] {
        let failed = run_to_end(&client, name, &location).await;
        assert_eq!((failed.phase(), failed.code.as_str()), (RunPhase::Failed, code), "{failed:?}");
        assert!(failed.message.contains(message), "{}", failed.message);
    }
    let escaping = client.submit_run("dots", &snapshot("backups", "../words"), None, None).await.unwrap_err();
    assert!(escaping.to_string().contains("spec.snapshot.path is ../words"), "{escaping}");
    assert_eq!((names(outside.path()), names(&backups)), (Vec::new(), vec!["out".to_owned(), "words".into()]));

    // Without one worker, only the partitions of the other one are uploaded; a cancelled run leaves nothing.
    let primaries: Vec<u32> = cluster.status(0).await.iter().filter(|it| it.primary).map(|it| it.partition).collect();
    let is_driven_here =
        |name: &String| primaries.contains(&RunState::partition(RunState::run_id(CLUSTER, name), PARTITIONS).0);
    let name = (0..).map(|number| format!("partial-{number}")).find(is_driven_here).unwrap();
    cluster.kill_worker(1).await;
    client.submit_run(&name, &snapshot("backups", "words/partial"), None, None).await.unwrap();
    let folder = backups.join("words/partial");
    let files = || -> usize { attempts(&folder).iter().map(|attempt| names(&folder.join(attempt)).len()).sum() };
    until("half of the snapshot is written", || async { files() == primaries.len() }).await;
    client.cancel_run(&name).await.unwrap();
    until("the partial snapshot is removed", || async { !folder.exists() }).await;
    assert_eq!(names(&backups.join("words")), ["monday"]);
    drop(cluster);

    for (workers, partitions) in [(1, PARTITIONS), (2, 3)] {
        let fresh = Cluster::start_with(bootstrap_spec("words/monday", workers, partitions), volumes.path()).await;
        let client = fresh.client().await;
        assert_eq!(client.digest().await.unwrap().digest, digest, "{workers} workers, {partitions} partitions");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_cluster_rejects_volumes() {
    let cluster = Cluster::start(spec(1, 1)).await;
    let failed = cluster.client().await.submit_run("monday", &snapshot("backups", "words"), None, None).await;
    let failed = failed.unwrap_err();
    assert_eq!(failed.kind(), ProblemKind::Invalid);
    assert!(
        failed.to_string().contains("spec.snapshot.volume is backups; allowed in clusters in Kubernetes"),
        "{failed}"
    );
}
