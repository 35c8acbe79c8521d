//! State transfer from a primary to a follower that needs records which are no longer retained.
//!
//! The primary exports the committed state between two turns and sends it in chunks, limited by [`Throttle`]. The follower writes
//! it as a durable snapshot, logs that the snapshot replaces its previous state, and continues from its LSN. At most two transfers
//! are sent at a time, and two to one follower; partitions with a single replica go first.

use crate::background::SnapshotWrite;
use crate::content::{Column, Content, PayloadRows};
use crate::partitions::Partitions;
use crate::payloads::{self, PayloadStream, Reference, StoredPayload};
use crate::peer::{Envelope, Message, StateChunk};
use crate::snapshot_file::{self, LEDGER, SnapshotHead};
use crate::stats;
use crate::store::{Mark, Store};
use crate::throttle::{Throttle, TimeShare};
use crate::{Error, ImportError};
use bytes::Bytes;
use engram_cluster::replica::{self, Event};
use engram_memory::hash::content_hash;
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
    /// Engine time of exports and installations.
    pub(crate) share: TimeShare,
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
            share: TimeShare::default(),
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
        let shape = partitions.features();
        let (chunks, payloads) = (&self.chunks, &mut self.payloads);
        self.rows.add_piece(bytes, |row, payload, is_lost| {
            if is_lost {
                let received = partitions.arena.payloads.receive_lost(id, row, payload);
                return received.map(|received| payloads.push(received)).is_some();
            }
            let Some(features) = features_of(chunks, row, shape.bytes()) else { return false };
            let content = content_hash(Some((shape.dtype, features)), payload);
            payloads.push(partitions.arena.payloads.receive(id, row, payload, content));
            true
        })
    }

    /// Finishes the payloads; `false` if one is missing, or the disk does not take them.
    fn finish_payloads(&mut self, partitions: &mut Partitions, id: PartitionId) -> bool {
        partitions.arena.payloads.write_buffered(id);
        let mut sources = self.payloads.iter_mut().map(|payload| {
            let source = partitions.arena.payloads.source(id, &payload.reference);
            source.map(|source| payload.source = source).is_some()
        });
        sources.all(|found| found) && self.rows.is_complete()
    }
}

impl Store {
    /// Sends queued transfers as far as followers and throttle allow.
    pub(crate) fn send_state(&mut self) -> Result<(), Error> {
        let now_ms = self.clock.elapsed_ms();
        let transfers = &mut self.replication.transfers;
        if transfers.throttle.is_due(now_ms) {
            // A follower is as busy installing a transfer as the primary is sending it.
            transfers.throttle.evaluate(now_ms, self.shared.write_us.totals(), !transfers.in_flight.is_empty());
        }
        loop {
            let transfers = &mut self.replication.transfers;
            let states = &self.states;
            let single_replica = |partition: PartitionId| states[partition.0 as usize].replica.in_sync_count() <= 1;
            if transfers.share.may_work(self.clock.elapsed_ms())
                && let Some((partition, to)) = transfers.next(single_replica)
            {
                self.charge_engine_share(|store| store.begin_transfer(partition, to))?;
                continue;
            }
            if transfers.sending.is_empty() || !transfers.throttle.may_send(now_ms) {
                return Ok(());
            }
            let Some(mut sending) = transfers.sending.pop_front() else { return Ok(()) };
            let (partition, to) = (sending.partition, sending.to);
            let chunk = match sending.next_chunk() {
                Ok(chunk) => chunk,
                Err(error) => {
                    self.transfer_failed(partition, to, sending.payloads.failed, &error);
                    continue;
                }
            };
            let transfers = &mut self.replication.transfers;
            if let Some(chunk) = chunk {
                transfers.throttle.charge(chunk.bytes.len());
                stats::add(&self.shared.transfer_sent_bytes, chunk.bytes.len() as u64);
                let envelope = Envelope::new(partition, Message::State(chunk));
                self.replication.outbox.entry(to).or_default().push(envelope);
            }
            if !sending.is_sent() {
                self.replication.transfers.sending.push_front(sending);
            }
        }
    }

