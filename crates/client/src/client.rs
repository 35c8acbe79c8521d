//! The client: its map, its connections, its retry budget.

use crate::call::{self, Failure, Service};
use crate::error::Error;
use crate::federated::Relay;
use crate::map::Map;
use crate::options::{Options, ReadMode};
use crate::pool::Pool;
use crate::retry::{Retry, RetryBudget};
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

mod watch_map;

/// How long one worker may take to return its map.
const MAP_DEADLINE: Duration = Duration::from_secs(2);
/// After this time without a response the next worker is asked as well: a hanging or dead worker must not delay the
/// search for its successor.
const MAP_PATIENCE: Duration = Duration::from_millis(20);
/// Minimum interval between map requests, regardless of the number of waiting calls.
const MAP_PAUSE: Duration = Duration::from_millis(10);
/// A call without a response for this long starts to poll for a newer map.
const CALL_PATIENCE: Duration = Duration::from_millis(250);
/// How long a worker may hold a map request until there is a newer map.
const MAP_WAIT: Duration = Duration::from_millis(200);

/// Connection to a cluster. Cheap to clone; clones share map, connections and budget.
#[derive(Debug, Clone)]
pub struct Client(Arc<Core>, ReadMode);

#[derive(Debug)]
struct Core {
    options: Options,
    pool: Pool,
    budget: RetryBudget,
    map: watch::Sender<Option<Arc<Map>>>,
    /// Whether this client requests the map itself; otherwise it is set from outside.
    fetches_map: bool,
    /// Time of the last map request; one caller requests at a time.
    last_request: Mutex<Option<Instant>>,
    /// Held by the one caller that waits at a worker for a newer map.
    map_wait: Mutex<()>,
    /// Task that watches the map in the background.
    watcher: OnceLock<AbortHandle>,
    relay: Relay,
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.abort();
        }
    }
}

