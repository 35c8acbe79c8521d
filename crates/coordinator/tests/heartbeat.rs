//! A coordinator over real sockets: what workers receive, and when.
#![allow(clippy::unwrap_used, reason = "a test whose setup fails has failed")]

use engram_cluster::rebuild::force_entry;
use engram_cluster::{Change, Entry, PartitionMap};
use engram_coordinator::{Coordinator, Options};
use engram_mapstore::{EntryOverride, FileStore, MapOverride, MapStore, MemoryStore, OverrideKind};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, StoreId, Term};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_testing::map_store::{FaultRates, FaultyMapStore};
use engram_wire as wire;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

const CLUSTER: ClusterId = ClusterId(77);
const DEADLINE: Duration = Duration::from_secs(20);

struct Running {
    client: CoordinatorServiceClient<Channel>,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<()>,
}

async fn start(folder: &Path) -> Running {
    let store = Arc::new(FileStore::open(folder, CLUSTER).unwrap());
    start_with(Options::new(CLUSTER, "test", 8, 2), store).await
}

/// Options of a cluster with two replicas.
fn pairs(workers: u32) -> Options {
    Options { replication_factor: 2, ..Options::new(CLUSTER, "test", 8, workers) }
}

async fn start_with(options: Options, store: Arc<dyn MapStore>) -> Running {
    serve(Coordinator::build(options, store).unwrap()).await
}

async fn serve(coordinator: Coordinator) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let ended = tokio::spawn(async move {
        coordinator.run(listener, async { drop(stopped.await) }).await.unwrap();
    });
    let client = CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap();
    Running { client, stop, ended }
}

impl Running {
    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(DEADLINE, self.ended).await.unwrap().unwrap();
    }

    /// Proposes changes of entries as they are in `map`.
    async fn propose(&self, by: &Member, map: &PartitionMap, changes: Vec<(usize, Change)>) {
        let proposal = |(partition, change): (usize, Change)| {
            let expected = map.partitions[partition].expectation();
            v1::MapChange {
                partition: partition as u32,
                term: expected.term.0,
                activated: expected.activated,
                solo_safe: expected.solo_safe,
                change: wire::change_to_proto(&change),
            }
        };
        let request = v1::ProposeMapChangesRequest {
            cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
            member: Some(wire::member_id_to_proto(by)),
            proposals: changes.into_iter().map(proposal).collect(),
        };
        self.client.clone().propose_map_changes(request).await.unwrap();
    }

    async fn order(&self, workers: u32, drain: &[u32], undrain: &[u32]) -> Result<v1::SetGoalResponse, tonic::Status> {
        let cluster = CLUSTER.0.to_be_bytes().to_vec().into();
        let request = v1::SetGoalRequest { cluster, workers, drain: drain.to_vec(), undrain: undrain.to_vec() };
        self.client.clone().set_goal(request).await.map(tonic::Response::into_inner)
    }

    async fn died(&self, member: &Member) {
        let report = v1::ReportDeathRequest {
            cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
            ordinal: member.ordinal.0,
            incarnation: member.incarnation.0,
            ..v1::ReportDeathRequest::default()
        };
        self.client.clone().report_death(report).await.unwrap();
    }

    async fn status(&self) -> v1::ClusterStatus {
        self.client.clone().get_cluster_status(v1::GetClusterStatusRequest::default()).await.unwrap().into_inner()
    }
}

fn member(ordinal: u32, incarnation: u64) -> Member {
    Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 1), incarnation: Incarnation(incarnation) }
}

fn hello(cluster: ClusterId, member: &Member) -> v1::HeartbeatRequest {
    let hello = v1::Hello {
        cluster: cluster.0.to_be_bytes().to_vec().into(),
        member: Some(wire::member_id_to_proto(member)),
        protocol_min: 1,
        protocol_max: 1,
        client_address: format!("127.0.0.1:{}", 7000 + member.ordinal.0),
        ..v1::Hello::default()
    };
    v1::HeartbeatRequest { hello: Some(hello), ..v1::HeartbeatRequest::default() }
}

/// A worker's side of a heartbeat stream; dropping it ends it.
struct Stream {
    sender: tokio::task::JoinHandle<()>,
    replies: Streaming<v1::HeartbeatResponse>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.sender.abort();
    }
}

