//! Limits of what one client or one run can take from a worker.

use crate::harness::{Cluster, spec};
use engram_memory::{LearningEpoch, QualityVector, RunId};
use engram_proto::v1;
use engram_proto::v1::run_service_client::RunServiceClient;
use std::time::Duration;
use tonic::Code;

/// A run of a built-in data set.
const EXAMPLE: &str = r#"{"clusterRef":{"name":"test"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}}}}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_workers_change_the_turn_and_a_turn_without_a_recorded_run_is_released() {
    let cluster = Cluster::start(spec(1, 4)).await;
    let ghost = RunId(7);
    let run = ghost.0.to_be_bytes().to_vec();
    let mut runs = RunServiceClient::new(cluster.channel(0).await);
    let acquire = v1::AcquireTurnRequest { run: run.clone().into(), name: "ghost".into(), submitted_ms: 0 };
    assert_eq!(runs.acquire_turn(acquire).await.unwrap_err().code(), Code::PermissionDenied);
    let release = v1::ReleaseTurnRequest { run: run.into() };
    assert_eq!(runs.release_turn(release).await.unwrap_err().code(), Code::PermissionDenied);
    let count = v1::SetUpdateCountingRequest { enabled: true, local: true };
    assert_eq!(runs.set_update_counting(count).await.unwrap_err().code(), Code::PermissionDenied);
    let client = cluster.client().await;
    assert_eq!(client.broadcast_quality(ghost, LearningEpoch(1), &QualityVector::default()).await, 0);

    let granted = cluster.peer_client().await.acquire_turn(ghost, "ghost", 0).await.unwrap();
    assert!(granted.granted, "workers may acquire it");
    client.submit_run("example", EXAMPLE, None, None).await.unwrap();
    let mut watch = client.watch_run("example");
    let ended = tokio::time::timeout(Duration::from_secs(60), async {
        let mut last = None;
        while let Some(status) = watch.next().await.unwrap() {
            last = Some(status);
        }
        last.unwrap()
    });
    let last = ended.await.expect("the turn of an unrecorded run is released");
    assert_eq!(last.phase(), v1::RunPhase::Succeeded, "{last:?}");
}
