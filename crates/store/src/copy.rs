//! Copies of a partition's state, from its primary to a follower that the kept records do not reach.
//!
//! The primary exports the committed state between two turns and sends it in pieces, as fast as [`Throttle`] lets them out. The
//! follower writes it as a snapshot of its own, durable, logs that it took the place of what was there,
//! and goes on from its lsn. Two copies at a time go out, and two to one follower; partitions that have no second copy go first.

use crate::background::Write;
use crate::content::{Column, Content};
use crate::peer::{CopyPiece, Envelope, Message};
use crate::snapshot_file::{self, LEDGER, SnapshotHead};
use crate::stats;
use crate::store::{Mark, Store};
use crate::throttle::{Share, Throttle};
use crate::{Error, ImportError};
use bytes::Bytes;
use engram_cluster::replica::{self, Event};
use engram_memory::{Digest, Lsn, Ordinal, PartitionId, Term};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Copies that are being sent, which are held in memory until then; and copies that one follower has not taken over yet.
const COPIES_AT_ONCE: usize = 2;

/// Copies on their way to followers.
pub(crate) struct Copies {
    /// Asked for, and not begun.
    asked: VecDeque<(PartitionId, Ordinal)>,
    /// Begun, and not sent to the end.
    sending: VecDeque<Sending>,
    /// Begun, and not answered.
    under_way: BTreeSet<(PartitionId, Ordinal)>,
    throttle: Throttle,
    /// What exports here, and copies taken over, may take of the engine's time.
    pub(crate) share: Share,
}

/// A copy that is being sent.
struct Sending {
    partition: PartitionId,
    to: Ordinal,
    pieces: VecDeque<CopyPiece>,
}

impl Copies {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Self {
            asked: VecDeque::new(),
            sending: VecDeque::new(),
            under_way: BTreeSet::new(),
            throttle: Throttle::new(bytes_per_s),
            share: Share::default(),
        }
    }

    /// A follower needs a copy. One that is being sent did not reach it: it is sent anew.
    pub(crate) fn ask(&mut self, partition: PartitionId, to: Ordinal) {
        self.answered(partition, to);
        if !self.asked.contains(&(partition, to)) {
            self.asked.push_back((partition, to));
        }
    }

    /// A follower has taken a copy over, or goes on without.
    pub(crate) fn answered(&mut self, partition: PartitionId, to: Ordinal) {
        self.under_way.remove(&(partition, to));
        self.sending.retain(|sending| (sending.partition, sending.to) != (partition, to));
    }

    /// What was on its way to a place is lost.
    pub(crate) fn lose(&mut self, place: Ordinal) {
        self.asked.retain(|(_, to)| *to != place);
        self.under_way.retain(|(_, to)| *to != place);
        self.sending.retain(|sending| sending.to != place);
    }

    /// Nothing of a partition is sent any more.
    pub(crate) fn stop(&mut self, partition: PartitionId) {
        self.asked.retain(|(other, _)| *other != partition);
        self.under_way.retain(|(other, _)| *other != partition);
        self.sending.retain(|sending| sending.partition != partition);
    }

    /// The next one to begin: of those whose follower takes one more the first that is `lone`, or else the first.
    fn next(&mut self, lone: impl Fn(PartitionId) -> bool) -> Option<(PartitionId, Ordinal)> {
        if self.sending.len() >= COPIES_AT_ONCE {
            return None;
        }
        let takes = |to: Ordinal| self.under_way.iter().filter(|(_, other)| *other == to).count() < COPIES_AT_ONCE;
        let can_begin = || self.asked.iter().enumerate().filter(|(_, (_, to))| takes(*to));
        let first = can_begin().find(|(_, (partition, _))| lone(*partition)).or_else(|| can_begin().next());
        let place = first.map(|(place, _)| place)?;
        self.asked.remove(place)
    }
}

/// A copy that is coming in.
pub(crate) struct Incoming {
    head: CopyPiece,
    next: u32,
    ledger: Vec<u8>,
    chunks: Vec<(Column, Vec<u8>)>,
}

impl Incoming {
    fn is_of(&self, piece: &CopyPiece) -> bool {
        let name = |piece: &CopyPiece| (piece.term, piece.lsn, piece.record_term, piece.pieces, piece.digest);
        name(&self.head) == name(piece) && self.next == piece.piece
    }

    fn take(&mut self, piece: &CopyPiece) -> Result<(), ImportError> {
        self.next += 1;
        if piece.kind == LEDGER {
            self.ledger.extend_from_slice(&piece.chunk);
        } else {
            let unknown = ImportError::Invalid("a column that this version does not know");
            self.chunks.push((Column::from_code(piece.kind).ok_or(unknown)?, piece.chunk.to_vec()));
        }
        Ok(())
    }
}