async fn connect(running: &Running, first: v1::HeartbeatRequest) -> Result<Stream, tonic::Status> {
    let (heartbeats, stream) = mpsc::channel(4);
    heartbeats.send(first).await.unwrap();
    let replies = running.client.clone().heartbeat(ReceiverStream::new(stream)).await?.into_inner();
    let sender = tokio::spawn(async move {
        while heartbeats.send(v1::HeartbeatRequest::default()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    Ok(Stream { sender, replies })
}

fn map_of(reply: &v1::HeartbeatResponse) -> PartitionMap {
    reply.map.as_ref().map(|map| wire::map_from_proto(map).unwrap()).expect("there is a map")
}

/// Connects workers 0 to `workers` - 1 of a cluster with two replicas, and returns the map that they form.
async fn form(running: &Running, workers: u32) -> (Vec<Stream>, PartitionMap) {
    let mut streams = Vec::new();
    for ordinal in 0..workers {
        streams.push(connect(running, hello(CLUSTER, &member(ordinal, 1))).await.unwrap());
    }
    let formed = streams[0].until(|reply| reply.map.is_some()).await;
    let map = map_of(&formed);
    (streams, map)
}

fn partitions_of(map: &PartitionMap, ordinal: u32) -> Vec<usize> {
    (0..map.partitions.len()).filter(|&partition| map.partitions[partition].primary == Ordinal(ordinal)).collect()
}

/// The other in-sync member.
fn backup(entry: &Entry) -> Member {
    *entry.isr.iter().find(|member| member.ordinal != entry.primary).unwrap()
}

impl Stream {
    /// Reads views until `wanted` holds.
    async fn until(&mut self, wanted: impl Fn(&v1::HeartbeatResponse) -> bool) -> v1::HeartbeatResponse {
        let view = async {
            loop {
                let reply = self.replies.message().await.unwrap().expect("the stream continues");
                if wanted(&reply) {
                    return reply;
                }
            }
        };
        timeout(DEADLINE, view).await.expect("the view arrives within the deadline")
    }
}

fn served(reply: &v1::HeartbeatResponse, member: &Member) -> usize {
    let map = reply.map.as_ref().map(|map| wire::map_from_proto(map).unwrap());
    map.map_or(0, |map| map.served_by(member).count())
}

#[tokio::test]
async fn cluster_forms_and_survives_restarts_of_coordinator_and_worker() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(folder.path()).await;
    let mut first = connect(&running, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let alone = first.until(|_| true).await;
    assert!(alone.map.is_none(), "one of two workers forms no cluster");
    let mut second = connect(&running, hello(CLUSTER, &member(1, 1))).await.unwrap();
    let formed = first.until(|reply| reply.map.is_some()).await;
    assert_eq!(served(&formed, &member(0, 1)) + served(&formed, &member(1, 1)), 8);
    assert_eq!(formed.members.len(), 2);
    second.until(|reply| reply.map.is_some()).await;

    drop(second);
    first.until(|reply| reply.members.iter().any(|member| member.ordinal == 1 && !member.alive)).await;
    let mut back = connect(&running, hello(CLUSTER, &member(1, 2))).await.unwrap();
    let resumed = back.until(|reply| served(reply, &member(1, 2)) > 0).await;
    assert_eq!(served(&resumed, &member(1, 2)), served(&formed, &member(1, 1)));
    assert_eq!(resumed.map.as_ref().unwrap().version, 2, "one write for all partitions of the worker");

    running.stop().await;
    let again = start(folder.path()).await;
    let mut third = connect(&again, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let read = third.until(|reply| reply.map.is_some()).await;
    assert_eq!(read.map, resumed.map, "the map outlives its coordinator");
}

#[tokio::test]
async fn foreign_workers_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(folder.path()).await;
    let rejection = |first: v1::HeartbeatRequest| async {
        match connect(&running, first).await {
            Err(status) => status.message().to_owned(),
            Ok(_) => panic!("a foreign worker was accepted"),
        }
    };
    let other = rejection(hello(ClusterId(78), &member(0, 1))).await;
    assert!(other.contains(&CLUSTER.to_string()) && other.contains(&ClusterId(78).to_string()), "{other}");
    let ninth = rejection(hello(CLUSTER, &member(9, 1))).await;
    assert!(ninth.contains("worker 9 does not belong to a cluster of 2 workers"), "{ninth}");
    let mut newer = hello(CLUSTER, &member(0, 1));
    let protocol = newer.hello.as_mut().unwrap();
    (protocol.protocol_min, protocol.protocol_max) = (2, 3);
    assert!(rejection(newer).await.contains("speaks 2 to 3"));

    // A later version that still speaks the older protocol is accepted, as in a rolling upgrade.
    let mut later = hello(CLUSTER, &member(0, 5));
    later.hello.as_mut().unwrap().protocol_max = 2;
    let _living = connect(&running, later).await.unwrap();
    let older = rejection(hello(CLUSTER, &member(0, 4))).await;
    assert!(older.contains("newer process"), "{older}");
}

#[tokio::test]
async fn failover_by_proof_takes_one_write_for_all_partitions_of_a_worker() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(3), Arc::clone(&store) as _).await;
    let (mut streams, map) = form(&running, 3).await;
    let moved = partitions_of(&map, 1);
    assert!(!moved.is_empty());
    running.died(&member(1, 9)).await;
    running.died(&member(1, 1)).await;
    let view = streams[0].until(|reply| map_of(reply).version > map.version).await;
    let after = map_of(&view);
    assert_eq!(after.version, map.version + 1);
    assert_eq!(partitions_of(&after, 1), [0_usize; 0]);
    for partition in moved {
        let (old, new) = (&map.partitions[partition], &after.partitions[partition]);
        assert_eq!(new.primary, backup(old).ordinal);
        assert!(!new.activated && new.prev == old.isr, "the new primary has to activate first");
    }
    assert!(view.members.iter().any(|member| member.ordinal == 1 && !member.alive));
    let status = running.status().await;
    assert!(
        status.conditions.iter().any(|why| why.contains("worker 1 sends no heartbeats")),
        "{:?}",
        status.conditions
    );
    assert_eq!(status.replication_factor, 2);
}

#[tokio::test]
async fn one_of_racing_proposals_wins_and_stale_ones_are_dropped() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(3), Arc::clone(&store) as _).await;
    let (mut streams, map) = form(&running, 3).await;
    let primary = member(map.partitions[0].primary.0, 1);
    let leaver = backup(&map.partitions[0]).ordinal;
    let remove = Change::Remove { primary, leaver };
    let successor = backup(&map.partitions[0]);
    let promote = Change::Promote { primary: successor, isr: vec![successor.ordinal] };
    // The primary shrinks the set, the backup proposes its promotion: the primary is alive, so it stays.
    running.propose(&successor, &map, vec![(0, promote.clone())]).await;
    running.propose(&primary, &map, vec![(0, remove.clone())]).await;
    let view = streams[0].until(|reply| map_of(reply).partitions[0].term > map.partitions[0].term).await;
    let shrunk = map_of(&view);
    assert_eq!(shrunk.partitions[0].isr, [primary]);

    // Both again, based on the old entry: no effect. A valid proposal sent after them shows when they were handled.
    running.propose(&primary, &map, vec![(0, remove)]).await;
    running.propose(&successor, &map, vec![(0, promote)]).await;
    let other = partitions_of(&map, primary.ordinal.0).into_iter().find(|&partition| partition != 0).unwrap();
    let leaver = backup(&map.partitions[other]).ordinal;
    running.propose(&primary, &shrunk, vec![(other, Change::Remove { primary, leaver })]).await;
    let view = streams[0].until(|reply| map_of(reply).partitions[other].isr.len() == 1).await;
    let entry = &map_of(&view).partitions[0];
    assert_eq!((entry.term, entry.primary), (shrunk.partitions[0].term, primary.ordinal));

    let missing = v1::ProposeMapChangesRequest {
        cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
        member: Some(wire::member_id_to_proto(&primary)),
        proposals: vec![v1::MapChange { partition: 8, ..v1::MapChange::default() }],
    };
    let refused = running.client.clone().propose_map_changes(missing).await.unwrap_err();
    assert!(refused.message().contains("partition 8 does not exist: there are 8"), "{refused}");
}

