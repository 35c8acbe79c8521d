//! Appends and changes of items, each exactly once.
//!
//! A batch is dealt to the partitions of the buffer in pieces, one after another from where the last append ended, so that partitions fill alike.
//! Items of a trajectory go to one partition, in order. A piece is applied together or not at all.

use super::batch::{Column, check_length};
use super::read::millis;
use super::spec::invalid;
use super::{Batch, Buffer};
use crate::call::Service;
use crate::error::{Error, PartFailure};
use crate::write::{Part, WriteResult};
use bytes::Bytes;
use engram_memory::buffer::{Remover, handles};
use engram_memory::edge::ShortNumber;
use engram_memory::{MAX_IDS, MemoryId, PartitionId, mix64, partition_of};
use engram_proto::v1::items_part::Change;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::columns::Columns;
use engram_replay::item::MAX_TAG_BYTES;
use engram_wire::WriteBody;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::Request;

/// Items per piece: fewer cost a record of the log each.
const PIECE_ITEMS: usize = 16;
/// Bytes per piece.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes of the pieces that are sent together. Several of these are in flight, so that client, primary and replica work at the same time.
const GROUP_BYTES: usize = 2 << 20;
/// Handles per message of one partition.
const HANDLES: usize = 16 << 10;

/// Items to append. Columns have one entry per item, or none where that is allowed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Items {
    /// Number of items.
    pub count: usize,
    /// Every field of the schema once, in any order.
    pub columns: Vec<Column>,
    /// Priorities, finite and not negative; none = the initial priority.
    pub priorities: Vec<f64>,
    /// Policy versions; none = 0.
    pub versions: Vec<u64>,
    /// Trajectories, for slices, or prompts, for groups; none = 0.
    pub trajectories: Vec<u64>,
    /// Tags of at most 255 bytes.
    pub tags: Vec<Bytes>,
    /// Longest wait until the rate limiter admits the batch; by default none.
    pub wait: Duration,
}

/// Result of an append.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Appended {
    /// Handles, in the order of the items.
    pub handles: Vec<MemoryId>,
    /// Items that were removed to make room.
    pub removed: u64,
}

/// Result of a change of items.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changed {
    /// Items changed.
    pub applied: u64,
    /// Handles that name no item any more, or are not leased.
    pub stale: u64,
}

/// What an append has written so far.
#[derive(Debug, Default)]
struct Progress {
    /// Handle of each row; 0 = not written yet.
    handles: Vec<MemoryId>,
    written: WriteResult,
}

/// A piece of a batch: a partition and its rows.
type Piece = (PartitionId, Vec<usize>);
/// What a group of pieces has written, and the partitions that are full and refuse; or the error, with the first partition of the group.
type GroupResult = Result<(WriteResult, Vec<PartitionId>), (PartitionId, Error)>;

