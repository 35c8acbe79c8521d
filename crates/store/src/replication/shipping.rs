//! Log shipping: records retained for followers, the position of each follower, and the bytes in flight.

use bytes::Bytes;
use engram_memory::{Lsn, Ordinal, PartitionId, Term};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most unacknowledged bytes per peer: some round trips of a fast link.
const WINDOW_BYTES: usize = 32 << 20;
/// Most bytes of records in one message.
const MESSAGE_BYTES: usize = 4 << 20;
/// Memory overhead of a retained record.
const RECORD_BYTES: usize = 64;
/// Most records examined for eviction when one is added.
const MAX_EVICTION_STEPS: usize = 64;

/// A retained log record.
#[derive(Debug, Clone)]
pub(crate) struct RetainedRecord {
    pub(crate) term: Term,
    pub(crate) bytes: Bytes,
}

/// The newest records of a partition, dense.
#[derive(Debug, Default)]
struct Log {
    /// LSN before the first record.
    before: Lsn,
    records: VecDeque<RetainedRecord>,
    /// Records above it are not in the applied state, so no state transfer contains them.
    applied: Lsn,
}

/// Stream position of a follower.
#[derive(Debug)]
struct Cursor {
    term: Term,
    sent: Lsn,
    /// Last commit sent.
    sent_commit: Lsn,
    /// (last LSN, bytes) of unacknowledged messages.
    in_flight: VecDeque<(Lsn, usize)>,
}

/// Records to send.
pub(crate) struct Batch {
    pub(crate) after: Lsn,
    pub(crate) runs: Vec<(Lsn, Term)>,
    pub(crate) records: Vec<Bytes>,
}

/// Records retained in memory for followers, and the positions of the followers.
#[derive(Debug)]
pub(crate) struct Shipping {
    logs: BTreeMap<PartitionId, Log>,
    /// Partition of each record, oldest first, for eviction; records not applied when examined are moved to the end.
    order: VecDeque<PartitionId>,
    bytes: usize,
    max_bytes: usize,
    cursors: BTreeMap<(PartitionId, Ordinal), Cursor>,
    windows: BTreeMap<Ordinal, usize>,
    /// Partitions with records or commits to send.
    pending: BTreeSet<PartitionId>,
}

