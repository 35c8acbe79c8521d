//! Contents of a Federated run as records of its partition: replicated and durable when a write is acknowledged.
//!
//! A content is one record: its state is a header, its rows are chunks. The version of the record is the number of its chunks, so an upload resumes
//! at it, and of two writers of a chunk one wins. Chunks of large models and updates are items of a buffer, on disk; their rows name them.

use crate::runs::federated::FederatedMetrics;
use crate::runs::federated::items::Items;
use crate::runs::record;
use crate::shared::Shared;
use engram_federated::job::MAX_PARAMETERS_IN_MEMORY;
use engram_federated::round::Digest;
use engram_federated::service::digest;
use engram_memory::{Command, MemoryId, PartitionId, Record, Refusal, RunId};
use engram_proto::v1::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// Prefix of such a record; records of runs are JSON.
const PREFIX: &[u8] = b"federated\n";
/// Bytes of a chunk.
pub(in crate::runs::federated) const CHUNK_BYTES: usize = 1 << 20;
/// Longest wait for room or a lease, in milliseconds: the partition may be another worker's, which announces neither.
const RETRY_MS: u64 = 100;

/// Returns whether a record is a content of a Federated run.
pub(in crate::runs) fn is_content(state: &[u8]) -> bool {
    state.starts_with(PREFIX)
}

/// Name of a content within its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::runs::federated) enum ContentName {
    /// The server of the run.
    Service,
    /// Parameters of a version.
    Model(u64),
    /// What the strategy remembers at a version.
    Aggregator(u64),
    /// Upload of a task: one, whatever the client sends.
    Update(u64),
    /// Messages of the secure aggregation of a round.
    Masks(u64),
    /// Parameters of a version as 8-bit integers.
    Quantized(u64),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Header {
    owner: u128,
    name: ContentName,
    /// Length of the whole content.
    bytes: u64,
    /// Of an upload, the client's name for it.
    nonce: u64,
}

/// Row of a chunk that is an item.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct StoredChunk {
    item: u64,
    digest: Digest,
}

impl StoredChunk {
    fn decode(row: &[u8]) -> Option<Self> {
        postcard::from_bytes(row).ok()
    }
}

impl Header {
    /// Whether the chunks are items.
    const fn is_on_disk(&self) -> bool {
        let may_be = matches!(self.name, ContentName::Model(_) | ContentName::Update(_));
        may_be && self.bytes > 4 * MAX_PARAMETERS_IN_MEMORY as u64
    }

    const fn chunks(&self) -> u64 {
        self.bytes.div_ceil(CHUNK_BYTES as u64)
    }

    fn encode(&self, attached: &[u8]) -> Vec<u8> {
        let header = postcard::to_stdvec(self).expect("a header has no type that the encoding lacks");
        [PREFIX, &[header.len() as u8], &header, attached].concat()
    }

    /// Returns the header of a record, and what is attached to it.
    fn decode(state: &[u8]) -> Option<(Self, &[u8])> {
        let (length, rest) = state.strip_prefix(PREFIX)?.split_first()?;
        let (header, attached) = rest.split_at_checked(usize::from(*length))?;
        Some((postcard::from_bytes(header).ok()?, attached))
    }
}

/// A record that was read whole.
pub(in crate::runs::federated) struct Content {
    /// Number of writes so far.
    pub(in crate::runs::federated) version: u64,
    /// What is attached to the header.
    pub(in crate::runs::federated) attached: Vec<u8>,
    /// The chunks.
    pub(in crate::runs::federated) rows: Vec<Vec<u8>>,
    /// Length of the whole content.
    pub(in crate::runs::federated) bytes: u64,
}

/// An upload in progress, or a complete one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::runs::federated) struct Upload {
    /// The client's name for it.
    pub(in crate::runs::federated) nonce: u64,
    /// Number of chunks that are stored.
    pub(in crate::runs::federated) chunks: u64,
}

/// Result of a write that may lose against another one.
pub(in crate::runs::federated) enum Written {
    Done,
    /// Another writer was first.
    Conflict,
    /// The partition has no room.
    Full,
}

/// The contents of one run.
#[derive(Clone)]
pub(in crate::runs::federated) struct Contents {
    shared: Arc<Shared>,
    partition: PartitionId,
    owner: RunId,
    items: Items,
}