impl Buffer {
    /// Appends items.
    ///
    /// # Errors
    /// A column does not match the schema; the buffer is full and refuses; the limiter did not allow it in time. Nothing was appended then: when
    /// other appends take the last room meanwhile, the items that were written are deleted again. [`Error::Partial`]: a part failed otherwise.
    pub async fn append(&self, items: Items) -> Result<Appended, Error> {
        self.check(&items)?;
        if items.count == 0 {
            return Ok(Appended::default());
        }
        let views: Vec<_> = items.columns.iter().map(Column::view).collect();
        let columns = self.schema().columns(&views, items.count).map_err(|error| invalid(error.to_string()))?;
        if self.spec().remover == Remover::Refuse {
            self.check_room(items.count).await?;
        }
        let partitions = self.client().map()?.partition_count();
        let batch = Rows { buffer: self, items: &items, columns: &columns, at_ms: now_ms(), partitions };
        self.admit(items.wait).await?;
        let mut progress = Progress { handles: vec![MemoryId(0); items.count], ..Progress::default() };
        match batch.append_all(&mut progress).await {
            Ok(()) => Ok(Appended { handles: progress.handles, removed: progress.written.outcome.evicted }),
            Err(error @ Error::Rejected(_)) if is_full(&error) => {
                let written: Vec<_> = progress.handles.into_iter().filter(|handle| handle.0 != 0).collect();
                self.delete(&written).await?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until the rate limiter admits a batch, before any of its messages is sent.
    async fn admit(&self, wait: Duration) -> Result<(), Error> {
        if self.spec().limiter.is_none() {
            return Ok(());
        }
        let client = self.client();
        let message =
            v1::WriteItemsRequest { admit: self.name().to_owned(), wait_ms: millis(wait), ..Default::default() };
        let call = |mut worker: Service, request: Request<v1::WriteItemsRequest>| async move {
            worker.buffers().write_items(request.map(|message| futures::stream::iter([message]))).await
        };
        client.call_any(client.write().waiting(wait), message, call).await.map(drop)
    }

    /// Sets priorities; handles of removed items are counted as stale. Of a repeated handle the last priority counts.
    ///
    /// # Errors
    /// A priority is negative, infinite or not a number.
    pub async fn update_priorities(&self, handles: &[MemoryId], priorities: &[f64]) -> Result<Changed, Error> {
        if handles.len() != priorities.len() {
            let text = format!(
                "priorities: {} entries are not allowed; allowed: one per handle ({})",
                priorities.len(),
                handles.len()
            );
            return Err(invalid(text));
        }
        self.check_priorities(priorities)?;
        self.change(handles, |rows| {
            let priorities = rows.iter().map(|row| priorities[*row]).collect();
            Change::Priorities(v1::SetPriorities { handles: pick(handles, rows), priorities })
        })
        .await
    }

    /// Deletes items; handles of removed items are counted as stale.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn delete(&self, handles: &[MemoryId]) -> Result<Changed, Error> {
        self.change(handles, |rows| Change::Delete(v1::DeleteItems { handles: pick(handles, rows) })).await
    }

    /// Records that a consumer is done with items that [`Buffer::consume`] returned. Those that are not leased are counted as stale: they were
    /// acknowledged before.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn acknowledge(&self, consumer: &str, handles: &[MemoryId]) -> Result<Changed, Error> {
        let change = |rows: &[usize]| {
            Change::Acknowledge(v1::AcknowledgeItems { consumer: consumer.to_owned(), handles: pick(handles, rows) })
        };
        self.change(handles, change).await
    }

    /// As [`Buffer::acknowledge`], of a whole batch.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn acknowledge_batch(&self, consumer: &str, batch: &Batch) -> Result<Changed, Error> {
        self.acknowledge(consumer, &batch.handles).await
    }

    async fn change(&self, handles: &[MemoryId], change: impl Fn(&[usize]) -> Change) -> Result<Changed, Error> {
        let partitions = self.client().map()?.partition_count();
        let mut rows: BTreeMap<PartitionId, Vec<usize>> = BTreeMap::new();
        for (row, handle) in handles.iter().enumerate() {
            rows.entry(partition_of(*handle, partitions)).or_default().push(row);
        }
        let mut parts = Vec::new();
        for (partition, rows) in &rows {
            parts.extend(rows.chunks(HANDLES).map(|rows| self.part(*partition, change(rows))));
        }
        let outcome = self.0.session.execute(parts).await?.outcome;
        Ok(Changed { applied: outcome.applied + outcome.evicted, stale: outcome.rejected })
    }

    fn part(&self, partition: PartitionId, change: Change) -> Part {
        let body =
            v1::ItemsPart { partition: partition.0, seq: 0, buffer: self.name().to_owned(), change: Some(change) };
        Part::new(partition, WriteBody::Items(body))
    }