    /// Runs work that blocks the engine, and charges its duration to the transfer share.
    pub(crate) fn charge_engine_share<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let from_ms = self.clock.elapsed_ms();
        let result = work(self)?;
        let (now_ms, served) = (self.clock.elapsed_ms(), self.shared.served());
        self.replication.transfers.share.charge(from_ms, now_ms, served);
        Ok(result)
    }

    /// Ends a transfer for which a payload cannot be read. Without another replica that may have it, the transfer begins again and leaves it out: the
    /// other items are re-replicated, and the item is damaged on all replicas.
    fn transfer_failed(&mut self, partition: PartitionId, to: Ordinal, failed: Option<Reference>, error: &Error) {
        let payloads = &mut self.partitions.arena.payloads;
        self.replication.transfers.finish(partition, to);
        if let Some(reference) = failed {
            payloads.mark_damaged(partition, &reference);
        }
        let what = payloads::describe(error);
        if failed.is_some() && self.states[partition.0 as usize].replica.in_sync_count() <= 1 {
            *self.shared.damage.write() = Some(format!("a payload of partition {partition} is damaged: {what}"));
            self.replication.transfers.enqueue(partition, to);
        } else {
            payloads.report_damage(partition, what);
        }
    }

    fn begin_transfer(&mut self, partition: PartitionId, to: Ordinal) -> Result<(), Error> {
        let state = &self.states[partition.0 as usize];
        let Some(term) = state.replica.primary_term() else { return Ok(()) };
        if state.replica.in_sync_count() <= 1 {
            self.partitions.arena.payloads.declare_lost(partition);
            self.background.payload_scrub.forget(partition);
        }
        let (lsn, record_term) = (state.applied, state.applied_term);
        let Some(content) = self.partitions.export(partition)? else {
            // The partition is empty: stream from the first record.
            self.replication.shipping.start(partition, to, term, Lsn(0));
            return Ok(());
        };
        stats::add(&self.shared.transfers_sent, 1);
        let transfers = &mut self.replication.transfers;
        transfers.in_flight.insert((partition, to));
        transfers.sending.push_back(outgoing_transfer(content, to, (term, lsn, record_term)));
        Ok(())
    }

    /// Processes a received chunk.
    pub(crate) fn receive_state(
        &mut self,
        partition: PartitionId,
        from: Ordinal,
        chunk: &StateChunk,
    ) -> Result<(), Error> {
        if !self.states[partition.0 as usize].replica.accepts_snapshot(chunk.term, chunk.lsn) {
            self.replication.incoming.remove(&partition);
            if chunk.index + 1 < chunk.count {
                return Ok(());
            }
            if self.states[partition.0 as usize].replica.has_lost_commits(chunk.term) {
                return self.discard_replica(
                    partition,
                    from,
                    chunk.term,
                    "its primary lost records that are committed here",
                );
            }
            self.request_transfer_again(partition, from, chunk.term);
            return Ok(());
        }
        if chunk.index == 0 {
            self.replication.incoming.insert(partition, IncomingTransfer::new(chunk.clone()));
        }
        let Some(incoming) = self.replication.incoming.get_mut(&partition) else { return Ok(()) };
        let result = if incoming.continues_with(chunk) {
            incoming.take(chunk, &mut self.partitions, partition)
        } else {
            Err(ImportError::Invalid("a chunk of the transfer is missing"))
        };
        if result.is_err() {
            self.replication.incoming.remove(&partition);
            self.request_transfer_again(partition, from, chunk.term);
        } else if incoming.next == chunk.count
            && let Some(mut incoming) = self.replication.incoming.remove(&partition)
        {
            if incoming.finish_payloads(&mut self.partitions, partition) {
                self.write_received_state(partition, from, incoming);
            } else {
                self.request_transfer_again(partition, from, chunk.term);
            }
        }
        Ok(())
    }

    /// Queues a complete state to be written as a snapshot.
    fn write_received_state(&mut self, partition: PartitionId, from: Ordinal, incoming: IncomingTransfer) {
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
            created_ms: self.clock.now_ms(),
            digest: head.digest,
        };
        let file_head = self.identity().head();
        let write = SnapshotWrite::install(Arc::clone(&self.disk), file_head, snapshot, content, (head.term, from));
        self.background.install(write);
    }

    /// Replaces the local state by a received one that is durable as a snapshot.
    pub(crate) fn install(
        &mut self,
        content: &Content,
        head: SnapshotHead,
        term: Term,
        from: Ordinal,
    ) -> Result<(), Error> {
        self.charge_engine_share(|store| store.import_state(content, head, term, from))
    }

    fn import_state(&mut self, content: &Content, head: SnapshotHead, term: Term, from: Ordinal) -> Result<(), Error> {
        let partition = head.partition;
        let accepts = self.states[partition.0 as usize].replica.accepts_snapshot(term, head.lsn);
        let imported = if accepts {
            self.partitions.close(partition);
            self.partitions.import(content)
        } else {
            Ok(())
        };
        if !accepts || imported.is_err() {
            // The next start must not find the unused snapshot, unless a duplicate transfer names the installed one.
            if !self.states[partition.0 as usize].snapshots.contains(&Some(head.lsn)) {
                let _ = self.disk.remove(&snapshot_file::name(partition, head.lsn));
            }
            if let Err(ImportError::Device(error)) = imported {
                return Err(error.into());
            }
            if accepts {
                // The previous state is gone without a replacement.
                stats::add(&self.shared.malformed_messages, 1);
                return self.discard_replica(
                    partition,
                    from,
                    term,
                    "the state received from its primary failed to load",
                );
            }
            self.request_transfer_again(partition, from, term);
            return Ok(());
        }
        stats::add(&self.shared.transfers_installed, 1);
        self.partitions.set_hidden(partition, true);
        self.drop_pending(partition);
        self.replication.shipping.set_applied(partition, head.lsn);
        let state = &mut self.states[partition.0 as usize];
        (state.applied, state.applied_term) = (head.lsn, head.term);
        state.written = (head.lsn, head.term);
        state.snapshots = [Some(head.lsn), state.snapshots[0].filter(|older| *older < head.lsn)];
        self.shared.set_lsn(partition, head.lsn);
        let ledger = self.partitions.ledger(partition);
        if let Some(sessions) = ledger.map(|ledger| &ledger.sessions) {
            self.session_clock.recovered(sessions.watermark_ms(), sessions.last_opened_ms().unwrap_or(0));
        }
        self.shared.set_settings(partition, ledger.map(|ledger| ledger.settings));
        self.log_installed(Mark::Other(partition), head.term, head.lsn)?;
        // The snapshot is durable; a restart finds it even if the log does not name it.
        self.step(partition, Event::Installed(head.lsn, head.term));
        self.finish_repair(partition)
    }

    pub(crate) fn request_transfer_again(&mut self, partition: PartitionId, to: Ordinal, term: Term) {
        let body = Message::Replica(replica::Message::NotOpen { term }, Vec::new());
        self.replication.outbox.entry(to).or_default().push(Envelope::new(partition, body));
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