impl Contents {
    /// Returns the contents of the run with this record and identity.
    pub(in crate::runs::federated) fn new(shared: &Arc<Shared>, run: RunId, identity: RunId) -> Self {
        let partition = crate::runs::partition(shared, run);
        let items = Items::new(shared, partition, identity);
        Self { shared: Arc::clone(shared), partition, owner: identity, items }
    }

    /// The chunks that are on disk.
    pub(in crate::runs::federated) const fn items(&self) -> &Items {
        &self.items
    }

    pub(in crate::runs::federated) fn metrics(&self) -> &FederatedMetrics {
        &self.shared.metrics.federated
    }

    fn id(&self, name: ContentName) -> RunId {
        let name = postcard::to_stdvec(&name).expect("a name has no type that the encoding lacks");
        RunId(xxh3_128(&[PREFIX, &self.owner.0.to_be_bytes(), &name].concat()))
    }

    fn header(&self, name: ContentName, bytes: u64) -> Header {
        Header { owner: self.owner.0, name, bytes, nonce: 0 }
    }

    async fn write(&self, command: Command) -> Result<Written, Problem> {
        match record::write(&self.shared, self.partition, command).await? {
            Ok(()) => Ok(Written::Done),
            Err(Refusal::RunConflict { .. }) => Ok(Written::Conflict),
            Err(Refusal::RunFull { .. }) => Ok(Written::Full),
            Err(refusal) => Err(Problem::of(ProblemKind::Unavailable, refusal.to_string()).retry_after(RETRY_MS)),
        }
    }

    /// Reads a content; `None` if there is none.
    pub(in crate::runs::federated) async fn load(&self, name: ContentName) -> Result<Option<Content>, Problem> {
        let Some(entry) = record::load(&self.shared, self.partition, self.id(name)).await? else { return Ok(None) };
        let Some((header, attached)) = Header::decode(&entry.state) else { return Ok(None) };
        let (version, attached) = (entry.version, attached.to_vec());
        Ok(Some(Content { version, attached, bytes: header.bytes, rows: entry.rows }))
    }

    /// Reads a content in memory that is complete; `None` if it is absent or a part is missing.
    pub(in crate::runs::federated) async fn get(&self, name: ContentName) -> Result<Option<Vec<u8>>, Problem> {
        let content = self.load(name).await?;
        Ok(content.and_then(|content| {
            let whole = content.rows.concat();
            (whole.len() as u64 == content.bytes).then_some(whole)
        }))
    }

    /// Reads a part of a content, and the length of the whole; `None` if it is absent or incomplete. A part after the end is empty.
    pub(in crate::runs::federated) async fn part(
        &self,
        name: ContentName,
        offset: u64,
        bytes: usize,
    ) -> Result<Option<(Vec<u8>, u64)>, Problem> {
        let size = CHUNK_BYTES as u64;
        let mut part = Vec::new();
        let mut at = offset;
        loop {
            let Some((chunk, whole)) = self.chunk(name, at / size).await? else { return Ok(None) };
            let end = offset.saturating_add(bytes as u64).min(whole);
            let from = (at % size) as usize;
            let until = ((end.saturating_sub(at - at % size)) as usize).min(chunk.len());
            part.extend_from_slice(chunk.get(from..until).unwrap_or_default());
            at = (at - at % size).saturating_add(size);
            if at >= end {
                return Ok(Some((part, whole)));
            }
        }
    }

    /// Reads a chunk of a complete content, and the length of the whole; a chunk after the last is empty.
    pub(in crate::runs::federated) async fn chunk(
        &self,
        name: ContentName,
        index: u64,
    ) -> Result<Option<(Vec<u8>, u64)>, Problem> {
        let (partition, id) = (self.partition, self.id(name));
        let read = move |partitions: &mut engram_store::Partitions| {
            let entry = partitions.ledger(partition)?.runs.get(id)?;
            let (header, _) = Header::decode(&entry.state)?;
            let is_complete = entry.rows.len() as u64 == header.chunks();
            is_complete.then(|| (header, entry.rows.get(index as usize).cloned().unwrap_or_default()))
        };
        let Some((header, row)) = self.shared.engine.read_leased(vec![partition], read).await? else { return Ok(None) };
        if !header.is_on_disk() || row.is_empty() {
            return Ok(Some((row, header.bytes)));
        }
        let Some(chunk) = StoredChunk::decode(&row) else { return Ok(None) };
        let content = self.items.read(MemoryId(chunk.item)).await?;
        Ok(content.map(|content| (content.to_vec(), header.bytes)))
    }