#[tokio::test]
async fn restarted_coordinator_suspects_no_worker_it_has_not_seen() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(2), Arc::clone(&store) as _).await;
    let (streams, map) = form(&running, 2).await;
    drop(streams);
    running.stop().await;

    let again = start_with(pairs(2), Arc::clone(&store) as _).await;
    let mut first = connect(&again, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let shrink = partitions_of(&map, 0)[0];
    let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
    again.propose(&member(0, 1), &map, vec![(shrink, change)]).await;
    let view = first.until(|reply| map_of(reply).version > map.version).await;
    let after = map_of(&view);
    for (partition, (old, new)) in map.partitions.iter().zip(&after.partitions).enumerate() {
        assert_eq!(old == new, partition != shrink, "only the proposal is applied");
    }
    let status = again.status().await;
    assert!(status.conditions.iter().any(|why| why.contains("no heartbeat from worker 1")), "{:?}", status.conditions);
    // Its new process is promoted at once.
    let mut back = connect(&again, hello(CLUSTER, &member(1, 2))).await.unwrap();
    let resumed = back.until(|reply| served(reply, &member(1, 2)) > 0).await;
    assert_eq!(served(&resumed, &member(1, 2)), partitions_of(&map, 1).len());
}

#[tokio::test]
async fn orders_survive_a_restart_and_errors_name_what_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let store = || Arc::new(FileStore::open(folder.path(), CLUSTER).unwrap());
    let running = start_with(pairs(3), store()).await;
    let (mut streams, map) = form(&running, 3).await;
    for (workers, drain, undrain, why) in [
        (1, &[][..], &[][..], "1 cannot hold 2 replicas"),
        (0, &[7], &[], "worker 7 does not exist: there are 3"),
        (0, &[1], &[1], "worker 1 cannot be drained and undrained"),
    ] {
        let refused = running.order(workers, drain, undrain).await.unwrap_err();
        assert!(refused.message().contains(why), "{refused}");
    }
    let reply = running.order(4, &[1], &[]).await.unwrap();
    assert_eq!((reply.workers, reply.draining), (4, vec![1]));
    // Leadership moves to the other replicas through the primaries.
    let view = streams[0].until(|reply| !reply.leadership_transfers.is_empty()).await;
    for order in &view.leadership_transfers {
        let entry = &map.partitions[order.partition as usize];
        assert!(entry.primary == Ordinal(1) && Ordinal(order.to) == backup(entry).ordinal);
    }
    assert_eq!(view.leadership_transfers.len(), partitions_of(&map, 1).len());
    drop(streams);
    running.stop().await;

    let again = start_with(pairs(3), store()).await;
    let status = again.status().await;
    assert_eq!((status.expected_workers, status.draining), (4, vec![1]));
    assert!(connect(&again, hello(CLUSTER, &member(3, 1))).await.is_ok(), "a fourth worker belongs to it");
    let reply = again.order(0, &[], &[1]).await.unwrap();
    assert_eq!((reply.workers, reply.draining), (4, vec![]));
    again.stop().await;
    // A change of the manifest wins.
    let edited = start_with(pairs(5), store()).await;
    assert_eq!(edited.status().await.expected_workers, 5);
}

