//! Writes, each request exactly once.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::retry::Retry;
use crate::rows::{GroupSignal, Rows, Updates, groups_to_wire, raw};
use crate::window::Generation;
use crate::write::{self, Part, WriteResult};
use engram_memory::session::WINDOW;
use engram_memory::{FeatureShape, FeatureType, Group, MemoryId, Ordinal, Outcome, PartitionId, SessionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{columns, split};
use engram_trace::{Span, in_span};
use engram_wire::WriteBody;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

/// Maximum number of parts of one partition in one message.
pub(crate) const PARTS_PER_PARTITION: usize = 4;
/// Batches in flight at once. With [`PARTS_PER_PARTITION`] parts each they just fill the window of a partition, so a
/// batch never waits for another's response while it holds numbers itself.
const BATCHES: usize = WINDOW as usize / PARTS_PER_PARTITION;
/// Longest wait for one worker to open a session: any primary can.
const OPENING: Duration = Duration::from_secs(2);

/// Writes to a cluster, each request exactly once regardless of retries. Cheap to clone; batches of clones may be in
/// flight at once, and are then applied in any order; parts of one batch are applied in order.
///
/// The session is opened at the first write and renewed on request of the cluster. A session whose window is held by a
/// request without a response is replaced by a new one.
#[derive(Debug, Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    current: Mutex<Option<Arc<Generation>>>,
    /// The worker that was last requested to open a session.
    opener: parking_lot::Mutex<Option<Ordinal>>,
    batches: Semaphore,
}

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It was executed, with this outcome.
    Applied(Outcome),
    /// It was rejected for this reason; it changed nothing.
    Rejected(Box<Problem>),
    /// It was never executed, and never will be.
    NeverExecuted,
}

impl Session {
    pub(crate) fn new(client: Client) -> Self {
        let batches = Semaphore::new(BATCHES);
        Self(Arc::new(Inner { client, current: Mutex::default(), opener: Default::default(), batches }))
    }

    /// Returns the client that it writes through.
    pub fn client(&self) -> &Client {
        &self.0.client
    }

    /// Inserts memories, or changes the given columns of existing ones. Rows of one partition are applied together or
    /// not at all.
    ///
    /// # Errors
    /// As for [`Error`]; columns are validated before anything is sent.
    pub async fn upsert(&self, rows: Rows) -> Result<WriteResult, Error> {
        let map = self.0.client.map()?;
        let part = rows.into_wire();
        // Only workers know the stored type; f32 admits everything that some type admits.
        let shape = FeatureShape { dimension: map.feature_dimension, dtype: FeatureType::F32 };
        // A batch may be larger than a message: it is validated in the parts that are sent.
        let parts = checked_rows(&part, |part| columns::upsert(part.clone(), shape).map(drop), map.partition_count())?;
        self.execute(parts).await
    }

