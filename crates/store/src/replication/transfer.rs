//! State transfer from a primary to a follower that needs records which are no longer retained.
//!
//! The primary exports the committed state between two turns and sends it in chunks, limited by [`Throttle`]. The follower writes
//! it as a durable snapshot, logs that the snapshot replaces its previous state, and continues from its LSN. At most two transfers
//! are sent at a time, and two to one follower; partitions with a single replica go first.

use super::Replication;
use super::throttle::Throttle;
use crate::payload::{PayloadStream, StoredPayload};
use crate::peer::{Message, StateChunk};
use crate::snapshot::job::SnapshotWrite;
use crate::snapshot_file::{self, LEDGER, SnapshotHead};
use crate::state::State;
use crate::state::content::{Column, Content};
use crate::state::import::PayloadRows;
use crate::state::partitions::Partitions;
use crate::stats;
use crate::{Error, ImportError};
use bytes::Bytes;
use engram_cluster::replica;
use engram_memory::{Digest, Lsn, Ordinal, PartitionId, Term};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Limit for transfers being sent, which are held in memory, and for transfers that one follower has not installed yet.
const MAX_CONCURRENT_TRANSFERS: usize = 2;

/// Transfers to followers.
pub(crate) struct StateTransfers {
    /// Requested, not started.
    queued: VecDeque<(PartitionId, Ordinal)>,
    /// Started, not completely sent.
    sending: VecDeque<OutgoingTransfer>,
    /// Started, not acknowledged.
    in_flight: BTreeSet<(PartitionId, Ordinal)>,
    throttle: Throttle,
}

/// A transfer being sent.
struct OutgoingTransfer {
    partition: PartitionId,
    to: Ordinal,
    chunks: VecDeque<StateChunk>,
    /// Payloads after them, read as they are sent.
    payloads: PayloadStream,
    /// The next chunk with payload.
    next: StateChunk,
}

impl OutgoingTransfer {
    /// Returns the next chunk; `None` after the last.
    fn next_chunk(&mut self) -> Result<Option<StateChunk>, Error> {
        if let Some(chunk) = self.chunks.pop_front() {
            return Ok(Some(chunk));
        }
        let Some(bytes) = self.payloads.next()? else { return Ok(None) };
        let chunk = StateChunk { bytes, ..self.next.clone() };
        self.next.index += 1;
        Ok(Some(chunk))
    }

    fn is_sent(&self) -> bool {
        self.chunks.is_empty() && self.next.index == self.next.count
    }
}

impl StateTransfers {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Self {
            queued: VecDeque::new(),
            sending: VecDeque::new(),
            in_flight: BTreeSet::new(),
            throttle: Throttle::new(bytes_per_s),
        }
    }

    /// Queues a transfer. One in flight did not arrive and is restarted.
    pub(crate) fn enqueue(&mut self, partition: PartitionId, to: Ordinal) {
        self.finish(partition, to);
        if !self.queued.contains(&(partition, to)) {
            self.queued.push_back((partition, to));
        }
    }

    /// Ends the transfer to a follower that installed the state or continues without it.
    pub(crate) fn finish(&mut self, partition: PartitionId, to: Ordinal) {
        self.in_flight.remove(&(partition, to));
        self.sending.retain(|sending| (sending.partition, sending.to) != (partition, to));
    }

    /// Drops all transfers to a peer.
    pub(crate) fn reset_peer(&mut self, peer: Ordinal) {
        self.queued.retain(|(_, to)| *to != peer);
        self.in_flight.retain(|(_, to)| *to != peer);
        self.sending.retain(|sending| sending.to != peer);
    }

    /// Drops all transfers of a partition.
    pub(crate) fn stop(&mut self, partition: PartitionId) {
        self.queued.retain(|(other, _)| *other != partition);
        self.in_flight.retain(|(other, _)| *other != partition);
        self.sending.retain(|sending| sending.partition != partition);
    }

    /// Drops the transfers of a partition to others than `followers`.
    pub(crate) fn keep_only(&mut self, partition: PartitionId, followers: &BTreeSet<Ordinal>) {
        let stays = |other: PartitionId, to: Ordinal| other != partition || followers.contains(&to);
        self.queued.retain(|(other, to)| stays(*other, *to));
        self.in_flight.retain(|(other, to)| stays(*other, *to));
        self.sending.retain(|sending| stays(sending.partition, sending.to));
    }

    /// Returns the next transfer to start: the first of a `single_replica` partition, or else the first, among followers with capacity.
    fn next(&mut self, single_replica: impl Fn(PartitionId) -> bool) -> Option<(PartitionId, Ordinal)> {
        if self.sending.len() >= MAX_CONCURRENT_TRANSFERS {
            return None;
        }
        let has_capacity =
            |to: Ordinal| self.in_flight.iter().filter(|(_, other)| *other == to).count() < MAX_CONCURRENT_TRANSFERS;
        let can_begin = || self.queued.iter().enumerate().filter(|(_, (_, to))| has_capacity(*to));
        let candidate =
            can_begin().find(|(_, (partition, _))| single_replica(*partition)).or_else(|| can_begin().next());
        let index = candidate.map(|(index, _)| index)?;
        self.queued.remove(index)
    }
}

