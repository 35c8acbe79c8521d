//! One machine with its worker: the real one, over a simulated disk, clocks and network.

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

/// Every cluster of a simulation is this one.
pub(crate) const CLUSTER: ClusterId = ClusterId(11);
/// Where workers listen.
pub(crate) const CLIENT_PORT: u16 = 7443;
const PEER_PORT: u16 = 7444;
/// Where the coordinator listens.
pub(crate) const COORDINATOR: &str = "coordinator";
pub(crate) const COORDINATOR_PORT: u16 = 7440;
/// Wall time when a run begins.
const BEGINS_MS: u64 = 1_700_000_000_000;
/// Small, since the simulated disk is in memory, and a run shall see more than one.
const SEGMENT_BYTES: u64 = 256 << 10;
/// How long a store works at most on what came before it looks again.
const IDLE: Duration = Duration::from_millis(50);

/// How a machine and the store on it behave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Habits {
    /// How long the disk takes for what one turn of the store writes.
    pub(crate) disk_ms: u64,
    /// Records kept for followers that were away: who needs older ones gets a copy of the state.
    pub(crate) kept_bytes: usize,
    pub(crate) snapshot_ms: u64,
    pub(crate) digest_ms: u64,
}

/// A machine: what stays of it when its worker dies.
#[derive(Clone)]
pub(crate) struct Node(Arc<Mutex<State>>);

struct State {
    ordinal: u32,
    disk: SimDisk,
    /// The store that was made or found on this very disk.
    store: Option<StoreId>,
    clock: Arc<ManualClock>,
    boot: u128,
    habits: Habits,
    spec: LearnerClusterSpec,
    trace: Trace,
}

impl Node {
    pub(crate) fn new(ordinal: u32, seed: u64, habits: Habits, spec: LearnerClusterSpec, trace: Trace) -> Self {
        Self(Arc::new(Mutex::new(State {
            ordinal,
            disk: SimDisk::new(seed),
            store: None,
            clock: Arc::new(ManualClock::new(BEGINS_MS)),
            boot: u128::from(seed) + 1,
            habits,
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

    /// Its process was killed: what it wrote is in the page cache.
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

    /// An empty disk is where its own was.
    pub(crate) fn lost_disk(&self, seed: u64) {
        self.with(|node| {
            node.disk.kill();
            node.disk = SimDisk::new(seed);
            node.store = None;
        });
    }

    /// Whether what a store wrote is still on its disk.
    pub(crate) fn has(&self, store: StoreId) -> bool {
        self.with(|node| node.store == Some(store))
    }

    /// The life of a process on it.
    pub(crate) async fn run(self) -> turmoil::Result {
        let (options, clock, trace) = self.with(|node| (node.options(), Arc::clone(&node.clock), node.trace.clone()));
        let ordinal = options.ordinal;
        let (client, peer) = (listen(CLIENT_PORT).await?, listen(PEER_PORT).await?);
        let (news, slot) = (Arc::new(Notify::new()), Arc::new(Mutex::new(None)));
        let open = {
            let (node, news, slot) = (self.clone(), Arc::clone(&news), Arc::clone(&slot));
            move |mut options: engram_store::Options, peers| {
                let (disk, clock) = node.with(|node| {
                    options.origin = Origin { boot: node.boot, mount: 0 };
                    let Habits { kept_bytes, snapshot_ms, digest_ms, .. } = node.habits;
                    options.replication.retained_bytes = kept_bytes;
                    (options.snapshot_ms, options.digest_ms) = (snapshot_ms, digest_ms);
                    options.wal.segment_bytes = SEGMENT_BYTES;
                    (Arc::new(node.disk.clone()) as Arc<dyn Disk>, Arc::clone(&node.clock))
                });
                let (mut store, recovery) = Store::open(disk, clock, Box::new(Cpu::new(1)), options)?;
                assert!(recovery.corrupt.is_empty(), "nothing was damaged, and yet {recovery:?}");
                node.with(|node| node.store = Some(store.member().store));
                let lossless_since = store.identity().lossless_since();
                let device = store.partitions().device();
                let device = (device.name.clone(), device.threads);
                let (store, stepped) = Engine::stepped(store, peers, Box::new(move || news.notify_one()));
                *slot.lock().expect("one thread") = Some((store.clone(), stepped));
                Ok(OpenedStore { store, recovery, lossless_since, device })
            }
        };
        let clock = clock as Arc<dyn Clock>;
        let machine = Machine { clock, network: Network::simulated(Wire), client, peer, open: Box::new(open) };
        let worker = Worker::on(machine, options)?;
        trace.note(format!("worker {ordinal} runs as {}", worker.handle().member()));
        let (store, stepped) = slot.lock().expect("one thread").take().expect("the worker has opened its store");
        let (disk_ms, partitions) = self.with(|node| (node.habits.disk_ms, node.spec.partitions));
        let works = work(stepped, &news, disk_ms, || {
            let served = (0..partitions).map(|partition| store.position(PartitionId(partition)));
            served.for_each(|position| trace.count(position.map_or(u64::MAX, |(term, lsn)| term.0 << 40 | lsn.0)));
        });
        tokio::select! {
            ended = worker.run(std::future::pending()) => ended?,
            failed = works => failed?,
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
            gpu_deadline_ms: None,
            tls: None,
            inputs: None,
            snapshots: None,
            bootstrap: None,
            spec: self.spec.clone(),
        }
    }
}

/// Steps a store whenever there is something for it; returns when it cannot go on.
async fn work(mut store: SteppedEngine, news: &Notify, disk_ms: u64, worked: impl Fn()) -> Result<(), engram_store::Error> {
    loop {
        if timeout(IDLE, news.notified()).await.is_ok() && disk_ms > 0 {
            // What comes meanwhile is in the same write.
            sleep(Duration::from_millis(disk_ms)).await;
        }
        store.step()?;
        worked();
    }
}
