//! A coordinator over real sockets: what workers are told, and when.
#![allow(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

use engram_cluster::rebuild::forced;
use engram_cluster::{Change, Entry, PartitionMap};
use engram_coordinator::{Coordinator, Options, wire};
use engram_mapstore::{FileStore, MapStore, MemoryStore, Order, Step, What};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, StoreId, Term};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_testing::map_store::{Faults, Faulty};
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

/// A coordinator of a cluster that keeps two copies.
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

    /// Asks for changes of entries as `map` has them.
    async fn propose(&self, by: &Member, map: &PartitionMap, changes: Vec<(usize, Change)>) {
        let proposal = |(partition, change): (usize, Change)| {
            let expected = map.partitions[partition].expected();
            v1::MapProposal {
                partition: partition as u32,
                term: expected.term.0,
                activated: expected.activated,
                solo_safe: expected.solo_safe,
                change: wire::change_to_proto(&change),
            }
        };
        let request = v1::ProposeMapRequest {
            cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
            member: Some(wire::member_id_to_proto(by)),
            proposals: changes.into_iter().map(proposal).collect(),
        };
        self.client.clone().propose_map(request).await.unwrap();
    }

    async fn order(&self, workers: u32, drain: &[u32], undrain: &[u32]) -> Result<v1::SetGoalReply, tonic::Status> {
        let cluster = CLUSTER.0.to_be_bytes().to_vec().into();
        let request = v1::SetGoalRequest { cluster, workers, drain: drain.to_vec(), undrain: undrain.to_vec() };
        self.client.clone().set_goal(request).await.map(tonic::Response::into_inner)
    }

    async fn died(&self, member: &Member) {
        let report = v1::DeathReport {
            cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
            ordinal: member.ordinal.0,
            incarnation: member.incarnation.0,
            ..v1::DeathReport::default()
        };
        self.client.clone().report_death(report).await.unwrap();
    }

    async fn status(&self) -> v1::ClusterStatus {
        self.client.clone().get_cluster_status(v1::ClusterStatusRequest::default()).await.unwrap().into_inner()
    }
}

fn member(ordinal: u32, incarnation: u64) -> Member {
    Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 1), incarnation: Incarnation(incarnation) }
}

fn hello(cluster: ClusterId, member: &Member) -> v1::Beat {
    let hello = v1::Hello {
        cluster: cluster.0.to_be_bytes().to_vec().into(),
        member: Some(wire::member_id_to_proto(member)),
        protocol_min: 1,
        protocol_max: 1,
        client_address: format!("127.0.0.1:{}", 7000 + member.ordinal.0),
        ..v1::Hello::default()
    };
    v1::Beat { hello: Some(hello), ..v1::Beat::default() }
}

/// A worker's side of a heartbeat stream; dropping it ends it.
struct Stream {
    beating: tokio::task::JoinHandle<()>,
    replies: Streaming<v1::BeatReply>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.beating.abort();
    }
}

