//! A worker as it runs in a pod, as plain processes: settings as the operator writes them, the environment as the kubelet sets it, the
//! hooks as the template names them, and a real coordinator.
#![allow(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

use engram_cluster::{Entry, PartitionMap};
use engram_coordinator::{Coordinator, Host, Options};
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Ordinal};
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{ClusterStatusRequest, MemberEntry};
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
/// Less than the deadline that the drains of these tests have.
const SOON: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(50);

/// Two workers with a copy of everything each, and their coordinator.
struct Cluster {
    folder: TempDir,
    coordinator: SocketAddr,
    host: Host,
    pods: Vec<Pod>,
}

struct Pod {
    http: SocketAddr,
    state: PathBuf,
    /// The container's first process.
    process: Child,
}

/// An address for a process that is started afterwards: below the ports that the system hands out, so that nobody is given it meanwhile.
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
        let is_whole = |map: &PartitionMap| map.partitions.iter().all(|it| it.activated && it.isr.len() == 2);
        cluster.until("everything twice", async |it| is_whole(&it.map())).await;
        cluster
    }

    async fn pod(&self, ordinal: u32, solo_policy: &str) -> Pod {
        let state = self.folder.path().join(format!("disk-{ordinal}"));
        std::fs::create_dir(&state).unwrap();
        let settings = self.folder.path().join(format!("cluster-{ordinal}.json"));
        let (client, peer) = (free_address().await, free_address().await);
        let (admin, http) = (free_address().await, free_address().await);
        // By name: the addresses behind it are found out.
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
            sleep(LOOK).await;
        }
    }

    /// Status and text of a page; 0 where nobody answers.
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

    fn led_by(&self, ordinal: u32) -> usize {
        self.map().partitions.iter().filter(|entry| entry.primary == Ordinal(ordinal)).count()
    }

    async fn member(&self, ordinal: u32) -> MemberEntry {
        let mut client = CoordinatorServiceClient::connect(format!("http://{}", self.coordinator)).await.unwrap();
        let status = client.get_cluster_status(ClusterStatusRequest::default()).await.unwrap().into_inner();
        status.members.into_iter().find(|member| member.ordinal == ordinal).unwrap()
    }

    async fn drain(&self, pod: usize) -> Output {
        let mut command = Command::new(PROGRAM);
        command.args(["drain", "--deadline=30s", "--socket"]).arg(self.pods[pod].state.join("admin.sock"));
        timeout(DEADLINE, command.output()).await.unwrap().unwrap()
    }

    async fn ended(&mut self, pod: usize) -> i32 {
        let status = timeout(DEADLINE, self.pods[pod].process.wait()).await.unwrap().unwrap();
        status.code().expect("the first process of a container ends by itself")
    }

    /// The worker below the first process.
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
async fn a_pod_that_is_deleted_leads_nothing_any_more_while_it_still_is_ready_and_then_stops_in_order() {
    let mut cluster = Cluster::start().await;
    assert_eq!((cluster.page(0, "/startupz").await.0, cluster.page(0, "/livez").await.0), (200, 200));
    let page = format!("{}/readyz", cluster.pods[0].http);
    let well = Command::new(PROGRAM).args(["healthcheck", &page]).status();
    assert!(timeout(DEADLINE, well).await.unwrap().unwrap().success());
    let led = cluster.led_by(0);
    assert!(led > 0, "both lead something");

    let drained = cluster.drain(0).await;
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(String::from_utf8_lossy(&drained.stdout).trim(), format!("handed over {led} partition(s)"));
    assert_eq!((cluster.led_by(0), cluster.led_by(1)), (0, 16));
    assert_eq!(cluster.page(0, "/readyz").await.0, 200, "whoever still asks it is passed on");
    let map = cluster.map();
    let is_alone = |entry: &Entry| entry.isr.len() == 1 && entry.in_sync(Ordinal(1)).is_some() && entry.solo_safe;
    assert!(map.partitions.iter().all(is_alone), "nobody waits for its copies when it has gone: {map:?}");
    assert!(map.partitions.iter().all(|entry| entry.learners.is_empty()), "nobody makes them again before: {map:?}");

    let first = nix::unistd::Pid::from_raw(cluster.pods[0].process.id().unwrap() as i32);
    signal(first, nix::sys::signal::Signal::SIGTERM);
    assert_eq!(cluster.ended(0).await, 0);
    assert!(cluster.member(0).await.dead, "its end was reported");
    let well = Command::new(PROGRAM).args(["healthcheck", &page]).status();
    assert_eq!(timeout(DEADLINE, well).await.unwrap().unwrap().code(), Some(1), "nobody is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_in_its_pod_is_dead_by_proof_when_the_container_ends() {
    let mut cluster = Cluster::start().await;
    signal(cluster.worker(0), nix::sys::signal::Signal::SIGKILL);
    assert_eq!(cluster.ended(0).await, 128 + 9);
    let member = cluster.member(0).await;
    assert!(member.dead && !member.alive, "by proof, not by its silence: {member:?}");
    cluster.until("the other leads everything", async |it| it.led_by(1) == 16).await;

    let unanswered = cluster.drain(0).await;
    assert_eq!(unanswered.status.code(), Some(1), "the event of a failed hook tells that nobody was there");
    let lone = cluster.drain(1).await;
    assert!(
        lone.status.success() && String::from_utf8_lossy(&lone.stdout).contains("no other copy is in sync"),
        "{lone:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_gives_up_where_nobody_is_left_who_moves_anything() {
    let cluster = Cluster::start().await;
    // As when the cluster's object is deleted: the operator answers, and knows nothing of it any more.
    cluster.host.remove(CLUSTER);
    let drained = timeout(SOON, cluster.drain(0)).await.expect("long before the deadline of a drain");
    let told = String::from_utf8_lossy(&drained.stdout);
    assert!(drained.status.success() && told.contains("or no coordinator answers"), "{drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_are_all_deleted_at_once_do_not_wait_for_each_other() {
    let cluster = Cluster::start().await;
    let both = async { tokio::join!(cluster.drain(0), cluster.drain(1)) };
    let (first, second) = timeout(SOON, both).await.expect("long before the deadline of a drain");
    assert!(first.status.success() && second.status.success(), "{first:?} {second:?}");
    let led = cluster.led_by(0) + cluster.led_by(1);
    assert_eq!(led, 16, "nothing is lost between them");
    assert!(cluster.map().partitions.iter().all(|entry| entry.isr.len() == 2), "nor is either left alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_without_which_nobody_may_write_stays_in_sync_until_its_pod_has_gone() {
    let cluster = Cluster::start_with("MinIsr").await;
    let drained = timeout(SOON, cluster.drain(0)).await.expect("long before the deadline of a drain");
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!((cluster.led_by(0), cluster.led_by(1)), (0, 16));
    assert!(cluster.map().partitions.iter().all(|entry| entry.isr.len() == 2), "one copy takes no writes");
}

#[tokio::test]
async fn settings_that_cannot_be_followed_end_the_container_with_a_word() {
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
    let (code, told) = run(&file.to_string(), "words-worker").await;
    assert!(code == Some(1) && told.contains("POD_NAME: 'words-worker'; allowed:"), "{told}");
    let (code, told) = run("{}", "words-worker-0").await;
    assert!(code == Some(1) && told.contains("clusterId"), "{told}");
}
