//! Replay buffers: create or open one, append, sample, update priorities, consume.

mod append;
mod batch;
mod get;
mod read;
mod spec;

pub use append::{Appended, Changed, Items};
pub use batch::{Batch, Column};
pub use read::{Fields, Sample, SampleBy};
pub use spec::{BufferDescription, BufferSpec, BufferStats, ConsumerStats, DeclarationProblem};

use crate::call::{Failure, Service};
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::retry::Retry;
use crate::session::Session;
use engram_memory::{Ordinal, PartitionId};
use engram_proto::v1;
use engram_replay::schema::Schema;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use tonic::{Request, Response, Status};

/// A replay buffer of a cluster. Cheap to clone; clones share a session.
#[derive(Debug, Clone)]
pub struct Buffer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    session: Session,
    spec: BufferSpec,
    schema: Schema,
    /// Partitions that take appends.
    partitions: Vec<PartitionId>,
    /// Index of the partition of the next append: appends go around.
    next: AtomicU32,
    /// Bytes of the jagged fields of an item, on average of the last read; 0 = unknown.
    jagged_bytes: AtomicUsize,
}

impl Client {
    /// Creates a buffer, or opens an existing one with the same settings.
    ///
    /// # Errors
    /// The specification is invalid; a buffer with this name has other settings, the first of which is named.
    pub async fn create_buffer(&self, spec: &BufferSpec) -> Result<Buffer, Error> {
        spec.check()?;
        let message = v1::CreateBufferRequest { spec: Some(spec.to_wire()) };
        let described = self
            .call_any(self.write(), message, |mut worker, request| async move {
                worker.buffers().create_buffer(request).await
            })
            .await?;
        Buffer::open(self, described)
    }

    /// Opens a buffer.
    ///
    /// # Errors
    /// [`ProblemKind::BufferUnknown`](engram_proto::v1::ProblemKind::BufferUnknown) if it does not exist.
    pub async fn buffer(&self, name: &str) -> Result<Buffer, Error> {
        Buffer::open(self, self.describe(name).await?)
    }

    /// Returns all buffers, by name.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn list_buffers(&self) -> Result<Vec<BufferDescription>, Error> {
        Ok(self.declared_buffers().await?.0)
    }

    /// Returns all buffers, by name, and those that the manifest of the cluster declares and that do not exist as declared.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn declared_buffers(&self) -> Result<(Vec<BufferDescription>, Vec<DeclarationProblem>), Error> {
        let listed = self
            .call_any(self.read(), v1::ListBuffersRequest {}, |mut worker, request| async move {
                worker.buffers().list_buffers(request).await
            })
            .await?;
        let problem = |it: v1::DeclarationProblem| DeclarationProblem { buffer: it.buffer, problem: it.problem };
        let buffers = listed.buffers.into_iter().map(BufferDescription::from_wire).collect::<Result<_, _>>()?;
        Ok((buffers, listed.problems.into_iter().map(problem).collect()))
    }

    /// Removes a buffer with its items; returns their number.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn drop_buffer(&self, name: &str) -> Result<u64, Error> {
        let message = v1::DropBufferRequest { name: name.to_owned() };
        let dropped = self
            .call_any(self.write(), message, |mut worker, request| async move {
                worker.buffers().drop_buffer(request).await
            })
            .await?;
        Ok(dropped.items)
    }

    async fn describe(&self, name: &str) -> Result<v1::DescribeBufferResponse, Error> {
        let message = v1::DescribeBufferRequest { name: name.to_owned() };
        self.call_any(self.read(), message, |mut worker, request| async move {
            worker.buffers().describe_buffer(request).await
        })
        .await
    }

    /// Calls a worker that is primary of some partition, and another one when it fails.
    pub(crate) async fn call_any<M: Clone, T, F>(
        &self,
        mut retry: Retry,
        message: M,
        call: impl Fn(Service, Request<M>) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        loop {
            let response = async {
                let (map, owner, service) = self.any_worker()?;
                let request = self.request(message.clone(), self.attempt(&retry));
                let call = async { Ok(call(service, request).await?.into_inner()) };
                self.while_owner(&map, owner, call).await
            };
            match response.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Returns a worker that is primary of some partition.
    pub(crate) fn any_worker(&self) -> Result<(Arc<Map>, Ordinal, Service), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let owners: Vec<Ordinal> = map.owners().into_iter().collect();
        let pick = rand::random_range(0..owners.len().max(1));
        let owner = *owners.get(pick).ok_or_else(|| Failure::unavailable("no worker serves a partition"))?;
        let service = self.service_of(&map, owner)?;
        Ok((map, owner, service))
    }
}

impl Buffer {
    fn open(client: &Client, described: v1::DescribeBufferResponse) -> Result<Self, Error> {
        let spec = BufferSpec::from_wire(described.spec.unwrap_or_default())?;
        let schema = spec.check()?;
        let next = AtomicU32::new(rand::random());
        let partitions: Vec<PartitionId> = described.partitions.into_iter().map(PartitionId).collect();
        if partitions.is_empty() {
            return Err(Error::Protocol("a buffer without partitions".into()));
        }
        Ok(Self(Arc::new(Inner {
            session: client.session(),
            spec,
            schema,
            partitions,
            next,
            jagged_bytes: AtomicUsize::new(0),
        })))
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.0.spec.name
    }

    /// Returns the partitions that take appends.
    pub fn partitions(&self) -> &[PartitionId] {
        &self.0.partitions
    }

    /// Returns its settings.
    pub fn spec(&self) -> &BufferSpec {
        &self.0.spec
    }

    /// Returns its fields.
    pub fn schema(&self) -> &Schema {
        &self.0.schema
    }

    /// Returns the client that it uses.
    pub fn client(&self) -> &Client {
        self.0.session.client()
    }

    /// Returns its figures.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn stats(&self) -> Result<BufferStats, Error> {
        Ok(BufferDescription::from_wire(self.client().describe(self.name()).await?)?.stats)
    }

    fn take_turns(&self, turns: u32) -> u32 {
        self.0.next.fetch_add(turns, Ordering::Relaxed)
    }
}