    fn check(&self, items: &Items) -> Result<(), Error> {
        if items.count > MAX_IDS {
            return Err(invalid(format!("items: {} are not allowed; allowed: at most 65,536 per call", items.count)));
        }
        if items.count as u64 > self.spec().capacity {
            let capacity = self.spec().capacity;
            return Err(invalid(format!(
                "items: {} are not allowed; allowed: at most the capacity ({capacity})",
                items.count
            )));
        }
        check_length("priorities", items.priorities.len(), items.count)?;
        check_length("versions", items.versions.len(), items.count)?;
        check_length("trajectories", items.trajectories.len(), items.count)?;
        check_length("tags", items.tags.len(), items.count)?;
        if let Some(row) = items.tags.iter().position(|tag| tag.len() > MAX_TAG_BYTES) {
            let bytes = items.tags[row].len();
            return Err(invalid(format!("tags[{row}]: {bytes} bytes are not allowed; allowed: at most 255")));
        }
        self.check_priorities(&items.priorities)
    }

    fn check_priorities(&self, priorities: &[f64]) -> Result<(), Error> {
        let refused = priorities.iter().position(|priority| self.spec().weight_units(*priority).is_none());
        let Some(row) = refused else { return Ok(()) };
        let value = ShortNumber(priorities[row]);
        Err(invalid(format!("priorities[{row}]: {value} is not allowed; allowed: a finite number of at least 0")))
    }

    async fn check_room(&self, count: usize) -> Result<(), Error> {
        let items = self.stats().await?.items;
        if items + count as u64 <= self.spec().capacity {
            return Ok(());
        }
        Err(self.full(items, count))
    }

    /// Returns the error of `count` items that do not fit.
    fn full(&self, items: u64, count: usize) -> Error {
        let (name, capacity) = (self.name(), self.spec().capacity);
        let room = capacity.saturating_sub(items);
        let text = format!(
            "buffer {name} is full: {items} items of capacity {capacity}, {count} more are not allowed; allowed: {room} (remover: Refuse)"
        );
        Error::rejected(Problem::of(ProblemKind::BufferFull, text))
    }
}

/// A checked batch that is being appended.
struct Rows<'a> {
    buffer: &'a Buffer,
    items: &'a Items,
    columns: &'a Columns<'a>,
    at_ms: u64,
    partitions: u32,
}

