//! Writing, each request exactly once.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::retry::Retry;
use crate::rows::{GroupSignal, Rows, Updates, groups_to_wire, raw};
use crate::window::Generation;
use crate::write::{self, Body, Part, Written};
use engram_memory::session::WINDOW;
use engram_memory::{FeatureShape, FeatureType, Group, MemoryId, Outcome, PartitionId, SessionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{columns, split};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Most parts of one partition in one message.
pub(crate) const PARTS_PER_PARTITION: usize = 4;
/// Batches in flight at once. With [`PARTS_PER_PARTITION`] of each partition they just fill its window, so a batch never waits for
/// another's answer while it holds numbers itself.
const BATCHES: usize = WINDOW as usize / PARTS_PER_PARTITION;

/// Writes to a cluster, each request exactly once whatever is sent again. Cheap to clone; batches of clones may be in flight at
/// once, and are then applied in any order; parts of one batch are applied in its order.
///
/// The session is opened at the first write and renewed when the cluster says so. A session whose window is held by a request
/// without an answer is replaced by a new one.
#[derive(Debug, Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    current: Mutex<Option<Arc<Generation>>>,
    batches: Semaphore,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It was executed, and did this.
    Applied(Outcome),
    /// It was refused, for the reason given; it changed nothing.
    Refused(Box<Problem>),
    /// It was never executed, and never will be.
    Never,
}

impl Session {
    pub(crate) fn new(client: Client) -> Self {
        Self(Arc::new(Inner { client, current: Mutex::default(), batches: Semaphore::new(BATCHES) }))
    }

    /// The client it writes through.
    pub fn client(&self) -> &Client {
        &self.0.client
    }

    /// Inserts memories, or changes what is given of existing ones. Rows of one partition are applied together or not at all.
    ///
    /// # Errors
    /// As [`Error`] says; what a column may hold is checked before anything is sent.
    pub async fn upsert(&self, rows: Rows) -> Result<Written, Error> {
        let map = self.0.client.map()?;
        let part = rows.into_wire();
        // The type kept is the worker's to know; f32 admits whatever some type admits.
        let shape = FeatureShape { dimension: map.feature_dimension, dtype: FeatureType::F32 };
        // A batch may be larger than a message: it is checked in parts, which are what is sent.
        let parts = checked_rows(&part, |part| columns::upsert(part.clone(), shape).map(drop), map.partition_count())?;
        self.execute(parts).await
    }

    /// Removes memories; unknown ids are reported in the outcome.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn remove(&self, ids: Vec<MemoryId>) -> Result<Written, Error> {
        let map = self.0.client.map()?;
        let parts = split::ids(&raw(ids), map.partition_count());
        self.execute(parts.into_iter().map(|(partition, ids)| Part::new(partition, Body::Remove(ids)))).await
    }

    /// Reinforces memories outside a learning epoch.
    ///
    /// # Errors
    /// As [`Error`] says; what a column may hold is checked before anything is sent.
    pub async fn reinforce(&self, updates: Updates) -> Result<Written, Error> {
        let map = self.0.client.map()?;
        let updates = updates.into_wire();
        columns::check_updates(&updates).map_err(Error::invalid)?;
        let parts = split::updates(&updates, map.partition_count());
        self.execute(parts.into_iter().map(|(partition, updates)| Part::new(partition, Body::Reinforce(updates)))).await
    }

    /// Reinforces every memory of some groups.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn reinforce_groups(&self, groups: &[(Group, GroupSignal)]) -> Result<Written, Error> {
        let updates = groups_to_wire(groups);
        columns::updates(updates.clone(), 1).map_err(Error::invalid)?;
        let partitions = self.0.client.map()?.partition_count();
        let part = |partition| Part::new(PartitionId(partition), Body::Reinforce(updates.clone()));
        self.execute((0..partitions).map(part)).await
    }

    /// Decays every memory by `amount` in [0, 1].
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn decay(&self, amount: f64) -> Result<Written, Error> {
        columns::decay("amount", amount).map_err(Error::invalid)?;
        let partitions = self.0.client.map()?.partition_count();
        self.execute((0..partitions).map(|partition| Part::new(PartitionId(partition), Body::Decay(amount)))).await
    }

    /// What became of a request that ended as [`Error::Unknown`]. The answer is final: a request that was not executed by now never
    /// will be.
    ///
    /// # Errors
    /// The session has expired, or the request lies outside its window: nobody knows any more.
    pub async fn fate(&self, session: SessionId, partition: PartitionId, seq: u64) -> Result<Fate, Error> {
        let client = &self.0.client;
        let mut retry = client.write();
        let answer = loop {
            let message = v1::GetOutcomeRequest { session: Some(session.into()), partition: partition.0, seq };
            match ask_outcome(client, &retry, message).await {
                Ok(reply) => break reply.answer,
                Err(failure) => retry.after(client, failure).await?,
            }
        };
        if let Some(current) = self.0.current.lock().await.as_ref().filter(|current| current.id == session) {
            current.answer(partition, seq);
        }
        let applied = match answer {
            Some(v1::get_outcome_reply::Answer::Never(_)) => return Ok(Fate::Never),
            Some(v1::get_outcome_reply::Answer::Applied(reply)) => reply.result,
            None => None,
        };
        match applied {
            Some(v1::partition_reply::Result::Outcome(outcome)) => Ok(Fate::Applied(outcome.try_into()?)),
            Some(v1::partition_reply::Result::Problem(problem)) => Ok(Fate::Refused(Box::new(problem))),
            None => Err(Error::Protocol("an outcome without an answer".into())),
        }
    }

    async fn execute(&self, parts: impl IntoIterator<Item = Part>) -> Result<Written, Error> {
        let mut retry = self.0.client.write();
        let waited = timeout_at(retry.deadline, self.0.batches.acquire()).await;
        let Ok(Ok(_permit)) = waited else {
            let busy =
                Failure::of(Problem::of(ProblemKind::Overloaded, "earlier batches of the session are still open"));
            return Err(retry.after(&self.0.client, busy).await.err().unwrap_or_else(|| {
                Error::refused(Problem::of(ProblemKind::Overloaded, "earlier batches of the session are still open"))
            }));
        };
        write::execute(self, &mut retry, parts.into_iter().collect()).await
    }

    /// The session to number the next request under: opened when there is none, replaced when it is due.
    pub(crate) async fn generation(&self, retry: &Retry) -> Result<Arc<Generation>, Failure> {
        let mut current = self.0.current.lock().await;
        if let Some(generation) = current.as_ref().filter(|generation| Instant::now() < generation.renew_at) {
            return Ok(generation.clone());
        }
        match (open(&self.0.client, retry).await, current.as_ref()) {
            (Ok(generation), _) => Ok(current.insert(Arc::new(generation)).clone()),
            // Due is not expired: the old one is good for hours yet.
            (Err(_), Some(generation)) => Ok(generation.clone()),
            (Err(failure), None) => Err(failure),
        }
    }

    /// No new request is numbered under this one.
    pub(crate) async fn retire(&self, old: &Arc<Generation>) {
        let mut current = self.0.current.lock().await;
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, old)) {
            *current = None;
        }
    }
}

