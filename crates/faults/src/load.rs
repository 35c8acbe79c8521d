//! Clients that write a ledger into the weights of a cluster while faults are injected.
//!
//! One task per partition, with its own session and one operation in flight, so that outages are measured per partition
//! and do not delay other partitions. An operation is a batch of ids of one partition, which is atomic; all ids of a
//! page share one [`Account`].

use crate::ledger::{Account, Response, Tally, delta};
use crate::outages::{Outage, Outages, Spread};
use engram_client::{
    Client, Error, GetOptions, Network, Options, Rows, Session, Signals, Updates, WriteOutcome, WriteResult,
};
use engram_memory::{ClusterId, MemoryId, PartitionId, partition_of};
use engram_proto::v1::ProblemKind;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Ids of one operation: few, so that operations are frequent and outages measured to a few milliseconds.
const PAGE_IDS: usize = 16;
/// Clients with their own connections and map, shared by the tasks.
const CLIENTS: u32 = 4;
/// Time limit of an operation with its retries: longer than any allowed failover.
const DEADLINE: Duration = Duration::from_secs(15);
/// Time limit of one attempt: a worker that hangs must not hide for longer than its failover takes.
const ATTEMPT: Duration = Duration::from_millis(500);
/// Retries per second always allowed: tens of tasks share one budget and may all wait for one worker.
const RETRIES: f64 = 500.0;
/// Ids per read at the end.
const READ_IDS: usize = 8_192;
/// Interval between checks whether every partition is served.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Running clients.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    tasks: JoinSet<Vec<Page>>,
    client: Client,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    /// Time between the starts of two operations of a task, in microseconds; 0 = no pause.
    period_us: AtomicU64,
    /// Threshold of an outage, in microseconds.
    slow_us: AtomicU64,
    acked: AtomicU64,
    outcome_queries: AtomicU64,
    partitions: Vec<Mutex<PartitionObservation>>,
}

/// Observations of one partition.
#[derive(Debug, Default)]
struct PartitionObservation {
    outages: Outages,
    /// Latencies of acknowledged operations since last taken, in microseconds.
    took_us: Vec<u32>,
}

/// Ids of one partition, and the operations on all of them.
#[derive(Debug)]
struct Page {
    ids: Vec<MemoryId>,
    account: Account,
}

/// What the clients know after their work.
#[derive(Debug)]
pub struct LoadReport {
    client: Client,
    pages: Vec<Page>,
    outcome_queries: u64,
}

impl Load {
    /// Connects and starts one task per partition, without a rate limit. An operation longer than `slow` counts as an
    /// outage.
    ///
    /// # Errors If the cluster does not answer.
    pub async fn start(endpoints: &[String], cluster: ClusterId, slow: Duration) -> Result<Self, Error> {
        Self::start_from(endpoints, cluster, slow, MemoryId(0)).await
    }

    /// Starts with ids from `first` on: consecutive loads whose reports are checked at the end must not share ids.
    ///
    /// # Errors If the cluster does not answer.
    pub async fn start_from(
        endpoints: &[String],
        cluster: ClusterId,
        slow: Duration,
        first: MemoryId,
    ) -> Result<Self, Error> {
        Self::start_over(Network::default(), endpoints, cluster, slow, first).await
    }