impl Rows<'_> {
    async fn append_all(&self, progress: &mut Progress) -> Result<(), Error> {
        for pieces in self.deal() {
            let full = self.write(&pieces, progress).await?;
            for (partition, rows) in pieces.iter().filter(|(partition, _)| full.contains(partition)) {
                for &row in rows {
                    self.place(*partition, row, progress).await?;
                }
            }
        }
        Ok(())
    }

    /// Returns the partition at this index, modulo their number.
    fn partition(&self, index: u32) -> PartitionId {
        let partitions = self.buffer.partitions();
        partitions[index as usize % partitions.len()]
    }

    /// Returns the pieces of the batch, in rounds with at most one piece per partition.
    fn deal(&self) -> Vec<Vec<Piece>> {
        let used = self.buffer.partitions().len();
        let mut rows_of: Vec<(PartitionId, Vec<usize>)> = Vec::new();
        if self.items.trajectories.iter().any(|trajectory| *trajectory != 0) {
            let mut by_partition: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
            for (row, trajectory) in self.items.trajectories.iter().enumerate() {
                by_partition.entry((mix64(*trajectory) % used as u64) as u32).or_default().push(row);
            }
            rows_of.extend(by_partition.into_iter().map(|(index, rows)| (self.partition(index), rows)));
        } else {
            let pieces = self.items.count.div_ceil(PIECE_ITEMS).clamp(1, used);
            let first = self.buffer.take_turns(pieces as u32);
            let bounds = |piece: usize| piece * self.items.count / pieces;
            let piece = |piece| {
                (self.partition(first.wrapping_add(piece as u32)), (bounds(piece)..bounds(piece + 1)).collect())
            };
            rows_of.extend((0..pieces).map(piece));
        }
        let mut rounds: Vec<Vec<Piece>> = Vec::new();
        for (partition, rows) in rows_of {
            for (round, rows) in self.cut(&rows).into_iter().enumerate() {
                if rounds.len() == round {
                    rounds.push(Vec::new());
                }
                rounds[round].push((partition, rows));
            }
        }
        rounds
    }

    /// Cuts rows so that a piece fits into a message and into the share of its partition.
    fn cut(&self, rows: &[usize]) -> Vec<Vec<usize>> {
        let share = (self.buffer.spec().capacity / self.buffer.partitions().len() as u64).max(1) as usize;
        let mut pieces: Vec<Vec<usize>> = Vec::new();
        let mut bytes = 0;
        for &row in rows {
            let size = self.columns.bytes(row) + 64;
            match pieces.last_mut() {
                Some(piece) if bytes + size <= PIECE_BYTES && piece.len() < share => piece.push(row),
                _ => {
                    pieces.push(vec![row]);
                    bytes = 0;
                }
            }
            bytes += size;
        }
        pieces
    }

    /// Appends a row to a partition with room, after the one that has none.
    async fn place(&self, full: PartitionId, row: usize, progress: &mut Progress) -> Result<(), Error> {
        for partition in self.buffer.partitions().iter().filter(|partition| **partition != full) {
            let pieces = [(*partition, vec![row])];
            if self.write(&pieces, progress).await?.is_empty() {
                return Ok(());
            }
        }
        // Other appends took the room.
        Err(self.buffer.full(self.buffer.spec().capacity, self.items.count))
    }

    /// Appends pieces, at most one per partition. Returns the partitions that are full and refuse.
    async fn write(&self, pieces: &[Piece], progress: &mut Progress) -> Result<Vec<PartitionId>, Error> {
        let groups = self.groups(pieces);
        let (written, full) = match conclude(join_all(groups.iter().map(|pieces| self.write_group(pieces))).await) {
            Ok(written) => written,
            Err(error) => return Err(with_earlier(std::mem::take(&mut progress.written), pieces[0].0, error)),
        };
        for (partition, first) in &written.first_items {
            let piece = pieces.iter().find(|(of, _)| of == partition);
            let rows = piece.map_or(&[][..], |(_, rows)| rows);
            for (row, handle) in rows.iter().zip(handles(*first, rows.len() as u64, self.partitions)) {
                progress.handles[*row] = handle;
            }
        }
        progress.written.merge(written);
        Ok(full)
    }

    /// Groups pieces that are sent together.
    fn groups<'a>(&self, pieces: &'a [Piece]) -> Vec<&'a [Piece]> {
        let bytes = |piece: &Piece| piece.1.iter().map(|row| self.columns.bytes(*row)).sum::<usize>();
        let total: usize = pieces.iter().map(bytes).sum();
        pieces.chunks(pieces.len().div_ceil(total.div_ceil(GROUP_BYTES).max(1)).max(1)).collect()
    }

    /// Appends the pieces of a group.
    async fn write_group(&self, pieces: &[Piece]) -> GroupResult {
        let part = |(partition, rows): &Piece| self.buffer.part(*partition, Change::Append(self.append(rows)));
        let parts: Vec<Part> = pieces.iter().map(part).collect();
        match self.buffer.0.session.execute_waiting(parts, self.items.wait).await {
            Ok(written) => Ok((written, Vec::new())),
            Err(Error::Partial { written, failures }) if failures.iter().all(|it| is_full(&it.error)) => {
                Ok((*written, failures.iter().map(|failure| failure.partition).collect()))
            }
            Err(error) if is_full(&error) => Ok((WriteResult::default(), pieces.iter().map(|piece| piece.0).collect())),
            Err(error) => Err((pieces[0].0, error)),
        }
    }

    /// Returns the elements of some rows of a column; of rows that follow one another without a copy.
    fn elements(&self, field: usize, rows: &[usize]) -> Bytes {
        let name = &self.buffer.schema().fields()[field].name;
        let column = self.items.columns.iter().find(|column| column.name == *name);
        match (column, self.columns.range(field, rows)) {
            (Some(column), Some(range)) => column.data.slice(range),
            _ => self.columns.elements(field, rows).into(),
        }
    }

    fn append(&self, rows: &[usize]) -> v1::AppendItems {
        let fields = self.buffer.schema().fields().iter().enumerate();
        let columns = fields.map(|(index, field)| v1::FieldColumn {
            field: field.name.clone(),
            dtype: field.dtype.name().into(),
            shape: field.shape.clone(),
            data: self.elements(index, rows),
            rows: self.columns.rows(index, rows),
        });
        v1::AppendItems {
            count: rows.len() as u32,
            columns: columns.collect(),
            priorities: pick_column(&self.items.priorities, rows),
            versions: pick_column(&self.items.versions, rows),
            trajectories: pick_column(&self.items.trajectories, rows),
            tags: pick_column(&self.items.tags, rows),
            at_ms: self.at_ms,
            first_row: rows.first().copied().unwrap_or(0) as u64,
        }
    }
}

