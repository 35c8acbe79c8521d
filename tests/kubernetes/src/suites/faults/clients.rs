//! The clients: threads in the network of node 1, from where every pod is reached, and which no fault hits.
//!
//! They write through the client library, and the ledger of `engram-faults` says in the end what became of each write. Each fault has
//! a load of its own with ids of its own, whose books are closed when the fault is over, and opened once more after the last fault.

use super::machine::{Machine, Spent};
use super::{TRIALS, watch};
use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::helpers::service_address;
use anyhow::{Context, Result, ensure};
use engram_faults::ledger::Tally;
use engram_faults::load::{Load, LoadReport};
use engram_faults::outages::Outage;
use engram_memory::{ClusterId, MemoryId, PartitionId};
use nix::sched::{CloneFlags, setns};
use std::fs::File;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Operations a second over all partitions, each a batch of 16 ids: less than 2,000 writes a second however they are counted.
const OPERATIONS_PER_SECOND: f64 = 120.0;
/// Sessions are opened and connections made before anything counts.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long the same load runs without a fault before each fault.
const CALM: Duration = Duration::from_secs(3);
/// How long it may take until nothing happens for so long.
const RESTS: Duration = Duration::from_secs(60);
/// An operation that takes longer is an outage in the load's own terms; what is judged here is the longest, whatever it took.
const SLOW: Duration = Duration::from_millis(100);
/// How long every partition may take to execute another operation once the copies are whole.
const SERVED: Duration = Duration::from_secs(20);
/// Ids of a load: none ever needs so many.
const IDS_BITS: u32 = 32;
/// What a planned change may always take, and how many times the slowest thousandth without faults.
const PLANNED: (Duration, f64) = (Duration::from_millis(200), 3.0);

/// Clients of the cluster of the trials.
pub(super) struct Clients {
    runtime: Runtime,
    endpoint: String,
    cluster: ClusterId,
    loads: u64,
    books: Vec<LoadReport>,
    /// How long operations took without a fault, over all loads.
    calm: Vec<Duration>,
    machine: Machine,
}

/// The longest that any partition took no write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Longest {
    pub(super) partition: PartitionId,
    /// How long after its fault it began.
    pub(super) after: Duration,
    /// What the machine did meanwhile.
    pub(super) machine: Spent,
}

/// What a load came to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Closed {
    /// Operations that were acknowledged from the first fault on.
    pub(super) acknowledged: u64,
    /// The longest that any partition took no write.
    pub(super) gap: Duration,
    pub(super) longest: Option<Longest>,
    /// What the weights say.
    pub(super) tally: Tally,
    /// Partitions that took no write once the copies were whole.
    pub(super) unserved: usize,
}

/// A load at work.
pub(super) struct Working {
    load: Load,
    /// How much of it was done before the first fault.
    before: u64,
    /// When the fault began that is not measured yet.
    since: tokio::time::Instant,
    gap: Duration,
    longest: Option<Longest>,
    unserved: usize,
}

impl Clients {
    /// Of the cluster that is there.
    pub(super) fn of(cluster: &Cluster) -> Result<Self> {
        let runtime = runtime(cluster)?;
        let status = watch::status(cluster)?;
        let id = status["clusterId"].as_str().and_then(|it| it.parse().ok()).context("the status has no clusterId")?;
        let endpoint = format!("{}:7443", service_address(cluster, TRIALS)?);
        Ok(Self {
            runtime,
            endpoint,
            cluster: id,
            loads: 0,
            books: Vec::new(),
            calm: Vec::new(),
            machine: Machine::watch()?,
        })
    }

    /// Begins a load, and lets it run for a while in which nothing happens.
    pub(super) fn begin(&mut self, cluster: &Cluster) -> Result<Working> {
        self.loads += 1;
        let (endpoints, id) = (vec![self.endpoint.clone()], self.cluster);
        let first = MemoryId(self.loads << IDS_BITS);
        let load = self.run(async move { Load::start_from(&endpoints, id, SLOW, first).await })?;
        load.set_rate(Some(OPERATIONS_PER_SECOND));
        std::thread::sleep(WARM_UP);
        let since = tokio::time::Instant::now();
        let mut working = Working { load, before: 0, since, gap: Duration::ZERO, longest: None, unserved: 0 };
        self.rest(cluster, &mut working)?;
        working.before = working.load.acked();
        Ok(working)
    }

