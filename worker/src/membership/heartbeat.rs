//! Heartbeats to coordinators and partners, sent from a dedicated thread so that a busy service does not look like a dead worker.
//!
//! A heartbeat carries evidence of progress. The response stream carries the partition map and the members, at once and at every
//! change.

use crate::engine::gpu_fault;
use crate::membership::coordinator_addresses;
use crate::observability::disk_space::DiskSpace;
use crate::peers;
use crate::shared::Shared;
use engram_identity::Keys;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{CertificateStatus, HeartbeatRequest, Hello};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

/// Heartbeat interval: a sixth of the silence after which a worker is suspected.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);
/// First and longest interval between attempts to connect to a coordinator, which announces nothing while it cannot be reached.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);
const MAX_RECONNECT_INTERVAL: Duration = Duration::from_secs(2);
/// Deadline for opening a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Ping interval and timeout of a connection. An unresponsive coordinator must be detected soon, because the worker acts on its own
/// when there is none.
const KEEPALIVE: Duration = Duration::from_millis(500);
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(1);

/// Queued work without progress for this long is reported: a read of many millions of memories takes its time, and a disk may be
/// slow without being dead.
const STALL_THRESHOLD: Duration = Duration::from_secs(3);

/// Starts the heartbeat thread, which ends when the worker stops.
pub(crate) fn start(shared: Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("engram-heartbeat".into()).spawn(move || {
        runtime.block_on(run(shared));
    })
}

/// Sends heartbeats until the worker stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut stopping = shared.lifecycle.stopping();
    tokio::select! {
        () = send_to_all(&shared) => {}
        () = coordinator_addresses::watch_names(Arc::clone(&shared)) => {}
        () = peers::heartbeat_partners(Arc::clone(&shared)) => {}
        () = record_turns(&shared) => {}
        // An error means that the worker was dropped, which ends this as well.
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
}

/// Records that this thread makes progress, for the liveness probe.
async fn record_turns(shared: &Shared) {
    loop {
        shared.lifecycle.heartbeat_turned();
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
    }
}

/// Keeps a heartbeat stream to every current coordinator.
async fn send_to_all(shared: &Arc<Shared>) {
    let mut roster = shared.membership.coordinators().addresses().subscribe();
    let (mut streams, mut connected) = (JoinSet::new(), BTreeSet::new());
    loop {
        for address in roster.borrow_and_update().iter().filter(|address| connected.insert(String::clone(address))) {
            streams.spawn(maintain_stream(Arc::clone(shared), address.clone()));
        }
        tokio::select! {
            changed = roster.changed() => if changed.is_err() { return },
            Some(ended) = streams.join_next() => match ended {
                Ok(address) => drop(connected.remove(&address)),
                // Without heartbeats the worker counts as dead, so it must not continue.
                Err(error) => if error.is_panic() { std::panic::resume_unwind(error.into_panic()) },
            },
        }
    }
}

/// Keeps a stream to one coordinator. Returns its address once it is no longer a coordinator.
async fn maintain_stream(shared: Arc<Shared>, address: String) -> String {
    let mut wait = RECONNECT_INTERVAL;
    while shared.membership.coordinators().addresses().current().contains(&address) {
        let ended = stream(&shared, &address).await;
        shared.membership.transfer_leadership(&address, &[]);
        match ended {
            Ok(()) => wait = RECONNECT_INTERVAL,
            Err(reason) => {
                tracing::debug!(coordinator = address, reason, "failed to open heartbeat stream");
                wait = (wait * 2).min(MAX_RECONNECT_INTERVAL);
            }
        }
        // Jitter, so that workers do not reconnect to a restarted coordinator all at once.
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
    }
    address
}