/// A transfer being received.
pub(crate) struct IncomingTransfer {
    head: StateChunk,
    next: u32,
    ledger: Vec<u8>,
    chunks: Vec<(Column, Vec<u8>)>,
    rows: PayloadRows,
    payloads: Vec<StoredPayload>,
}

impl IncomingTransfer {
    fn new(head: StateChunk) -> Self {
        let (rows, payloads) = (PayloadRows::default(), Vec::new());
        Self { head, next: 0, ledger: Vec::new(), chunks: Vec::new(), rows, payloads }
    }

    fn continues_with(&self, chunk: &StateChunk) -> bool {
        let identity = |chunk: &StateChunk| (chunk.term, chunk.lsn, chunk.record_term, chunk.count, chunk.digest);
        identity(&self.head) == identity(chunk) && self.next == chunk.index
    }

    /// Takes a chunk; payloads are appended to the segments of the partition.
    fn take(&mut self, chunk: &StateChunk, partitions: &mut Partitions, id: PartitionId) -> Result<(), ImportError> {
        self.next += 1;
        if chunk.kind == LEDGER {
            self.ledger.extend_from_slice(&chunk.bytes);
            return Ok(());
        }
        match Column::from_code(chunk.kind) {
            Some(Column::Lengths) => {
                let lengths = chunk.bytes.as_chunks().0.iter();
                self.rows.lengths.extend(lengths.map(|bytes| u32::from_le_bytes(*bytes)));
                Ok(())
            }
            Some(Column::Bytes) => self.take_payloads(&chunk.bytes, partitions, id),
            None | Some(Column::References | Column::Segments) => Err(ImportError::Invalid("unknown column")),
            Some(column) => {
                self.chunks.push((column, chunk.bytes.to_vec()));
                Ok(())
            }
        }
    }

    fn take_payloads(&mut self, bytes: &[u8], partitions: &mut Partitions, id: PartitionId) -> Result<(), ImportError> {
        let width = partitions.features().bytes();
        let (chunks, payloads) = (&self.chunks, &mut self.payloads);
        self.rows.add_piece(bytes, |row, payload, is_lost| {
            let received = if is_lost {
                partitions.receive_lost_payload(id, row, payload)
            } else {
                features_of(chunks, row, width).map(|features| partitions.receive_payload(id, row, features, payload))
            };
            received.map(|received| payloads.push(received)).is_some()
        })
    }

    /// Finishes the payloads; `false` if one is missing, or the disk does not take them.
    fn finish_payloads(&mut self, partitions: &mut Partitions, id: PartitionId) -> bool {
        partitions.finish_received_payloads(id, &mut self.payloads) && self.rows.is_complete()
    }
}

/// What a received chunk leads to.
pub(crate) enum TransferProgress {
    /// More chunks follow, or the transfer is requested again.
    Incomplete,
    /// The state here has to be discarded: it has what its primary lost.
    LostCommits,
    /// The state is complete, and is to be written as a snapshot.
    Complete(Box<SnapshotWrite>),
}

/// Sending.
impl Replication {
    /// Queues a state transfer to a follower.
    pub(crate) fn enqueue_transfer(&mut self, partition: PartitionId, to: Ordinal) {
        self.transfers.enqueue(partition, to);
    }