impl Client {
    /// Connects: requests the map from the endpoints until one responds. After that a task on the current runtime
    /// watches the map; it ends with the last clone.
    ///
    /// # Errors
    /// No endpoint responds before the read deadline, or they belong to another cluster.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client = Self::new(options, true);
        let deadline = Instant::now() + client.options().read_deadline;
        // Doubled up to a limit: an endpoint that does not listen yet announces nothing.
        let mut wait = Duration::from_millis(10);
        loop {
            match client.fetch_map(deadline, Duration::ZERO).await {
                Ok(()) => {
                    client.0.watch_map();
                    return Ok(client);
                }
                Err(error @ Error::Rejected(_)) => return Err(error),
                Err(error) if Instant::now() + wait >= deadline => return Err(error),
                Err(_) => sleep(wait).await,
            }
            wait = (wait * 2).min(Duration::from_millis(200));
        }
    }

    /// Creates a client that never requests the map; it is set by [`Client::set_map`].
    pub fn with_external_map(options: Options) -> Self {
        Self::new(options, false)
    }

    pub(crate) fn owner_key(&self) -> &str {
        &self.0.options.owner_key.0
    }

    fn new(options: Options, fetches_map: bool) -> Self {
        let pool = Pool::new(&options);
        let budget = RetryBudget::new(options.retry_ratio, options.retry_floor);
        let core = Core {
            options,
            pool,
            budget,
            map: watch::channel(None).0,
            fetches_map,
            last_request: Mutex::default(),
            map_wait: Mutex::default(),
            watcher: OnceLock::new(),
            relay: Relay::default(),
        };
        Self(Arc::new(core), ReadMode::default())
    }

    /// Returns a client with another read mode.
    #[must_use]
    pub fn with_read_mode(&self, mode: ReadMode) -> Self {
        Self(Arc::clone(&self.0), mode)
    }

    /// Returns its read mode.
    pub const fn read_mode(&self) -> ReadMode {
        self.1
    }

    /// Returns its options.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// Returns the current map.
    ///
    /// # Errors
    /// There is none yet.
    pub fn map(&self) -> Result<Arc<Map>, Error> {
        self.0
            .map
            .borrow()
            .clone()
            .ok_or_else(|| Error::rejected(Problem::of(ProblemKind::Unavailable, "the partition map is not known yet")))
    }

    /// Requests the map and returns it; the current one if no worker responds.
    ///
    /// # Errors
    /// There is none and no worker responds.
    pub async fn refreshed_map(&self) -> Result<Arc<Map>, Error> {
        self.refresh(self.version(), Instant::now() + MAP_DEADLINE).await;
        self.map()
    }

    /// Sets the map, unless the current one is newer.
    pub fn set_map(&self, map: Map) {
        self.0.set_map(map);
    }

    /// Creates a session for writes.
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }

    /// Creates a request with this client's metadata and the given deadline: for calls that a worker forwards.
    pub fn request<T>(&self, message: T, deadline: Duration) -> Request<T> {
        call::request(message, self.cluster(), &self.options().network, deadline)
    }

    /// Returns the services of one worker: for calls that a worker forwards.
    ///
    /// # Errors
    /// The map does not contain its address.
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

    pub(crate) fn relay(&self) -> &Relay {
        &self.0.relay
    }

    /// Returns the connection to one of the configured endpoints.
    pub(crate) fn channel_of_endpoint(&self, number: usize) -> Result<tonic::transport::Channel, Failure> {
        let endpoints = &self.options().endpoints;
        let address = endpoints.get(number % endpoints.len().max(1));
        let address = address.ok_or_else(|| Failure::unavailable("no endpoint is configured"))?;
        self.0.pool.channel(address).map_err(Failure::unavailable)
    }

    pub(crate) fn channel_of(&self, map: &Map, ordinal: Ordinal) -> Result<tonic::transport::Channel, Failure> {
        let worker = map.workers.get(&ordinal);
        let address = worker.map(|worker| worker.address(self.options().plane)).filter(|address| !address.is_empty());
        let address = address.ok_or_else(|| Failure::unavailable(format!("worker {ordinal} has no address yet")))?;
        self.0.pool.channel(address).map_err(Failure::unavailable)
    }

    pub(crate) fn budget(&self) -> &RetryBudget {
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

    /// Returns the limit of the next attempt.
    pub(crate) fn attempt(&self, retry: &Retry) -> Duration {
        let least = Duration::from_millis(1);
        let wait = Duration::from_millis(retry.wait_ms.into());
        retry.remaining().unwrap_or(least).min(self.options().attempt_deadline + wait).max(least)
    }

    /// Returns the configured cluster, or else the first that responded.
    pub(crate) fn cluster(&self) -> Option<ClusterId> {
        self.0.cluster()
    }

    pub(crate) fn version(&self) -> u64 {
        self.0.version()
    }

    /// Requests a map newer than `seen`; returns when there is one, or when the request brought none.
    pub(crate) async fn refresh(&self, seen: u64, deadline: Instant) {
        if !self.0.fetches_map {
            // The map is set from outside; the caller's own wait between attempts is long enough.
            return;
        }
        let Ok(mut last_request) = timeout_at(deadline, self.0.last_request.lock()).await else { return };
        let recent = last_request.is_some_and(|at| at.elapsed() < MAP_PAUSE);
        if self.version() > seen || recent {
            return;
        }
        self.try_fetch_map(deadline, Duration::ZERO).await;
        *last_request = Some(Instant::now());
    }

    /// Completes when a map of this version or a newer one assigns one of these partitions to another worker than
    /// `owner`: a forwarded call to it can then be abandoned.
    pub async fn wait_until_moved(&self, version: u64, owner: Ordinal, partitions: &[PartitionId]) {
        let moved = |map: &Option<Arc<Map>>| {
            let moved = |map: &Map| partitions.iter().any(|partition| map.owner(*partition) != Some(owner));
            map.as_ref().is_some_and(|map| map.version >= version && moved(map))
        };
        // An error means that this client was dropped.
        let _ = self.0.map.subscribe().wait_for(moved).await;
    }

    /// Completes when a map assigns a partition of `map` that `owner` had to another worker; requests the map if
    /// necessary.
    pub(crate) async fn wait_until_replaced(&self, map: &Map, owner: Ordinal) {
        let mut maps = self.0.map.subscribe();
        let replaced = maps.wait_for(|newer| newer.as_ref().is_some_and(|newer| map.takes_from(newer, owner)));
        let polling = async {
            if !self.0.fetches_map {
                return std::future::pending().await;
            }
            loop {
                let _exclusive = self.0.map_wait.lock().await;
                self.try_fetch_map(Instant::now() + MAP_DEADLINE, MAP_WAIT).await;
                sleep(MAP_PAUSE).await;
            }
        };
        tokio::select! {
            _ = replaced => {}
            () = polling => {}
        }
    }

    /// Waits for a call to a worker until a newer map assigns a partition of that worker to another: a hanging worker
    /// never responds while its successor serves. Whether it executes the call is then unknown.
    pub(crate) async fn while_owner<T>(
        &self,
        map: &Arc<Map>,
        owner: Ordinal,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let replaced = async {
            sleep(CALL_PATIENCE).await;
            self.wait_until_replaced(map, owner).await;
        };
        let response = tokio::select! {
            biased;
            response = call => response,
            () = replaced => {
                let text = "no response, and another worker took over";
                Err(Failure { maybe_executed: true, ..Failure::unavailable(text) })
            }
        };
        response.map_err(|failure| match failure.should_retry_elsewhere() {
            true => failure.lost_at(map, owner),
            false => failure,
        })
    }

    async fn try_fetch_map(&self, deadline: Instant, wait: Duration) {
        if let Err(error) = self.fetch_map(deadline, wait).await {
            tracing::debug!(%error, "failed to fetch the partition map");
        }
    }

    /// Requests the map from one worker, and from another whenever one fails or is slow, until one responds; each waits
    /// `wait` for a newer map.
    async fn fetch_map(&self, deadline: Instant, wait: Duration) -> Result<(), Error> {
        let mut addresses: BTreeSet<String> = self.options().endpoints.iter().cloned().collect();
        if let Some(map) = self.0.map.borrow().as_ref() {
            let alive = map.workers.values().filter(|worker| worker.alive);
            addresses.extend(alive.map(|worker| worker.address(self.options().plane).to_owned()));
        }
        addresses.remove("");
        let mut addresses: Vec<String> = addresses.into_iter().collect();
        let start = rand::random_range(0..addresses.len().max(1));
        addresses.rotate_left(start);
        let mut last = String::from("no endpoint configured");
        let until = deadline.min(Instant::now() + MAP_DEADLINE);
        let mut remaining = addresses.iter().map(|address| self.fetch_map_from(address, wait, until));
        let mut pending: FuturesUnordered<_> = remaining.next().into_iter().collect();
        loop {
            let response = tokio::select! {
                response = pending.next() => response,
                () = sleep(wait + MAP_PATIENCE), if remaining.len() > 0 => {
                    pending.extend(remaining.next());
                    continue;
                }
            };
            match response {
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
                    return Err(Error::rejected(failure.problem));
                }
                Some(Err(failure)) => {
                    last = failure.problem.message;
                    pending.extend(remaining.next());
                }
                None => return Err(Error::Connect { endpoints: addresses.join(", "), last }),
            }
        }
    }

    async fn fetch_map_from(&self, address: &str, wait: Duration, until: Instant) -> Result<Map, Failure> {
        let message = v1::GetPartitionMapRequest {
            newer_than: self.version(),
            wait_ms: wait.as_millis() as u32,
            ..v1::GetPartitionMapRequest::default()
        };
        let call = self.0.map_call(address, message, MAP_DEADLINE)?;
        let response = timeout_at(until, call).await;
        let reply = response.map_err(|_| Failure::unavailable(format!("{address} did not respond in time")))??;
        self.0.map_of(address, reply)
    }
}