impl Store {
    /// Sends copies that were asked for, as far as followers take them and the throttle lets them out.
    pub(crate) fn send_copies(&mut self) -> Result<(), Error> {
        let now_ms = self.clock.elapsed_ms();
        let copies = &mut self.replication.copies;
        if copies.throttle.is_due(now_ms) {
            // A follower that takes a copy over is as busy with it as whoever sends.
            copies.throttle.judge(now_ms, self.shared.write_us.totals(), !copies.under_way.is_empty());
        }
        loop {
            let copies = &mut self.replication.copies;
            let places = &self.places;
            let lone = |partition: PartitionId| places[partition.0 as usize].replica.replicas() <= 1;
            if copies.share.may_work(self.clock.elapsed_ms())
                && let Some((partition, to)) = copies.next(lone)
            {
                self.working_for_copies(|store| store.begin_copy(partition, to))?;
                continue;
            }
            if copies.sending.is_empty() || !copies.throttle.may_send(now_ms) {
                return Ok(());
            }
            let Some(mut sending) = copies.sending.pop_front() else { return Ok(()) };
            let (partition, to) = (sending.partition, sending.to);
            if let Some(piece) = sending.pieces.pop_front() {
                copies.throttle.sent(piece.chunk.len());
                stats::add(&self.shared.copied_bytes, piece.chunk.len() as u64);
                let envelope = Envelope { partition, body: Message::Copy(piece) };
                self.replication.outbox.entry(to).or_default().push(envelope);
            }
            if !sending.pieces.is_empty() {
                copies.sending.push_front(sending);
            }
        }
    }

    /// Does what nothing else can be done beside, and counts how long it took.
    pub(crate) fn working_for_copies<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let from_ms = self.clock.elapsed_ms();
        let done = work(self)?;
        let (now_ms, served) = (self.clock.elapsed_ms(), self.shared.served());
        self.replication.copies.share.worked(from_ms, now_ms, served);
        Ok(done)
    }

    fn begin_copy(&mut self, partition: PartitionId, to: Ordinal) -> Result<(), Error> {
        let place = &self.places[partition.0 as usize];
        let Some(term) = place.replica.leads() else { return Ok(()) };
        let (lsn, record_term) = (place.applied, place.applied_term);
        let Some(content) = self.partitions.export(partition)? else {
            // Nothing is here: from the first record on.
            self.replication.shipping.start(partition, to, term, Lsn(0));
            return Ok(());
        };
        stats::add(&self.shared.copies_sent, 1);
        let copies = &mut self.replication.copies;
        copies.under_way.insert((partition, to));
        copies.sending.push_back(Sending { partition, to, pieces: pieces(content, term, lsn, record_term) });
        Ok(())
    }

    /// Takes a piece of a copy.
    pub(crate) fn hear_copy(&mut self, partition: PartitionId, from: Ordinal, piece: &CopyPiece) -> Result<(), Error> {
        if !self.places[partition.0 as usize].replica.takes_copy(piece.term, piece.lsn) {
            self.replication.incoming.remove(&partition);
            if piece.piece + 1 < piece.pieces {
                return Ok(());
            }
            if self.places[partition.0 as usize].replica.is_bereft(piece.term) {
                return self.start_over(partition, from, piece.term, "its primary has lost what was committed here");
            }
            self.ask_again(partition, from, piece.term);
            return Ok(());
        }
        if piece.piece == 0 {
            let begun = Incoming { head: piece.clone(), next: 0, ledger: Vec::new(), chunks: Vec::new() };
            self.replication.incoming.insert(partition, begun);
        }
        let Some(incoming) = self.replication.incoming.get_mut(&partition) else { return Ok(()) };
        let taken = if incoming.is_of(piece) {
            incoming.take(piece)
        } else {
            Err(ImportError::Invalid("a piece of a copy is missing"))
        };
        if taken.is_err() {
            self.replication.incoming.remove(&partition);
            self.ask_again(partition, from, piece.term);
        } else if incoming.next == piece.pieces
            && let Some(incoming) = self.replication.incoming.remove(&partition)
        {
            self.write_copy(partition, from, incoming);
        }
        Ok(())
    }

    /// Writes a whole copy as a snapshot, on the thread for these.
    fn write_copy(&mut self, partition: PartitionId, from: Ordinal, incoming: Incoming) {
        let Incoming { head, ledger, chunks, .. } = incoming;
        let content = Content {
            partition,
            memories: head.memories,
            clock: head.clock,
            ledger,
            digest: Digest(head.digest),
            chunks,
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
        let write = Write::install(Arc::clone(&self.disk), file_head, snapshot, content, (head.term, from));
        self.background.install(write);
    }

    /// A copy is durable as a snapshot: it takes the place of what is here.
    pub(crate) fn install(
        &mut self,
        content: &Content,
        head: SnapshotHead,
        term: Term,
        from: Ordinal,
    ) -> Result<(), Error> {
        self.working_for_copies(|store| store.take_over(content, head, term, from))
    }

    fn take_over(&mut self, content: &Content, head: SnapshotHead, term: Term, from: Ordinal) -> Result<(), Error> {
        let partition = head.partition;
        let may = self.places[partition.0 as usize].replica.takes_copy(term, head.lsn);
        let imported = if may {
            self.partitions.close(partition);
            self.partitions.import(content)
        } else {
            Ok(())
        };
        if !may || imported.is_err() {
            // Nobody knows of it: the next start must not find it. But one that came twice is the one that was installed.
            if !self.places[partition.0 as usize].snapshots.contains(&Some(head.lsn)) {
                let _ = self.disk.remove(&snapshot_file::name(partition, head.lsn));
            }
            if let Err(ImportError::Device(error)) = imported {
                return Err(error.into());
            }
            if may {
                // What was here is gone, and nothing took its place.
                stats::add(&self.shared.malformed_messages, 1);
                return self.start_over(partition, from, term, "a copy of its primary did not load");
            }
            self.ask_again(partition, from, term);
            return Ok(());
        }
        stats::add(&self.shared.copies_installed, 1);
        self.partitions.set_hidden(partition, true);
        self.forget_pending(partition);
        self.replication.shipping.applied(partition, head.lsn);
        let place = &mut self.places[partition.0 as usize];
        (place.applied, place.applied_term) = (head.lsn, head.term);
        place.wrote = (head.lsn, head.term);
        place.snapshots = [Some(head.lsn), place.snapshots[0].filter(|older| *older < head.lsn)];
        self.shared.set_lsn(partition, head.lsn);
        let settings = self.partitions.ledger(partition).map(|ledger| ledger.settings);
        self.shared.set_settings(partition, settings);
        self.log_installed(Mark::Other(partition), head.term, head.lsn)?;
        // It is durable as a snapshot, which a start finds whether the log names it or not.
        self.step(partition, Event::Installed(head.lsn, head.term));
        self.heal(partition)
    }

    fn ask_again(&mut self, partition: PartitionId, to: Ordinal, term: Term) {
        let body = Message::Replica(replica::Message::NotOpen { term }, Vec::new());
        self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
    }
}

