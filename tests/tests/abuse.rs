//! One client makes the calls that once took a worker down, at ten times their bounds, while another client is served as fast as before.

use engram_client::{Client, GetOptions, Rows};
use engram_memory::{MemoryId, RunId};
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::run_service_client::RunServiceClient;
use engram_proto::v1::{self, ProblemKind};
use engram_tests::{Cluster, cluster_manifest};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// Calls per connection, and connections: ten times the calls that a listener has in flight.
const CALLS_PER_CONNECTION: usize = 120;
const CONNECTIONS: usize = 86;
/// Connections with four large unfinished messages each: ten times the bytes that a listener keeps of them.
const UNFINISHED_CONNECTIONS: usize = 160;
const PAYLOAD_BYTES: usize = 64 << 10;
const PAYLOADS: u64 = 1_024;
/// Growth of the worker's resident memory that may remain after the abuse, in KiB: the payloads, and what the allocator and connections keep.
const MAX_GROWTH_KIB: u64 = (64 + 96) << 10;
/// How long freed memory may stay resident.
const RETURN_WITHIN: Duration = Duration::from_secs(60);
/// Pairs of a write and a read whose latency is measured.
const SAMPLES: usize = 100;
/// The latency of another client may grow by this factor. Shorter ones than [`NOISE`] depend on the scheduler more than on the worker.
const MAX_SLOWDOWN: u32 = 3;
const NOISE: Duration = Duration::from_millis(100);
/// How long another load of the machine may disturb the measurement, and the calls of the abuse may take to arrive. The long polls last longer.
const MAX_DISTURBANCE: Duration = Duration::from_secs(25);

/// Returns the resident memory of a process in KiB.
fn resident_kib(pid: u32) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).expect("failed to read the status of the worker");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has resident memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number of KiB")
}

