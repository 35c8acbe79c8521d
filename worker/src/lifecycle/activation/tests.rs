//! Requests and map queries during a change of the map: each wait ends with its condition, on a paused clock.

use crate::buffers::Definitions;
use crate::lifecycle::activation::{MAX_WAIT, MAX_WAITING};
use crate::lifecycle::watch::follow_served;
use crate::lifecycle::worker::Worker;
use crate::options::{Listen, Options};
use crate::service::{MAX_MAP_WAIT, Memories, Plane};
use crate::shared::Shared;
use crate::write::WritePart;
use engram_api::LearnerClusterSpec;
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Incarnation, Member, MemoryId, Ordinal, PartitionId, StoreId, partition_of};
use engram_proto::v1::memory_service_server::MemoryService as _;
use engram_proto::v1::partition_result::Result as Answer;
use engram_proto::v1::{self, GetPartitionMapRequest, HeartbeatResponse, ProblemKind};
use engram_wire::{self as wire, WriteBody};
use futures::FutureExt as _;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tonic::Request;

const CLUSTER: ClusterId = ClusterId(7);
const LOCAL: PartitionId = PartitionId(0);
const REMOTE: PartitionId = PartitionId(1);

/// Worker 0 of three, with an open store and no map.
struct SingleWorker {
    memories: Memories,
    _folder: TempDir,
}

impl SingleWorker {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let spec = LearnerClusterSpec { partitions: 2, replication_factor: 1, ..LearnerClusterSpec::with_workers(3) };
        let options = Options {
            cluster: CLUSTER,
            cluster_name: "test".into(),
            ordinal: 0,
            state_dir: folder.path().to_owned(),
            listen: Listen::any_port(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            advertise_host: None,
            coordinators: Vec::new(),
            peer_detours: BTreeMap::new(),
            map_location: None,
            threads: Some(1),
            machine_workers: None,
            local_files: None,
            gpu_deadline_ms: None,
            tls: None,
            inputs: None,
            snapshots: None,
            bootstrap: None,
            spec,
        };
        let shared = Worker::build(options).await.unwrap().into_shared();
        Self { memories: Memories { shared, plane: Plane::Client }, _folder: folder }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.memories.shared
    }

    /// Returns a map with this worker as primary of partition 0, and worker `there` of partition 1.
    fn map(&self, version: u64, there: u32) -> PartitionMap {
        let other = Member { ordinal: Ordinal(there), store: StoreId(9), incarnation: Incarnation(1) };
        let partitions = [self.shared().setup.member, other].map(|member| Entry::first(vec![member])).to_vec();
        PartitionMap { cluster: CLUSTER, version, partitions }
    }

    /// Publishes a map to the services but not to the store, so that an assigned partition stays inactive.
    fn publish(&self, map: PartitionMap) {
        let partitions = self.shared().partitions();
        assert!(self.shared().membership.modify_view(|view| view.update_map(map, CLUSTER, partitions)));
    }

    /// Receives a map and the address of worker 1 from a coordinator.
    fn receive(&self, map: &PartitionMap, at: &str) {
        let member = |ordinal| v1::MemberEntry { ordinal, peer_address: at.to_owned(), ..v1::MemberEntry::default() };
        let members = (0..3).map(member).collect();
        self.shared().membership.receive(
            "coordinator",
            HeartbeatResponse { map: Some(wire::map_to_proto(map)), members, ..HeartbeatResponse::default() },
        );
    }

    /// Passes a map to the store and returns once it has published that it serves its partition. No timer fires meanwhile.
    async fn serve(&self, map: PartitionMap) {
        let engine = &self.shared().engine;
        let mut served = pin!(engine.wait_until(|| engine.position(LOCAL).is_some()));
        assert!(served.as_mut().now_or_never().is_none(), "the partition is not served before");
        engine.update_map(Arc::new(map));
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while served.as_mut().now_or_never().is_none() {
            assert!(std::time::Instant::now() < deadline, "the store publishes that it serves the partition");
            tokio::task::yield_now().await;
        }
    }

