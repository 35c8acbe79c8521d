//! The client: its map, its connections, its budget.

use crate::call::{self, Failure, Service};
use crate::error::Error;
use crate::map::Map;
use crate::options::{Options, ReadMode};
use crate::pool::Pool;
use crate::retry::{Budget, Retry};
use crate::session::Session;
use engram_memory::{ClusterId, Ordinal, PartitionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Request;

mod follow;

/// How long one worker may take to tell its map.
const MAP_DEADLINE: Duration = Duration::from_secs(2);
/// After so long without an answer the next worker is asked as well: one that hangs, or is gone without a word, must not hold up who
/// looks for its successor.
const MAP_PATIENCE: Duration = Duration::from_millis(20);
/// The map is not asked for more often than this, however many calls wait for it.
const MAP_PAUSE: Duration = Duration::from_millis(10);
/// A call without an answer for so long makes its caller look for a newer map, again and again.
const CALL_PATIENCE: Duration = Duration::from_millis(250);
/// How long a worker that is asked for a newer map may wait for one.
const NEWS: Duration = Duration::from_millis(200);

/// A cluster, as a program sees it. Cheap to clone; clones share map, connections and budget.
#[derive(Debug, Clone)]
pub struct Client(Arc<Core>, ReadMode);

#[derive(Debug)]
struct Core {
    options: Options,
    pool: Pool,
    budget: Budget,
    map: watch::Sender<Option<Arc<Map>>>,
    /// Whether this client asks for the map, or is given it.
    asks: bool,
    /// When the map was last asked for; one caller asks at a time.
    asked: Mutex<Option<Instant>>,
    /// Held by the one caller that waits at a worker for a newer map.
    listening: Mutex<()>,
    /// What follows the map while nobody calls.
    follower: OnceLock<AbortHandle>,
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.get() {
            follower.abort();
        }
    }
}