/// Returns what the groups of an append have written, and the partitions that are full; or the error of those that failed.
fn conclude(results: Vec<GroupResult>) -> Result<(WriteResult, Vec<PartitionId>), Error> {
    let (mut written, mut full, mut failures) = (WriteResult::default(), Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok((of_group, full_partitions)) => {
                written.merge(of_group);
                full.extend(full_partitions);
            }
            Err((_, Error::Partial { written: of_group, failures: of_parts })) => {
                written.merge(*of_group);
                failures.extend(of_parts);
            }
            Err((partition, error)) => failures.push(PartFailure { partition, error }),
        }
    }
    match failures.len() {
        0 => Ok((written, full)),
        // Nothing was appended: the first error says why.
        _ if written.versions.is_empty() => Err(failures.swap_remove(0).error),
        _ => Err(Error::Partial { written: Box::new(written), failures }),
    }
}

/// Returns the error of a batch, of which earlier messages have written a part.
fn with_earlier(mut earlier: WriteResult, partition: PartitionId, error: Error) -> Error {
    if earlier.versions.is_empty() {
        return error;
    }
    let failures = match error {
        Error::Partial { written, failures } => {
            earlier.merge(*written);
            failures
        }
        error => vec![PartFailure { partition, error }],
    };
    Error::Partial { written: Box::new(earlier), failures }
}

fn is_full(error: &Error) -> bool {
    error.kind() == ProblemKind::BufferFull
}

fn pick(handles: &[MemoryId], rows: &[usize]) -> Vec<u64> {
    rows.iter().map(|row| handles[*row].0).collect()
}

fn pick_column<T: Clone>(column: &[T], rows: &[usize]) -> Vec<T> {
    if column.is_empty() { Vec::new() } else { rows.iter().map(|row| column[*row].clone()).collect() }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::Version;
    use engram_memory::{Lsn, Term};

    #[test]
    fn error_of_a_later_message_reports_what_earlier_ones_have_written() {
        let wait = || Error::rejected(Problem::of(ProblemKind::BufferWait, "waiting for samples"));
        let partition = PartitionId(1);
        assert!(matches!(with_earlier(WriteResult::default(), partition, wait()), Error::Rejected(_)));
        let version = Version { partition, term: Term(1), lsn: Lsn(1), replicas: 2, durable: true };
        let earlier = WriteResult { versions: vec![version], ..WriteResult::default() };
        let Error::Partial { written, failures } = with_earlier(earlier.clone(), PartitionId(2), wait()) else {
            panic!("a part was written")
        };
        assert_eq!((*written, failures.len(), failures[0].partition), (earlier, 1, PartitionId(2)));
    }
}