    /// Waits for a while in which nothing happens: what the last fault has left behind, such as partitions that are moved back, is nothing
    /// of the next one.
    pub(super) fn rest(&mut self, cluster: &Cluster, working: &mut Working) -> Result<()> {
        let load = &working.load;
        until("no takeover of a partition for a while", RESTS, || {
            let before = watch::map(cluster)?.terms();
            load.take_times();
            std::thread::sleep(CALM);
            let times = load.take_times();
            ensure!(watch::map(cluster)?.terms() == before, "partitions change hands");
            self.calm.extend(times);
            Ok(Some(()))
        })?;
        load.reset_longest();
        working.since = tokio::time::Instant::now();
        Ok(())
    }

    /// Waits until every partition takes writes again, and measures what the fault since the last rest has cost.
    pub(super) fn measure(&self, mut working: Working) -> Result<Working> {
        working = self.run(async move {
            let served = working.load.wait_until_served(SERVED).await;
            working.unserved += served.err().map_or(0, |behind| behind.len());
            Ok::<_, std::convert::Infallible>(working)
        })?;
        let (load, since) = (&working.load, working.since);
        let gap = load.outages(since, |_| true).into_iter().max().unwrap_or_default();
        if gap > working.gap {
            let longest = load.each_outage(since).into_iter().max_by_key(|(_, outage)| outage.length);
            working.longest = longest.map(|(partition, Outage { began, length })| Longest {
                partition,
                after: began.saturating_duration_since(since),
                machine: self.machine.spent(began.into_std(), (began + length).into_std()),
            });
            working.gap = gap;
        }
        Ok(working)
    }

    /// Ends the load, and compares every weight with the ledger.
    pub(super) fn close(&mut self, working: Working) -> Result<Closed> {
        let Working { load, before, gap, longest, unserved, .. } = working;
        let acknowledged = load.acked() - before;
        let (books, tally) = self.run(async move {
            let books = load.finish().await;
            let tally = books.check().await;
            Ok::<_, std::convert::Infallible>((books, tally))
        })?;
        let tally = tally.context("the weights could not be read")?;
        self.books.push(books);
        Ok(Closed { acknowledged, gap, longest, tally, unserved })
    }

    /// Compares what all loads wrote with what is there now.
    pub(super) fn audit(&mut self) -> Result<Tally> {
        let books = std::mem::take(&mut self.books);
        self.run(async move {
            let mut all = Tally::default();
            for books in &books {
                all.add(&books.check().await?);
            }
            Ok::<_, engram_client::Error>(all)
        })
    }

    /// How long a planned change may hold up a write: three times what the slowest of a thousand took without faults.
    pub(super) fn planned_budget(&self) -> Duration {
        PLANNED.0.max(self.slowest_thousandth().mul_f64(PLANNED.1))
    }

    /// The time that 999 of 1,000 operations without a fault did not exceed.
    pub(super) fn slowest_thousandth(&self) -> Duration {
        let mut calm = self.calm.clone();
        calm.sort_unstable();
        let rank = (calm.len() as f64 * 0.999).ceil() as usize;
        calm.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// On the threads of the clients: a connection that is made here would be made in the network of this machine.
    fn run<T, E>(&self, work: impl Future<Output = Result<T, E>> + Send + 'static) -> Result<T>
    where
        T: Send + 'static,
        E: std::error::Error + Send + Sync + 'static,
    {
        Ok(self.runtime.block_on(self.runtime.spawn(work)).context("a client panicked")??)
    }
}

/// Threads in the network of node 1. What is spawned on them runs there, and what blocks on them does not.
pub(in crate::suites) fn runtime(cluster: &Cluster) -> Result<Runtime> {
    let network = Arc::new(cluster.network_namespace(1)?);
    let enter = move || enter(&network);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .on_thread_start(enter)
        .build()
        .context("failed to start threads")
}

/// Moves the calling thread into a network.
fn enter(network: &File) {
    setns(network, CloneFlags::CLONE_NEWNET).expect("the creator of a namespace may enter it");
}