    /// Removes memories; unknown ids are reported in the outcome.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn remove(&self, ids: Vec<MemoryId>) -> Result<WriteResult, Error> {
        let map = self.0.client.map()?;
        let parts = split::ids(&raw(ids), map.partition_count());
        self.execute(parts.into_iter().map(|(partition, ids)| Part::new(partition, WriteBody::Remove(ids)))).await
    }

    /// Reinforces memories outside a learning epoch.
    ///
    /// # Errors
    /// As [`Error`] says; what a column may hold is checked before anything is sent.
    pub async fn reinforce(&self, updates: Updates) -> Result<WriteResult, Error> {
        let map = self.0.client.map()?;
        let updates = updates.into_wire();
        columns::check_updates(&updates).map_err(Error::invalid)?;
        let parts = split::updates(&updates, map.partition_count());
        self.execute(parts.into_iter().map(|(partition, updates)| Part::new(partition, WriteBody::Reinforce(updates))))
            .await
    }

    /// Reinforces every memory of some groups.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn reinforce_groups(&self, groups: &[(Group, GroupSignal)]) -> Result<WriteResult, Error> {
        let updates = groups_to_wire(groups);
        columns::updates(updates.clone(), 1).map_err(Error::invalid)?;
        let partitions = self.0.client.map()?.partition_count();
        let part = |partition| Part::new(PartitionId(partition), WriteBody::Reinforce(updates.clone()));
        self.execute((0..partitions).map(part)).await
    }

    /// Decays every memory by `amount` in [0, 1].
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn decay(&self, amount: f64) -> Result<WriteResult, Error> {
        columns::decay("amount", amount).map_err(Error::invalid)?;
        let partitions = self.0.client.map()?.partition_count();
        self.execute((0..partitions).map(|partition| Part::new(PartitionId(partition), WriteBody::Decay(amount)))).await
    }

    /// Returns the outcome of a request that ended as [`Error::OutcomeUnknown`]. It is final: a request that was not
    /// executed by now never will be.
    ///
    /// # Errors
    /// The session has expired, or the request is outside its window: the outcome is no longer known.
    pub async fn write_outcome(
        &self,
        session: SessionId,
        partition: PartitionId,
        seq: u64,
    ) -> Result<WriteOutcome, Error> {
        let client = &self.0.client;
        let mut retry = client.write();
        let outcome = loop {
            let message = v1::GetOutcomeRequest { session: Some(session.into()), partition: partition.0, seq };
            match get_outcome(client, &retry, message).await {
                Ok(reply) => break reply.outcome,
                Err(failure) => retry.after(client, failure).await?,
            }
        };
        if let Some(current) = self.0.current.lock().await.as_ref().filter(|current| current.id == session) {
            current.answer(partition, seq);
        }
        let applied = match outcome {
            Some(v1::get_outcome_response::Outcome::NeverExecuted(_)) => return Ok(WriteOutcome::NeverExecuted),
            Some(v1::get_outcome_response::Outcome::Applied(reply)) => reply.result,
            None => None,
        };
        match applied {
            Some(v1::partition_result::Result::Outcome(outcome)) => Ok(WriteOutcome::Applied(outcome.try_into()?)),
            Some(v1::partition_result::Result::Problem(problem)) => Ok(WriteOutcome::Rejected(Box::new(problem))),
            None => Err(Error::Protocol("an outcome without a result".into())),
        }
    }

    pub(crate) async fn execute(&self, parts: impl IntoIterator<Item = Part>) -> Result<WriteResult, Error> {
        self.execute_waiting(parts, Duration::ZERO).await
    }

    /// Executes parts that may wait for a rate limiter.
    pub(crate) async fn execute_waiting(
        &self,
        parts: impl IntoIterator<Item = Part>,
        wait: Duration,
    ) -> Result<WriteResult, Error> {
        let mut span = Span::child_or_root("write").as_client();
        let parts: Vec<Part> = parts.into_iter().collect();
        span.set("engram.parts", parts.len());
        let result = in_span(&span, self.execute_parts(parts, wait)).await;
        span.note(&result);
        result
    }

    async fn execute_parts(&self, parts: Vec<Part>, wait: Duration) -> Result<WriteResult, Error> {
        let mut retry = self.0.client.write().waiting(wait);
        let waited = timeout_at(retry.deadline, self.0.batches.acquire()).await;
        let Ok(Ok(_permit)) = waited else {
            let busy =
                Failure::of(Problem::of(ProblemKind::Overloaded, "earlier batches of the session are still in flight"));
            return Err(retry.after(&self.0.client, busy).await.err().unwrap_or_else(|| {
                Error::rejected(Problem::of(
                    ProblemKind::Overloaded,
                    "earlier batches of the session are still in flight",
                ))
            }));
        };
        write::execute(self, &mut retry, parts).await
    }

    /// Returns the session for the next request: opened if there is none, replaced when it is due.
    pub(crate) async fn generation(&self, retry: &Retry) -> Result<Arc<Generation>, Failure> {
        let locked = timeout_at(retry.deadline, self.0.current.lock()).await;
        let mut current = locked.map_err(|_| self.not_opened())?;
        if let Some(generation) = current.as_ref().filter(|generation| Instant::now() < generation.renew_at) {
            return Ok(generation.clone());
        }
        match (self.open(retry).await, current.as_ref()) {
            (Ok(generation), _) => Ok(current.insert(Arc::new(generation)).clone()),
            // Due is not expired: the old session is valid for hours.
            (Err(_), Some(generation)) => Ok(generation.clone()),
            (Err(failure), None) => Err(failure),
        }
    }

    /// Requests a session from the primaries in turn, from a random one on.
    async fn open(&self, retry: &Retry) -> Result<Generation, Failure> {
        let client = &self.0.client;
        let map = client.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let owners: Vec<_> = map.owners().into_iter().collect();
        let start = rand::random_range(0..owners.len().max(1));
        let mut last = match owners.is_empty() {
            true => Failure::unavailable("no worker is primary of a partition"),
            false => self.not_opened(),
        };
        for owner in owners.iter().cycle().skip(start).take(owners.len()) {
            if retry.remaining().is_none() {
                // The error names the worker that took the time.
                break;
            }
            *self.0.opener.lock() = Some(*owner);
            let limit = client.attempt(retry).min(OPENING);
            match client.while_owner(&map, *owner, open_at(client, &map, *owner, limit)).await {
                Ok(v1::OpenSessionResponse { session: Some(session), renew_after_ms, .. }) => {
                    let renew_at = Instant::now() + Duration::from_millis(renew_after_ms);
                    return Ok(Generation::new(session.into(), renew_at, map.partition_count()));
                }
                Ok(_) => last = Failure::unavailable(format!("worker {owner} returned a session without an id")),
                Err(failure) => last = failure,
            }
        }
        // No request of the caller was executed, regardless of the session.
        Err(Failure { maybe_executed: false, ..last })
    }

    /// Returns the failure of a request that waited for a session that another request opens.
    fn not_opened(&self) -> Failure {
        let text = match *self.0.opener.lock() {
            Some(owner) => format!("worker {owner} has not opened a session in time"),
            None => "no session was opened in time".to_owned(),
        };
        Failure::unavailable(text)
    }

    /// Stops numbering new requests under the session.
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
    Ok(parts.into_iter().map(|(partition, part)| Part::new(partition, WriteBody::Upsert(part))).collect())
}

async fn open_at(
    client: &Client,
    map: &Map,
    owner: Ordinal,
    limit: Duration,
) -> Result<v1::OpenSessionResponse, Failure> {
    let mut service = client.service_of(map, owner)?;
    let call = service.open_session(client.request(v1::OpenSessionRequest {}, limit));
    Ok(timeout(limit, call).await.map_err(|_| Failure::timed_out())??.into_inner())
}

async fn get_outcome(
    client: &Client,
    retry: &Retry,
    message: v1::GetOutcomeRequest,
) -> Result<v1::GetOutcomeResponse, Failure> {
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
