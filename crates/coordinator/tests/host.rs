//! Several clusters behind one listener.
#![allow(clippy::unwrap_used, reason = "a test without its setup has failed")]

use engram_coordinator::{Coordinator, Environment, GpuFault, Host, Options, WorkerCertificate};
use engram_identity::{
    CertificateAuthority, ExpectedPeer, Keys, Name, Realm, Reason, Role, RootId, Roots, connect, connect_anonymously,
};
use engram_mapstore::{Goal, MemoryStore};
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

const DEADLINE: Duration = Duration::from_secs(20);

fn coordinator(cluster: u128, name: &str) -> Coordinator {
    Coordinator::build(Options::new(ClusterId(cluster), name, 4, 1), Arc::new(MemoryStore::default())).unwrap()
}

fn heartbeat(cluster: u128) -> v1::HeartbeatRequest {
    let member = v1::MemberId { ordinal: 0, store: 5u128.to_be_bytes().to_vec().into(), incarnation: 1 };
    let hello = v1::Hello {
        cluster: cluster.to_be_bytes().to_vec().into(),
        member: Some(member),
        protocol_min: 1,
        protocol_max: 1,
        ..v1::Hello::default()
    };
    v1::HeartbeatRequest { hello: Some(hello), ..v1::HeartbeatRequest::default() }
}

type HeartbeatStreams = (mpsc::Sender<v1::HeartbeatRequest>, Streaming<v1::HeartbeatResponse>);

async fn join(client: &CoordinatorServiceClient<Channel>, cluster: u128) -> Result<HeartbeatStreams, Status> {
    let (heartbeats, outgoing) = mpsc::channel(4);
    heartbeats.send(heartbeat(cluster)).await.unwrap();
    let replies = client.clone().heartbeat(ReceiverStream::new(outgoing)).await?;
    Ok((heartbeats, replies.into_inner()))
}

async fn status(
    client: &CoordinatorServiceClient<Channel>,
    cluster: Option<u128>,
) -> Result<v1::ClusterStatus, Status> {
    let cluster = cluster.map(|cluster| cluster.to_be_bytes().to_vec()).unwrap_or_default();
    Ok(client.clone().get_cluster_status(v1::GetClusterStatusRequest { cluster: cluster.into() }).await?.into_inner())
}