    /// Sends queued transfers as far as followers and throttle allow.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn send_state(&mut self, state: &mut State) -> Result<(), Error> {
        let context = Arc::clone(&self.context);
        let (shared, now_ms) = (&context.shared, context.now_ms());
        let transfers = &mut self.transfers;
        if transfers.throttle.is_due(now_ms) {
            // A follower is as busy installing a transfer as the primary is sending it.
            transfers.throttle.evaluate(now_ms, shared.write_us.totals(), !transfers.in_flight.is_empty());
        }
        loop {
            let single_replica = |partition: PartitionId| state.of(partition).replica().in_sync_count() <= 1;
            if state.may_transfer()
                && let Some((partition, to)) = self.transfers.next(single_replica)
            {
                let from_ms = context.now_ms();
                self.begin_transfer(state, partition, to)?;
                state.charge_transfer(from_ms);
                continue;
            }
            let transfers = &mut self.transfers;
            if transfers.sending.is_empty() || !transfers.throttle.may_send(now_ms) {
                return Ok(());
            }
            let Some(mut sending) = transfers.sending.pop_front() else { return Ok(()) };
            let (partition, to) = (sending.partition, sending.to);
            let chunk = match sending.next_chunk() {
                Ok(chunk) => chunk,
                Err(error) => {
                    self.transfers.finish(partition, to);
                    // The other items are re-replicated, and the item is damaged on all replicas.
                    if state.payload_failed(partition, sending.payloads.failed, &error) {
                        self.transfers.enqueue(partition, to);
                    }
                    continue;
                }
            };
            if let Some(chunk) = chunk {
                self.transfers.throttle.charge(chunk.bytes.len());
                stats::add(&shared.transfer_sent_bytes, chunk.bytes.len() as u64);
                self.send(to, partition, Message::State(chunk));
            }
            if !sending.is_sent() {
                self.transfers.sending.push_front(sending);
            }
        }
    }

    fn begin_transfer(&mut self, state: &mut State, partition: PartitionId, to: Ordinal) -> Result<(), Error> {
        let partition_state = state.of(partition);
        let Some(term) = partition_state.replica().primary_term() else { return Ok(()) };
        let has_single_replica = partition_state.replica().in_sync_count() <= 1;
        let (lsn, record_term) = partition_state.applied();
        let Some(content) = state.export_for_transfer(partition, has_single_replica)? else {
            // The partition is empty: stream from the first record.
            self.shipping.start(partition, to, term, Lsn(0));
            return Ok(());
        };
        stats::add(&self.context.shared.transfers_sent, 1);
        self.transfers.in_flight.insert((partition, to));
        self.transfers.sending.push_back(outgoing_transfer(content, to, (term, lsn, record_term)));
        Ok(())
    }
}

/// Receiving.
impl Replication {
    /// Processes a received chunk.
    pub(crate) fn receive_state(
        &mut self,
        state: &mut State,
        partition: PartitionId,
        from: Ordinal,
        chunk: &StateChunk,
    ) -> TransferProgress {
        let replica = state.of(partition).replica();
        if !replica.accepts_snapshot(chunk.term, chunk.lsn) {
            self.incoming.remove(&partition);
            if chunk.index + 1 < chunk.count {
                return TransferProgress::Incomplete;
            }
            if replica.has_lost_commits(chunk.term) {
                return TransferProgress::LostCommits;
            }
            self.request_transfer_again(partition, from, chunk.term);
            return TransferProgress::Incomplete;
        }
        if chunk.index == 0 {
            self.incoming.insert(partition, IncomingTransfer::new(chunk.clone()));
        }
        let Some(incoming) = self.incoming.get_mut(&partition) else { return TransferProgress::Incomplete };
        let result = if incoming.continues_with(chunk) {
            incoming.take(chunk, state.partitions_mut(), partition)
        } else {
            Err(ImportError::Invalid("a chunk of the transfer is missing"))
        };
        if result.is_err() {
            self.incoming.remove(&partition);
            self.request_transfer_again(partition, from, chunk.term);
        } else if incoming.next == chunk.count
            && let Some(mut incoming) = self.incoming.remove(&partition)
        {
            if incoming.finish_payloads(state.partitions_mut(), partition) {
                return TransferProgress::Complete(Box::new(self.received_state(partition, from, incoming)));
            }
            self.request_transfer_again(partition, from, chunk.term);
        }
        TransferProgress::Incomplete
    }

