//! Snapshots in a volume that all workers have: made, refused, called off, and begun from.

use crate::harness::{CLUSTER, Cluster, spec, until};
use engram_api::{Bootstrap, LearnerClusterSpec, SnapshotPlace};
use engram_client::{Client, Rows};
use engram_learn::run::RunState;
use engram_memory::MemoryId;
use engram_proto::v1::{ProblemKind, RunPhase, RunStatus};
use engram_snapshot::{Folder, Manifest, Place, shape_of};
use serde_json::json;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Few enough that those of one of two workers are on their way all at once.
const PARTITIONS: u32 = 6;

fn snapshot(volume: &str, path: &str) -> String {
    let place = json!({ "volume": volume, "path": path });
    json!({ "clusterRef": { "name": "test" }, "kind": "Snapshot", "snapshot": place }).to_string()
}

/// Submits a run and waits for its end.
async fn ended(client: &Client, name: &str, spec: &str) -> RunStatus {
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

/// The folders of the attempts of a snapshot, which may not be there yet.
fn attempts(folder: &Path) -> Vec<String> {
    if folder.exists() { names(folder) } else { Vec::new() }
}

fn beginning_from(path: &str, workers: u32, partitions: u32) -> LearnerClusterSpec {
    let volume = Some("backups".to_owned());
    let snapshot = SnapshotPlace { volume, path: Some(path.into()), ..SnapshotPlace::default() };
    LearnerClusterSpec { bootstrap: Some(Bootstrap { snapshot }), ..spec(workers, partitions) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_in_a_volume_is_whole_or_not_there_and_clusters_begin_from_it() {
    let volumes = tempfile::tempdir().unwrap();
    let (backups, elsewhere) = (volumes.path().join("backups"), tempfile::tempdir().unwrap());
    std::fs::create_dir(&backups).unwrap();
    symlink(elsewhere.path(), backups.join("out")).unwrap();
    let mut cluster = Cluster::start_with(spec(2, PARTITIONS), volumes.path()).await;
    let client = cluster.client().await;
    let ids: Vec<_> = (0..300).map(MemoryId).collect();
    client.session().upsert(Rows { ids, weights: vec![0.25; 300], ..Rows::default() }).await.unwrap();
    let digest = client.digest().await.unwrap().digest;

    let made = ended(&client, "monday", &snapshot("backups", "words/{name}")).await;
    assert_eq!((made.phase(), made.epoch), (RunPhase::Succeeded, PARTITIONS.into()), "{made:?}");
    let written = made.snapshot.unwrap();
    assert_eq!((written.url.as_str(), written.memories), ("volume://backups/words/monday", 300));
    let monday = backups.join("words/monday");
    let [attempt, manifest] = &names(&monday)[..] else { panic!("{:?}", names(&monday)) };
    assert_eq!((manifest.as_str(), names(&monday.join(attempt)).len()), ("manifest.json", PARTITIONS as usize));
    // To whoever has the volume under another path it is a folder like any other.
    let place = Place::Folder(Folder::of_machine(backups.join("words")));
    assert_eq!(place.names().await.unwrap(), ["monday"]);
    let manifest: Manifest = place.below("monday").manifest().await.unwrap().unwrap();
    manifest.verify(&monday, "monday", CLUSTER, shape_of(&spec(2, PARTITIONS)), |_| {}).unwrap();
    assert_eq!(manifest.digest.as_ref(), Some(&written.digest));

    for (name, place, code, said) in [
        ("again", snapshot("backups", "words/monday"), "ENG-0106", "something is at volume://backups/words/monday"),
        (
            "nowhere",
            snapshot("tapes", "a"),
            "ENG-0510",
            r#"no volume "tapes"; allowed: those of spec.snapshotVolumes (backups)"#,
        ),
        ("escapes", snapshot("backups", "out/{name}"), "ENG-0510", "a symbolic link leads out of the volume"),
    ] {
        let refused = ended(&client, name, &place).await;
        assert_eq!((refused.phase(), refused.code.as_str()), (RunPhase::Failed, code), "{refused:?}");
        assert!(refused.message.contains(said), "{}", refused.message);
    }
    let escaping = client.submit_run("dots", &snapshot("backups", "../words"), None, None).await.unwrap_err();
    assert!(escaping.to_string().contains("spec.snapshot.path is ../words"), "{escaping}");
    assert_eq!((names(elsewhere.path()), names(&backups)), (Vec::new(), vec!["out".to_owned(), "words".into()]));

    // One worker is gone, so that there is no more than what the other one leads; called off, it leaves nothing.
    let led: Vec<u32> = cluster.status(0).await.iter().filter(|it| it.primary).map(|it| it.partition).collect();
    let driven = |name: &String| led.contains(&RunState::partition(RunState::run_id(CLUSTER, name), PARTITIONS).0);
    let held = (0..).map(|number| format!("held-{number}")).find(driven).unwrap();
    cluster.kill_worker(1).await;
    client.submit_run(&held, &snapshot("backups", "words/held"), None, None).await.unwrap();
    let folder = backups.join("words/held");
    let files = || -> usize { attempts(&folder).iter().map(|attempt| names(&folder.join(attempt)).len()).sum() };
    until("half of it is there", || async { files() == led.len() }).await;
    client.cancel_run(&held).await.unwrap();
    until("it is gone", || async { !folder.exists() }).await;
    assert_eq!(names(&backups.join("words")), ["monday"]);
    drop(cluster);

    for (workers, partitions) in [(1, PARTITIONS), (2, 3)] {
        let fresh = Cluster::start_with(beginning_from("words/monday", workers, partitions), volumes.path()).await;
        let client = fresh.client().await;
        assert_eq!(client.digest().await.unwrap().digest, digest, "{workers} workers, {partitions} partitions");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_of_one_machine_has_no_volumes_and_says_so() {
    let cluster = Cluster::start(spec(1, 1)).await;
    let refused = cluster.client().await.submit_run("monday", &snapshot("backups", "words"), None, None).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::Invalid);
    assert!(
        refused.to_string().contains("spec.snapshot.volume is backups; allowed in clusters in Kubernetes"),
        "{refused}"
    );
}