    /// Starts over a network of the caller.
    ///
    /// # Errors If the cluster does not answer.
    pub async fn start_over(
        network: Network,
        endpoints: &[String],
        cluster: ClusterId,
        slow: Duration,
        first: MemoryId,
    ) -> Result<Self, Error> {
        let options = Options {
            network,
            write_deadline: DEADLINE,
            attempt_deadline: ATTEMPT,
            connect_deadline: ATTEMPT,
            retry_floor: RETRIES,
            ..Options::new(endpoints.iter().cloned()).with_cluster(cluster)
        };
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(Client::connect(options.clone()).await?);
        }
        let partitions = clients[0].map()?.partition_count();
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            period_us: AtomicU64::new(0),
            slow_us: AtomicU64::new(slow.as_micros() as u64),
            acked: AtomicU64::new(0),
            outcome_queries: AtomicU64::new(0),
            partitions: (0..partitions).map(|_| Mutex::default()).collect(),
        });
        let mut tasks = JoinSet::new();
        for (partition, client) in (0..partitions).zip(clients.iter().cycle()) {
            let writer = Writer::new(Arc::clone(&shared), client.session(), PartitionId(partition), first);
            tasks.spawn(writer.run());
        }
        let client = clients.swap_remove(0);
        Ok(Self { shared, tasks, client })
    }

    /// Sets the number of operations per second over all partitions; `None` = unlimited.
    pub fn set_rate(&self, operations_per_second: Option<f64>) {
        let tasks = self.shared.partitions.len() as f64;
        let period = operations_per_second.map_or(0.0, |rate| 1e6 * tasks / rate.max(1.0));
        self.shared.period_us.store(period as u64, Ordering::Relaxed);
    }

    /// Sets the threshold of an outage.
    pub fn set_slow(&self, slow: Duration) {
        self.shared.slow_us.store(slow.as_micros() as u64, Ordering::Relaxed);
    }

    /// Returns the number of acknowledged operations so far.
    pub fn acked(&self) -> u64 {
        self.shared.acked.load(Ordering::Relaxed)
    }

    /// Takes the latencies of operations acknowledged since the last call.
    pub fn take_latency(&self) -> Spread {
        Spread::of(self.take_times())
    }

    /// Takes them one by one, for statistics over several loads.
    pub fn take_times(&self) -> Vec<Duration> {
        let taken = self.shared.partitions().flat_map(|mut seen| std::mem::take(&mut seen.took_us));
        taken.map(|us| Duration::from_micros(us.into())).collect()
    }

    /// Waits until every partition has executed an operation that began after this call.
    ///
    /// # Errors Partitions that have not by the deadline.
    pub async fn wait_until_served(&self, deadline: Duration) -> Result<(), Vec<PartitionId>> {
        let since = Instant::now();
        loop {
            let behind = (0..).zip(self.shared.partitions()).filter(|(_, seen)| !seen.outages.is_served_since(since));
            let behind: Vec<PartitionId> = behind.map(|(partition, _)| PartitionId(partition)).collect();
            match behind.is_empty() {
                true => return Ok(()),
                false if since.elapsed() >= deadline => return Err(behind),
                false => tokio::time::sleep(CHECK_INTERVAL).await,
            }
        }
    }

    /// Restarts the measurement of the longest operations.
    pub fn reset_longest(&self) {
        for mut seen in self.shared.partitions() {
            seen.outages.take_longest();
        }
    }

    /// Returns the longest outage of each partition that had one at `from` or later. For partitions that are `hit` it
    /// is the longest operation since [`Load::reset_longest`], outage or not.
    pub fn outages(&self, from: Instant, hit: impl Fn(PartitionId) -> bool) -> Vec<Duration> {
        let longest =
            |(partition, mut seen): (u32, MutexGuard<'_, PartitionObservation>)| match hit(PartitionId(partition)) {
                true => Some(seen.outages.take_longest()),
                false => seen.outages.since(from).map(|outage| outage.length).max(),
            };
        (0..).zip(self.shared.partitions()).filter_map(longest).collect()
    }

    /// Returns each outage that lasted until `from` or later, with its partition.
    pub fn each_outage(&self, from: Instant) -> Vec<(PartitionId, Outage)> {
        let of = |(partition, seen): (u32, MutexGuard<'_, PartitionObservation>)| {
            let outages: Vec<Outage> = seen.outages.since(from).copied().collect();
            outages.into_iter().map(move |outage| (PartitionId(partition), outage))
        };
        (0..).zip(self.shared.partitions()).flat_map(of).collect()
    }

    /// Returns the client for reads.
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Stops after the current operations.
    ///
    /// # Panics If a task panicked.
    pub async fn finish(mut self) -> LoadReport {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut pages = Vec::new();
        while let Some(done) = self.tasks.join_next().await {
            pages.extend(done.expect("tasks do not panic"));
        }
        let outcome_queries = self.shared.outcome_queries.load(Ordering::Relaxed);
        LoadReport { client: self.client, pages, outcome_queries }
    }
}

impl Shared {
    fn partitions(&self) -> impl Iterator<Item = MutexGuard<'_, PartitionObservation>> {
        self.partitions.iter().map(|seen| seen.lock())
    }
}

impl LoadReport {
    /// Reads every weight and compares; counts every operation on every id.
    ///
    /// # Errors If the cluster does not answer.
    pub async fn check(&self) -> Result<Tally, Error> {
        let mut tally = Tally::default();
        let mut pages = self.pages.iter().peekable();
        while pages.peek().is_some() {
            let part: Vec<&Page> = pages.by_ref().take(READ_IDS / PAGE_IDS).collect();
            let ids: Vec<MemoryId> = part.iter().flat_map(|page| page.ids.iter().copied()).collect();
            let found = self.client.get(&ids, GetOptions::default()).await?;
            let weights: std::collections::HashMap<MemoryId, u32> =
                found.memories.iter().map(|memory| (memory.id, memory.weight.units())).collect();
            for page in part {
                for id in &page.ids {
                    tally.add(&page.account.check(weights.get(id).copied()));
                }
            }
        }
        Ok(tally)
    }

