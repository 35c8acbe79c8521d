//! Records on their way to other copies: what is kept to be sent, how far each follower was sent, how much is under way.

use bytes::Bytes;
use engram_memory::{Lsn, Ordinal, PartitionId, Term};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bytes that may be under way to one peer, sent and not acknowledged: some round trips of a fast link.
const WINDOW_BYTES: usize = 32 << 20;
/// Bytes of records in one message.
const MESSAGE_BYTES: usize = 4 << 20;
/// What a record takes in memory beside its bytes.
const RECORD_BYTES: usize = 64;
/// Records that are looked at for one to forget, when one is kept.
const MOST_LOOKS: usize = 64;

/// A record as it is logged.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    pub(crate) term: Term,
    pub(crate) bytes: Bytes,
}

/// The newest records of a partition, dense.
#[derive(Debug, Default)]
struct Log {
    /// Lsn before the first.
    before: Lsn,
    records: VecDeque<Kept>,
    /// Those above it are in no copy of the state: who lacks one gets it from here or not at all.
    applied: Lsn,
}

/// How far a follower was sent.
#[derive(Debug)]
struct Cursor {
    term: Term,
    sent: Lsn,
    /// Commit that it was told.
    told: Lsn,
    /// (last lsn, bytes) of messages that it has not acknowledged.
    under_way: VecDeque<(Lsn, usize)>,
}

/// Records to be sent.
pub(crate) struct Batch {
    pub(crate) after: Lsn,
    pub(crate) runs: Vec<(Lsn, Term)>,
    pub(crate) records: Vec<Bytes>,
}

/// The records that are kept in memory for followers, and the followers.
#[derive(Debug)]
pub(crate) struct Shipping {
    logs: BTreeMap<PartitionId, Log>,
    /// Oldest first, to forget the oldest of all partitions; but those that were not applied when their turn came stand last.
    order: VecDeque<PartitionId>,
    bytes: usize,
    most_bytes: usize,
    cursors: BTreeMap<(PartitionId, Ordinal), Cursor>,
    windows: BTreeMap<Ordinal, usize>,
    /// Partitions with news for followers.
    news: BTreeSet<PartitionId>,
}

