//! Several clusters behind one listener.
#![allow(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

use engram_coordinator::{CLUSTER_METADATA, Coordinator, Host, Options, Surroundings};
use engram_mapstore::Goal;
use engram_mapstore::testing::Memory;
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

const DEADLINE: Duration = Duration::from_secs(20);

fn coordinator(cluster: u128, name: &str) -> Coordinator {
    Coordinator::build(Options::new(ClusterId(cluster), name, 4, 1), Arc::new(Memory::default())).unwrap()
}

fn beat(cluster: u128) -> v1::Beat {
    let member = v1::MemberId { ordinal: 0, store: 5u128.to_be_bytes().to_vec().into(), incarnation: 1 };
    let hello = v1::Hello {
        cluster: cluster.to_be_bytes().to_vec().into(),
        member: Some(member),
        protocol_min: 1,
        protocol_max: 1,
        ..v1::Hello::default()
    };
    v1::Beat { hello: Some(hello), ..v1::Beat::default() }
}

type Beats = (mpsc::Sender<v1::Beat>, Streaming<v1::BeatReply>);

async fn join(client: &CoordinatorServiceClient<Channel>, cluster: u128) -> Result<Beats, Status> {
    let (beats, outgoing) = mpsc::channel(4);
    beats.send(beat(cluster)).await.unwrap();
    let replies = client.clone().heartbeat(ReceiverStream::new(outgoing)).await?;
    Ok((beats, replies.into_inner()))
}

async fn status(
    client: &CoordinatorServiceClient<Channel>,
    cluster: Option<u128>,
) -> Result<v1::ClusterStatus, Status> {
    let mut request = Request::new(v1::ClusterStatusRequest {});
    if let Some(cluster) = cluster {
        request.metadata_mut().insert(CLUSTER_METADATA, ClusterId(cluster).to_string().parse().unwrap());
    }
    Ok(client.clone().get_cluster_status(request).await?.into_inner())
}

#[tokio::test]
async fn each_message_reaches_the_coordinator_of_its_cluster_and_one_that_is_removed_lets_its_workers_go() {
    let host = Host::default();
    host.add(coordinator(1, "words"));
    let other = host.add(coordinator(2, "books"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(host.clone().run(listener, async { drop(stopped.await) }));
    let client = CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap();

    let (_beats, mut replies) = join(&client, 2).await.unwrap();
    let map = loop {
        let reply = timeout(DEADLINE, replies.message()).await.unwrap().unwrap().unwrap();
        if let Some(map) = reply.map {
            break map;
        }
    };
    assert_eq!(map.cluster, 2u128.to_be_bytes().to_vec());
    assert_eq!(other.report().map.unwrap().cluster, ClusterId(2));
    assert_eq!(status(&client, Some(1)).await.unwrap().map, None, "the other has heard nobody");
    assert_eq!(status(&client, Some(2)).await.unwrap().cluster_name, "books");
    let vague = status(&client, None).await.unwrap_err();
    assert_eq!((vague.code(), vague.message().contains(CLUSTER_METADATA)), (Code::InvalidArgument, true));
    assert_eq!(join(&client, 3).await.unwrap_err().code(), Code::Unavailable);

    other.steer(Goal { draining: [engram_memory::Ordinal(0)].into(), ..Goal::default() }, Surroundings::default());
    assert_eq!(status(&client, Some(2)).await.unwrap().draining, [0]);

    host.remove(ClusterId(2));
    while let Some(reply) = timeout(DEADLINE, replies.message()).await.unwrap().unwrap() {
        drop(reply);
    }
    assert_eq!(status(&client, None).await.unwrap().cluster_name, "words", "one is left: nobody else can be meant");
    stop.send(()).unwrap();
    timeout(DEADLINE, serving).await.unwrap().unwrap().unwrap();
}
