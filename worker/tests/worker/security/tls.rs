//! Under TLS each listener accepts calls of its roles, and a message must match the sender's certificate.

use crate::harness::{CLUSTER, spec, until};
use crate::operations::metrics;
use engram_client::{Client, Network, Options as ClientOptions};
use engram_identity::{CertificateAuthority, ExpectedPeer, Files, Keys, Name, Role};
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::peer_service_client::PeerServiceClient;
use engram_worker::{Addresses, Worker};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use tokio_stream::iter;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// A worker of a cluster, and the CA that it trusts.
pub(crate) struct TlsCluster {
    pub(crate) folder: TempDir,
    ca: CertificateAuthority,
}

impl TlsCluster {
    pub(crate) fn new() -> Self {
        let (folder, ca) = (TempDir::new().unwrap(), CertificateAuthority::create(CLUSTER, SystemTime::now()).unwrap());
        std::fs::write(folder.path().join("ca.pem"), ca.certificate()).unwrap();
        Self { folder, ca }
    }

    async fn start() -> (Self, Addresses) {
        let cluster = Self::new();
        let addresses = cluster.start_worker(|_| {}).await;
        (cluster, addresses)
    }

    /// Starts worker 1 with changed options.
    pub(crate) async fn start_worker(&self, change: impl FnOnce(&mut Value)) -> Addresses {
        let path = |name: &str| self.folder.path().join(name);
        let files = self.files(Role::Worker, 1);
        let mut options = json!({
            "cluster": CLUSTER.to_string(),
            "clusterName": "test",
            "ordinal": 1,
            "stateDir": path("state"),
            "listen": { "client": "127.0.0.1:0", "peer": "127.0.0.1:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0" },
            "coordinators": ["127.0.0.1:1"],
            "threads": 1,
            "tls": { "files": files },
            "spec": spec(2, 2),
        });
        change(&mut options);
        let worker = Worker::build(serde_json::from_value(options).unwrap()).await.unwrap();
        let addresses = worker.addresses();
        tokio::spawn(worker.run(std::future::pending()));
        addresses
    }

    pub(crate) fn files(&self, role: Role, ordinal: u32) -> Files {
        let name = Name::local("test", CLUSTER, role, ordinal);
        let issued = self.ca.issue(&name, SystemTime::now(), Duration::from_secs(600)).unwrap();
        let path = self.folder.path().join(format!("{role}-{ordinal}.pem"));
        std::fs::write(&path, issued.pem).unwrap();
        Files::pair(self.folder.path().join("ca.pem"), path)
    }

    pub(crate) fn network(&self, role: Role, ordinal: u32) -> Network {
        let keys: Arc<Keys> = Keys::open(self.files(role, ordinal)).unwrap();
        Network::with_tls(keys, ExpectedPeer::one(Role::Worker, 1))
    }

    async fn channel(&self, role: Role, ordinal: u32, address: SocketAddr) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        self.network(role, ordinal).connect(endpoint).await.unwrap()
    }
}

/// Returns the number of authentication failures with this reason.
pub(crate) fn count_of(page: &str, reason: &str) -> Option<u32> {
    let label = format!("reason=\"{reason}\"");
    let line =
        page.lines().find(|line| line.starts_with("engram_authentication_failures_total") && line.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_check_roles_and_messages_check_senders() {
    use Role::{Client as Person, Coordinator, Worker as Other};
    let (cluster, at) = TlsCluster::start().await;

    let mut rejected: u32 = 0;
    for (role, address, is_admitted) in [
        (Person, at.client, true),
        (Other, at.client, true),
        (Coordinator, at.client, true),
        (Other, at.peer, true),
        (Person, at.peer, false),
        (Coordinator, at.peer, false),
    ] {
        let mut service = MemoryServiceClient::new(cluster.channel(role, 0, address).await);
        // Admitted callers get the error that there is no map yet.
        let refusal = service.get_partition_map(v1::GetPartitionMapRequest::default()).await.err();
        let refusal = refusal.filter(|status| status.code() == Code::PermissionDenied);
        assert_eq!(refusal.is_none(), is_admitted, "a {role} at {address}: {refusal:?}");
        if let Some(status) = refusal {
            assert!(status.message().contains(&format!("not for a {role}; allowed: worker")), "{status}");
            rejected += 1;
        }
    }
    for (role, is_admitted) in [(Person, true), (Coordinator, true), (Other, false)] {
        let mut service = AdminServiceClient::new(cluster.channel(role, 0, at.admin).await);
        let reply = service.get_worker_status(v1::GetWorkerStatusRequest {}).await;
        assert_eq!(reply.is_ok(), is_admitted, "a {role}: {reply:?}");
        rejected += u32::from(!is_admitted);
    }

    // Worker 2 claims to be worker 0.
    let exchange = async |ordinal| {
        let member = v1::MemberId { ordinal: 0, store: identity(7), incarnation: 1 };
        let hello = v1::Hello {
            cluster: identity(CLUSTER.0),
            member: Some(member),
            protocol_min: 1,
            protocol_max: u32::MAX,
            ..v1::Hello::default()
        };
        let frame = v1::PeerFrame { hello: Some(hello), ..v1::PeerFrame::default() };
        let mut service = PeerServiceClient::new(cluster.channel(Other, ordinal, at.peer).await);
        service.exchange(iter([frame])).await
    };
    let refusal = exchange(2).await.expect_err("the certificate is of another worker");
    assert_eq!(refusal.code(), Code::PermissionDenied);
    assert!(refusal.message().contains("names worker 0, the certificate worker 2"), "{refusal}");
    exchange(0).await.unwrap();

    // A client without TLS gets an error, and nothing about the cluster.
    let plain = Client::connect(ClientOptions {
        read_deadline: Duration::from_millis(500),
        ..ClientOptions::new([at.client.to_string()])
    });
    plain.await.expect_err("a plaintext connection fails");
    until("failures are counted", || async {
        let page = metrics(at.http).await;
        let count = |reason: &str| count_of(&page, reason);
        let left = page.lines().find(|line| line.starts_with("engram_certificate_expiry_seconds"));
        let left: i64 = left.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_default();
        assert!((1..=600).contains(&left), "{left}");
        count("role") == Some(rejected) && count("sender") == Some(1) && count("plaintext").is_some_and(|it| it > 0)
    })
    .await;
}