impl Shipping {
    /// Keeps about `most_bytes` of records, and all that are not applied; 0 = none, for a store without peers.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self {
            logs: BTreeMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            most_bytes,
            cursors: BTreeMap::new(),
            windows: BTreeMap::new(),
            news: BTreeSet::new(),
        }
    }

    /// Keeps a record that follows the last one of its partition.
    pub(crate) fn keep(&mut self, partition: PartitionId, lsn: Lsn, term: Term, record: &[u8]) {
        if self.most_bytes == 0 {
            return;
        }
        let log = self.logs.entry(partition).or_default();
        if log.before.0 + log.records.len() as u64 + 1 != lsn.0 {
            // The log goes on elsewhere: after a copy, or behind what a start found.
            if !log.records.is_empty() {
                self.bytes -= log.records.iter().map(|kept| kept.bytes.len() + RECORD_BYTES).sum::<usize>();
                self.order.retain(|other| *other != partition);
            }
            *log = Log { before: Lsn(lsn.0 - 1), records: VecDeque::new(), applied: log.applied };
        }
        let log = self.logs.entry(partition).or_default();
        log.records.push_back(Kept { term, bytes: Bytes::copy_from_slice(record) });
        self.order.push_back(partition);
        self.bytes += record.len() + RECORD_BYTES;
        self.news.insert(partition);
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        for _ in 0..MOST_LOOKS {
            if self.bytes <= self.most_bytes {
                return;
            }
            let Some(oldest) = self.order.pop_front() else { return };
            let Some(log) = self.logs.get_mut(&oldest) else { continue };
            if log.before >= log.applied {
                self.order.push_back(oldest);
            } else if let Some(kept) = log.records.pop_front() {
                log.before.0 += 1;
                self.bytes -= kept.bytes.len() + RECORD_BYTES;
            }
        }
    }

    /// Records up to here are in the state, and in every copy of it that is made from now on.
    pub(crate) fn applied(&mut self, partition: PartitionId, lsn: Lsn) {
        if self.most_bytes > 0 {
            self.logs.entry(partition).or_default().applied = lsn;
        }
    }

    /// Forgets the records above `after`.
    pub(crate) fn truncate(&mut self, partition: PartitionId, after: Lsn) {
        let Some(log) = self.logs.get_mut(&partition) else { return };
        while log.before.0 + log.records.len() as u64 > after.0
            && let Some(kept) = log.records.pop_back()
        {
            self.bytes -= kept.bytes.len() + RECORD_BYTES;
            if let Some(place) = self.order.iter().rposition(|other| *other == partition) {
                self.order.remove(place);
            }
        }
    }

    /// Whether all records above `after` up to `end` are kept.
    pub(crate) fn reaches(&self, partition: PartitionId, after: Lsn, end: Lsn) -> bool {
        after >= end
            || self
                .logs
                .get(&partition)
                .is_some_and(|log| log.before <= after && log.before.0 + log.records.len() as u64 >= end.0)
    }

    /// Sends a follower everything above `after` from now on.
    pub(crate) fn start(&mut self, partition: PartitionId, to: Ordinal, term: Term, after: Lsn) {
        self.stop(partition, to);
        let cursor = Cursor { term, sent: after, told: Lsn(0), under_way: VecDeque::new() };
        self.cursors.insert((partition, to), cursor);
        self.news.insert(partition);
    }

    /// Sends a follower nothing more.
    pub(crate) fn stop(&mut self, partition: PartitionId, to: Ordinal) {
        if let Some(cursor) = self.cursors.remove(&(partition, to)) {
            let under_way: usize = cursor.under_way.iter().map(|(_, bytes)| bytes).sum();
            *self.windows.entry(to).or_default() -= under_way;
        }
    }

    /// Sends nobody anything of a partition.
    pub(crate) fn stop_all(&mut self, partition: PartitionId) {
        let followers: Vec<Ordinal> = self.followers(partition).collect();
        followers.into_iter().for_each(|to| self.stop(partition, to));
    }

    /// Sends nothing more to a place: whoever is there comes anew.
    pub(crate) fn lose(&mut self, to: Ordinal) {
        self.cursors.retain(|(_, other), _| *other != to);
        self.windows.insert(to, 0);
    }

    /// A follower has acknowledged.
    pub(crate) fn acked(&mut self, partition: PartitionId, from: Ordinal, written: Lsn) {
        let Some(cursor) = self.cursors.get_mut(&(partition, from)) else { return };
        let window = self.windows.entry(from).or_default();
        while let Some(&(lsn, bytes)) = cursor.under_way.front()
            && lsn <= written
        {
            cursor.under_way.pop_front();
            *window -= bytes;
        }
        if cursor.sent.0 < self.logs.get(&partition).map_or(0, |log| log.before.0 + log.records.len() as u64) {
            self.news.insert(partition);
        }
    }

    /// Something of a partition is to be told: a commit.
    pub(crate) fn note(&mut self, partition: PartitionId) {
        if self.most_bytes == 0 {
            return;
        }
        self.news.insert(partition);
    }

    /// Takes the partitions with news.
    pub(crate) fn take_news(&mut self) -> BTreeSet<PartitionId> {
        std::mem::take(&mut self.news)
    }

    pub(crate) fn followers(&self, partition: PartitionId) -> impl Iterator<Item = Ordinal> + '_ {
        let all = self.cursors.range((partition, Ordinal(0))..=(partition, Ordinal(u32::MAX)));
        all.map(|((_, to), _)| *to)
    }

    /// Whether records were forgotten that a follower was not sent.
    pub(crate) fn fell_behind(&self, partition: PartitionId, to: Ordinal) -> bool {
        let log = self.logs.get(&partition);
        self.cursors.get(&(partition, to)).zip(log).is_some_and(|(cursor, log)| cursor.sent < log.before)
    }

    /// What a follower is to be sent now, at this term, with the commit that it is told; `None` = nothing.
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
            for kept in log.records.range(skipped.min(log.records.len())..) {
                if bytes >= MESSAGE_BYTES {
                    self.news.insert(partition);
                    break;
                }
                cursor.sent.0 += 1;
                bytes += kept.bytes.len() + RECORD_BYTES;
                match batch.runs.last_mut() {
                    Some(run) if run.1 == kept.term => run.0 = cursor.sent,
                    _ => batch.runs.push((cursor.sent, kept.term)),
                }
                batch.records.push(kept.bytes.clone());
            }
            if bytes > 0 {
                *window += bytes;
                cursor.under_way.push_back((cursor.sent, bytes));
            }
        }
        if batch.records.is_empty() && cursor.told >= commit.min(cursor.sent) {
            return None;
        }
        cursor.told = commit;
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
    fn a_follower_is_sent_everything_once_and_every_commit() {
        let mut shipping = Shipping::new(1 << 20);
        (1..=3).for_each(|lsn| shipping.keep(P, Lsn(lsn), Term(1), &[lsn as u8]));
        shipping.start(P, B, Term(1), Lsn(1));
        assert_eq!(sent(shipping.next(P, B, Term(1), Lsn(1))), (1, vec![2, 3]));
        assert!(shipping.next(P, B, Term(1), Lsn(1)).is_none());
        assert_eq!(sent(shipping.next(P, B, Term(1), Lsn(3))), (3, vec![]), "the commit alone");
        assert!(shipping.next(P, B, Term(2), Lsn(3)).is_none(), "the term was not opened to it");
        shipping.truncate(P, Lsn(2));
        shipping.keep(P, Lsn(3), Term(2), &[9]);
        shipping.start(P, B, Term(2), Lsn(2));
        let batch = shipping.next(P, B, Term(2), Lsn(2)).unwrap();
        assert_eq!((batch.runs, batch.records[0][0]), (vec![(Lsn(3), Term(2))], 9));
    }

    #[test]
    fn what_is_kept_and_what_is_under_way_is_bounded() {
        let record = vec![0; 1 << 20];
        let mut shipping = Shipping::new(64 << 20);
        shipping.applied(P, Lsn(50));
        (1..=100).for_each(|lsn| shipping.keep(P, Lsn(lsn), Term(1), &record));
        assert!(shipping.bytes <= 64 << 20 && shipping.reaches(P, Lsn(50), Lsn(100)));
        assert!(!shipping.reaches(P, Lsn(10), Lsn(100)), "the oldest are forgotten");
        shipping.start(P, B, Term(1), Lsn(60));
        (101..=200).for_each(|lsn| shipping.keep(P, Lsn(lsn), Term(1), &record));
        assert!(shipping.reaches(P, Lsn(50), Lsn(200)), "what no copy of the state holds is kept");
        assert!(!shipping.fell_behind(P, B));
        shipping.applied(P, Lsn(200));
        shipping.keep(P, Lsn(201), Term(1), &record);
        assert!(shipping.fell_behind(P, B), "what it was not sent is forgotten");
        let mut shipping = Shipping::new(64 << 20);
        (1..=100).for_each(|lsn| {
            shipping.applied(P, Lsn(lsn));
            shipping.keep(P, Lsn(lsn), Term(1), &record);
        });
        assert!(shipping.bytes <= 64 << 20 && shipping.reaches(P, Lsn(50), Lsn(100)));
        assert!(!shipping.reaches(P, Lsn(10), Lsn(100)), "the oldest are forgotten");
        shipping.start(P, B, Term(1), Lsn(40));
        let mut end = 40;
        while let Some(batch) = shipping.next(P, B, Term(1), Lsn(0)).filter(|batch| !batch.records.is_empty()) {
            end = batch.after.0 + batch.records.len() as u64;
        }
        assert!((70..80).contains(&end), "the window is full after {end}");
        shipping.acked(P, B, Lsn(end));
        assert!(shipping.take_news().contains(&P));
        assert!(!shipping.next(P, B, Term(1), Lsn(0)).unwrap().records.is_empty());
        shipping.lose(B);
        assert!(shipping.next(P, B, Term(1), Lsn(0)).is_none());
    }
}