impl Client {
    /// Connects: asks the endpoints for the map until one answers. From then on it hears of every change of the map, on a task of the
    /// runtime that this is called on; the task ends with the last clone.
    ///
    /// # Errors
    /// None answers before the read deadline, or they are of another cluster.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client = Self::new(options, true);
        let deadline = Instant::now() + client.options().read_deadline;
        let mut wait = Duration::from_millis(10);
        loop {
            match client.ask(deadline, Duration::ZERO).await {
                Ok(()) => {
                    client.0.follow();
                    return Ok(client);
                }
                Err(error @ Error::Refused(_)) => return Err(error),
                Err(error) if Instant::now() + wait >= deadline => return Err(error),
                Err(_) => sleep(wait).await,
            }
            wait = (wait * 2).min(Duration::from_millis(200));
        }
    }

    /// A client that never asks for the map and is given it by [`Client::set_map`]: for whoever hears of it first.
    pub fn given(options: Options) -> Self {
        Self::new(options, false)
    }

    fn new(options: Options, asks: bool) -> Self {
        let pool = Pool::new(&options);
        let budget = Budget::new(options.retry_ratio, options.retry_floor);
        let core = Core {
            options,
            pool,
            budget,
            map: watch::channel(None).0,
            asks,
            asked: Mutex::default(),
            listening: Mutex::default(),
            follower: OnceLock::new(),
        };
        Self(Arc::new(core), ReadMode::default())
    }

    /// The same client, whose reads are answered so.
    #[must_use]
    pub fn reading(&self, mode: ReadMode) -> Self {
        Self(Arc::clone(&self.0), mode)
    }

    /// How its reads are answered.
    pub const fn read_mode(&self) -> ReadMode {
        self.1
    }

    /// The options it was made with.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// The map as last heard.
    ///
    /// # Errors
    /// None has been heard yet.
    pub fn map(&self) -> Result<Arc<Map>, Error> {
        self.0
            .map
            .borrow()
            .clone()
            .ok_or_else(|| Error::refused(Problem::of(ProblemKind::Unavailable, "the partition map is not known yet")))
    }

    /// Asks for the map anew and returns it; the old one where nobody answers.
    ///
    /// # Errors
    /// None is known and nobody answers.
    pub async fn refreshed_map(&self) -> Result<Arc<Map>, Error> {
        self.refresh(self.version(), Instant::now() + MAP_DEADLINE).await;
        self.map()
    }

    /// Takes a map, unless a newer one is known already.
    pub fn set_map(&self, map: Map) {
        self.0.set_map(map);
    }

    /// A session: whoever writes needs one.
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }

    /// A request with this client's metadata and the deadline given: for calls that a worker passes on itself.
    pub fn request<T>(&self, message: T, deadline: Duration) -> Request<T> {
        call::request(message, self.cluster(), &self.options().network, deadline)
    }

    /// The memories of one worker: for calls that a worker passes on itself.
    ///
    /// # Errors
    /// The map does not say where it is.
    pub fn worker(&self, ordinal: Ordinal) -> Result<Service, Problem> {
        let map = self.0.map.borrow().clone();
        let Some(map) = map else {
            return Err(Problem::of(ProblemKind::Unavailable, "the partition map is not known yet"));
        };
        self.service_of(&map, ordinal).map_err(|failure| failure.problem)
    }

    pub(crate) fn service_of(&self, map: &Map, ordinal: Ordinal) -> Result<Service, Failure> {
        self.channel_of(map, ordinal).map(|channel| call::service(channel, self.options().plane))
    }

    pub(crate) fn channel_of(&self, map: &Map, ordinal: Ordinal) -> Result<tonic::transport::Channel, Failure> {
        let worker = map.workers.get(&ordinal);
        let address = worker.map(|worker| worker.address(self.options().plane)).filter(|address| !address.is_empty());
        let address = address.ok_or_else(|| Failure::unavailable(format!("worker {ordinal} is not up yet")))?;
        self.0.pool.channel(address).map_err(Failure::unavailable)
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.0.budget
    }

    pub(crate) fn read(&self) -> Retry {
        self.0.budget.earn();
        Retry::new(self.options().read_deadline)
    }

    pub(crate) fn write(&self) -> Retry {
        self.0.budget.earn();
        Retry::new(self.options().write_deadline)
    }

    /// How long the next attempt may take.
    pub(crate) fn attempt(&self, retry: &Retry) -> Duration {
        let least = Duration::from_millis(1);
        retry.left().unwrap_or(least).min(self.options().attempt_deadline).max(least)
    }

    /// The cluster asked for, or else the first that answered.
    pub(crate) fn cluster(&self) -> Option<ClusterId> {
        self.0.cluster()
    }

    pub(crate) fn version(&self) -> u64 {
        self.0.version()
    }

    /// Looks for a map newer than `seen`; returns when there is one, or when asking again brought none.
    pub(crate) async fn refresh(&self, seen: u64, deadline: Instant) {
        if !self.0.asks {
            // It comes by itself; the caller's own wait between attempts is long enough to notice.
            return;
        }
        let Ok(mut asked) = timeout_at(deadline, self.0.asked.lock()).await else { return };
        let recent = asked.is_some_and(|asked| asked.elapsed() < MAP_PAUSE);
        if self.version() > seen || recent {
            return;
        }
        self.ask_or_tell(deadline, Duration::ZERO).await;
        *asked = Some(Instant::now());
    }

    /// Completes when a map of this version or a newer one gives one of these partitions to somebody else than `owner`: a call to it
    /// may then be given up. For whoever passes calls on.
    pub async fn until_moved(&self, version: u64, owner: Ordinal, partitions: &[PartitionId]) {
        let moved = |map: &Option<Arc<Map>>| {
            let moved = |map: &Map| partitions.iter().any(|partition| map.owner(*partition) != Some(owner));
            map.as_ref().is_some_and(|map| map.version >= version && moved(map))
        };
        // An error means that this very client is gone.
        let _ = self.0.map.subscribe().wait_for(moved).await;
    }

    /// Completes when there is a map that takes a partition of `map` from `owner`; asks for it, where nobody tells it.
    pub(crate) async fn until_replaced(&self, map: &Map, owner: Ordinal) {
        let mut known = self.0.map.subscribe();
        let replaced = known.wait_for(|now| now.as_ref().is_some_and(|now| map.takes_from(now, owner)));
        let asking = async {
            if !self.0.asks {
                return std::future::pending().await;
            }
            loop {
                let _alone = self.0.listening.lock().await;
                self.ask_or_tell(Instant::now() + MAP_DEADLINE, NEWS).await;
                sleep(MAP_PAUSE).await;
            }
        };
        tokio::select! {
            _ = replaced => {}
            () = asking => {}
        }
    }

    /// Waits for a call to a worker as long as no newer map takes a partition from that worker: one that hangs answers nothing while
    /// its successor serves. Whether it executes the call is then unknown.
    pub(crate) async fn while_owner<T>(
        &self,
        map: &Arc<Map>,
        owner: Ordinal,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let replaced = async {
            sleep(CALL_PATIENCE).await;
            self.until_replaced(map, owner).await;
        };
        let answer = tokio::select! {
            biased;
            answer = call => answer,
            () = replaced => {
                let text = format!("worker {owner} did not answer, and another has taken over from it");
                Err(Failure { maybe_executed: true, ..Failure::unavailable(text) })
            }
        };
        answer.map_err(|failure| match failure.sends_elsewhere() {
            true => Failure { lost: Some((Arc::clone(map), owner)), ..failure },
            false => failure,
        })
    }

    async fn ask_or_tell(&self, deadline: Instant, news: Duration) {
        if let Err(error) = self.ask(deadline, news).await {
            tracing::debug!(%error, "no worker told the partition map");
        }
    }

    /// Asks one worker, and another whenever one fails or takes its time, until one answers; it waits so long for news.
    async fn ask(&self, deadline: Instant, news: Duration) -> Result<(), Error> {
        let mut addresses: BTreeSet<String> = self.options().endpoints.iter().cloned().collect();
        if let Some(map) = self.0.map.borrow().as_ref() {
            let known = map.workers.values().filter(|worker| worker.alive);
            addresses.extend(known.map(|worker| worker.address(self.options().plane).to_owned()));
        }
        addresses.remove("");
        let mut addresses: Vec<String> = addresses.into_iter().collect();
        let start = rand::random_range(0..addresses.len().max(1));
        addresses.rotate_left(start);
        let mut last = String::from("no endpoint was given");
        let until = deadline.min(Instant::now() + MAP_DEADLINE);
        let mut unasked = addresses.iter().map(|address| self.ask_one(address, news, until));
        let mut asked: FuturesUnordered<_> = unasked.next().into_iter().collect();
        loop {
            let answer = tokio::select! {
                answer = asked.next() => answer,
                () = sleep(news + MAP_PATIENCE), if unasked.len() > 0 => {
                    asked.extend(unasked.next());
                    continue;
                }
            };
            match answer {
                Some(Ok(map)) => {
                    self.set_map(map);
                    return Ok(());
                }
                Some(Err(failure))
                    if matches!(
                        failure.problem.kind(),
                        ProblemKind::WrongCluster | ProblemKind::Denied | ProblemKind::Unauthenticated
                    ) =>
                {
                    return Err(Error::refused(failure.problem));
                }
                Some(Err(failure)) => {
                    last = failure.problem.message;
                    asked.extend(unasked.next());
                }
                None => return Err(Error::Connect { endpoints: addresses.join(", "), last }),
            }
        }
    }

    async fn ask_one(&self, address: &str, news: Duration, until: Instant) -> Result<Map, Failure> {
        let question = v1::PartitionMapRequest {
            newer_than: self.version(),
            wait_ms: news.as_millis() as u32,
            ..v1::PartitionMapRequest::default()
        };
        let asked = self.0.question(address, question, MAP_DEADLINE)?;
        let answer = timeout_at(until, asked).await;
        let reply = answer.map_err(|_| Failure::unavailable(format!("{address} did not answer in time")))??;
        self.0.map_of(address, reply)
    }
}