impl Core {
    fn version(&self) -> u64 {
        self.map.borrow().as_ref().map_or(0, |map| map.version)
    }

    /// Returns the configured cluster, or else the first that responded.
    fn cluster(&self) -> Option<ClusterId> {
        self.options.cluster.or_else(|| self.map.borrow().as_ref().map(|map| map.cluster))
    }

    /// Starts a map request to a worker that borrows nothing of this client but its connection.
    fn map_call(
        &self,
        address: &str,
        message: v1::GetPartitionMapRequest,
        deadline: Duration,
    ) -> Result<impl Future<Output = Result<v1::GetPartitionMapResponse, Failure>> + Send + use<>, Failure> {
        let channel = self.pool.channel(address).map_err(Failure::unavailable)?;
        let mut service = call::service(channel, self.options.plane);
        let request = call::request(message, self.cluster(), &self.options.network, deadline);
        Ok(async move { Ok(service.get_partition_map(request).await?.into_inner()) })
    }

    /// Parses the map that a worker returned, if it is of this cluster.
    fn map_of(&self, address: &str, reply: v1::GetPartitionMapResponse) -> Result<Map, Failure> {
        let map = Map::try_from(reply).map_err(|error| Failure::unavailable(error.to_string()))?;
        match self.cluster() {
            Some(expected) if expected != map.cluster => Err(Failure::of(Problem::of(
                ProblemKind::WrongCluster,
                format!("{address} belongs to cluster {}, not to {expected}", map.cluster),
            ))),
            _ => Ok(map),
        }
    }

    /// Sets the map, unless the current one is newer.
    fn set_map(&self, map: Map) {
        self.map.send_if_modified(|current| {
            if current.as_ref().is_some_and(|current| current.version > map.version || **current == map) {
                return false;
            }
            let addresses: Vec<&str> = map.workers.values().map(|worker| worker.address(self.options.plane)).collect();
            self.pool.retain(|address| {
                addresses.contains(&address) || self.options.endpoints.iter().any(|endpoint| endpoint == address)
            });
            *current = Some(Arc::new(map));
            true
        });
    }
}

#[cfg(test)]
mod tests;