    /// Returns the digests of the chunks of a complete content on disk.
    pub(in crate::runs::federated) async fn chunk_digests(
        &self,
        name: ContentName,
    ) -> Result<Option<Vec<Digest>>, Problem> {
        let (partition, id) = (self.partition, self.id(name));
        let read = move |partitions: &mut engram_store::Partitions| {
            let entry = partitions.ledger(partition)?.runs.get(id)?;
            let (header, _) = Header::decode(&entry.state)?;
            let is_complete = header.is_on_disk() && entry.rows.len() as u64 == header.chunks();
            let digests = entry.rows.iter().map(|row| Some(StoredChunk::decode(row)?.digest));
            if is_complete { digests.collect() } else { None }
        };
        self.shared.engine.read_leased(vec![partition], read).await
    }

    /// Number of chunks that are stored.
    pub(in crate::runs::federated) async fn chunks(&self, name: ContentName) -> Result<u64, Problem> {
        let (partition, id) = (self.partition, self.id(name));
        let read = move |partitions: &mut engram_store::Partitions| {
            let entry = partitions.ledger(partition).and_then(|ledger| ledger.runs.get(id));
            entry.map_or(0, |entry| entry.rows.len() as u64)
        };
        self.shared.engine.read_leased(vec![partition], read).await
    }

    /// Returns the upload of a task, if it has begun.
    pub(in crate::runs::federated) async fn upload(&self, task: u64) -> Result<Option<Upload>, Problem> {
        let (partition, id) = (self.partition, self.id(ContentName::Update(task)));
        let read = move |partitions: &mut engram_store::Partitions| {
            let entry = partitions.ledger(partition)?.runs.get(id)?;
            let (header, _) = Header::decode(&entry.state)?;
            Some(Upload { nonce: header.nonce, chunks: entry.rows.len() as u64 })
        };
        self.shared.engine.read_leased(vec![partition], read).await
    }

    /// Adds chunk `index` of an update of `bytes` bytes. Of two uploads of a task the one whose first chunk is stored first remains.
    pub(in crate::runs::federated) async fn append_update(
        &self,
        (task, nonce): (u64, u64),
        bytes: u64,
        index: u64,
        chunk: &[u8],
    ) -> Result<Written, Problem> {
        self.append_to(Header { nonce, ..self.header(ContentName::Update(task), bytes) }, index, chunk).await
    }

    /// Adds chunk `index` of a content of `bytes` bytes.
    pub(in crate::runs::federated) async fn append(
        &self,
        name: ContentName,
        bytes: u64,
        index: u64,
        chunk: &[u8],
    ) -> Result<Written, Problem> {
        self.append_to(self.header(name, bytes), index, chunk).await
    }

    async fn append_to(&self, header: Header, index: u64, chunk: &[u8]) -> Result<Written, Problem> {
        let state = header.encode(&[]);
        let run = self.id(header.name);
        if !header.is_on_disk() {
            let row = Some(chunk.to_vec());
            return self.write(Command::RunRecord { run, expected: index, state, row }).await;
        }
        let Some(item) = self.items.append(index, chunk).await? else { return Ok(Written::Full) };
        let row = StoredChunk { item: item.0, digest: digest(chunk) };
        let row = Some(postcard::to_stdvec(&row).expect("a row has no type that the encoding lacks"));
        let written = self.write(Command::RunRecord { run, expected: index, state, row }).await?;
        if !matches!(written, Written::Done) {
            self.items.remove(vec![item]).await?;
        }
        Ok(written)
    }

    /// Writes a whole content, in place of what there is.
    pub(in crate::runs::federated) async fn put(&self, name: ContentName, content: &[u8]) -> Result<Written, Problem> {
        self.remove(&[name]).await?;
        for (index, chunk) in content.chunks(CHUNK_BYTES).enumerate() {
            match self.append(name, content.len() as u64, index as u64, chunk).await? {
                Written::Done => {}
                other => return Ok(other),
            }
        }
        Ok(Written::Done)
    }