async fn beat(running: &Running, first: v1::Beat) -> Result<Stream, tonic::Status> {
    let (beats, stream) = mpsc::channel(4);
    beats.send(first).await.unwrap();
    let replies = running.client.clone().heartbeat(ReceiverStream::new(stream)).await?.into_inner();
    let beating = tokio::spawn(async move {
        while beats.send(v1::Beat::default()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    Ok(Stream { beating, replies })
}

fn map_of(reply: &v1::BeatReply) -> PartitionMap {
    reply.map.as_ref().map(|map| wire::map_from_proto(map).unwrap()).expect("there is a map")
}

/// Workers 0 to `workers` - 1 of a cluster that keeps two copies, and the map they form.
async fn form(running: &Running, workers: u32) -> (Vec<Stream>, PartitionMap) {
    let mut streams = Vec::new();
    for ordinal in 0..workers {
        streams.push(beat(running, hello(CLUSTER, &member(ordinal, 1))).await.unwrap());
    }
    let formed = streams[0].until(|reply| reply.map.is_some()).await;
    let map = map_of(&formed);
    (streams, map)
}

fn led_by(map: &PartitionMap, ordinal: u32) -> Vec<usize> {
    (0..map.partitions.len()).filter(|&partition| map.partitions[partition].primary == Ordinal(ordinal)).collect()
}

/// The other member in sync.
fn backup(entry: &Entry) -> Member {
    *entry.isr.iter().find(|member| member.ordinal != entry.primary).unwrap()
}

impl Stream {
    /// Reads what it is told until `wanted` holds.
    async fn until(&mut self, wanted: impl Fn(&v1::BeatReply) -> bool) -> v1::BeatReply {
        let told = async {
            loop {
                let reply = self.replies.message().await.unwrap().expect("the stream goes on");
                if wanted(&reply) {
                    return reply;
                }
            }
        };
        timeout(DEADLINE, told).await.expect("told within the deadline")
    }
}

fn served(reply: &v1::BeatReply, member: &Member) -> usize {
    let map = reply.map.as_ref().map(|map| wire::map_from_proto(map).unwrap());
    map.map_or(0, |map| map.served_by(member).count())
}

#[tokio::test]
async fn a_cluster_forms_survives_its_coordinator_and_takes_back_a_restarted_worker() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(folder.path()).await;
    let mut first = beat(&running, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let alone = first.until(|_| true).await;
    assert!(alone.map.is_none(), "one worker of two is no cluster yet");
    let mut second = beat(&running, hello(CLUSTER, &member(1, 1))).await.unwrap();
    let formed = first.until(|reply| reply.map.is_some()).await;
    assert_eq!(served(&formed, &member(0, 1)) + served(&formed, &member(1, 1)), 8);
    assert_eq!(formed.members.len(), 2);
    second.until(|reply| reply.map.is_some()).await;

    drop(second);
    first.until(|reply| reply.members.iter().any(|member| member.ordinal == 1 && !member.alive)).await;
    let mut back = beat(&running, hello(CLUSTER, &member(1, 2))).await.unwrap();
    let resumed = back.until(|reply| served(reply, &member(1, 2)) > 0).await;
    assert_eq!(served(&resumed, &member(1, 2)), served(&formed, &member(1, 1)));
    assert_eq!(resumed.map.as_ref().unwrap().version, 2, "one write for all partitions of the worker");

    running.stop().await;
    let again = start(folder.path()).await;
    let mut third = beat(&again, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let read = third.until(|reply| reply.map.is_some()).await;
    assert_eq!(read.map, resumed.map, "the map outlives its coordinator");
}

#[tokio::test]
async fn strangers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(folder.path()).await;
    let refused = |beat_: v1::Beat| async {
        match beat(&running, beat_).await {
            Err(status) => status.message().to_owned(),
            Ok(_) => panic!("a stranger was let in"),
        }
    };
    let other = refused(hello(ClusterId(78), &member(0, 1))).await;
    assert!(other.contains(&CLUSTER.to_string()) && other.contains(&ClusterId(78).to_string()), "{other}");
    let ninth = refused(hello(CLUSTER, &member(9, 1))).await;
    assert!(ninth.contains("worker 9 does not belong to a cluster of 2 workers"), "{ninth}");
    let mut newer = hello(CLUSTER, &member(0, 1));
    let protocol = newer.hello.as_mut().unwrap();
    (protocol.protocol_min, protocol.protocol_max) = (2, 3);
    assert!(refused(newer).await.contains("speaks 2 to 3"));

    // One of a later build that still speaks the older version is let in, as in a rolling upgrade.
    let mut later = hello(CLUSTER, &member(0, 5));
    later.hello.as_mut().unwrap().protocol_max = 2;
    let _living = beat(&running, later).await.unwrap();
    let older = refused(hello(CLUSTER, &member(0, 4))).await;
    assert!(older.contains("newer process"), "{older}");
}

#[tokio::test]
async fn failover_by_proof_takes_one_write_for_all_partitions_of_a_worker() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(3), Arc::clone(&store) as _).await;
    let (mut streams, map) = form(&running, 3).await;
    let moved = led_by(&map, 1);
    assert!(!moved.is_empty());
    running.died(&member(1, 9)).await;
    running.died(&member(1, 1)).await;
    let told = streams[0].until(|reply| map_of(reply).version > map.version).await;
    let after = map_of(&told);
    assert_eq!(after.version, map.version + 1);
    assert_eq!(led_by(&after, 1), [0_usize; 0]);
    for partition in moved {
        let (old, new) = (&map.partitions[partition], &after.partitions[partition]);
        assert_eq!(new.primary, backup(old).ordinal);
        assert!(!new.activated && new.prev == old.isr, "the new primary has to say that it serves");
    }
    assert!(told.members.iter().any(|member| member.ordinal == 1 && !member.alive));
    let status = running.status().await;
    assert!(status.conditions.iter().any(|why| why.contains("worker 1 does not answer")), "{:?}", status.conditions);
    assert_eq!(status.replication_factor, 2);
}

#[tokio::test]
async fn of_racing_proposals_one_wins_and_what_was_decided_on_an_older_entry_is_dropped() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(3), Arc::clone(&store) as _).await;
    let (mut streams, map) = form(&running, 3).await;
    let leader = member(map.partitions[0].primary.0, 1);
    let leaver = backup(&map.partitions[0]).ordinal;
    let remove = Change::Remove { primary: leader, leaver };
    let takes_over = backup(&map.partitions[0]);
    let promote = Change::Promote { primary: takes_over, isr: vec![takes_over.ordinal] };
    // The primary shrinks, the backup wants to lead: the primary is heard here, so it stays.
    running.propose(&takes_over, &map, vec![(0, promote.clone())]).await;
    running.propose(&leader, &map, vec![(0, remove.clone())]).await;
    let told = streams[0].until(|reply| map_of(reply).partitions[0].term > map.partitions[0].term).await;
    let shrunk = map_of(&told);
    assert_eq!(shrunk.partitions[0].isr, [leader]);

    // Both again, as of the entry that was: nothing. A proposal that fits, sent after them, tells when they were looked at.
    running.propose(&leader, &map, vec![(0, remove)]).await;
    running.propose(&takes_over, &map, vec![(0, promote)]).await;
    let other = led_by(&map, leader.ordinal.0).into_iter().find(|&partition| partition != 0).unwrap();
    let leaver = backup(&map.partitions[other]).ordinal;
    running.propose(&leader, &shrunk, vec![(other, Change::Remove { primary: leader, leaver })]).await;
    let told = streams[0].until(|reply| map_of(reply).partitions[other].isr.len() == 1).await;
    let entry = &map_of(&told).partitions[0];
    assert_eq!((entry.term, entry.primary), (shrunk.partitions[0].term, leader.ordinal));

    let missing = v1::ProposeMapRequest {
        cluster: CLUSTER.0.to_be_bytes().to_vec().into(),
        member: Some(wire::member_id_to_proto(&leader)),
        proposals: vec![v1::MapProposal { partition: 8, ..v1::MapProposal::default() }],
    };
    let refused = running.client.clone().propose_map(missing).await.unwrap_err();
    assert!(refused.message().contains("partition 8 does not exist: there are 8"), "{refused}");
}

