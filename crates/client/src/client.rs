//! The client: its map, its connections, its budget.

use crate::call::{self, Failure, Service};
use crate::error::Error;
use crate::map::Map;
use crate::options::Options;
use crate::pool::Pool;
use crate::retry::{Budget, Retry};
use crate::session::Session;
use engram_memory::{ClusterId, Ordinal};
use engram_proto::v1::{self, Problem, ProblemKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout_at};
use tonic::Request;

/// How long one worker may take to tell its map.
const MAP_DEADLINE: Duration = Duration::from_secs(2);
/// The map is not asked for more often than this, however many calls wait for it.
const MAP_PAUSE: Duration = Duration::from_millis(10);

/// A cluster, as a program sees it. Cheap to clone; clones share map, connections and budget.
#[derive(Debug, Clone)]
pub struct Client(Arc<Core>);

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
}

impl Client {
    /// Connects: asks the endpoints for the map until one answers.
    ///
    /// # Errors
    /// None answers before the read deadline, or they are of another cluster.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client = Self::new(options, true);
        let deadline = Instant::now() + client.options().read_deadline;
        let mut wait = Duration::from_millis(10);
        loop {
            match client.ask(deadline).await {
                Ok(()) => return Ok(client),
                Err(error @ Error::Refused(_)) => return Err(error),
                Err(error) if Instant::now() + wait >= deadline => return Err(error),
                Err(_) => tokio::time::sleep(wait).await,
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
        Self(Arc::new(Core { options, pool, budget, map: watch::channel(None).0, asks, asked: Mutex::default() }))
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
        self.0.map.send_if_modified(|known| {
            if known.as_ref().is_some_and(|known| known.version > map.version || **known == map) {
                return false;
            }
            let addresses: Vec<&str> = map.workers.values().map(|it| it.address(self.options().plane)).collect();
            self.0.pool.retain(|address| {
                addresses.contains(&address) || self.options().endpoints.iter().any(|endpoint| endpoint == address)
            });
            *known = Some(Arc::new(map));
            true
        });
    }

    /// A session: whoever writes needs one.
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }

    /// A request with this client's metadata and the deadline given: for calls that a worker passes on itself.
    pub fn request<T>(&self, message: T, deadline: Duration) -> Request<T> {
        call::request(message, self.cluster(), deadline)
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
        self.options().cluster.or_else(|| self.0.map.borrow().as_ref().map(|map| map.cluster))
    }

    pub(crate) fn version(&self) -> u64 {
        self.0.map.borrow().as_ref().map_or(0, |map| map.version)
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
        if let Err(error) = self.ask(deadline).await {
            tracing::debug!(%error, "no worker told the partition map");
        }
        *asked = Some(Instant::now());
    }

    /// Asks one worker after another, those of the map first, until one answers.
    async fn ask(&self, deadline: Instant) -> Result<(), Error> {
        let mut addresses: BTreeMap<String, ()> = BTreeMap::new();
        if let Some(map) = self.0.map.borrow().as_ref() {
            let known = map.workers.values().filter(|worker| worker.alive);
            addresses.extend(known.map(|worker| (worker.address(self.options().plane).to_owned(), ())));
        }
        addresses.extend(self.options().endpoints.iter().map(|endpoint| (endpoint.clone(), ())));
        addresses.remove("");
        let mut addresses: Vec<String> = addresses.into_keys().collect();
        let start = rand::random_range(0..addresses.len().max(1));
        addresses.rotate_left(start);
        let mut last = String::from("no endpoint was given");
        for address in &addresses {
            let until = deadline.min(Instant::now() + MAP_DEADLINE);
            match timeout_at(until, self.ask_one(address)).await {
                Ok(Ok(map)) => {
                    self.set_map(map);
                    return Ok(());
                }
                Ok(Err(failure)) if failure.problem.kind() == ProblemKind::WrongCluster => {
                    return Err(Error::refused(failure.problem));
                }
                Ok(Err(failure)) => last = failure.problem.message,
                Err(_) => last = format!("{address} did not answer in time"),
            }
        }
        Err(Error::Connect { endpoints: addresses.join(", "), last })
    }

    async fn ask_one(&self, address: &str) -> Result<Map, Failure> {
        let channel = self.0.pool.channel(address).map_err(Failure::unavailable)?;
        let mut service = call::service(channel, self.options().plane);
        let reply = service.get_partition_map(self.request(v1::PartitionMapRequest {}, MAP_DEADLINE)).await?;
        let map = Map::try_from(reply.into_inner()).map_err(|error| Failure::unavailable(error.to_string()))?;
        match self.cluster() {
            Some(expected) if expected != map.cluster => Err(Failure::of(Problem::of(
                ProblemKind::WrongCluster,
                format!("{address} is of cluster {}, not of {expected}", map.cluster),
            ))),
            _ => Ok(map),
        }
    }
}