    /// Returns the number of ids written to.
    pub fn memories(&self) -> usize {
        self.pages.iter().map(|page| page.ids.len()).sum()
    }

    /// Returns the number of requests whose outcome was unknown at first and was queried.
    pub const fn outcome_queries(&self) -> u64 {
        self.outcome_queries
    }

    /// Returns the client for reads.
    pub const fn client(&self) -> &Client {
        &self.client
    }
}

/// The task of one partition.
struct Writer {
    shared: Arc<Shared>,
    session: Session,
    partition: PartitionId,
    /// Start of the search for the next id of this partition.
    next_id: u64,
    pages: Vec<Page>,
}

impl Writer {
    fn new(shared: Arc<Shared>, session: Session, partition: PartitionId, first: MemoryId) -> Self {
        Self { shared, session, partition, next_id: first.0, pages: Vec::new() }
    }

    async fn run(mut self) -> Vec<Page> {
        // Not all at once: synchronized tasks would cause waves of load.
        self.pause(Instant::now(), rand::random_range(0.0..1.0)).await;
        let mut page: Option<Page> = None;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            match &mut page {
                None => page = self.open_page().await,
                Some(open) => match open.account.begin() {
                    Some(j) => {
                        let deltas = Signals::Deltas(vec![delta(j); open.ids.len()]);
                        let updates = Updates { ids: open.ids.clone(), signals: deltas, ..Updates::default() };
                        let done = self.session.reinforce(updates).await;
                        open.account.note(j, self.note_outcome(began, done).await);
                    }
                    None => {
                        self.pages.extend(page.take());
                        continue;
                    }
                },
            }
            self.pause(began, 1.0).await;
        }
        self.pages.extend(page);
        self.pages
    }

    /// Creates ids with weight 0; `None` = their creation is uncertain, and they are not used.
    async fn open_page(&mut self) -> Option<Page> {
        let began = Instant::now();
        let partitions = self.shared.partitions.len() as u32;
        let ids = (self.next_id..).map(MemoryId).filter(|id| partition_of(*id, partitions) == self.partition);
        let ids: Vec<MemoryId> = ids.take(PAGE_IDS).collect();
        self.next_id = ids.last().map_or(0, |last| last.0 + 1);
        let rows = Rows { ids: ids.clone(), weights: vec![0.0; ids.len()], ..Rows::default() };
        let done = self.session.upsert(rows).await;
        let response = self.note_outcome(began, done).await;
        (response == Response::Acked).then(|| Page { ids, account: Account::default() })
    }

    /// Notes the outcome and duration of an operation; queries the outcome if the answer does not give it.
    async fn note_outcome(&self, began: Instant, done: Result<WriteResult, Error>) -> Response {
        let ended = Instant::now();
        let slow = Duration::from_micros(self.shared.slow_us.load(Ordering::Relaxed));
        let seen = &self.shared.partitions[self.partition.0 as usize];
        {
            let mut seen = seen.lock();
            seen.outages.note(began, ended, done.is_ok(), slow);
            if done.is_ok() {
                seen.took_us.push(u32::try_from((ended - began).as_micros()).unwrap_or(u32::MAX));
            }
        }
        match done {
            Ok(_) => {
                self.shared.acked.fetch_add(1, Ordering::Relaxed);
                Response::Acked
            }
            Err(Error::OutcomeUnknown { session, partition, seq, .. }) => {
                self.shared.outcome_queries.fetch_add(1, Ordering::Relaxed);
                match self.session.write_outcome(session, partition, seq).await {
                    Ok(WriteOutcome::Applied(_)) => Response::Acked,
                    Ok(WriteOutcome::Rejected(_) | WriteOutcome::NeverExecuted) => Response::Never,
                    Err(_) => Response::Unknown,
                }
            }
            Err(Error::Deadline { .. }) => Response::Never,
            Err(error @ Error::Rejected(_)) => match error.kind() {
                // An earlier attempt may have been executed.
                ProblemKind::SessionExpired | ProblemKind::AlreadyClosed | ProblemKind::OutOfWindow => {
                    Response::Unknown
                }
                _ => Response::Never,
            },
            Err(Error::Partial { .. } | Error::Connect { .. } | Error::Protocol(_)) => Response::Unknown,
        }
    }

    /// Waits for a fraction of the period, counted from `began`.
    async fn pause(&self, began: Instant, part: f64) {
        let period = Duration::from_micros(self.shared.period_us.load(Ordering::Relaxed));
        tokio::time::sleep_until(began + period.mul_f64(part)).await;
    }
}
