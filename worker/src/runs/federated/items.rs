//! Chunks of large contents as items of a buffer: on disk, replicated and scrubbed as experience is. Memory holds their places only.
//!
//! An item belongs to one run, by its trajectory. The record of a content names its items, and an item that no record names is removed: its writer
//! died between both, or another one was first.

use crate::buffers::{Buffers, command as to_command};
use crate::service::Plane;
use crate::shared::Shared;
use engram_client::{BufferSpec, DType, Field, Remover};
use engram_memory::buffer::{BufferCommand, order, position, position_of};
use engram_memory::{Command, MemoryId, PartitionId, Record, Refusal, Reply, RunId};
use engram_proto::v1::{self, Problem, ProblemKind};
use std::sync::Arc;

/// Name of the buffer.
pub(in crate::runs::federated) const BUFFER: &str = "engram-federated";
/// The field of an item.
const FIELD: &str = "chunk";
/// Most chunks in a partition: 64 GiB.
const MOST_PER_PARTITION: u64 = 1 << 16;
/// Age at which no write can be in progress any more.
const ORPHAN_MS: u64 = 600_000;
/// Longest wait before a write is tried again, in milliseconds: the primary is another worker, which does not announce room.
const RETRY_MS: u64 = 100;

/// The items of one run.
#[derive(Clone)]
pub(in crate::runs::federated) struct Items {
    buffers: Buffers,
    partition: PartitionId,
    /// Trajectory of the run's items.
    owner: u64,
}

impl Items {
    pub(in crate::runs::federated) fn new(shared: &Arc<Shared>, partition: PartitionId, owner: RunId) -> Self {
        let buffers = Buffers { shared: Arc::clone(shared), plane: Plane::Client };
        // Zero is the trajectory of items without one.
        Self { buffers, partition, owner: (owner.0 as u64) | 1 }
    }

    /// Creates the buffer in the cluster; one that exists is accepted.
    pub(in crate::runs::federated) async fn create(&self) -> Result<(), Problem> {
        let shared = &self.buffers.shared;
        let per_partition = match shared.engine.served_settings(self.partition) {
            Some(settings) => settings.limit.min(MOST_PER_PARTITION),
            None => return Err(shared.not_primary(self.partition)),
        };
        let field = Field { name: FIELD.to_owned(), dtype: DType::UInt8, shape: Vec::new(), jagged: true };
        let capacity = per_partition * u64::from(shared.partitions());
        let spec = BufferSpec { remover: Remover::Refuse, ..BufferSpec::new(BUFFER, vec![field], capacity) };
        self.buffers.create(Some(spec.to_wire())).await.map(drop)
    }

    /// Writes a chunk; `None` if the partition has no room.
    pub(in crate::runs::federated) async fn append(
        &self,
        index: u64,
        chunk: &[u8],
    ) -> Result<Option<MemoryId>, Problem> {
        let definition = self.buffers.definition(BUFFER).await?;
        let column = v1::FieldColumn {
            field: FIELD.to_owned(),
            dtype: "uint8".to_owned(),
            rows: vec![chunk.len() as u32],
            data: chunk.to_vec().into(),
            ..v1::FieldColumn::default()
        };
        let append = v1::AppendItems {
            count: 1,
            columns: vec![column],
            versions: vec![index],
            trajectories: vec![self.owner],
            ..v1::AppendItems::default()
        };
        let change = Some(v1::items_part::Change::Append(append));
        let part = v1::ItemsPart { partition: self.partition.0, seq: 0, buffer: BUFFER.to_owned(), change };
        let command = to_command(part, &definition, &self.buffers.shared)?;
        match self.write(command).await? {
            Reply::Applied(outcome) => Ok(outcome.first),
            Reply::Refused(Refusal::BufferFull { .. }) => Ok(None),
            Reply::Refused(refusal) => Err(self.refused(&refusal)),
        }
    }

    /// Reads a chunk; `None` if it does not exist.
    pub(in crate::runs::federated) async fn read(&self, item: MemoryId) -> Result<Option<bytes::Bytes>, Problem> {
        let request =
            v1::GetItemsRequest { buffer: BUFFER.to_owned(), handles: vec![item.0], ..v1::GetItemsRequest::default() };
        let batch = self.buffers.local_items(request).await?;
        Ok(batch.columns.into_iter().next().filter(|_| !batch.handles.is_empty()).map(|column| column.data))
    }

    /// Returns the command that removes items; nothing if there is none to remove.
    pub(in crate::runs::federated) async fn removal(&self, items: Vec<MemoryId>) -> Result<Option<Record>, Problem> {
        if items.is_empty() {
            return Ok(None);
        }
        let buffer = match self.buffers.definition(BUFFER).await {
            Ok(definition) => definition.buffer,
            // Its items are gone with it.
            Err(problem) if problem.kind() == ProblemKind::BufferUnknown => return Ok(None),
            Err(problem) => return Err(problem),
        };
        Ok(Some(Record::bare(Command::Buffer(BufferCommand::Delete { buffer, ids: items }))))
    }

    /// Removes items.
    pub(in crate::runs::federated) async fn remove(&self, items: Vec<MemoryId>) -> Result<(), Problem> {
        let Some(record) = self.removal(items).await? else { return Ok(()) };
        let Command::Buffer(command) = record.command else { return Ok(()) };
        match self.write(command).await? {
            Reply::Applied(_) => Ok(()),
            Reply::Refused(refusal) => Err(self.refused(&refusal)),
        }
    }

    /// Returns the items of the run that no write in progress can have written.
    pub(in crate::runs::federated) async fn old(&self) -> Result<Vec<MemoryId>, Problem> {
        // Without the buffer there is none.
        let Ok(definition) = self.buffers.definition(BUFFER).await else { return Ok(Vec::new()) };
        let (partition, owner, group) = (self.partition, self.owner, definition.buffer.group);
        let partitions = self.buffers.shared.partitions();
        let before =
            position(order(crate::runs::federated::now_millis().saturating_sub(ORPHAN_MS), 0), partition.0, partitions);
        let read = move |store: &mut engram_store::Partitions| {
            let trajectories = store.trajectories(partition, group, 0)?;
            let own = trajectories.into_iter().filter(|it| it.number == owner).flat_map(|it| it.items);
            Ok::<Vec<MemoryId>, engram_kernels::Error>(own.filter(|item| position_of(*item) < before).collect())
        };
        let read = self.buffers.shared.engine.read_leased(vec![partition], read).await?;
        read.map_err(|error| crate::engine::device_problem(&error))
    }

    async fn write(&self, command: BufferCommand) -> Result<Reply, Problem> {
        let record = Record::bare(Command::Buffer(command));
        let answers = self.buffers.shared.engine.write(vec![(self.partition, record)]).await?;
        let answer = answers.into_iter().next().expect("one answer per record");
        Ok(answer.map_err(|error| crate::engine::write_problem(&error))?.reply)
    }

    /// The buffer was removed, and may have been created again.
    fn refused(&self, refusal: &Refusal) -> Problem {
        self.buffers.shared.buffers.forget(BUFFER);
        Problem::of(ProblemKind::Unavailable, format!("buffer {BUFFER}: {refusal}")).retry_after(RETRY_MS)
    }
}
