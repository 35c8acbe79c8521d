//! Requests, and questions for the map, that meet a change of the map: each wait ends by what it waits for, seen with the clock
//! standing still.

use super::{HELD, HOLD};
use crate::options::{Listen, Options};
use crate::part::Body;
use crate::service::{Memories, NEWS_MOST, Plane};
use crate::shared::Shared;
use crate::worker::Worker;
use crate::write::Asked;
use engram_api::LearnerClusterSpec;
use engram_cluster::{Entry, PartitionMap};
use engram_coordinator::wire;
use engram_memory::{ClusterId, Incarnation, Member, MemoryId, Ordinal, PartitionId, StoreId, partition_of};
use engram_proto::v1::memory_service_server::MemoryService as _;
use engram_proto::v1::partition_reply::Result as Answer;
use engram_proto::v1::{self, BeatReply, PartitionMapRequest, ProblemKind};
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
const HERE: PartitionId = PartitionId(0);
const THERE: PartitionId = PartitionId(1);

/// Worker 0 of three, with an open store and no map.
struct Lone {
    memories: Memories,
    _folder: TempDir,
}

impl Lone {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let spec = LearnerClusterSpec { partitions: 2, replication_factor: 1, ..LearnerClusterSpec::with_workers(3) };
        let options = Options {
            cluster: CLUSTER,
            cluster_name: "test".into(),
            ordinal: 0,
            state_dir: folder.path().to_owned(),
            listen: Listen::anywhere(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            advertise_host: None,
            coordinators: Vec::new(),
            peer_detours: BTreeMap::new(),
            map_place: None,
            threads: Some(1),
            machine_workers: None,
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

    /// Partition 0 is led here, partition 1 at the place given.
    fn map(&self, version: u64, there: u32) -> PartitionMap {
        let other = Member { ordinal: Ordinal(there), store: StoreId(9), incarnation: Incarnation(1) };
        let partitions = [self.shared().member, other].map(|member| Entry::first(vec![member])).to_vec();
        PartitionMap { cluster: CLUSTER, version, partitions }
    }

    /// Shows the services a map that the store is not told of: what it gives to this worker is on its way for as long as a test likes.
    fn foresee(&self, map: PartitionMap) {
        let partitions = self.shared().partitions();
        assert!(self.shared().view.send_if_modified(|view| view.take_map(map, CLUSTER, partitions)));
    }

    /// Hears a map and where worker 1 is, as a coordinator tells it.
    fn hear(&self, map: &PartitionMap, at: &str) {
        let member = |ordinal| v1::MemberEntry { ordinal, peer_address: at.to_owned(), ..v1::MemberEntry::default() };
        let members = (0..3).map(member).collect();
        self.shared()
            .hear("coordinator", BeatReply { map: Some(wire::map_to_proto(map)), members, ..BeatReply::default() });
    }

    /// Hears a map that the store takes, and returns when it serves its partition. No timer fires meanwhile.
    async fn serve(&self, map: PartitionMap) {
        self.shared().engine.learn(Arc::new(map));
        while self.shared().engine.position(HERE).is_none() {
            tokio::task::yield_now().await;
        }
    }

    async fn decay(&self, partition: PartitionId) -> Answer {
        let asked = Asked { partition: Some(partition.0), seq: 0, body: Body::Decay(0.5) };
        let mut reply = self.memories.write(None, vec![asked]).await.unwrap();
        reply.parts.remove(0).result.unwrap()
    }

    async fn version(&self, newer_than: u64, wait_ms: u32) -> u64 {
        let asked = Request::new(PartitionMapRequest { newer_than, wait_ms, known: 0 });
        self.memories.get_partition_map(asked).await.unwrap().into_inner().version
    }
}

#[tokio::test(start_paused = true)]
async fn a_successor_keeps_requests_until_it_serves_and_then_answers_them() {
    let lone = Lone::start().await;
    let map = lone.map(1, 1);
    lone.foresee(map.clone());
    let id = (0..).find(|id| partition_of(MemoryId(*id), 2) == HERE).unwrap();
    let mut write = pin!(lone.decay(HERE));
    let mut read = pin!(lone.memories.get(v1::GetMemoriesRequest { ids: vec![id], ..Default::default() }));
    let session = v1::Session { opened_ms: lone.shared().clock.now_ms(), random: 3 };
    let mut fate =
        pin!(lone.memories.outcome(v1::GetOutcomeRequest { session: Some(session), partition: HERE.0, seq: 1 }));
    assert!(write.as_mut().now_or_never().is_none(), "it is not refused");
    assert!(read.as_mut().now_or_never().is_none());
    assert!(fate.as_mut().now_or_never().is_none());
    assert_eq!(lone.shared().held.available_permits(), HELD - 3, "each of them is kept, and counted");
    lone.serve(map).await;
    assert!(matches!(write.await, Answer::Outcome(_)));
    assert!(read.await.is_ok());
    assert_eq!(fate.await.unwrap().answer, Some(v1::get_outcome_reply::Answer::Never(true)));
    assert_eq!(lone.shared().held.available_permits(), HELD);
}

#[tokio::test(start_paused = true)]
async fn a_request_is_kept_no_longer_than_a_lease_and_not_where_nothing_comes() {
    let lone = Lone::start().await;
    let shared = lone.shared();
    let ends_at_once = |partition| shared.taken_over(std::iter::once(partition)).now_or_never().is_some();
    assert!(ends_at_once(HERE), "no map gives it to anybody");
    lone.foresee(lone.map(1, 1));
    assert!(ends_at_once(THERE), "it comes to another");

    let begun = Instant::now();
    shared.taken_over(std::iter::once(HERE)).await;
    assert!(
        begun.elapsed() >= HOLD && begun.elapsed() < HOLD * 2,
        "{:?} of a clock that stands still",
        begun.elapsed()
    );

    let mut taken_away = pin!(shared.taken_over(std::iter::once(HERE)));
    assert!(taken_away.as_mut().now_or_never().is_none());
    let elsewhere =
        PartitionMap { partitions: lone.map(2, 1).partitions.into_iter().rev().collect(), ..lone.map(2, 1) };
    lone.foresee(elsewhere);
    let begun = Instant::now();
    taken_away.await;
    assert!(begun.elapsed() < HOLD, "it comes here no more");

    lone.foresee(lone.map(3, 1));
    let all = shared.held.try_acquire_many(HELD as u32).unwrap();
    assert!(ends_at_once(HERE), "one more that waits is one too many");
    drop(all);
    let mut stopped = pin!(shared.taken_over(std::iter::once(HERE)));
    assert!(stopped.as_mut().now_or_never().is_none());
    shared.stopping.send_replace(true);
    assert!(stopped.as_mut().now_or_never().is_some(), "a worker that stops keeps nobody");
    assert!(ends_at_once(HERE));
}

#[tokio::test]
async fn what_was_passed_on_to_an_owner_that_hangs_comes_back_when_another_has_taken_over() {
    let lone = Lone::start().await;
    // It takes connections, and never says a word.
    let hangs = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = hangs.local_addr().unwrap().to_string();
    lone.hear(&lone.map(1, 1), &at);
    let session = v1::Session { opened_ms: lone.shared().clock.now_ms(), random: 3 };
    let asked = v1::GetOutcomeRequest { session: Some(session), partition: THERE.0, seq: 1 };
    let moving = async {
        let connection = hangs.accept().await.unwrap();
        lone.hear(&lone.map(2, 2), &at);
        connection
    };
    let (write, fate, _connection) = tokio::join!(lone.decay(THERE), lone.memories.outcome(asked), moving);
    let Answer::Problem(write) = write else { panic!("nobody executed it: {write:?}") };
    for problem in [write, fate.unwrap_err()] {
        assert_eq!(problem.kind(), ProblemKind::Unavailable, "it may have been executed");
        assert_eq!(problem.message, "worker 1 did not answer, and another has taken over from it");
    }
}

#[tokio::test(start_paused = true)]
async fn who_asks_for_a_newer_map_is_answered_when_there_is_one_and_not_before() {
    let lone = Lone::start().await;
    let unknown = lone.memories.get_partition_map(Request::new(PartitionMapRequest::default())).await.unwrap_err();
    assert_eq!(v1::Problem::from_status(&unknown).unwrap().kind(), ProblemKind::Unavailable);
    lone.foresee(lone.map(1, 1));
    assert_eq!(lone.version(0, 60_000).now_or_never(), Some(1), "it knows less");
    assert_eq!(lone.version(1, 0).now_or_never(), Some(1), "it does not wait");

    let mut waits = pin!(lone.version(1, 60_000));
    assert_eq!(waits.as_mut().now_or_never(), None);
    lone.foresee(lone.map(2, 1));
    assert_eq!(waits.as_mut().now_or_never(), Some(2));
    let mut waits = pin!(lone.version(2, 60_000));
    assert_eq!(waits.as_mut().now_or_never(), None);
    lone.shared().view.send_modify(|view| view.members.push(v1::MemberEntry::default()));
    assert_eq!(waits.as_mut().now_or_never(), Some(2), "other members are news");

    for (wait_ms, most) in [(200, Duration::from_millis(200)), (60_000, NEWS_MOST)] {
        let begun = Instant::now();
        assert_eq!(lone.version(2, wait_ms).await, 2, "the one it knows");
        let waited = begun.elapsed();
        assert!(waited >= most && waited < most * 2, "{waited:?} of a clock that stands still");
    }
    let ask = |known| {
        let asked = Request::new(PartitionMapRequest { newer_than: 0, wait_ms: 60_000, known });
        async { lone.memories.get_partition_map(asked).await.unwrap().into_inner() }
    };
    let told = ask(0).now_or_never().expect("it knows less");
    let mut waits = pin!(ask(told.stamp));
    assert_eq!(waits.as_mut().now_or_never(), None);
    lone.shared().view.send_modify(|_| {});
    assert_eq!(waits.as_mut().now_or_never(), None, "what is said again is no news");
    lone.shared().view.send_modify(|view| view.members[0].alive ^= true);
    let other = waits.as_mut().now_or_never().expect("another member is news");
    assert!(other.stamp != told.stamp && other.version == told.version);

    let mut waits = pin!(lone.version(2, 60_000));
    assert_eq!(waits.as_mut().now_or_never(), None);
    lone.shared().stopping.send_replace(true);
    assert_eq!(waits.as_mut().now_or_never(), Some(2));
}
