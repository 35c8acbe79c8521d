//! State shared by the services, the heartbeat and the HTTP pages of one worker.

use crate::accept::ConnectionCounters;
use crate::activation;
use crate::admission::Admission;
use crate::authorization::AccountAuthorizer;
use crate::bootstrap::BootstrapProgress;
use crate::buffers::Catalog;
use crate::cluster_view::ClusterView;
use crate::coordinator_addresses::CoordinatorAddresses;
use crate::cpu_pressure::CpuPressure;
use crate::device::Device;
use crate::engine::Engine;
use crate::failovers::Failovers;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::peers::{HelloContext, Links, MIN_AGE_MS, MapStoreClient, PeerDetector, Proposals};
use crate::read::AnswerBytes;
use crate::runs::Runs;
use crate::training::Trainings;
use engram_client::{Client, Network};
use engram_cluster::PartitionMap;
use engram_identity::{ExpectedPeer, Keys, Reason, Role};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, Shape};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::Clock;
use engram_store::leases::GRANT_MS;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// Shared state of one worker.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) shape: Shape,
    pub(crate) member: Member,
    /// The store uses the same clock.
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    /// Certificate of this process, under TLS.
    pub(crate) keys: Option<Arc<Keys>>,
    /// Authorization of client tokens.
    pub(crate) accounts: Option<Arc<AccountAuthorizer>>,
    pub(crate) engine: Engine,
    /// Client of all workers, including this one for requests to all.
    pub(crate) peers: Client,
    pub(crate) metrics: Metrics,
    /// Definitions of buffers.
    pub(crate) buffers: Catalog,
    /// Limits of reads and writes in flight.
    pub(crate) admission: Admission,
    /// Learning runs driven by this worker.
    pub(crate) runs: Runs,
    /// Failovers that are traced here.
    pub(crate) failovers: Failovers,
    /// This object, for tasks.
    pub(crate) this: Weak<Self>,
    /// Members of training groups on this worker.
    pub(crate) trainings: Trainings,
    /// Groups of processes outside of the cluster hosted by this worker.
    pub(crate) groups: Groups,
    pub(crate) view: watch::Sender<ClusterView>,
    /// Identity of this worker in hellos.
    pub(crate) hello: HelloContext,
    /// Open streams to the stores of other workers.
    pub(crate) links: Arc<Links>,
    /// Map changes proposed by the replicas here.
    pub(crate) proposals: Arc<Proposals>,
    /// Direct client of the map store, if this worker can reach it.
    pub(crate) map_store: Option<MapStoreClient>,
    peer_detector: Mutex<PeerDetector>,
    pub(crate) coordinators: Coordinators,
    pub(crate) coordinator_addresses: CoordinatorAddresses,
    /// Version of the newest map that this disk had recorded when the process started; 0 = none.
    pub(crate) disk_map_version: AtomicU64,
    /// Number of the newest map state request of a coordinator; 0 = none.
    pub(crate) map_state_request: watch::Sender<u64>,
    /// Leadership transfers requested from the store.
    leadership_transfers: Mutex<LeadershipTransfers>,
    /// Leaving workers that the store was notified of.
    leavers: Mutex<BTreeSet<Ordinal>>,
    /// Bytes of answers of several pages that clients have not read yet.
    pub(crate) answer_bytes: AnswerBytes,
    /// Permits for requests that wait for a partition that is being activated.
    pub(crate) waiting: Semaphore,
    /// Set once: requests are rejected from then on.
    pub(crate) stopping: watch::Sender<bool>,
    /// Set while the worker is drained before a stop.
    pub(crate) leaving: AtomicBool,
    /// Progress of loading a new disk.
    pub(crate) bootstrap: BootstrapProgress,
    /// Set if the process exits to be restarted at once.
    pub(crate) restart_requested: AtomicBool,
    /// Notified when an orderly stop is requested.
    pub(crate) stop_requested: tokio::sync::Notify,
    pub(crate) broadcast: RwLock<Option<v1::BroadcastQualityRequest>>,
    pub(crate) started: Instant,
    /// Start time by the clock of heartbeats and leases, in milliseconds.
    started_ms: u64,
    pub(crate) recovery: String,
    pub(crate) device: Device,
    pub(crate) last_snapshot_ms: AtomicU64,
    /// When the heartbeat thread made progress last, by the clock of heartbeats and leases.
    pub(crate) heartbeat_turn_ms: AtomicU64,
    /// Delay of timers on the runtime of the services, in milliseconds.
    pub(crate) event_loop_lag_ms: AtomicU64,
}

