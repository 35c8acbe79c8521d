//! One machine with its worker: the real one, over a simulated disk, clock and network.

use crate::trace::Trace;
use crate::wire::{Wire, listen};
use engram_api::LearnerClusterSpec;
use engram_client::Network;
use engram_kernels::Cpu;
use engram_memory::{ClusterId, PartitionId, StoreId};
use engram_store::disk::Disk;
use engram_store::{Clock, Engine, ManualClock, Origin, SimDisk, SteppedEngine, Store};
use engram_worker::machine::{Machine, OpenedStore};
use engram_worker::{Listen, Options, Worker};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Cluster id of all simulations.
pub(crate) const CLUSTER: ClusterId = ClusterId(11);
/// Ports of workers.
pub(crate) const CLIENT_PORT: u16 = 7443;
const PEER_PORT: u16 = 7444;
/// Address of the coordinator.
pub(crate) const COORDINATOR: &str = "coordinator";
pub(crate) const COORDINATOR_PORT: u16 = 7440;
/// Wall time at the start of a run.
const START_MS: u64 = 1_700_000_000_000;
/// Small, since the simulated disk is in memory and a run should use several segments.
const SEGMENT_BYTES: u64 = 256 << 10;
/// Maximum time between two steps of a store.
const IDLE: Duration = Duration::from_millis(50);

/// Parameters of a machine and its store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MachineOptions {
    /// Time the disk takes for the writes of one step.
    pub(crate) disk_ms: u64,
    /// Records kept for followers that were away; who needs older ones gets a snapshot.
    pub(crate) kept_bytes: usize,
    pub(crate) snapshot_ms: u64,
    pub(crate) digest_ms: u64,
}

/// A machine, which outlives its worker.
#[derive(Clone)]
pub(crate) struct Node(Arc<Mutex<State>>);

struct State {
    ordinal: u32,
    disk: SimDisk,
    /// The store created or found on the current disk.
    store: Option<StoreId>,
    clock: Arc<ManualClock>,
    boot: u128,
    options: MachineOptions,
    spec: LearnerClusterSpec,
    trace: Trace,
}

impl Node {
    pub(crate) fn new(
        ordinal: u32,
        seed: u64,
        options: MachineOptions,
        spec: LearnerClusterSpec,
        trace: Trace,
    ) -> Self {
        Self(Arc::new(Mutex::new(State {
            ordinal,
            disk: SimDisk::new(seed),
            store: None,
            clock: Arc::new(ManualClock::new(START_MS)),
            boot: u128::from(seed) + 1,
            options,
            spec,
            trace,
        })))
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.lock().expect("one thread, and no panic while it is held"))
    }

    pub(crate) fn name(ordinal: u32) -> String {
        format!("worker-{ordinal}")
    }

    pub(crate) fn pass(&self, ms: u64) {
        self.with(|node| node.clock.advance(ms));
    }

    /// Its process was killed: the page cache survives.
    pub(crate) fn killed(&self) {
        self.with(|node| node.disk.kill());
    }

    /// It lost power: what was not synced survives in part.
    pub(crate) fn lost_power(&self) {
        self.with(|node| {
            node.disk.kill();
            node.disk.lose_power();
            node.boot += 1;
        });
    }

    /// Its disk was replaced by an empty one.
    pub(crate) fn lost_disk(&self, seed: u64) {
        self.with(|node| {
            node.disk.kill();
            node.disk = SimDisk::new(seed);
            node.store = None;
        });
    }

    /// Whether the store is still on its disk.
    pub(crate) fn has(&self, store: StoreId) -> bool {
        self.with(|node| node.store == Some(store))
    }

    /// Runs a process on it.
    pub(crate) async fn run(self) -> turmoil::Result {
        let (options, clock, trace) = self.with(|node| (node.options(), Arc::clone(&node.clock), node.trace.clone()));
        let ordinal = options.ordinal;
        let (client, peer) = (listen(CLIENT_PORT).await?, listen(PEER_PORT).await?);
        let (wake, slot) = (Arc::new(Notify::new()), Arc::new(Mutex::new(None)));
        let open = {
            let (node, wake, slot) = (self.clone(), Arc::clone(&wake), Arc::clone(&slot));
            move |mut options: engram_store::Options, peers| {
                let (disk, clock) = node.with(|node| {
                    options.origin = Origin { boot: node.boot, mount: 0 };
                    let MachineOptions { kept_bytes, snapshot_ms, digest_ms, .. } = node.options;
                    options.replication.retained_bytes = kept_bytes;
                    (options.snapshot_ms, options.digest_ms) = (snapshot_ms, digest_ms);
                    options.wal.segment_bytes = SEGMENT_BYTES;
                    (Arc::new(node.disk.clone()) as Arc<dyn Disk>, Arc::clone(&node.clock))
                });
                let (mut store, recovery) = Store::open(disk, clock, Box::new(Cpu::new(1)), options)?;
                assert!(recovery.corrupt.is_empty(), "no damage was injected, but {recovery:?}");
                node.with(|node| node.store = Some(store.member().store));
                let lossless_since = store.identity().lossless_since();
                let device = store.partitions().device();
                let device = (device.name.clone(), device.threads);
                let (store, stepped) = Engine::stepped(store, peers, Box::new(move || wake.notify_one()));
                *slot.lock().expect("one thread") = Some((store.clone(), stepped));
                Ok(OpenedStore { store, recovery, lossless_since, device })
            }
        };
        let clock = clock as Arc<dyn Clock>;
        let machine = Machine { clock, network: Network::simulated(Wire), client, peer, open: Box::new(open) };
        let worker = Worker::on(machine, options)?;
        trace.note(format!("worker {ordinal} runs as {}", worker.handle().member()));
        let (store, stepped) = slot.lock().expect("one thread").take().expect("the worker opened its store");
        let (disk_ms, partitions) = self.with(|node| (node.options.disk_ms, node.spec.partitions));
        let steps = step_store(stepped, &wake, disk_ms, || {
            let served = (0..partitions).map(|partition| store.position(PartitionId(partition)));
            served.for_each(|position| trace.count(position.map_or(u64::MAX, |(term, lsn)| term.0 << 40 | lsn.0)));
        });
        tokio::select! {
            ended = worker.run(std::future::pending()) => ended?,
            failed = steps => failed?,
        }
        Ok(())
    }
}

impl State {
    fn options(&self) -> Options {
        Options {
            cluster: CLUSTER,
            cluster_name: "simulated".into(),
            ordinal: self.ordinal,
            state_dir: PathBuf::new(),
            listen: Listen::default(),
            advertise_host: Some(Node::name(self.ordinal)),
            coordinators: vec![format!("{COORDINATOR}:{COORDINATOR_PORT}")],
            peer_detours: Default::default(),
            map_location: None,
            threads: Some(1),
            machine_workers: None,
            local_files: None,
            gpu_deadline_ms: None,
            tls: None,
            inputs: None,
            snapshots: None,
            bootstrap: None,
            spec: self.spec.clone(),
        }
    }
}

/// Steps a store whenever it has work; returns on an error.
async fn step_store(
    mut store: SteppedEngine,
    wake: &Notify,
    disk_ms: u64,
    stepped: impl Fn(),
) -> Result<(), engram_store::Error> {
    loop {
        if timeout(IDLE, wake.notified()).await.is_ok() && disk_ms > 0 {
            // What arrives meanwhile is in the same write.
            sleep(Duration::from_millis(disk_ms)).await;
        }
        store.step()?;
        stepped();
    }
}
