//! Reads of copies: behind by at most what the caller allows, and answered by any copy that can tell.
//!
//! A copy asks its primary where it stands, and remembers when it asked, by its own clock. The primary answers while it holds
//! its read leases, so an answer is never that of a deposed one that does not know. Once the record it names is applied, the
//! copy holds everything that was acknowledged before the question: it lags by the time since then, at most, whatever
//! became of the primary meanwhile. State only goes forward, so what was known of it stays true, also in another role; a primary
//! with its leases lags by nothing. Nothing is asked while nobody reads, and loose bounds share an answer.
//!
//! Lag is counted until the read came, so a bound of 0 asks each time and is answered after a round trip. A copy that is
//! damaged, or waits to be made anew, answers nothing. Clocks are those of leases, and of how long a second is.

use crate::Partitions;
use crate::peer::{Envelope, Message};
use crate::store::Store;
use engram_memory::{Lsn, Member, PartitionId, Term};
use std::collections::{BTreeMap, VecDeque};

/// How long a read waits for its copies to learn where they stand, in milliseconds: some round trips. The caller asks another
/// copy after that.
const PATIENCE_MS: u64 = 150;
/// A question without an answer is asked again after so many milliseconds.
const REMIND_MS: u64 = 50;
/// Answers of one partition that wait for their record to be applied.
const MOST_TOLD: usize = 8;

/// Where a copy that was read stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the last record in it.
    pub term: Term,
    /// That record.
    pub lsn: Lsn,
    /// Everything acknowledged so many milliseconds before the read came is in it.
    pub lag_ms: u64,
}

type Done = Box<dyn FnOnce(&mut Partitions, Vec<Copied>) + Send>;

/// The reads that wait, and what copies know of themselves.
#[derive(Default)]
pub(crate) struct Lagging {
    reads: Vec<Waiting>,
    known: BTreeMap<PartitionId, Known>,
}

struct Waiting {
    partitions: Vec<PartitionId>,
    max_lag_ms: u64,
    since_ms: u64,
    done: Done,
}

#[derive(Default)]
struct Known {
    /// Everything acknowledged before this moment is applied.
    whole_ms: Option<u64>,
    /// The same holds for later moments once these records are.
    told: VecDeque<(Lsn, u64)>,
    asked_ms: Option<u64>,
}

impl Store {
    /// Reads those of `partitions` whose copy here lags by at most `max_lag_ms`, counted until now, whoever leads them. `done` sees
    /// these only, and is told where each stands: none, where none is close enough.
    pub fn read_copies(
        &mut self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        done: impl FnOnce(&mut Partitions, Vec<Copied>) + Send + 'static,
    ) {
        let since_ms = self.clock.elapsed_ms();
        self.lagging.reads.push(Waiting { partitions, max_lag_ms, since_ms, done: Box::new(done) });
    }

    /// Tells a copy where this primary stands, if it can be sure that it leads.
    pub(crate) fn hear_ask_position(&mut self, partition: PartitionId, from: Member, asked_ms: u64) {
        let place = &self.places[partition.0 as usize];
        if let Some(term) = place.replica.serves().filter(|_| self.is_readable(partition)) {
            let body = Message::Position { term, lsn: place.applied, asked_ms };
            self.replication.outbox.entry(from.ordinal).or_default().push(Envelope { partition, body });
        }
    }

    /// Takes what a primary says of itself.
    pub(crate) fn hear_position(&mut self, partition: PartitionId, from: Member, term: Term, lsn: Lsn, asked_ms: u64) {
        let replica = &self.places[partition.0 as usize].replica;
        let known = self.lagging.known.entry(partition).or_default();
        let was_asked = known.asked_ms.is_some_and(|asked| asked_ms <= asked);
        if was_asked && replica.follows(from) && replica.promised() == term && known.told.len() < MOST_TOLD {
            known.told.push_back((lsn, asked_ms));
        }
    }

    /// Answers the reads whose copies are close enough, or have had their time.
    pub(crate) fn answer_copies(&mut self) {
        let now_ms = self.clock.elapsed_ms();
        for read in std::mem::take(&mut self.lagging.reads) {
            let mut copied = Vec::new();
            let mut open = false;
            for partition in &read.partitions {
                let is_here = self.can_be_read(*partition);
                match self.whole_ms(*partition, now_ms).filter(|_| is_here) {
                    Some(whole_ms) if whole_ms.saturating_add(read.max_lag_ms) >= read.since_ms => {
                        let place = &self.places[partition.0 as usize];
                        let lag_ms = read.since_ms.saturating_sub(whole_ms);
                        let (term, lsn) = (place.applied_term, place.applied);
                        copied.push(Copied { partition: *partition, term, lsn, lag_ms });
                    }
                    _ if is_here => open |= self.ask_position(*partition, &read, now_ms),
                    _ => {}
                }
            }
            if open && now_ms.saturating_sub(read.since_ms) < PATIENCE_MS {
                self.lagging.reads.push(read);
            } else {
                let shown: Vec<PartitionId> = copied.iter().map(|copied| copied.partition).collect();
                self.partitions.showing(&shown, |partitions| (read.done)(partitions, copied));
            }
        }
    }

    /// Whether what is here is whole, and a prefix of what its primary has.
    fn can_be_read(&self, partition: PartitionId) -> bool {
        let place = self.places.get(partition.0 as usize);
        place.is_some_and(|place| place.corrupt.is_none() && !place.replica.awaits_copy())
    }

    /// The moment before which everything acknowledged is applied here, as far as is known.
    fn whole_ms(&mut self, partition: PartitionId, now_ms: u64) -> Option<u64> {
        let leads = self.is_readable(partition);
        let applied = self.places.get(partition.0 as usize)?.applied;
        let known = self.lagging.known.entry(partition).or_default();
        while let Some((_, asked_ms)) = known.told.pop_front_if(|(lsn, _)| *lsn <= applied) {
            known.whole_ms = known.whole_ms.max(Some(asked_ms));
        }
        if leads {
            known.whole_ms = Some(now_ms);
        }
        known.whole_ms
    }

    /// Asks the primary for a read, unless an answer is due that will do; whether there is somebody to ask.
    fn ask_position(&mut self, partition: PartitionId, read: &Waiting, now_ms: u64) -> bool {
        let seen = self.places[partition.0 as usize].replica.seen().map(|entry| entry.primary);
        let Some(primary) = seen.filter(|primary| *primary != self.options.replication.ordinal) else { return false };
        let known = self.lagging.known.entry(partition).or_default();
        let will_do = |asked: u64| asked.saturating_add(read.max_lag_ms) >= read.since_ms && now_ms < asked + REMIND_MS;
        if !known.asked_ms.is_some_and(will_do) {
            known.asked_ms = Some(now_ms);
            let body = Message::AskPosition { asked_ms: now_ms };
            self.replication.outbox.entry(primary).or_default().push(Envelope { partition, body });
        }
        true
    }
}