/// Leadership transfers.
#[derive(Debug, Default)]
struct LeadershipTransfers {
    /// Transfers requested by each coordinator, by its address. Coordinators decide the same, but not at the same moment: a
    /// transfer that one does not list yet is not cancelled, otherwise a partition would be paused and resumed.
    by_coordinator: BTreeMap<String, BTreeMap<PartitionId, Ordinal>>,
    /// Transfers requested from the store.
    requested: BTreeMap<PartitionId, Ordinal>,
}

/// Components of a worker before it runs.
pub(crate) struct SharedParts {
    pub(crate) options: Options,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) greeter: HelloContext,
    pub(crate) links: Arc<Links>,
    pub(crate) proposals: Arc<Proposals>,
    pub(crate) engine: Engine,
    pub(crate) peers: Client,
    pub(crate) recovery: String,
    pub(crate) device: Device,
    pub(crate) connections: ConnectionCounters,
}

/// Tracks whether any coordinator is connected.
pub(crate) struct Coordinators {
    clock: Arc<dyn Clock>,
    streams: AtomicUsize,
    /// When the last stream ended, in milliseconds of the clock that counts suspends; initially the start of the worker.
    lost_ms: AtomicU64,
}

impl Coordinators {
    fn new(clock: Arc<dyn Clock>) -> Self {
        Self { streams: AtomicUsize::new(0), lost_ms: AtomicU64::new(clock.elapsed_ms()), clock }
    }

    /// Counts a stream as open while the returned value lives.
    pub(crate) fn stream_opened(&self) -> impl Drop + '_ {
        struct Open<'a>(&'a Coordinators);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.lost_ms.store(self.0.clock.elapsed_ms(), Ordering::Release);
                self.0.streams.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.streams.fetch_add(1, Ordering::AcqRel);
        Open(self)
    }

    /// Returns for how long no coordinator has been connected; 0 = one is.
    pub(crate) fn silence_ms(&self) -> u64 {
        if self.streams.load(Ordering::Acquire) > 0 {
            return 0;
        }
        self.clock.elapsed_ms().saturating_sub(self.lost_ms.load(Ordering::Acquire))
    }
}

impl Shared {
    /// Returns the network for connections to coordinators, which verifies their role under TLS.
    pub(crate) fn to_coordinators(&self) -> Network {
        self.network.for_peer(ExpectedPeer::any(Role::Coordinator))
    }