fn checked_rows(
    rows: &v1::UpsertPart,
    check: impl Fn(&v1::UpsertPart) -> Result<(), columns::Invalid>,
    partitions: u32,
) -> Result<Vec<Part>, Error> {
    columns::check_lengths(rows).map_err(Error::invalid)?;
    let parts = split::upsert(rows, partitions);
    for (_, part) in &parts {
        check(part).map_err(Error::invalid)?;
    }
    Ok(parts.into_iter().map(|(partition, part)| Part::new(partition, Body::Upsert(part))).collect())
}

async fn open(client: &Client, retry: &Retry) -> Result<Generation, Failure> {
    let map = client.map().map_err(|error| Failure::unavailable(error.to_string()))?;
    let owners: Vec<_> = map.owners().into_iter().collect();
    let start = rand::random_range(0..owners.len().max(1));
    let mut last = Failure::unavailable("no worker serves");
    for owner in owners.iter().cycle().skip(start).take(owners.len()) {
        let attempt = client.attempt(retry).min(Duration::from_secs(2));
        let opened = match client.service_of(&map, *owner) {
            Ok(mut service) => service.open_session(client.request(v1::OpenSessionRequest {}, attempt)).await,
            Err(failure) => {
                last = failure;
                continue;
            }
        };
        match opened.map(tonic::Response::into_inner) {
            Ok(v1::OpenSessionReply { session: Some(session), renew_after_ms, .. }) => {
                let renew_at = Instant::now() + Duration::from_millis(renew_after_ms);
                return Ok(Generation::new(session.into(), renew_at, map.partition_count()));
            }
            Ok(_) => last = Failure::unavailable("a session without an id"),
            Err(status) => last = status.into(),
        }
    }
    // Nothing was executed for the caller, whatever became of the session.
    Err(Failure { maybe_executed: false, ..last })
}

async fn ask_outcome(
    client: &Client,
    retry: &Retry,
    message: v1::GetOutcomeRequest,
) -> Result<v1::GetOutcomeReply, Failure> {
    let map = client.map().map_err(|error| Failure::unavailable(error.to_string()))?;
    let partition = PartitionId(message.partition);
    let owner = map.owner(partition).ok_or_else(|| {
        Failure::of(Problem::of(
            ProblemKind::Invalid,
            format!("partition {partition}: the cluster has no such partition"),
        ))
    })?;
    let mut service = client.service_of(&map, owner)?;
    let reply = service.get_outcome(client.request(message, client.attempt(retry))).await?;
    Ok(reply.into_inner())
}
