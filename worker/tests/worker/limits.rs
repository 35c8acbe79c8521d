//! Limits of what one client or one run can take from a worker.

use crate::harness::{Cluster, spec};
use engram_client::{Client, GetOptions, Rows};
use engram_memory::{LearningEpoch, MemoryId, QualityVector, RunId};
use engram_proto::v1;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::run_service_client::RunServiceClient;
use prost::Message as _;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// Calls per connection, below the limit of a connection, and connections: together more calls than a listener executes at once.
const CALLS_PER_CONNECTION: usize = 120;
const CONNECTIONS: usize = 10;
const PAYLOAD_BYTES: usize = 64 << 10;

/// A run of a built-in data set.
const EXAMPLE: &str =
    r#"{"clusterRef":{"name":"test"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}}}}"#;

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
    // The turn of an unrecorded run is released.
    let last = ended(&client, "example").await;
    assert_eq!(last.phase(), v1::RunPhase::Succeeded, "{last:?}");
}

/// Waits for the end of a run and returns its last status.
async fn ended(client: &Client, name: &str) -> v1::RunStatus {
    let mut watch = client.watch_run(name);
    let ended = tokio::time::timeout(Duration::from_secs(60), async {
        let mut last = None;
        while let Some(status) = watch.next().await.unwrap() {
            last = Some(status);
        }
        last.unwrap()
    });
    ended.await.expect("the run ends")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_with_another_uid_learns_again_once_the_previous_one_has_ended() {
    let cluster = Cluster::start(spec(1, 4)).await;
    let client = cluster.client().await;
    let spec = |epochs: u64, suspend: bool| {
        format!(
            r#"{{"clusterRef":{{"name":"test"}},"kind":"Memory","suspend":{suspend},
            "memory":{{"source":{{"example":{{"name":"StateOfTheUnion"}}}},"epochs":{epochs}}}}}"#
        )
    };
    let submit = async |name: &str, uid: &str, spec: &str| {
        let reply = client.submit_run_as(name, uid, spec, None, None).await.unwrap();
        (reply.created, reply.status.unwrap())
    };
    assert!(submit("again", "a", &spec(2, false)).await.0);
    let first = ended(&client, "again").await;
    assert_eq!((first.phase(), first.epoch, &*first.uid), (v1::RunPhase::Succeeded, 2, "a"));
    assert!(!submit("again", "a", &spec(2, false)).await.0, "a repeated submission");
    let learned = client.digest().await.unwrap().digest;
    assert_eq!(first.outputs["digest"], learned.to_string());
    assert_eq!(first.metrics, client.list_runs().await.unwrap()[0].metrics, "figures stay with the record");
    assert!(!first.metrics.is_empty());

    // Another specification is allowed: it is another run.
    assert!(submit("again", "b", &spec(3, false)).await.0);
    let second = ended(&client, "again").await;
    assert_eq!((second.phase(), second.epoch, &*second.uid), (v1::RunPhase::Succeeded, 3, "b"));
    assert_ne!(second.run, first.run, "its epochs are its own");
    assert_ne!(client.digest().await.unwrap().digest, learned, "its epochs were applied and not taken for repeats");

    assert!(submit("held", "a", &spec(1, true)).await.0);
    let (created, held) = submit("held", "b", &spec(1, false)).await;
    assert!(!created && held.uid == "a" && held.phase() == v1::RunPhase::Suspended, "{held:?}");
    assert_eq!(client.cancel_run_as("held", "b").await.unwrap().uid, "a");
    let resumed = client.suspend_run_as("held", "b", false).await.unwrap();
    assert_eq!(resumed.phase(), v1::RunPhase::Suspended, "only its submitter changes it by uid");
    client.cancel_run_as("held", "a").await.unwrap();
    assert_eq!(ended(&client, "held").await.phase(), v1::RunPhase::Cancelled);
    assert!(submit("held", "b", &spec(1, false)).await.0);
    assert_eq!(ended(&client, "held").await.phase(), v1::RunPhase::Succeeded);
}

/// Returns bare clients with a connection each.
async fn connections(cluster: &Cluster) -> Vec<MemoryServiceClient<Channel>> {
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(cluster.bare(0).await);
    }
    clients
}

