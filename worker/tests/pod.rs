//! A worker as it runs in a pod, with plain processes: the operator's settings, the kubelet's environment, the hooks of the
//! template, and a real coordinator.
#![allow(clippy::unwrap_used, reason = "a failed setup is a failed test")]

use engram_cluster::{Entry, PartitionMap};
use engram_coordinator::{Coordinator, Host, Options};
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Ordinal};
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{GetClusterStatusRequest, MemberEntry};
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

const PROGRAM: &str = env!("CARGO_BIN_EXE_engram-worker");
const CLUSTER: ClusterId = ClusterId(0x90d);
const DEADLINE: Duration = Duration::from_secs(60);
/// Less than the drain deadline of these tests.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Two workers with a replica of every partition each, and their coordinator.
struct Cluster {
    folder: TempDir,
    coordinator: SocketAddr,
    host: Host,
    pods: Vec<Pod>,
}

struct Pod {
    http: SocketAddr,
    state: PathBuf,
    /// First process of the container.
    process: Child,
}

/// Returns an address for a process that is started later: below the system's ephemeral ports, so that no other process gets it.
async fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    loop {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, NEXT.fetch_add(1, Ordering::Relaxed)));
        if TcpListener::bind(address).await.is_ok() {
            return address;
        }
    }
}

impl Cluster {
    async fn start() -> Self {
        Self::start_with("SoloDurable").await
    }

    async fn start_with(solo_policy: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(FileStore::open(folder.path(), CLUSTER).unwrap());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let coordinator = listener.local_addr().unwrap();
        let options = Options { replication_factor: 2, ..Options::new(CLUSTER, "words", 16, 2) };
        let host = Host::default();
        host.add(Coordinator::build(options, store).unwrap(), None);
        tokio::spawn(host.clone().run(listener, std::future::pending()));
        let mut cluster = Self { folder, coordinator, host, pods: Vec::new() };
        for ordinal in 0..2 {
            let pod = cluster.pod(ordinal, solo_policy).await;
            cluster.pods.push(pod);
        }
        for ordinal in 0..2 {
            cluster.until("ready", async |it| it.page(ordinal, "/readyz").await.0 == 200).await;
        }
        let is_replicated = |map: &PartitionMap| map.partitions.iter().all(|it| it.activated && it.isr.len() == 2);
        cluster.until("two replicas of every partition", async |it| is_replicated(&it.map())).await;
        cluster
    }

    async fn pod(&self, ordinal: u32, solo_policy: &str) -> Pod {
        let state = self.folder.path().join(format!("disk-{ordinal}"));
        std::fs::create_dir(&state).unwrap();
        let settings = self.folder.path().join(format!("cluster-{ordinal}.json"));
        let (client, peer) = (free_address().await, free_address().await);
        let (admin, http) = (free_address().await, free_address().await);
        // A name, so that its addresses are resolved.
        let file = json!({
            "clusterId": CLUSTER.to_string(), "coordinators": [format!("localhost:{}", self.coordinator.port())],
            "replicationFactor": 2, "partitions": 16, "gpu": { "mode": "Auto", "threshold": null },
            "soloPolicy": solo_policy,
            "listen": { "client": client, "peer": peer, "admin": admin, "http": http }, "threads": 1,
        });
        std::fs::write(&settings, file.to_string()).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("--settings").arg(settings).arg("--state-dir").arg(&state);
        command.env_clear().env("ENGRAM_CLUSTER", "words").env("POD_IP", "127.0.0.1");
        command.env("POD_NAME", format!("words-worker-{ordinal}")).stdin(Stdio::null()).kill_on_drop(true);
        Pod { http, state, process: command.spawn().unwrap() }
    }