#[tokio::test]
async fn map_store_faults_delay_changes_and_lose_none() {
    for seed in 0..4 {
        let members = || vec![member(0, 1), member(1, 1)];
        let map = PartitionMap { cluster: CLUSTER, version: 0, partitions: vec![Entry::first(members()); 8] };
        let store = Arc::new(FaultyMapStore::new(MemoryStore::default(), seed, FaultRates::ALL));
        let map = store.inner().compare_and_swap(None, map).unwrap();
        // A coordinator that cannot read the map does not start.
        let coordinator = (0..100).find_map(|_| Coordinator::build(pairs(2), Arc::clone(&store) as _).ok());
        let running = serve(coordinator.expect("an outage ends")).await;
        let mut streams = Vec::new();
        for ordinal in 0..2 {
            streams.push(connect(&running, hello(CLUSTER, &member(ordinal, 1))).await.unwrap());
        }
        for partition in 0..8 {
            let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
            running.propose(&member(0, 1), &map, vec![(partition, change)]).await;
        }
        let done = |map: &PartitionMap| map.partitions.iter().all(|entry| entry.term.0 == 2 && entry.isr.len() == 1);
        let view = streams[0].until(|reply| done(&map_of(reply))).await;
        assert!(done(&store.inner().get().unwrap().unwrap()), "seed {seed}: the published map is the stored one");
        drop(view);
        running.stop().await;
    }
}

#[tokio::test]
async fn map_written_by_another_principal_is_adopted_and_its_order_reported() {
    let store = Arc::new(MemoryStore::default());
    let options = Options { executes_orders: false, ..Options::new(CLUSTER, "test", 8, 2) };
    let running = start_with(options, Arc::clone(&store) as Arc<dyn MapStore>).await;
    let (mut streams, map) = form(&running, 2).await;
    let before = map.partitions[3].clone();
    let after = force_entry(Some(&before), &member(1 - before.primary.0, 1), Term(40));
    let step =
        EntryOverride { partition: PartitionId(3), before: Some(before), after: after.clone(), lost: "all".into() };
    let order = MapOverride::now(OverrideKind::ForcePromote, "ann", "both disks burnt", vec![step.clone()]);
    order.apply(&*store, |there| step.apply_to(there)).unwrap();

    streams[0].until(|reply| reply.map.as_ref().is_some_and(|map| map.partitions[3].term == 41)).await;
    let orders = loop {
        let status = running.status().await;
        if !status.overrides.is_empty() {
            break status.overrides;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(
        (orders.len(), orders[0].requested_by.as_str(), orders[0].reason.as_str()),
        (1, "ann", "both disks burnt")
    );
    let reported = engram_coordinator::wire::step_from_proto(&orders[0].steps[0]).unwrap();
    assert_eq!(reported, step, "as recorded");
    running.stop().await;
}