/// Checks that another client's read and write and a health check are answered.
async fn assert_serves(cluster: &Cluster) {
    let client = cluster.client().await;
    client.session().upsert(Rows { ids: vec![MemoryId(7)], ..Rows::default() }).await.unwrap();
    assert_eq!(client.get(&[MemoryId(7)], GetOptions::default()).await.unwrap().memories.len(), 1);
    let mut health = HealthClient::new(cluster.channel(0).await);
    health.check(HealthCheckRequest { service: String::new() }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_polls_and_silent_streams_leave_room_for_other_clients() {
    let cluster = Cluster::start(spec(1, 4)).await;
    let clients = connections(&cluster).await;
    let known_stamp = clients[0].clone().get_partition_map(v1::GetPartitionMapRequest::default()).await.unwrap();
    let known_stamp = known_stamp.into_inner().stamp;
    let mut polls = tokio::task::JoinSet::new();
    for client in clients.iter().flat_map(|client| std::iter::repeat_n(client, CALLS_PER_CONNECTION)) {
        let mut client = client.clone();
        let poll = v1::GetPartitionMapRequest { newer_than: 0, wait_ms: 30_000, known_stamp };
        polls.spawn(async move { client.get_partition_map(poll).await });
    }
    assert!(tokio::time::timeout(Duration::from_millis(500), polls.join_next()).await.is_err(), "all polls wait");
    assert_serves(&cluster).await;
    drop(polls);

    let mut uploads = tokio::task::JoinSet::new();
    for client in clients.iter().flat_map(|client| std::iter::repeat_n(client, CALLS_PER_CONNECTION)) {
        let mut client = client.clone();
        uploads.spawn(async move { client.upsert(futures::stream::pending()).await });
    }
    assert!(tokio::time::timeout(Duration::from_millis(500), uploads.join_next()).await.is_err(), "all uploads wait");
    assert_serves(&cluster).await;
    let ended = uploads.join_next().await.unwrap().unwrap().unwrap_err();
    assert_eq!(ended.code(), Code::DeadlineExceeded, "{ended}");
}

async fn insert(cluster: &Cluster, memories: u64) {
    let payload = vec![1_u8; PAYLOAD_BYTES];
    let session = cluster.client().await;
    let session = session.session();
    for ids in (0..memories).collect::<Vec<u64>>().chunks(32) {
        let payloads = Some(ids.iter().map(|_| &payload).collect());
        let rows = Rows { ids: ids.iter().copied().map(MemoryId).collect(), payloads, ..Rows::default() };
        session.upsert(rows).await.unwrap();
    }
}

/// Reads a stream; returns its rows and the size of its largest message.
async fn read(mut stream: Streaming<v1::MemoryBatch>) -> (usize, usize) {
    let (mut rows, mut largest) = (0, 0);
    while let Some(batch) = stream.message().await.unwrap() {
        rows += batch.ids.len();
        largest = largest.max(batch.encoded_len());
    }
    (rows, largest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_are_answered_in_pages_bounded_in_bytes_also_when_forwarded() {
    let cluster = Cluster::start(spec(2, 4)).await;
    insert(&cluster, 64).await;
    let mut bare = cluster.bare(0).await;
    // A quarter of a GiB, half of it of the other worker.
    let ids: Vec<u64> = (0..64).cycle().take(4_096).collect();
    let get = v1::GetMemoriesRequest { ids, with_payloads: true, ..v1::GetMemoriesRequest::default() };
    let (rows, largest) = read(bare.get_memories(get).await.unwrap().into_inner()).await;
    assert_eq!(rows, 4_096);
    assert!(largest < 40 * PAYLOAD_BYTES, "a message has {largest} bytes");
    let local = v1::ScanMemoriesRequest { local: true, with_payloads: true, ..v1::ScanMemoriesRequest::default() };
    let (_, largest) = read(bare.scan_memories(local).await.unwrap().into_inner()).await;
    assert!(largest < 16 * PAYLOAD_BYTES, "a message has {largest} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read_are_bounded() {
    let cluster = Cluster::start(spec(1, 4)).await;
    insert(&cluster, 256).await;
    let clients = connections(&cluster).await;
    let scan = v1::ScanMemoriesRequest { local: true, with_payloads: true, ..v1::ScanMemoriesRequest::default() };
    let (mut unread, mut rejected) = (Vec::new(), 0);
    for client in clients.iter().flat_map(|client| std::iter::repeat_n(client, 20)) {
        match client.clone().scan_memories(scan.clone()).await {
            Ok(stream) => unread.push(stream),
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                rejected += 1;
            }
        }
    }
    assert_eq!((unread.len(), rejected), (128, 72));
    assert_serves(&cluster).await;
    drop(unread);
    let (rows, _) = read(cluster.bare(0).await.scan_memories(scan).await.unwrap().into_inner()).await;
    assert!(rows >= 256);
}