    pub(crate) fn new(parts: SharedParts, this: Weak<Self>) -> Self {
        let SharedParts {
            options,
            clock,
            network,
            keys,
            greeter,
            links,
            proposals,
            engine,
            peers,
            recovery,
            device,
            connections,
        } = parts;
        let tokens = options.tls.as_ref().and_then(|tls| tls.tokens.as_ref());
        let accounts = tokens.map(|files| Arc::new(AccountAuthorizer::open(files, options.cluster)));
        if let Some(accounts) = &accounts {
            accounts.watch_files();
        }
        Self {
            shape: options.shape(),
            metrics: Metrics::new(&options.cluster_name, options.ordinal, &links.traffic, &connections, keys.is_some()),
            buffers: Catalog::default(),
            admission: Admission::new(if network.is_simulated() {
                CpuPressure::unknown()
            } else {
                CpuPressure::of_process()
            }),
            coordinator_addresses: CoordinatorAddresses::new(&options.coordinators, !network.is_simulated()),
            map_store: MapStoreClient::of(&options),
            options,
            member: greeter.member,
            network,
            keys,
            accounts,
            engine,
            peers,
            runs: Runs::default(),
            failovers: Failovers::default(),
            this,
            trainings: Trainings::default(),
            groups: Groups::default(),
            view: watch::Sender::new(ClusterView::default()),
            hello: greeter,
            links,
            proposals,
            peer_detector: Mutex::new(PeerDetector::new(clock.elapsed_ms())),
            coordinators: Coordinators::new(Arc::clone(&clock)),
            disk_map_version: AtomicU64::new(0),
            map_state_request: watch::Sender::new(0),
            leadership_transfers: Mutex::default(),
            leavers: Mutex::default(),
            answer_bytes: AnswerBytes::default(),
            waiting: Semaphore::new(activation::MAX_WAITING),
            started_ms: clock.elapsed_ms(),
            heartbeat_turn_ms: AtomicU64::new(clock.elapsed_ms()),
            clock,
            stopping: watch::Sender::new(false),
            leaving: AtomicBool::new(false),
            bootstrap: BootstrapProgress::default(),
            restart_requested: AtomicBool::new(false),
            stop_requested: tokio::sync::Notify::new(),
            broadcast: RwLock::default(),
            started: Instant::now(),
            recovery,
            device,
            last_snapshot_ms: AtomicU64::new(0),
            event_loop_lag_ms: AtomicU64::new(0),
        }
    }