#[tokio::test]
async fn each_message_reaches_the_coordinator_of_its_cluster_and_one_that_is_removed_lets_its_workers_go() {
    let host = Host::default();
    host.add(coordinator(1, "words"), None);
    let other = host.add(coordinator(2, "books"), None);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(host.clone().run(listener, async { drop(stopped.await) }));
    let client = CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap();

    let (heartbeats, mut replies) = join(&client, 2).await.unwrap();
    let map = loop {
        let reply = timeout(DEADLINE, replies.message()).await.unwrap().unwrap().unwrap();
        if let Some(map) = reply.map {
            break map;
        }
    };
    assert_eq!(map.cluster, 2u128.to_be_bytes().to_vec());
    assert_eq!(other.report().map.unwrap().cluster, ClusterId(2));
    let trouble = Some(v1::GpuFault { was_in_use: true, reason: "H100 was given up".into() });
    let certificate = Some(v1::CertificateStatus { trusted_roots: vec![7, 8], issuer_root: 8 });
    heartbeats
        .send(v1::HeartbeatRequest { gpu_fault: trouble, certificate, ..v1::HeartbeatRequest::default() })
        .await
        .unwrap();
    let heard = async {
        while other.report().gpu_faults.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(DEADLINE, heard).await.unwrap();
    let reported = GpuFault { was_in_use: true, reason: "H100 was given up".into() };
    assert_eq!(other.report().gpu_faults, [(engram_memory::Ordinal(0), reported)].into());
    let reported = WorkerCertificate { trusted_roots: vec![RootId(7), RootId(8)], root: RootId(8) };
    assert_eq!(other.report().certificates, [(engram_memory::Ordinal(0), reported)].into());
    heartbeats.send(v1::HeartbeatRequest::default()).await.unwrap();
    let quiet = async {
        while !other.report().gpu_faults.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(DEADLINE, quiet).await.unwrap();

    // A leaderless partition is reported with the command that repairs it.
    heartbeats
        .send(v1::HeartbeatRequest { leaderless_partitions: vec![1], ..v1::HeartbeatRequest::default() })
        .await
        .unwrap();
    let named = async {
        loop {
            let conditions = status(&client, Some(2)).await.unwrap().conditions;
            if let Some(condition) =
                conditions.into_iter().find(|condition| condition.contains("partition 1 is leaderless"))
            {
                break condition;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let condition = timeout(DEADLINE, named).await.unwrap();
    assert!(condition.contains("worker 0") && condition.contains("`engram partition force-promote 1`"), "{condition}");
    assert_eq!(status(&client, Some(1)).await.unwrap().map, None, "the other cluster is unaffected");
    assert_eq!(status(&client, Some(2)).await.unwrap().cluster_name, "books");
    let vague = status(&client, None).await.unwrap_err();
    assert_eq!((vague.code(), vague.message().starts_with("2 clusters")), (Code::InvalidArgument, true));
    assert_eq!(join(&client, 3).await.unwrap_err().code(), Code::Unavailable);

    other.update(Goal { draining: [engram_memory::Ordinal(0)].into(), ..Goal::default() }, Environment::default());
    assert_eq!(status(&client, Some(2)).await.unwrap().draining, [0]);

    host.remove(ClusterId(2));
    while let Some(reply) = timeout(DEADLINE, replies.message()).await.unwrap().unwrap() {
        drop(reply);
    }
    assert_eq!(status(&client, None).await.unwrap().cluster_name, "words", "the only cluster that is left");
    stop.send(()).unwrap();
    timeout(DEADLINE, serving).await.unwrap().unwrap().unwrap();
}

/// A client of the coordinator.
enum TestClient {
    Certified(Arc<Keys>),
    Anonymous(Roots, ClusterId),
}

async fn over_tls(asker: TestClient, address: String) -> Result<CoordinatorServiceClient<Channel>, std::io::Error> {
    let expected = ExpectedPeer::any(Role::Coordinator);
    let stream = match asker {
        TestClient::Certified(keys) => connect(&keys, expected, &address).await?,
        TestClient::Anonymous(roots, cluster) => connect_anonymously(&roots, cluster, expected, &address).await?,
    };
    let mut stream = Some(TokioIo::new(stream));
    let connect = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("once"));
        async move { stream }
    });
    let channel = Endpoint::from_static("http://host").connect_with_connector(connect).await.unwrap();
    Ok(CoordinatorServiceClient::new(channel))
}

#[tokio::test]
async fn tls_cluster_accepts_only_its_own_processes_next_to_a_plaintext_one() {
    let (host, now) = (Host::default(), SystemTime::now());
    let ca = CertificateAuthority::create(Realm::Operator, now).unwrap();
    let keys = |cluster, role, ordinal| {
        let name = Name::on_kubernetes("research", "words", ClusterId(cluster), role, ordinal);
        let issued = ca.issue(&name, now, Duration::from_secs(3_600)).unwrap();
        Keys::from_pem(ca.certificate(), &issued.pem, Arc::clone(host.refusals())).unwrap()
    };
    host.add(coordinator(1, "words"), Some(keys(1, Role::Coordinator, 0)));
    host.add(coordinator(2, "books"), None);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(host.clone().run(listener, std::future::pending()));
    let refused = async |client: &CoordinatorServiceClient<Channel>, cluster| {
        let status = join(client, cluster).await.unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let counted = |reason| host.refusals().of(reason);

    let worker = over_tls(TestClient::Certified(keys(1, Role::Worker, 0)), address.clone()).await.unwrap();
    let (_heartbeats, mut replies) = join(&worker, 1).await.unwrap();
    assert!(timeout(DEADLINE, replies.message()).await.unwrap().unwrap().is_some());
    let reported = refused(&worker, 2).await;
    assert!(reported.0 == Code::PermissionDenied && reported.1.contains("without TLS"), "{reported:?}");
    let other = over_tls(TestClient::Certified(keys(1, Role::Worker, 1)), address.clone()).await.unwrap();
    assert_eq!((refused(&other, 1).await.0, counted(Reason::Sender)), (Code::PermissionDenied, 1));

    let clear = CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap();
    join(&clear, 2).await.unwrap();
    let reported = refused(&clear, 1).await;
    assert!(reported.1.contains("over TLS"), "{reported:?}");
    assert_eq!((reported.0, counted(Reason::PlainText)), (Code::PermissionDenied, 1));

    let roots = Roots::parse(ca.certificate().as_bytes()).unwrap();
    let anonymous = over_tls(TestClient::Anonymous(roots, ClusterId(1)), address.clone()).await.unwrap();
    assert_eq!((refused(&anonymous, 1).await.0, counted(Reason::NoCertificate)), (Code::PermissionDenied, 1));

    // Same CA: a handshake for a missing or plaintext cluster is refused.
    for cluster in [2, 3] {
        assert!(over_tls(TestClient::Certified(keys(cluster, Role::Worker, 0)), address.clone()).await.is_err());
    }
    assert_eq!(counted(Reason::OtherCluster), 2);
}
