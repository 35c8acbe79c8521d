//! A coordinator over real sockets: what workers are told, and when.
#![allow(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

use engram_coordinator::{Coordinator, Options, wire};
use engram_mapstore::FileStore;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
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
    let options = Options { cluster: CLUSTER, cluster_name: "test".into(), partitions: 8, workers: 2 };
    let store = Arc::new(FileStore::open(folder, CLUSTER).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let coordinator = Coordinator::build(options, store).unwrap();
    let ended = tokio::spawn(async move {
        coordinator.run(listener, async { drop(stopped.await) }).await.unwrap();
    });
    let client = CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap();
    Running { client, stop, ended }
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

/// A worker's side of a heartbeat stream; dropping `_beats` ends it.
struct Stream {
    _beats: mpsc::Sender<v1::Beat>,
    replies: Streaming<v1::BeatReply>,
}

async fn beat(running: &Running, first: v1::Beat) -> Result<Stream, tonic::Status> {
    let (beats, stream) = mpsc::channel(4);
    beats.send(first).await.unwrap();
    let replies = running.client.clone().heartbeat(ReceiverStream::new(stream)).await?.into_inner();
    Ok(Stream { _beats: beats, replies })
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

    running.stop.send(()).unwrap();
    timeout(DEADLINE, running.ended).await.unwrap().unwrap();
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

    let _living = beat(&running, hello(CLUSTER, &member(0, 5))).await.unwrap();
    let older = refused(hello(CLUSTER, &member(0, 4))).await;
    assert!(older.contains("newer process"), "{older}");
}