/// Runs one stream until it breaks. Returns `Ok` if anything was received on it.
async fn stream(shared: &Shared, address: &str) -> Result<(), String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_DEADLINE);
    let channel = shared.setup.to_coordinators().connect(endpoint).await.map_err(|error| error.to_string())?;
    let mut client =
        CoordinatorServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    // Capacity 1: a newer heartbeat makes a queued one obsolete.
    let (heartbeats, outgoing) = mpsc::channel(1);
    let mut progress = Progress::new();
    let hello = Hello { newest_map_version: shared.membership.seen_version(), ..shared.setup.hello.hello() };
    heartbeats
        .try_send(HeartbeatRequest { hello: Some(hello), ..progress.next(shared) })
        .map_err(|error| error.to_string())?;
    let replies =
        client.heartbeat(ReceiverStream::new(outgoing)).await.map_err(|status| status.message().to_owned())?;
    let mut replies = replies.into_inner();
    let mut ticks = tokio::time::interval(HEARTBEAT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut received = false;
    let _heard = shared.membership.coordinators().stream_opened();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                if let Err(mpsc::error::TrySendError::Closed(_)) = heartbeats.try_send(progress.next(shared)) {
                    return Ok(());
                }
            }
            reply = replies.message() => match reply {
                Ok(Some(reply)) => {
                    received = true;
                    shared.membership.receive(address, reply);
                }
                Ok(None) if received => return Ok(()),
                Ok(None) => return Err("the stream ended without a response".into()),
                Err(_) if received => return Ok(()),
                Err(status) => return Err(status.message().to_owned()),
            },
        }
    }
}

/// Returns the roots that this process trusts and the root that issued its certificate.
fn certificate_status(keys: &Keys) -> CertificateStatus {
    CertificateStatus {
        trusted_roots: keys.trusted_roots().iter().map(|root| root.0).collect(),
        issuer_root: keys.root().0,
    }
}

/// Detects whether the store makes progress: a process whose disk or engine is stuck serves nothing.
struct Progress {
    /// Rises whenever something progressed or nothing is queued.
    progress_count: u64,
    progressed_at: Instant,
    /// Log writes completed at the last heartbeat.
    log_writes: u64,
    /// Engine pings: sent, answered, and answered by the last heartbeat. One is sent with each heartbeat.
    pings_sent: u64,
    pings_answered: Arc<AtomicU64>,
    pings_seen: u64,
    disk: DiskSpace,
}

impl Progress {
    fn new() -> Self {
        Self {
            progress_count: 0,
            progressed_at: Instant::now(),
            log_writes: 0,
            pings_sent: 0,
            pings_answered: Arc::default(),
            pings_seen: 0,
            disk: DiskSpace::default(),
        }
    }

    fn next(&mut self, shared: &Shared) -> HeartbeatRequest {
        let stats = shared.engine.stats();
        let pings_answered = self.pings_answered.load(Ordering::Acquire);
        let log_is_stuck = stats.waiting_records > 0 && stats.write_us.count == self.log_writes;
        let engine_is_stuck = self.pings_sent > pings_answered && self.pings_seen == pings_answered;
        (self.log_writes, self.pings_seen) = (stats.write_us.count, pings_answered);
        if !log_is_stuck && !engine_is_stuck {
            self.progress_count += 1;
            self.progressed_at = Instant::now();
        }
        if self.pings_sent == pings_answered && shared.engine.ping(Arc::clone(&self.pings_answered)) {
            self.pings_sent += 1;
        }
        HeartbeatRequest {
            hello: None,
            map_version: shared.membership.view().version(),
            applied_records: stats.applied_records,
            operations: stats.applied_records + stats.reads,
            event_loop_lag_ms: shared.lifecycle.event_loop_lag_ms(),
            memories: stats.memories,
            ready: shared.is_ready(),
            suspects: shared.peers.detector().suspects(),
            queued: self.progressed_at.elapsed() >= STALL_THRESHOLD,
            progress_count: self.progress_count,
            leaving: shared.membership.is_leaving(),
            disk_full: self.disk.is_full(&shared.setup.options.state_dir),
            leaderless_partitions: stats.leaderless_partitions.iter().map(|partition| partition.0).collect(),
            bootstrap: shared.lifecycle.bootstrap().status(),
            certificate: shared.setup.keys.as_deref().map(certificate_status),
            gpu_fault: gpu_fault::gpu_fault(
                shared.setup.options.spec.gpu.mode,
                shared.setup.device.without(),
                stats.gpu.as_ref(),
            ),
        }
    }
}