/// Waits until most of the memory that the abuse took is returned to the system.
fn assert_memory_returns(worker: u32, before: u64) {
    let (start, limit) = (Instant::now(), before + MAX_GROWTH_KIB);
    loop {
        let resident = resident_kib(worker);
        println!("{before} KiB were resident before; {resident} KiB {:.0?} after the abuse", start.elapsed());
        if resident <= limit {
            return;
        }
        assert!(start.elapsed() < RETURN_WITHIN, "{resident} KiB are resident; allowed: {limit}");
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Another client, with its latency before the abuse.
struct OtherClient {
    client: Client,
    before: Duration,
}

impl OtherClient {
    async fn new(client: Client) -> Self {
        let before = Self::p99(&client, "the start").await;
        Self { client, before }
    }

    /// Checks that the client is served, and not much slower than before. Another load of the machine may disturb some windows, the
    /// abuse would disturb all.
    async fn assert_serves(&self, during: &str) {
        let (start, limit) = (Instant::now(), self.before.max(NOISE) * MAX_SLOWDOWN);
        loop {
            let p99 = Self::p99(&self.client, during).await;
            if p99 <= limit {
                return;
            }
            let before = self.before;
            let text =
                format!("p99 of another client is {p99:?} during {during}; it was {before:?}, allowed: {limit:?}");
            assert!(start.elapsed() < MAX_DISTURBANCE, "{text}");
        }
    }

    /// Returns the 99th percentile of the latency of a write and a read.
    async fn p99(client: &Client, during: &str) -> Duration {
        let (id, session) = (MemoryId(1), client.session());
        let mut latencies = Vec::with_capacity(SAMPLES);
        for _ in 0..SAMPLES {
            let start = Instant::now();
            let written = session.upsert(Rows { ids: vec![id], ..Rows::default() }).await;
            written.unwrap_or_else(|error| panic!("a write during {during}: {error}"));
            let read = client.get(&[id], GetOptions::default()).await;
            assert_eq!(read.unwrap_or_else(|error| panic!("a read during {during}: {error}")).memories.len(), 1);
            latencies.push(start.elapsed());
        }
        latencies.sort_unstable();
        latencies[SAMPLES * 99 / 100 - 1]
    }
}

async fn connections(address: &str) -> Vec<MemoryServiceClient<Channel>> {
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        clients.push(MemoryServiceClient::new(endpoint.connect().await.expect("failed to connect")));
    }
    clients
}

fn each_call(clients: &[MemoryServiceClient<Channel>]) -> impl Iterator<Item = MemoryServiceClient<Channel>> {
    clients.iter().flat_map(|client| std::iter::repeat_n(client.clone(), CALLS_PER_CONNECTION))
}

/// Sends most of four large messages on a new connection, and keeps it open.
fn unfinished_messages(address: &str) -> Option<TcpStream> {
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let literal = |name: &str, value: &str| {
        [&[0, name.len() as u8][..], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    let path = "/engram.v1.MemoryService/Upsert";
    let headers = [
        &[0x83, 0x86, 0x44, path.len() as u8][..],
        path.as_bytes(),
        &[0x41, 1, b'a'],
        &literal("content-type", "application/grpc"),
        &literal("te", "trailers"),
    ]
    .concat();
    let mut connection = TcpStream::connect(address).ok()?;
    connection.set_write_timeout(Some(Duration::from_secs(5))).ok()?;
    connection.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").ok()?;
    connection.write_all(&frame(4, 0, 0, &[])).ok()?;
    let _ = connection.read(&mut [0; 4_096]).ok()?;
    connection.write_all(&frame(4, 1, 0, &[])).ok()?;
    for stream in [1, 3, 5, 7] {
        let mut bytes = frame(1, 4, stream, &headers);
        bytes.extend(frame(0, 0, stream, &[&[0][..], &4_100_000_u32.to_be_bytes()].concat()));
        (0..238).for_each(|_| bytes.extend(frame(0, 0, stream, &[0x12; 16 << 10])));
        connection.write_all(&bytes).ok()?;
    }
    Some(connection)
}

#[test]
fn one_client_can_neither_stop_a_worker_nor_fill_its_memory() {
    let cluster = Cluster::up(&cluster_manifest("abused", 1, "  replicationFactor: 1\n  partitions: 8\n"));
    let worker = cluster.worker(0).expect("the worker runs");
    let before = resident_kib(worker);
    cluster.client(async |other| {
        let address = other
            .map()
            .expect("a connected client has a map")
            .workers
            .values()
            .next()
            .expect("one")
            .client_address
            .clone();
        let other = OtherClient::new(other).await;
        let clients = connections(&address).await;
        let mut bare = clients[0].clone();

        let map = bare.get_partition_map(v1::GetPartitionMapRequest::default()).await.expect("a map").into_inner();
        let mut polls = JoinSet::new();
        for mut client in each_call(&clients) {
            let poll = v1::GetPartitionMapRequest { newer_than: 0, wait_ms: 30_000, known_stamp: map.stamp };
            polls.spawn(async move { client.get_partition_map(poll).await });
        }
        let mut uploads = JoinSet::new();
        let silent = connections(&address).await;
        for mut client in each_call(&silent) {
            uploads.spawn(async move { client.upsert(tokio_stream::pending()).await });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        other.assert_serves("long polls and silent uploads").await;
        drop((polls, uploads));

        let payload = vec![1; PAYLOAD_BYTES];
        for first in (0..PAYLOADS).step_by(32) {
            let ids: Vec<MemoryId> = (first..first + 32).map(MemoryId).collect();
            let payloads = Some(ids.iter().map(|_| &payload).collect());
            other.client.session().upsert(Rows { ids, payloads, ..Rows::default() }).await.expect("an insert");
        }
        let (mut unread, mut rejected) = (Vec::new(), 0);
        for mut client in clients.iter().flat_map(|client| std::iter::repeat_n(client.clone(), 16)) {
            let scan = v1::ScanMemoriesRequest { local: true, with_payloads: true, ..Default::default() };
            match client.scan_memories(scan).await {
                Ok(stream) => unread.push(stream),
                Err(status) => {
                    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                    rejected += 1;
                }
            }
        }
        assert!(rejected >= unread.len(), "{} unread scans are held, {rejected} were rejected", unread.len());
        other.assert_serves("unread scans").await;
        drop(unread);
        let get = v1::GetMemoriesRequest { ids: vec![7; 16_384], with_payloads: true, ..Default::default() };
        let held = bare.get_memories(get).await.expect("the head of a large answer");
        other.assert_serves("an answer of a GiB").await;
        drop(held);

        let at = address.clone();
        let unfinished = tokio::task::spawn_blocking(move || {
            (0..UNFINISHED_CONNECTIONS).filter_map(|_| unfinished_messages(&at)).collect::<Vec<_>>()
        });
        let unfinished = unfinished.await.expect("it does not panic");
        assert!(!unfinished.is_empty());
        other.assert_serves("unfinished messages").await;
        drop(unfinished);

        let mut runs = RunServiceClient::new(
            Endpoint::from_shared(format!("http://{address}")).expect("an address").connect_lazy(),
        );
        let run = RunId(7).0.to_be_bytes().to_vec();
        let turn = v1::AcquireTurnRequest { run: run.clone().into(), name: "ghost".into(), submitted_ms: 0 };
        assert_eq!(runs.acquire_turn(turn).await.expect_err("only workers").code(), Code::PermissionDenied);
        for _ in 0..100 {
            let epoch = v1::LearnEpochRequest { run: run.clone().into(), epoch: 1, decay: 0.0, parts: Vec::new() };
            let status = bare.learn_epoch(tokio_stream::iter([epoch])).await.expect_err("the run is not recorded");
            assert_eq!(v1::Problem::from_status(&status).map(|problem| problem.kind()), Some(ProblemKind::RunUnknown));
        }
        other.assert_serves("epochs of unknown runs").await;
    });
    assert_eq!(cluster.worker(0), Some(worker), "the worker was not restarted");
    assert_memory_returns(worker, before);
    cluster.stop();
}