    async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !holds(self).await {
            assert!(Instant::now() < deadline, "not within {} s: {what}", DEADLINE.as_secs());
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns status and text of a page; status 0 without a response.
    async fn page(&self, pod: usize, path: &str) -> (u16, String) {
        let get = async {
            let mut stream = TcpStream::connect(self.pods[pod].http).await?;
            stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            std::io::Result::Ok(text)
        };
        let text = timeout(DEADLINE, get).await.unwrap().unwrap_or_default();
        let code = text.split_whitespace().nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        (code, text)
    }

    fn map(&self) -> PartitionMap {
        FileStore::open(self.folder.path(), CLUSTER).unwrap().get().unwrap().unwrap()
    }

    fn primary_count(&self, ordinal: u32) -> usize {
        self.map().partitions.iter().filter(|entry| entry.primary == Ordinal(ordinal)).count()
    }

    async fn member(&self, ordinal: u32) -> MemberEntry {
        let mut client = CoordinatorServiceClient::connect(format!("http://{}", self.coordinator)).await.unwrap();
        let status = client.get_cluster_status(GetClusterStatusRequest::default()).await.unwrap().into_inner();
        status.members.into_iter().find(|member| member.ordinal == ordinal).unwrap()
    }

    async fn drain(&self, pod: usize) -> Output {
        let mut command = Command::new(PROGRAM);
        command.args(["drain", "--deadline=30s", "--socket"]).arg(self.pods[pod].state.join("admin.sock"));
        timeout(DEADLINE, command.output()).await.unwrap().unwrap()
    }

    async fn exit_code(&mut self, pod: usize) -> i32 {
        let status = timeout(DEADLINE, self.pods[pod].process.wait()).await.unwrap().unwrap();
        status.code().expect("the first process of a container exits")
    }

    /// Returns the worker process, the child of the first process.
    fn worker(&self, pod: usize) -> nix::unistd::Pid {
        let first = self.pods[pod].process.id().unwrap();
        let children = std::fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap();
        nix::unistd::Pid::from_raw(children.trim().parse().expect("one worker"))
    }
}

fn signal(pid: nix::unistd::Pid, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(pid, signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pod_transfers_its_primaries_before_it_stops() {
    let mut cluster = Cluster::start().await;
    assert_eq!((cluster.page(0, "/startupz").await.0, cluster.page(0, "/livez").await.0), (200, 200));
    let page = format!("{}/readyz", cluster.pods[0].http);
    let healthcheck = Command::new(PROGRAM).args(["healthcheck", &page]).status();
    assert!(timeout(DEADLINE, healthcheck).await.unwrap().unwrap().success());
    let primaries = cluster.primary_count(0);
    assert!(primaries > 0, "both are primary of some partitions");

    let drained = cluster.drain(0).await;
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(String::from_utf8_lossy(&drained.stdout).trim(), format!("transferred {primaries} partition(s)"));
    assert_eq!((cluster.primary_count(0), cluster.primary_count(1)), (0, 16));
    assert_eq!(cluster.page(0, "/readyz").await.0, 200, "requests are still forwarded");
    let map = cluster.map();
    let is_sole_replica =
        |entry: &Entry| entry.isr.len() == 1 && entry.in_sync(Ordinal(1)).is_some() && entry.solo_safe;
    assert!(map.partitions.iter().all(is_sole_replica), "no primary waits for its replicas when it has gone: {map:?}");
    assert!(map.partitions.iter().all(|entry| entry.learners.is_empty()), "nothing is re-replicated before: {map:?}");

    let first = nix::unistd::Pid::from_raw(cluster.pods[0].process.id().unwrap() as i32);
    signal(first, nix::sys::signal::Signal::SIGTERM);
    assert_eq!(cluster.exit_code(0).await, 0);
    assert!(cluster.member(0).await.dead, "its death was reported");
    let healthcheck = Command::new(PROGRAM).args(["healthcheck", &page]).status();
    assert_eq!(timeout(DEADLINE, healthcheck).await.unwrap().unwrap().code(), Some(1), "the worker has gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_in_its_pod_is_proven_dead() {
    let mut cluster = Cluster::start().await;
    signal(cluster.worker(0), nix::sys::signal::Signal::SIGKILL);
    assert_eq!(cluster.exit_code(0).await, 128 + 9);
    let member = cluster.member(0).await;
    assert!(member.dead && !member.alive, "the death is proven, not suspected: {member:?}");
    cluster.until("the other is primary of every partition", async |it| it.primary_count(1) == 16).await;

    let failed_drain = cluster.drain(0).await;
    assert_eq!(failed_drain.status.code(), Some(1), "a hook without a worker fails");
    let last_worker_drain = cluster.drain(1).await;
    assert!(
        last_worker_drain.status.success()
            && String::from_utf8_lossy(&last_worker_drain.stdout).contains("no other replica is in sync"),
        "{last_worker_drain:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_gives_up_without_a_coordinator() {
    let cluster = Cluster::start().await;
    // As after the deletion of the cluster's object: the operator responds, and no longer knows the cluster.
    cluster.host.remove(CLUSTER);
    let drained = timeout(DRAIN_LIMIT, cluster.drain(0)).await.expect("well before the drain deadline");
    let stderr = String::from_utf8_lossy(&drained.stdout);
    assert!(drained.status.success() && stderr.contains("or no coordinator responds"), "{drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_deleted_together_do_not_wait_for_each_other() {
    let cluster = Cluster::start().await;
    let both = async { tokio::join!(cluster.drain(0), cluster.drain(1)) };
    let (first, second) = timeout(DRAIN_LIMIT, both).await.expect("well before the drain deadline");
    assert!(first.status.success() && second.status.success(), "{first:?} {second:?}");
    let primaries = cluster.primary_count(0) + cluster.primary_count(1);
    assert_eq!(primaries, 16, "every partition has a primary");
    assert!(cluster.map().partitions.iter().all(|entry| entry.isr.len() == 2), "no partition has a single replica");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_required_for_writes_stays_in_sync_during_a_drain() {
    let cluster = Cluster::start_with("MinIsr").await;
    let drained = timeout(DRAIN_LIMIT, cluster.drain(0)).await.expect("well before the drain deadline");
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!((cluster.primary_count(0), cluster.primary_count(1)), (0, 16));
    assert!(cluster.map().partitions.iter().all(|entry| entry.isr.len() == 2), "a single replica takes no writes");
}

#[tokio::test]
async fn invalid_settings_fail_the_container_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let run = async |file: &str, pod: &str| {
        let settings = folder.path().join("cluster.json");
        std::fs::write(&settings, file).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("--settings").arg(settings).arg("--state-dir").arg(folder.path());
        command.env_clear().env("ENGRAM_CLUSTER", "words").env("POD_NAME", pod).env("POD_IP", "127.0.0.1");
        let output = timeout(DEADLINE, command.output()).await.unwrap().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let file = json!({ "clusterId": CLUSTER.to_string(), "coordinators": ["localhost:1"], "replicationFactor": 2 });
    let (code, stderr) = run(&file.to_string(), "words-worker").await;
    assert!(code == Some(1) && stderr.contains("POD_NAME: 'words-worker'; allowed:"), "{stderr}");
    let (code, stderr) = run("{}", "words-worker-0").await;
    assert!(code == Some(1) && stderr.contains("clusterId"), "{stderr}");
}
