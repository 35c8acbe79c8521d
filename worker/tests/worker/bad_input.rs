//! Bad input is rejected as a whole, by field, and changes nothing.

use crate::harness::{Cluster, spec};
use engram_api::CapacityPolicy;
use engram_client::{Client, Options as ClientOptions, Rows, Signals, Updates};
use engram_memory::{ClusterId, MemoryId, partition_of};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_worker::{Error, Worker};
use tonic::{Code, Status};

fn updates(ids: Vec<u64>, qualities: Vec<f32>) -> v1::ApplyReinforcementRequest {
    let updates = v1::Updates { ids, qualities, ..Default::default() };
    let part = v1::ReinforcePart { updates: Some(updates), ..Default::default() };
    v1::ApplyReinforcementRequest { session: None, parts: vec![part] }
}

#[track_caller]
fn assert_rejected(status: &Status, code: Code, kind: ProblemKind, message: &[&str]) {
    assert_eq!(status.code(), code, "{status:?}");
    let problem = Problem::from_status(status).unwrap_or_else(|| panic!("no problem in {status:?}"));
    assert_eq!(problem.kind(), kind, "{problem:?}");
    for text in message {
        assert!(status.message().contains(text), "'{}' does not contain '{text}'", status.message());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_is_rejected_by_field_and_nothing_is_applied() {
    let mut spec = spec(2, 8);
    spec.features.dimension = 2;
    let cluster = Cluster::start(spec).await;
    let client = cluster.client().await;
    client.session().upsert(Rows { ids: (0..100).map(MemoryId).collect(), ..Rows::default() }).await.unwrap();
    let before = client.digest().await.unwrap();
    let mut worker = cluster.bare(0).await;
    let all: Vec<u64> = (0..100).collect();

    // The only bad value comes last, after ninety-nine good ones over all partitions of both workers.
    for (value, message) in
        [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (1.5, "1.5"), (-0.1, "-0.1")]
    {
        let mut qualities = vec![0.9; 100];
        qualities[99] = value;
        let status = worker.apply_reinforcement(updates(all.clone(), qualities.clone())).await.unwrap_err();
        assert_rejected(
            &status,
            Code::InvalidArgument,
            ProblemKind::Invalid,
            &["qualities[99]", message, "from 0 to 1"],
        );
        // The client library rejects it before it sends anything.
        let rows = Updates {
            ids: (0..100).map(MemoryId).collect(),
            signals: Signals::Qualities(qualities),
            ..Default::default()
        };
        let error = client.session().reinforce(rows).await.unwrap_err();
        assert!(error.kind() == ProblemKind::Invalid && error.to_string().contains("qualities[99]"), "{error}");
    }

    let status = worker.apply_reinforcement(updates(all.clone(), vec![0.5; 99])).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["qualities", "99 entries for 100 ids"]);
    let status = worker.apply_reinforcement(updates(vec![1; 65_537], vec![0.5; 65_537])).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["65537", "65,536"]);

    let wrong_dimension = v1::UpsertPart { ids: all.clone(), features: vec![0.0; 300], ..Default::default() };
    let request = v1::UpsertRequest { session: None, parts: vec![wrong_dimension] };
    let status = worker.upsert(tokio_stream::iter([request])).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["features", "dimension"]);

    let status =
        worker.apply_decay(v1::ApplyDecayRequest { amount: f64::NAN, ..Default::default() }).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["amount", "NaN"]);

    // A message above the limit is not read.
    let payload = v1::Blobs { ends: vec![5 << 20], data: vec![0; 5 << 20].into() };
    let oversized = v1::UpsertPart { ids: vec![1], payloads: Some(payload), ..Default::default() };
    let request = v1::UpsertRequest { session: None, parts: vec![oversized] };
    let status = worker.upsert(tokio_stream::iter([request])).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    assert!(
        status.message().contains(&engram_proto::MAX_MESSAGE_BYTES.to_string()),
        "the limit is not in the message: {status:?}"
    );

    // A part that names a partition other than that of its ids, after a correct one.
    let session = worker.open_session(v1::OpenSessionRequest {}).await.unwrap().into_inner().session.unwrap();
    let part = |id: u64, partition: u32, seq: u64| v1::ReinforcePart {
        partition: Some(partition),
        seq,
        updates: Some(v1::Updates { ids: vec![id], quality: Some(1.0), ..Default::default() }),
    };
    let partition = |id: u64| partition_of(MemoryId(id), 8).0;
    let foreign_id = (2..100).find(|id| partition(*id) != partition(1)).unwrap();
    let parts = vec![part(1, partition(1), 1), part(foreign_id, partition(1), 2)];
    let request = v1::ApplyReinforcementRequest { session: Some(session), parts };
    let status = worker.apply_reinforcement(request).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::WrongPartition, &["ids[0]", &foreign_id.to_string()]);
    let request = v1::ApplyReinforcementRequest { session: Some(session), parts: vec![part(1, 8, 1)] };
    assert_rejected(
        &worker.apply_reinforcement(request).await.unwrap_err(),
        Code::InvalidArgument,
        ProblemKind::Invalid,
        &["partition: 8", "0 to 7"],
    );
    let request = v1::ApplyReinforcementRequest { session: Some(session), parts: vec![part(1, partition(1), 0)] };
    let status = worker.apply_reinforcement(request).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["seq", "from 1"]);
    let future = v1::Session { opened_ms: session.opened_ms + 2 * 60 * 60 * 1_000, random: 1 };
    let request = v1::ApplyReinforcementRequest { session: Some(future), parts: vec![part(1, partition(1), 1)] };
    let status = worker.apply_reinforcement(request).await.unwrap_err();
    assert_rejected(&status, Code::InvalidArgument, ProblemKind::Invalid, &["opened_ms", "one hour"]);

    assert_eq!(client.digest().await.unwrap().digest, before.digest, "no rejected request was applied");
    // The sequence numbers of the rejected requests are still unused.
    let request = v1::ApplyReinforcementRequest { session: Some(session), parts: vec![part(1, partition(1), 1)] };
    let reply = worker.apply_reinforcement(request).await.unwrap().into_inner();
    assert!(matches!(reply.parts[0].result, Some(v1::partition_result::Result::Outcome(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_clusters_taken_ports_and_full_partitions_fail_clearly() {
    let mut spec = spec(1, 1);
    spec.capacity.memories = 100;
    spec.capacity.policy = CapacityPolicy::Refuse;
    let cluster = Cluster::start(spec).await;
    let endpoint = cluster.endpoint(0);
    let other = ClusterId(0xbad);
    let mut options = ClientOptions::new([endpoint]).with_cluster(other);
    options.read_deadline = std::time::Duration::from_secs(5);
    let error = Client::connect(options).await.unwrap_err();
    assert_eq!(error.kind(), ProblemKind::WrongCluster, "{error}");
    assert!(error.to_string().contains(&other.to_string()), "both clusters must be in the message: {error}");

    let mut options = cluster.options(7);
    options.listen.client = cluster.addresses(0).client;
    let Err(error) = Worker::build(options).await else { panic!("two workers on one port") };
    assert!(matches!(error, Error::Bind { role: "client", .. }), "{error}");
    let Err(error) = Worker::build(cluster.options(0)).await else { panic!("two workers in one folder") };
    assert!(error.to_string().contains("in use by process"), "{error}");

    let session = cluster.client().await.session();
    let ids = |count: u64| (0..count).map(MemoryId).collect::<Vec<_>>();
    session.upsert(Rows { ids: ids(100), ..Rows::default() }).await.unwrap();
    let more = (1_000..1_020).map(MemoryId).collect();
    let error = session.upsert(Rows { ids: more, ..Rows::default() }).await.unwrap_err();
    assert_eq!(error.kind(), ProblemKind::Capacity, "{error}");
    session.upsert(Rows { ids: ids(50), ..Rows::default() }).await.unwrap();
    assert_eq!(session.client().digest().await.unwrap().memories, 100);
}