impl Core {
    fn version(&self) -> u64 {
        self.map.borrow().as_ref().map_or(0, |map| map.version)
    }

    /// The cluster asked for, or else the first that answered.
    fn cluster(&self) -> Option<ClusterId> {
        self.options.cluster.or_else(|| self.map.borrow().as_ref().map(|map| map.cluster))
    }

    /// A question for the map that is on its way to a worker, and holds on to nothing of this client but its connection.
    fn question(
        &self,
        address: &str,
        question: v1::PartitionMapRequest,
        deadline: Duration,
    ) -> Result<impl Future<Output = Result<v1::PartitionMapReply, Failure>> + Send + use<>, Failure> {
        let channel = self.pool.channel(address).map_err(Failure::unavailable)?;
        let mut service = call::service(channel, self.options.plane);
        let request = call::request(question, self.cluster(), &self.options.network, deadline);
        Ok(async move { Ok(service.get_partition_map(request).await?.into_inner()) })
    }

    /// The map that a worker told, if it is of this cluster.
    fn map_of(&self, address: &str, reply: v1::PartitionMapReply) -> Result<Map, Failure> {
        let map = Map::try_from(reply).map_err(|error| Failure::unavailable(error.to_string()))?;
        match self.cluster() {
            Some(expected) if expected != map.cluster => Err(Failure::of(Problem::of(
                ProblemKind::WrongCluster,
                format!("{address} is of cluster {}, not of {expected}", map.cluster),
            ))),
            _ => Ok(map),
        }
    }

    /// Takes a map, unless a newer one is known already.
    fn set_map(&self, map: Map) {
        self.map.send_if_modified(|known| {
            if known.as_ref().is_some_and(|known| known.version > map.version || **known == map) {
                return false;
            }
            let addresses: Vec<&str> = map.workers.values().map(|it| it.address(self.options.plane)).collect();
            self.pool.retain(|address| {
                addresses.contains(&address) || self.options.endpoints.iter().any(|endpoint| endpoint == address)
            });
            *known = Some(Arc::new(map));
            true
        });
    }
}

#[cfg(test)]
mod tests;
