//! Under TLS a listener takes the calls of those roles that it is for, and messages of whom the certificate is.

use crate::harness::{CLUSTER, spec, until};
use crate::operations::metrics;
use engram_client::{Client, Network, Options as ClientOptions};
use engram_identity::{Authority, Expected, Files, Keys, Name, Role};
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

/// A worker of a cluster, and an authority that it believes.
pub(crate) struct Home {
    pub(crate) folder: TempDir,
    authority: Authority,
}

impl Home {
    pub(crate) fn new() -> Self {
        let (folder, authority) = (TempDir::new().unwrap(), Authority::create(CLUSTER, SystemTime::now()).unwrap());
        std::fs::write(folder.path().join("ca.pem"), authority.certificate()).unwrap();
        Self { folder, authority }
    }

    async fn start() -> (Self, Addresses) {
        let home = Self::new();
        let addresses = home.start_worker(|_| {}).await;
        (home, addresses)
    }

    /// Starts worker 1, with what is changed of its options.
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
        let issued = self.authority.issue(&name, SystemTime::now(), Duration::from_secs(600)).unwrap();
        let path = self.folder.path().join(format!("{role}-{ordinal}.pem"));
        std::fs::write(&path, issued.pem).unwrap();
        Files::pair(self.folder.path().join("ca.pem"), path)
    }

    pub(crate) fn network(&self, role: Role, ordinal: u32) -> Network {
        let keys: Arc<Keys> = Keys::open(self.files(role, ordinal)).unwrap();
        Network::secured(keys, Expected::one(Role::Worker, 1))
    }

    async fn channel(&self, role: Role, ordinal: u32, address: SocketAddr) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        self.network(role, ordinal).connect(endpoint).await.unwrap()
    }
}

/// How often somebody was refused for this, by the page of metrics.
pub(crate) fn count_of(page: &str, reason: &str) -> Option<u32> {
    let label = format!("reason=\"{reason}\"");
    let line = page.lines().find(|line| line.starts_with("engram_tls_refused_total") && line.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_listener_is_for_its_roles_and_each_message_for_its_sender() {
    use Role::{Client as Person, Coordinator, Worker as Other};
    let (home, at) = Home::start().await;

    let mut asked: u32 = 0;
    for (role, address, is_let_in) in [
        (Person, at.client, true),
        (Other, at.client, true),
        (Coordinator, at.client, true),
        (Other, at.peer, true),
        (Person, at.peer, false),
        (Coordinator, at.peer, false),
    ] {
        let mut service = MemoryServiceClient::new(home.channel(role, 0, address).await);
        // There is no map yet, which who is let in may be told.
        let refused = service.get_partition_map(v1::PartitionMapRequest::default()).await.err();
        let refused = refused.filter(|status| status.code() == Code::PermissionDenied);
        assert_eq!(refused.is_none(), is_let_in, "a {role} at {address}: {refused:?}");
        if let Some(status) = refused {
            assert!(status.message().contains(&format!("not for a {role}; allowed: worker")), "{status}");
            asked += 1;
        }
    }
    for (role, is_let_in) in [(Person, true), (Coordinator, true), (Other, false)] {
        let mut service = AdminServiceClient::new(home.channel(role, 0, at.admin).await);
        let reply = service.get_worker_status(v1::WorkerStatusRequest {}).await;
        assert_eq!(reply.is_ok(), is_let_in, "a {role}: {reply:?}");
        asked += u32::from(!is_let_in);
    }

    // Worker 2 says that it is worker 0.
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
        let mut service = PeerServiceClient::new(home.channel(Other, ordinal, at.peer).await);
        service.exchange(iter([frame])).await
    };
    let refused = exchange(2).await.expect_err("the certificate is of another worker");
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("of worker 0, the certificate of worker 2"), "{refused}");
    exchange(0).await.unwrap();

    // A program that knows nothing of TLS is told something, and nothing of the cluster.
    let plain = Client::connect(ClientOptions {
        read_deadline: Duration::from_millis(500),
        ..ClientOptions::new([at.client.to_string()])
    });
    plain.await.expect_err("it does not get through");
    until("what was refused is counted", || async {
        let page = metrics(at.http).await;
        let count = |reason: &str| count_of(&page, reason);
        let left = page.lines().find(|line| line.starts_with("engram_certificate_expiry_seconds"));
        let left: i64 = left.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_default();
        assert!((1..=600).contains(&left), "{left}");
        count("role") == Some(asked) && count("sender") == Some(1) && count("plain_text").is_some_and(|it| it > 0)
    })
    .await;
}