    /// Returns the time by the clock of heartbeats and leases.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.clock.elapsed_ms()
    }

    pub(crate) const fn ordinal(&self) -> Ordinal {
        self.member.ordinal
    }

    pub(crate) const fn partitions(&self) -> u32 {
        self.shape.partitions
    }

    /// Returns the partitions served here.
    pub(crate) fn served(&self) -> Vec<PartitionId> {
        self.engine.served(self.partitions())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Returns whether the worker is being drained and must not become primary.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Returns whether it has a map, serves all partitions assigned to it, and could take over from a partner.
    pub(crate) fn is_ready(&self) -> bool {
        !self.is_stopping() && self.is_settled() && self.is_complete()
    }

    /// Returns whether this process is old enough to take over: until the leases that its predecessor may have granted have expired
    /// it serves nothing, and until its minimum age it suspects no partner. A rolling restart waits for it.
    fn is_settled(&self) -> bool {
        let is_first_process = self.options.spec.replication_factor == 1 || self.member.incarnation == Incarnation(1);
        is_first_process || self.elapsed_ms().saturating_sub(self.started_ms) >= MIN_AGE_MS.max(GRANT_MS)
    }

    /// Returns whether it serves every partition whose primary is this ordinal. A partition still assigned to the previous process
    /// is not served until it is assigned to this one, or another.
    fn is_complete(&self) -> bool {
        let Some(map) = self.view.borrow().map.clone() else { return false };
        let own_entries = map.entries().filter(|(_, entry)| entry.primary == self.ordinal());
        let mut served = own_entries
            .map(|(partition, entry)| entry.served_by(&self.member) && self.engine.position(partition).is_some());
        served.all(|served| served)
    }

    /// Counts an authentication or authorization failure.
    pub(crate) fn count_refusal(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }

    /// Returns the fault of the store, if any.
    pub(crate) fn fault(&self) -> Option<String> {
        self.engine.stats().fault
    }

    /// Applies a coordinator's response; returns whether map or members changed.
    pub(crate) fn receive(&self, coordinator: &str, mut reply: v1::HeartbeatResponse) -> bool {
        for member in &mut reply.members {
            if let Some(detour) = self.options.peer_detours.get(&member.ordinal) {
                member.peer_address.clone_from(detour);
            }
        }
        let changed =
            self.view.send_if_modified(|view| view.update(&reply, self.options.cluster, self.shape.partitions));
        if changed {
            self.publish_map();
        }
        self.transfer_leadership(coordinator, &reply.leadership_transfers);
        self.map_state_request.send_if_modified(|last_request| {
            std::mem::replace(last_request, reply.map_state_request) != reply.map_state_request
        });
        changed
    }

    /// Returns the version of the newest map that this disk has recorded; 0 = none.
    pub(crate) fn seen_version(&self) -> u64 {
        self.view.borrow().version().max(self.disk_map_version.load(Ordering::Acquire))
    }

    /// Applies the leadership transfers that a coordinator requests now; transfers that no coordinator lists any more are
    /// cancelled. A disconnected coordinator requests none.
    pub(crate) fn transfer_leadership(&self, coordinator: &str, requested: &[v1::LeadershipTransfer]) {
        let mut transfers = self.leadership_transfers.lock();
        if requested.is_empty() {
            transfers.by_coordinator.remove(coordinator);
        } else {
            let requested =
                requested.iter().map(|transfer| (PartitionId(transfer.partition), Ordinal(transfer.to))).collect();
            transfers.by_coordinator.insert(coordinator.to_owned(), requested);
        }
        // If two coordinators differ, the first one counts.
        let all: BTreeMap<PartitionId, Ordinal> =
            transfers.by_coordinator.values().rev().flatten().map(|(partition, to)| (*partition, *to)).collect();
        for partition in transfers.requested.keys().filter(|partition| !all.contains_key(partition)) {
            // A transfer to this worker cancels the previous one.
            self.engine.transfer_leadership(*partition, self.ordinal());
        }
        for (partition, to) in &all {
            self.engine.transfer_leadership(*partition, *to);
        }
        transfers.requested = all;
    }

    /// Applies a map that was read from the map store.
    pub(crate) fn read_map(&self, map: PartitionMap) {
        if self.view.send_if_modified(|view| view.update_map(map, self.options.cluster, self.shape.partitions)) {
            self.publish_map();
        }
    }

    /// Notifies the store of changes of the leaving workers. A worker that is leaving itself drops no replicas, so that workers
    /// that are stopped at once keep each other's.
    pub(crate) fn update_leavers(&self) {
        let leavers = if self.is_leaving() { BTreeSet::new() } else { self.view.borrow().leavers() };
        let mut notified = self.leavers.lock();
        if *notified != leavers {
            self.engine.leaving(leavers.clone());
            *notified = leavers;
        }
    }

    /// Passes the map to the store and the client of the other workers.
    fn publish_map(&self) {
        self.update_leavers();
        let view = self.view.borrow();
        if let Some(map) = &view.map {
            self.engine.update_map(Arc::clone(map));
        }
        if let Some(map) = view.client_map(&self.options.cluster_name, self.shape.features.dimension) {
            self.peers.set_map(map);
        }
    }

    /// Returns the failure detector of partners.
    pub(crate) fn peer_detector(&self) -> MutexGuard<'_, PeerDetector> {
        self.peer_detector.lock()
    }

    /// Returns the problem for a partition that is not served here.
    pub(crate) fn not_primary(&self, partition: PartitionId) -> Problem {
        let view = self.view.borrow();
        let primary = view.primary(partition);
        let text = match primary {
            Some(primary) if primary == self.ordinal() => {
                format!("partition {partition} is being activated on this worker")
            }
            Some(primary) => format!("partition {partition} is served by worker {primary}"),
            None => "the partition map is not known yet".to_owned(),
        };
        let mut problem = Problem::of(ProblemKind::NotPrimary, text).at(partition);
        problem.map_version = view.version();
        problem.primary = primary.map(|primary| primary.0);
        problem
    }

    /// Checks a partition number.
    pub(crate) fn check_partition(&self, partition: u32) -> Result<PartitionId, Problem> {
        if partition < self.partitions() {
            return Ok(PartitionId(partition));
        }
        let text = format!("partition: {partition} is not allowed; allowed: 0 to {}", self.partitions() - 1);
        Err(Problem::of(ProblemKind::Invalid, text))
    }
}