    /// Returns the snapshot of a complete state.
    fn received_state(&self, partition: PartitionId, from: Ordinal, incoming: IncomingTransfer) -> SnapshotWrite {
        let IncomingTransfer { head, ledger, chunks, payloads, .. } = incoming;
        let content = Content {
            partition,
            memories: head.memories,
            clock: head.clock,
            ledger,
            digest: Digest(head.digest),
            chunks,
            payloads,
        };
        let snapshot = SnapshotHead {
            partition,
            lsn: head.lsn,
            term: head.record_term,
            clock: head.clock,
            memories: head.memories,
            created_ms: self.context.clock.now_ms(),
            digest: head.digest,
        };
        let disk = Arc::clone(&self.context.disk);
        SnapshotWrite::install(disk, self.context.file_head, snapshot, content, (head.term, from))
    }

    /// Requests the state of a partition from its primary.
    pub(crate) fn request_transfer_again(&mut self, partition: PartitionId, to: Ordinal, term: Term) {
        self.send(to, partition, Message::Replica(replica::Message::NotOpen { term }, Vec::new()));
    }
}

fn outgoing_transfer(content: Content, to: Ordinal, (term, lsn, record_term): (Term, Lsn, Term)) -> OutgoingTransfer {
    let Content { partition, clock, memories, digest, .. } = content;
    let payloads = content.payload_stream();
    let pieces = PayloadStream::pieces(&content.payloads, snapshot_file::MAX_CHUNK_BYTES) as u32;
    let lengths = content.lengths();
    let ledger =
        content.ledger.chunks(snapshot_file::MAX_CHUNK_BYTES).map(|part| (LEDGER, Bytes::copy_from_slice(part)));
    let columns = content.chunks.into_iter().chain(lengths);
    let columns = columns.map(|(column, bytes)| (column.code(), Bytes::from(bytes)));
    let chunks: Vec<(u32, Bytes)> = ledger.chain(columns).collect();
    let count = chunks.len() as u32 + pieces;
    let chunk = |(index, (kind, bytes))| StateChunk {
        term,
        lsn,
        record_term,
        index,
        count,
        clock,
        memories,
        digest: digest.0,
        kind,
        bytes,
    };
    let next = chunk((chunks.len() as u32, (Column::Bytes.code(), Bytes::new())));
    OutgoingTransfer { partition, to, chunks: (0..).zip(chunks).map(chunk).collect(), payloads, next }
}

/// Returns the features of a row; `None` if they did not arrive.
fn features_of(chunks: &[(Column, Vec<u8>)], row: u32, width: usize) -> Option<&[u8]> {
    if width == 0 {
        return Some(&[]);
    }
    let mut start = row as usize * width;
    for (_, bytes) in chunks.iter().filter(|(column, _)| *column == Column::Features) {
        match start.checked_sub(bytes.len()) {
            Some(rest) => start = rest,
            None => return bytes.get(start..start + width),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_replica_partitions_go_first_and_a_busy_follower_delays_no_other() {
        let mut transfers = StateTransfers::new(0);
        let (b, c) = (Ordinal(1), Ordinal(2));
        (0..4).for_each(|partition| transfers.enqueue(PartitionId(partition), b));
        transfers.enqueue(PartitionId(1), c);
        let single_replica = |partition: PartitionId| partition.0 == 2;
        let begin = |transfers: &mut StateTransfers| {
            let started = transfers.next(single_replica);
            transfers.in_flight.extend(started);
            started.map(|(partition, to)| (partition.0, to))
        };
        assert_eq!(begin(&mut transfers), Some((2, b)));
        assert_eq!(begin(&mut transfers), Some((0, b)));
        assert_eq!(begin(&mut transfers), Some((1, c)), "the other follower already has two transfers");
        assert_eq!(begin(&mut transfers), None);
        transfers.finish(PartitionId(0), b);
        assert_eq!(begin(&mut transfers), Some((1, b)));
        transfers.enqueue(PartitionId(2), b);
        assert_eq!(begin(&mut transfers), Some((2, b)), "a transfer that did not arrive is restarted");
        transfers.stop(PartitionId(1));
        transfers.reset_peer(b);
        assert_eq!((begin(&mut transfers), transfers.in_flight.len()), (None, 0));
    }
}