    /// Writes what is attached to a content, and adds a row if there is one, if it has had `expected` writes.
    pub(in crate::runs::federated) async fn attach(
        &self,
        name: ContentName,
        expected: u64,
        attached: &[u8],
        row: Option<Vec<u8>>,
    ) -> Result<Written, Problem> {
        let state = self.header(name, 0).encode(attached);
        self.write(Command::RunRecord { run: self.id(name), expected, state, row }).await
    }

    /// Names all contents of the run.
    pub(in crate::runs::federated) async fn names(&self) -> Result<Vec<ContentName>, Problem> {
        let (partition, owner) = (self.partition, self.owner.0);
        let read = move |partitions: &mut engram_store::Partitions| {
            let runs = partitions.ledger(partition).into_iter().flat_map(|ledger| ledger.runs.iter());
            let headers = runs.filter_map(|(_, entry)| Some(Header::decode(&entry.state)?.0));
            headers.filter(|header| header.owner == owner).map(|header| header.name).collect()
        };
        self.shared.engine.read_leased(vec![partition], read).await
    }

    /// Removes contents; those that are absent are left out.
    pub(in crate::runs::federated) async fn remove(&self, names: &[ContentName]) -> Result<(), Problem> {
        let command = |name: &ContentName| (self.partition, Record::bare(Command::RunRemove { run: self.id(*name) }));
        let commands: Vec<_> = names.iter().map(command).collect();
        if commands.is_empty() {
            return Ok(());
        }
        let items = self.items_of(names.iter().map(|name| self.id(*name)).collect()).await?;
        let removal = self.items.removal(items).await?;
        let commands: Vec<_> = removal.map(|record| (self.partition, record)).into_iter().chain(commands).collect();
        for answer in self.shared.engine.write(commands).await? {
            answer.map_err(|error| crate::engine::write_problem(&error))?;
        }
        Ok(())
    }

    /// Returns the items that records name.
    async fn items_of(&self, records: Vec<RunId>) -> Result<Vec<MemoryId>, Problem> {
        let partition = self.partition;
        let read = move |partitions: &mut engram_store::Partitions| {
            let ledger = partitions.ledger(partition);
            let entries = records.iter().filter_map(|id| ledger?.runs.get(*id));
            let on_disk = entries.filter(|entry| Header::decode(&entry.state).is_some_and(|it| it.0.is_on_disk()));
            let rows = on_disk.flat_map(|entry| &entry.rows);
            rows.filter_map(|row| Some(MemoryId(StoredChunk::decode(row)?.item))).collect()
        };
        self.shared.engine.read_leased(vec![partition], read).await
    }

    /// Removes the items that no content names: their writers died.
    pub(in crate::runs::federated) async fn remove_orphans(&self) -> Result<(), Problem> {
        let old = self.items.old().await?;
        if old.is_empty() {
            return Ok(());
        }
        let names = self.names().await?.into_iter().map(|name| self.id(name)).collect();
        let named: std::collections::BTreeSet<MemoryId> = self.items_of(names).await?.into_iter().collect();
        self.items.remove(old.into_iter().filter(|item| !named.contains(item)).collect()).await
    }

    /// Removes the contents that `is_kept` does not name.
    pub(in crate::runs::federated) async fn sweep(&self, is_kept: impl Fn(ContentName) -> bool) -> Result<(), Problem> {
        let surplus: Vec<ContentName> = self.names().await?.into_iter().filter(|name| !is_kept(*name)).collect();
        self.remove(&surplus).await
    }
}

/// Shows a digest or a signature.
pub(in crate::runs::federated) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_differ_from_records_of_runs() {
        let header = Header { owner: 7, name: ContentName::Update(3), bytes: 9, nonce: u64::MAX };
        let state = header.encode(b"attached");
        assert!(is_content(&state) && !is_content(b"{}"));
        let (decoded, attached) = Header::decode(&state).unwrap();
        assert_eq!((decoded.owner, decoded.name, decoded.bytes, attached), (7, header.name, 9, &b"attached"[..]));
        assert_eq!(decoded.nonce, u64::MAX);
        assert!(Header::decode(&state[..12]).is_none());
    }
}