fn pieces(content: Content, term: Term, lsn: Lsn, record_term: Term) -> VecDeque<CopyPiece> {
    let (clock, memories, digest) = (content.clock, content.memories, content.digest.0);
    let ledger =
        content.ledger.chunks(snapshot_file::MAX_CHUNK_BYTES).map(|part| (LEDGER, Bytes::copy_from_slice(part)));
    let columns = content.chunks.into_iter().map(|(column, bytes)| (column.code(), Bytes::from(bytes)));
    let chunks: Vec<(u32, Bytes)> = ledger.chain(columns).collect();
    let pieces = chunks.len() as u32;
    let piece = |(piece, (kind, chunk))| CopyPiece {
        term,
        lsn,
        record_term,
        piece,
        pieces,
        clock,
        memories,
        digest,
        kind,
        chunk,
    };
    (0..).zip(chunks).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_without_a_second_copy_go_first_and_a_busy_follower_holds_up_no_other() {
        let mut copies = Copies::new(0);
        let (b, c) = (Ordinal(1), Ordinal(2));
        (0..4).for_each(|partition| copies.ask(PartitionId(partition), b));
        copies.ask(PartitionId(1), c);
        let lone = |partition: PartitionId| partition.0 == 2;
        let begin = |copies: &mut Copies| {
            let begun = copies.next(lone);
            copies.under_way.extend(begun);
            begun.map(|(partition, to)| (partition.0, to))
        };
        assert_eq!(begin(&mut copies), Some((2, b)));
        assert_eq!(begin(&mut copies), Some((0, b)));
        assert_eq!(begin(&mut copies), Some((1, c)), "the other follower has two to take over");
        assert_eq!(begin(&mut copies), None);
        copies.answered(PartitionId(0), b);
        assert_eq!(begin(&mut copies), Some((1, b)));
        copies.ask(PartitionId(2), b);
        assert_eq!(begin(&mut copies), Some((2, b)), "what did not reach it is sent anew");
        copies.stop(PartitionId(1));
        copies.lose(b);
        assert_eq!((begin(&mut copies), copies.under_way.len()), (None, 0));
    }
}