#[tokio::test]
async fn a_restarted_coordinator_has_no_opinion_of_who_it_has_not_heard() {
    let store = Arc::new(MemoryStore::default());
    let running = start_with(pairs(2), Arc::clone(&store) as _).await;
    let (streams, map) = form(&running, 2).await;
    drop(streams);
    running.stop().await;

    let again = start_with(pairs(2), Arc::clone(&store) as _).await;
    let mut first = beat(&again, hello(CLUSTER, &member(0, 1))).await.unwrap();
    let shrink = led_by(&map, 0)[0];
    let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
    again.propose(&member(0, 1), &map, vec![(shrink, change)]).await;
    let told = first.until(|reply| map_of(reply).version > map.version).await;
    let after = map_of(&told);
    for (partition, (old, new)) in map.partitions.iter().zip(&after.partitions).enumerate() {
        assert_eq!(old == new, partition != shrink, "what was asked for is done, and nothing else");
    }
    let status = again.status().await;
    assert!(status.conditions.iter().any(|why| why.contains("worker 1 has not been heard")), "{:?}", status.conditions);
    // Its new process is elected without waiting for anything.
    let mut back = beat(&again, hello(CLUSTER, &member(1, 2))).await.unwrap();
    let resumed = back.until(|reply| served(reply, &member(1, 2)) > 0).await;
    assert_eq!(served(&resumed, &member(1, 2)), led_by(&map, 1).len());
}