impl Shipping {
    /// Retains about `max_bytes` of records, and all unapplied ones; 0 = none, for a store without peers.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            logs: BTreeMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            max_bytes,
            cursors: BTreeMap::new(),
            windows: BTreeMap::new(),
            pending: BTreeSet::new(),
        }
    }

    /// Returns the bytes of the retained records.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Retains a record that follows the last one of its partition.
    pub(crate) fn retain(&mut self, partition: PartitionId, lsn: Lsn, term: Term, record: &[u8]) {
        if self.max_bytes == 0 {
            return;
        }
        let log = self.logs.entry(partition).or_default();
        if log.before.0 + log.records.len() as u64 + 1 != lsn.0 {
            // The log continues at another LSN: after a state transfer or a recovery.
            if !log.records.is_empty() {
                self.bytes -= log.records.iter().map(|record| record.bytes.len() + RECORD_BYTES).sum::<usize>();
                self.order.retain(|other| *other != partition);
            }
            *log = Log { before: Lsn(lsn.0 - 1), records: VecDeque::new(), applied: log.applied };
        }
        let log = self.logs.entry(partition).or_default();
        log.records.push_back(RetainedRecord { term, bytes: Bytes::copy_from_slice(record) });
        self.order.push_back(partition);
        self.bytes += record.len() + RECORD_BYTES;
        self.pending.insert(partition);
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        for _ in 0..MAX_EVICTION_STEPS {
            if self.bytes <= self.max_bytes {
                return;
            }
            let Some(oldest) = self.order.pop_front() else { return };
            let Some(log) = self.logs.get_mut(&oldest) else { continue };
            if log.before >= log.applied {
                self.order.push_back(oldest);
            } else if let Some(record) = log.records.pop_front() {
                log.before.0 += 1;
                self.bytes -= record.bytes.len() + RECORD_BYTES;
            }
        }
    }

    /// Sets the last applied record: later state transfers contain all records up to it.
    pub(crate) fn set_applied(&mut self, partition: PartitionId, lsn: Lsn) {
        if self.max_bytes > 0 {
            self.logs.entry(partition).or_default().applied = lsn;
        }
    }

    /// Drops the records above `after`.
    pub(crate) fn truncate(&mut self, partition: PartitionId, after: Lsn) {
        let Some(log) = self.logs.get_mut(&partition) else { return };
        while log.before.0 + log.records.len() as u64 > after.0
            && let Some(record) = log.records.pop_back()
        {
            self.bytes -= record.bytes.len() + RECORD_BYTES;
            if let Some(index) = self.order.iter().rposition(|other| *other == partition) {
                self.order.remove(index);
            }
        }
    }

    /// Whether all records above `after` up to `end` are retained.
    pub(crate) fn covers(&self, partition: PartitionId, after: Lsn, end: Lsn) -> bool {
        after >= end
            || self
                .logs
                .get(&partition)
                .is_some_and(|log| log.before <= after && log.before.0 + log.records.len() as u64 >= end.0)
    }

    /// Starts streaming to a follower from `after`.
    pub(crate) fn start(&mut self, partition: PartitionId, to: Ordinal, term: Term, after: Lsn) {
        self.stop(partition, to);
        let cursor = Cursor { term, sent: after, sent_commit: Lsn(0), in_flight: VecDeque::new() };
        self.cursors.insert((partition, to), cursor);
        self.pending.insert(partition);
    }

    /// Stops streaming to a follower.
    pub(crate) fn stop(&mut self, partition: PartitionId, to: Ordinal) {
        if let Some(cursor) = self.cursors.remove(&(partition, to)) {
            let in_flight: usize = cursor.in_flight.iter().map(|(_, bytes)| bytes).sum();
            *self.windows.entry(to).or_default() -= in_flight;
        }
    }

    /// Stops streaming a partition to all followers.
    pub(crate) fn stop_all(&mut self, partition: PartitionId) {
        let followers: Vec<Ordinal> = self.followers(partition).collect();
        followers.into_iter().for_each(|to| self.stop(partition, to));
    }

    /// Stops all streams to a peer, which has to reopen them.
    pub(crate) fn reset_peer(&mut self, to: Ordinal) {
        self.cursors.retain(|(_, other), _| *other != to);
        self.windows.insert(to, 0);
    }

    /// Processes an acknowledgment of a follower.
    pub(crate) fn acknowledge(&mut self, partition: PartitionId, from: Ordinal, written: Lsn) {
        let Some(cursor) = self.cursors.get_mut(&(partition, from)) else { return };
        let window = self.windows.entry(from).or_default();
        while let Some(&(lsn, bytes)) = cursor.in_flight.front()
            && lsn <= written
        {
            cursor.in_flight.pop_front();
            *window -= bytes;
        }
        if cursor.sent.0 < self.logs.get(&partition).map_or(0, |log| log.before.0 + log.records.len() as u64) {
            self.pending.insert(partition);
        }
    }

    /// Marks a partition as having a commit to send.
    pub(crate) fn mark_pending(&mut self, partition: PartitionId) {
        if self.max_bytes == 0 {
            return;
        }
        self.pending.insert(partition);
    }

    /// Takes the partitions with something to send.
    pub(crate) fn take_pending(&mut self) -> BTreeSet<PartitionId> {
        std::mem::take(&mut self.pending)
    }

    pub(crate) fn followers(&self, partition: PartitionId) -> impl Iterator<Item = Ordinal> + '_ {
        let all = self.cursors.range((partition, Ordinal(0))..=(partition, Ordinal(u32::MAX)));
        all.map(|((_, to), _)| *to)
    }

    /// Whether records were evicted before they were sent to a follower.
    pub(crate) fn fell_behind(&self, partition: PartitionId, to: Ordinal) -> bool {
        let log = self.logs.get(&partition);
        self.cursors.get(&(partition, to)).zip(log).is_some_and(|(cursor, log)| cursor.sent < log.before)
    }

    /// Returns the next records for a follower at this term, sent together with `commit`; `None` = nothing to send.
    pub(crate) fn next(&mut self, partition: PartitionId, to: Ordinal, term: Term, commit: Lsn) -> Option<Batch> {
        let cursor = self.cursors.get_mut(&(partition, to)).filter(|cursor| cursor.term == term)?;
        let window = self.windows.entry(to).or_default();
        let mut batch = Batch { after: cursor.sent, runs: Vec::new(), records: Vec::new() };
        if let Some(log) = self.logs.get(&partition)
            && *window < WINDOW_BYTES
            && log.before <= cursor.sent
        {
            let mut bytes = 0;
            let skipped = (cursor.sent.0 - log.before.0) as usize;
            for record in log.records.range(skipped.min(log.records.len())..) {
                if bytes >= MESSAGE_BYTES {
                    self.pending.insert(partition);
                    break;
                }
                cursor.sent.0 += 1;
                bytes += record.bytes.len() + RECORD_BYTES;
                match batch.runs.last_mut() {
                    Some(run) if run.1 == record.term => run.0 = cursor.sent,
                    _ => batch.runs.push((cursor.sent, record.term)),
                }
                batch.records.push(record.bytes.clone());
            }
            if bytes > 0 {
                *window += bytes;
                cursor.in_flight.push_back((cursor.sent, bytes));
            }
        }
        if batch.records.is_empty() && cursor.sent_commit >= commit.min(cursor.sent) {
            return None;
        }
        cursor.sent_commit = commit;
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PartitionId = PartitionId(3);
    const B: Ordinal = Ordinal(1);

    fn sent(batch: Option<Batch>) -> (u64, Vec<u8>) {
        batch.map_or((0, Vec::new()), |batch| (batch.after.0, batch.records.iter().map(|record| record[0]).collect()))
    }

    #[test]
    fn a_follower_receives_every_record_once_and_every_commit() {
        let mut shipping = Shipping::new(1 << 20);
        (1..=3).for_each(|lsn| shipping.retain(P, Lsn(lsn), Term(1), &[lsn as u8]));
        shipping.start(P, B, Term(1), Lsn(1));
        assert_eq!(sent(shipping.next(P, B, Term(1), Lsn(1))), (1, vec![2, 3]));
        assert!(shipping.next(P, B, Term(1), Lsn(1)).is_none());
        assert_eq!(sent(shipping.next(P, B, Term(1), Lsn(3))), (3, vec![]), "a commit without records");
        assert!(shipping.next(P, B, Term(2), Lsn(3)).is_none(), "the follower has not opened this term");
        shipping.truncate(P, Lsn(2));
        shipping.retain(P, Lsn(3), Term(2), &[9]);
        shipping.start(P, B, Term(2), Lsn(2));
        let batch = shipping.next(P, B, Term(2), Lsn(2)).unwrap();
        assert_eq!((batch.runs, batch.records[0][0]), (vec![(Lsn(3), Term(2))], 9));
    }

    #[test]
    fn retained_records_and_bytes_in_flight_are_bounded() {
        let record = vec![0; 1 << 20];
        let mut shipping = Shipping::new(64 << 20);
        shipping.set_applied(P, Lsn(50));
        (1..=100).for_each(|lsn| shipping.retain(P, Lsn(lsn), Term(1), &record));
        assert!(shipping.bytes <= 64 << 20 && shipping.covers(P, Lsn(50), Lsn(100)));
        assert!(!shipping.covers(P, Lsn(10), Lsn(100)), "the oldest records are evicted");
        shipping.start(P, B, Term(1), Lsn(60));
        (101..=200).for_each(|lsn| shipping.retain(P, Lsn(lsn), Term(1), &record));
        assert!(shipping.covers(P, Lsn(50), Lsn(200)), "unapplied records are retained");
        assert!(!shipping.fell_behind(P, B));
        shipping.set_applied(P, Lsn(200));
        shipping.retain(P, Lsn(201), Term(1), &record);
        assert!(shipping.fell_behind(P, B), "records were evicted before they were sent");
        let mut shipping = Shipping::new(64 << 20);
        (1..=100).for_each(|lsn| {
            shipping.set_applied(P, Lsn(lsn));
            shipping.retain(P, Lsn(lsn), Term(1), &record);
        });
        assert!(shipping.bytes <= 64 << 20 && shipping.covers(P, Lsn(50), Lsn(100)));
        assert!(!shipping.covers(P, Lsn(10), Lsn(100)), "the oldest records are evicted");
        shipping.start(P, B, Term(1), Lsn(40));
        let mut end = 40;
        while let Some(batch) = shipping.next(P, B, Term(1), Lsn(0)).filter(|batch| !batch.records.is_empty()) {
            end = batch.after.0 + batch.records.len() as u64;
        }
        assert!((70..80).contains(&end), "the window is full after {end}");
        shipping.acknowledge(P, B, Lsn(end));
        assert!(shipping.take_pending().contains(&P));
        assert!(!shipping.next(P, B, Term(1), Lsn(0)).unwrap().records.is_empty());
        shipping.reset_peer(B);
        assert!(shipping.next(P, B, Term(1), Lsn(0)).is_none());
    }
}