    async fn decay(&self, partition: PartitionId) -> Answer {
        let request = WritePart { partition: Some(partition.0), seq: 0, body: WriteBody::Decay(0.5) };
        let mut reply = self.memories.write(None, vec![request], &Definitions::default()).await.unwrap();
        reply.parts.remove(0).result.unwrap()
    }

    async fn version(&self, newer_than: u64, wait_ms: u32) -> u64 {
        let request = Request::new(GetPartitionMapRequest { newer_than, wait_ms, known_stamp: 0 });
        self.memories.get_partition_map(request).await.unwrap().into_inner().version
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_primary_keeps_requests_until_it_serves_them() {
    let worker = SingleWorker::start().await;
    let map = worker.map(1, 1);
    worker.publish(map.clone());
    let id = (0..).find(|id| partition_of(MemoryId(*id), 2) == LOCAL).unwrap();
    let mut write = pin!(worker.decay(LOCAL));
    let mut read = pin!(worker.memories.get(v1::GetMemoriesRequest { ids: vec![id], ..Default::default() }));
    let session = v1::Session { opened_ms: worker.shared().setup.clock.now_ms(), random: 3 };
    let mut outcome =
        pin!(worker.memories.outcome(v1::GetOutcomeRequest { session: Some(session), partition: LOCAL.0, seq: 1 }));
    assert!(write.as_mut().now_or_never().is_none(), "the write is not rejected");
    assert!(read.as_mut().now_or_never().is_none());
    assert!(outcome.as_mut().now_or_never().is_none());
    let mut waiting = pin!(worker.shared().wait_until_served(std::iter::once(LOCAL)));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert_eq!(
        worker.shared().limits.waiting().available_permits(),
        MAX_WAITING - 4,
        "each of them waits, and is counted"
    );
    worker.serve(map).await;
    assert!(waiting.as_mut().now_or_never().is_some(), "the notification ends the wait, no timer does");
    assert!(matches!(write.await, Answer::Outcome(_)));
    assert!(read.await.is_ok());
    assert_eq!(outcome.await.unwrap().outcome, Some(v1::get_outcome_response::Outcome::NeverExecuted(true)));
    assert_eq!(worker.shared().limits.waiting().available_permits(), MAX_WAITING);
}

#[tokio::test(start_paused = true)]
async fn a_partition_that_is_served_after_its_assignment_is_noticed_without_a_timer() {
    let worker = SingleWorker::start().await;
    let shared = worker.shared();
    let (health, _service) = tonic_health::server::health_reporter();
    let watching = tokio::spawn(follow_served(Arc::clone(shared), health));
    let map = worker.map(1, 1);
    worker.publish(map.clone());
    // On a paused clock it ends once the assignment was noticed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(shared.metrics.promotions.get(), 0);
    worker.serve(map).await;
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while shared.metrics.promotions.get() == 0 {
        assert!(std::time::Instant::now() < deadline, "the store publishes that it serves the partition");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    watching.abort();
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_at_most_for_a_lease_and_only_during_activation() {
    let worker = SingleWorker::start().await;
    let shared = worker.shared();
    let ends_at_once = |partition| shared.wait_until_served(std::iter::once(partition)).now_or_never().is_some();
    assert!(ends_at_once(LOCAL), "no map assigns the partition");
    worker.publish(worker.map(1, 1));
    assert!(ends_at_once(REMOTE), "the partition is assigned to another worker");

    let begun = Instant::now();
    shared.wait_until_served(std::iter::once(LOCAL)).await;
    assert!(begun.elapsed() >= MAX_WAIT && begun.elapsed() < MAX_WAIT * 2, "{:?} on a paused clock", begun.elapsed());

    let mut reassigned = pin!(shared.wait_until_served(std::iter::once(LOCAL)));
    assert!(reassigned.as_mut().now_or_never().is_none());
    let elsewhere =
        PartitionMap { partitions: worker.map(2, 1).partitions.into_iter().rev().collect(), ..worker.map(2, 1) };
    worker.publish(elsewhere);
    let begun = Instant::now();
    reassigned.await;
    assert!(begun.elapsed() < MAX_WAIT, "the partition was assigned to another worker");

    worker.publish(worker.map(3, 1));
    let all = shared.limits.waiting().try_acquire_many(MAX_WAITING as u32).unwrap();
    assert!(ends_at_once(LOCAL), "a request beyond the limit does not wait");
    drop(all);
    let mut stopped = pin!(shared.wait_until_served(std::iter::once(LOCAL)));
    assert!(stopped.as_mut().now_or_never().is_none());
    shared.lifecycle.begin_stop();
    assert!(stopped.as_mut().now_or_never().is_some(), "a stopping worker keeps no requests");
    assert!(ends_at_once(LOCAL));
}

#[tokio::test]
async fn a_forwarded_call_ends_once_the_map_names_another_primary() {
    let worker = SingleWorker::start().await;
    // Accepts connections and never responds.
    let unresponsive = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = unresponsive.local_addr().unwrap().to_string();
    worker.receive(&worker.map(1, 1), &at);
    let session = v1::Session { opened_ms: worker.shared().setup.clock.now_ms(), random: 3 };
    let request = v1::GetOutcomeRequest { session: Some(session), partition: REMOTE.0, seq: 1 };
    let moving = async {
        let connection = unresponsive.accept().await.unwrap();
        worker.receive(&worker.map(2, 2), &at);
        connection
    };
    let (write, outcome, _connection) = tokio::join!(worker.decay(REMOTE), worker.memories.outcome(request), moving);
    let Answer::Problem(write) = write else { panic!("no worker executed it: {write:?}") };
    for problem in [write, outcome.unwrap_err()] {
        assert_eq!(problem.kind(), ProblemKind::Unavailable, "it may have been executed");
        assert_eq!(problem.message, "worker 1 did not respond, and another worker is primary now");
    }
}

#[tokio::test(start_paused = true)]
async fn a_map_query_waits_for_a_newer_map() {
    let worker = SingleWorker::start().await;
    let unknown = worker.memories.get_partition_map(Request::new(GetPartitionMapRequest::default())).await.unwrap_err();
    assert_eq!(v1::Problem::from_status(&unknown).unwrap().kind(), ProblemKind::Unavailable);
    worker.publish(worker.map(1, 1));
    assert_eq!(worker.version(0, 60_000).now_or_never(), Some(1), "the client's map is older");
    assert_eq!(worker.version(1, 0).now_or_never(), Some(1), "the client does not wait");

    let mut pending = pin!(worker.version(1, 60_000));
    assert_eq!(pending.as_mut().now_or_never(), None);
    worker.publish(worker.map(2, 1));
    assert_eq!(pending.as_mut().now_or_never(), Some(2));
    let mut pending = pin!(worker.version(2, 60_000));
    assert_eq!(pending.as_mut().now_or_never(), None);
    worker.shared().membership.modify_view(|view| view.members.push(v1::MemberEntry::default()));
    assert_eq!(pending.as_mut().now_or_never(), Some(2), "changed members end the wait");

    for (wait_ms, most) in [(200, Duration::from_millis(200)), (60_000, MAX_MAP_WAIT)] {
        let begun = Instant::now();
        assert_eq!(worker.version(2, wait_ms).await, 2, "the client's own version");
        let waited = begun.elapsed();
        assert!(waited >= most && waited < most * 2, "{waited:?} on a paused clock");
    }
    let ask = |known_stamp| {
        let request = Request::new(GetPartitionMapRequest { newer_than: 0, wait_ms: 60_000, known_stamp });
        async { worker.memories.get_partition_map(request).await.unwrap().into_inner() }
    };
    let first = ask(0).now_or_never().expect("the client's map is older");
    let mut pending = pin!(ask(first.stamp));
    assert_eq!(pending.as_mut().now_or_never(), None);
    worker.shared().membership.modify_view(|_| {});
    assert_eq!(pending.as_mut().now_or_never(), None, "an equal map does not end the wait");
    worker.shared().membership.modify_view(|view| view.members[0].alive ^= true);
    let other = pending.as_mut().now_or_never().expect("a changed member ends the wait");
    assert!(other.stamp != first.stamp && other.version == first.version);

    let mut pending = pin!(worker.version(2, 60_000));
    assert_eq!(pending.as_mut().now_or_never(), None);
    worker.shared().lifecycle.begin_stop();
    assert_eq!(pending.as_mut().now_or_never(), Some(2));
}