#[tokio::test]
async fn orders_are_kept_over_a_restart_and_say_what_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let store = || Arc::new(FileStore::open(folder.path(), CLUSTER).unwrap());
    let running = start_with(pairs(3), store()).await;
    let (mut streams, map) = form(&running, 3).await;
    for (workers, drain, undrain, why) in [
        (1, &[][..], &[][..], "1 cannot hold 2 copies"),
        (0, &[7], &[], "worker 7 does not exist: there are 3"),
        (0, &[1], &[1], "worker 1 cannot be emptied and kept"),
    ] {
        let refused = running.order(workers, drain, undrain).await.unwrap_err();
        assert!(refused.message().contains(why), "{refused}");
    }
    let reply = running.order(4, &[1], &[]).await.unwrap();
    assert_eq!((reply.workers, reply.draining), (4, vec![1]));
    // What it leads goes to the other copies, by their primaries' own doing.
    let told = streams[0].until(|reply| !reply.hand_overs.is_empty()).await;
    for order in &told.hand_overs {
        let entry = &map.partitions[order.partition as usize];
        assert!(entry.primary == Ordinal(1) && Ordinal(order.to) == backup(entry).ordinal);
    }
    assert_eq!(told.hand_overs.len(), led_by(&map, 1).len());
    drop(streams);
    running.stop().await;

    let again = start_with(pairs(3), store()).await;
    let status = again.status().await;
    assert_eq!((status.expected_workers, status.draining), (4, vec![1]));
    assert!(beat(&again, hello(CLUSTER, &member(3, 1))).await.is_ok(), "a fourth worker belongs to it");
    let reply = again.order(0, &[], &[1]).await.unwrap();
    assert_eq!((reply.workers, reply.draining), (4, vec![]));
    again.stop().await;
    // The manifest says something new: that is what holds.
    let edited = start_with(pairs(5), store()).await;
    assert_eq!(edited.status().await.expected_workers, 5);
}

#[tokio::test]
async fn a_map_store_that_fails_in_every_way_delays_changes_and_loses_none() {
    for seed in 0..4 {
        let members = || vec![member(0, 1), member(1, 1)];
        let map = PartitionMap { cluster: CLUSTER, version: 0, partitions: vec![Entry::first(members()); 8] };
        let store = Arc::new(Faulty::new(MemoryStore::default(), seed, Faults::ALL));
        let map = store.inner().compare_and_swap(None, map).unwrap();
        // A coordinator that cannot read the map does not start.
        let coordinator = (0..100).find_map(|_| Coordinator::build(pairs(2), Arc::clone(&store) as _).ok());
        let running = serve(coordinator.expect("an outage ends")).await;
        let mut streams = Vec::new();
        for ordinal in 0..2 {
            streams.push(beat(&running, hello(CLUSTER, &member(ordinal, 1))).await.unwrap());
        }
        for partition in 0..8 {
            let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
            running.propose(&member(0, 1), &map, vec![(partition, change)]).await;
        }
        let done = |map: &PartitionMap| map.partitions.iter().all(|entry| entry.term.0 == 2 && entry.isr.len() == 1);
        let told = streams[0].until(|reply| done(&map_of(reply))).await;
        assert!(done(&store.inner().get().unwrap().unwrap()), "seed {seed}: what is told is what is kept");
        drop(told);
        running.stop().await;
    }
}

#[tokio::test]
async fn what_a_person_wrote_by_rights_of_their_own_is_gone_on_from_and_told() {
    let store = Arc::new(MemoryStore::default());
    let options = Options { carries_out_orders: false, ..Options::new(CLUSTER, "test", 8, 2) };
    let running = start_with(options, Arc::clone(&store) as Arc<dyn MapStore>).await;
    let (mut streams, map) = form(&running, 2).await;
    let before = map.partitions[3].clone();
    let after = forced(Some(&before), &member(1 - before.primary.0, 1), Term(40));
    let step = Step { partition: PartitionId(3), before: Some(before), after: after.clone(), lost: "all".into() };
    let order = Order::now(What::ForcePromote, "ann", "both disks burnt", vec![step.clone()]);
    order.carry_out(&*store, |there| step.taken(there)).unwrap();

    streams[0].until(|reply| reply.map.as_ref().is_some_and(|map| map.partitions[3].term == 41)).await;
    let orders = loop {
        let status = running.status().await;
        if !status.orders.is_empty() {
            break status.orders;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((orders.len(), orders[0].by.as_str(), orders[0].reason.as_str()), (1, "ann", "both disks burnt"));
    let told = wire::step_from_proto(&orders[0].steps[0]).unwrap();
    assert_eq!(told, step, "as it was written down");
    running.stop().await;
}
