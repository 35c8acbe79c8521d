//! Confirmed reads: linearizable, and no clock is part of the argument.
//!
//! A read that comes to a primary serving term T notes how far the state has to go, its *index*: all that is committed here,
//! and the tail of the log that this process took over. Then every other member of the maximal in-sync set (that of the map,
//! and a newcomer from its proposal on) is asked what it has promised. The read runs on the applied state when each has
//! answered T, from the disk that the map names, to a question that was sent after the read came; the index is applied; and
//! this process still serves T.
//!
//! Why nothing is missing that was acknowledged before the read came, at moment *m*:
//! - acknowledged at T: committed here, by this process, so at or below the index;
//! - acknowledged at an earlier term: every primary starts from the log of a member in sync, so it is in the tail. That this
//!   process has read the mark that T is activated says that no entry before T can be activated any more;
//! - acknowledged at a later term: there is none. T is activated, so the first later entry that is activated is led by a
//!   member of T's maximal in-sync set: the map promotes nobody else. A primary promises its term, in memory at once and on
//!   disk, before it asks for the mark, and serves after it has read it. If that is another member, it answered *after m* that
//!   its highest promise is T, so it serves nothing before m. If it is this process, it would no longer serve T.
//!
//! A member answers on the engine's thread of its store, which also takes the map and makes promises: an answer comes after
//! everything promised before it. Members without an answer hold a read up until it is confirmed, or the map no longer names them
//! and this process leads at the next term, where the question is asked anew; or until it is too late. Who was dropped from
//! the set meanwhile may answer that it follows still: it counts for T, which ends when this process reads the new entry.
//!
//! Questions of one turn share a round, whatever number of reads waits for them. The time limit here is that of patience.

use crate::Partitions;
use crate::peer::{Envelope, Message};
use crate::store::Store;
use engram_memory::{Lsn, Member, Ordinal, PartitionId, StoreId, Term};
use std::collections::BTreeMap;

/// How long a read waits to be confirmed, in milliseconds: a member that died is out of the set by then.
const PATIENCE_MS: u64 = 3_000;
/// A question without an answer is asked again after so many milliseconds.
const REMIND_MS: u64 = 200;

/// Why a read was not confirmed. It did not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unconfirmed {
    /// This worker does not serve the partition, or not any more.
    #[error("partition {partition} is not served here")]
    NotServed {
        /// Partition.
        partition: PartitionId,
    },
    /// A member in sync has promised a higher term: another worker leads, or will.
    #[error("partition {partition} is no longer led from here at term {term}: a copy has promised term {promised}")]
    Deposed {
        /// Partition.
        partition: PartitionId,
        /// The term served here.
        term: Term,
        /// What it has promised.
        promised: Term,
    },
    /// Not every member in sync has answered.
    #[error("partition {partition} could not be confirmed: no answer of worker {silent:?}")]
    NoAnswer {
        /// Partition.
        partition: PartitionId,
        /// Who is silent; nobody where the records under way are not applied in time.
        silent: Vec<u32>,
    },
}

type Done = Box<dyn FnOnce(Result<&mut Partitions, Unconfirmed>) + Send>;

/// The reads that wait, and what was answered.
#[derive(Default)]
pub(crate) struct Confirming {
    reads: Vec<Waiting>,
    round: u64,
    /// By partition and place: disk, term and round of the newest answer.
    answers: BTreeMap<(PartitionId, Ordinal), (StoreId, Term, u64)>,
    /// Highest promise that was told of a term below it.
    refused: BTreeMap<PartitionId, Term>,
    reminded_ms: u64,
}

struct Waiting {
    wanted: Vec<Want>,
    since_ms: u64,
    done: Done,
}

struct Want {
    partition: PartitionId,
    asked: Option<Asked>,
}

#[derive(Clone)]
struct Asked {
    term: Term,
    round: u64,
    index: Lsn,
    members: Vec<Member>,
}

impl Confirming {
    /// Takes an answer.
    pub(crate) fn hear(&mut self, partition: PartitionId, from: Member, term: Term, round: u64, promised: Term) {
        if promised > term {
            let refused = self.refused.entry(partition).or_default();
            *refused = promised.max(*refused);
        } else if promised == term {
            let answer = self.answers.entry((partition, from.ordinal)).or_insert((from.store, term, round));
            if answer.0 != from.store || (answer.1, answer.2) < (term, round) {
                *answer = (from.store, term, round);
            }
        }
    }

    fn has_answered(&self, partition: PartitionId, member: &Member, asked: &Asked) -> bool {
        self.answers
            .get(&(partition, member.ordinal))
            .is_some_and(|(store, term, round)| *store == member.store && *term == asked.term && *round >= asked.round)
    }

    fn silent(&self, partition: PartitionId, asked: &Asked) -> impl Iterator<Item = Ordinal> {
        let silent = asked.members.iter().filter(move |member| !self.has_answered(partition, member, asked));
        silent.map(|member| member.ordinal)
    }
}

impl Store {
    /// Reads `partitions`, linearizable without trust in any clock: `done` gets the state when every other member in sync has said,
    /// after this call, that this process leads; all of that in later turns. See the head of `confirm.rs` for why.
    pub fn read_confirmed(
        &mut self,
        partitions: Vec<PartitionId>,
        done: impl FnOnce(Result<&mut Partitions, Unconfirmed>) + Send + 'static,
    ) {
        let wanted = partitions.into_iter().map(|partition| Want { partition, asked: None }).collect();
        let since_ms = self.clock.elapsed_ms();
        self.confirming.reads.push(Waiting { wanted, since_ms, done: Box::new(done) });
    }

    /// Says what was promised here.
    pub(crate) fn hear_confirm(&mut self, partition: PartitionId, from: Member, term: Term, round: u64) {
        let promised = self.places[partition.0 as usize].replica.promised();
        let body = Message::Confirmed { term, round, promised };
        self.replication.outbox.entry(from.ordinal).or_default().push(Envelope { partition, body });
    }

    /// Asks for what is not asked, and answers what has its answers.
    pub(crate) fn answer_confirmed(&mut self) {
        if self.confirming.reads.is_empty() {
            return;
        }
        let now_ms = self.clock.elapsed_ms();
        let mut reads = std::mem::take(&mut self.confirming.reads);
        self.ask(&mut reads, now_ms);
        for read in reads {
            match self.is_confirmed(&read, now_ms) {
                Ok(true) => (read.done)(Ok(&mut self.partitions)),
                Ok(false) => self.confirming.reads.push(read),
                Err(error) => (read.done)(Err(error)),
            }
        }
    }

    /// One round for all that is new; what was asked long ago is asked again.
    fn ask(&mut self, reads: &mut [Waiting], now_ms: u64) {
        let reminds = now_ms.saturating_sub(self.confirming.reminded_ms) >= REMIND_MS;
        if reminds {
            self.confirming.reminded_ms = now_ms;
        }
        self.confirming.round += 1;
        let mut standing: BTreeMap<PartitionId, Option<Asked>> = BTreeMap::new();
        let mut questions: BTreeMap<(PartitionId, Ordinal), (Term, u64)> = BTreeMap::new();
        for want in reads.iter_mut().flat_map(|read| &mut read.wanted) {
            let partition = want.partition;
            let now = standing.entry(partition).or_insert_with(|| self.stands(partition));
            let asks = now.as_ref().filter(|now| want.asked.as_ref().is_none_or(|asked| asked.term != now.term));
            let is_new = asks.is_some();
            if is_new {
                want.asked = asks.cloned();
            }
            if let Some(asked) = want.asked.as_ref().filter(|_| is_new || reminds) {
                for silent in self.confirming.silent(partition, asked) {
                    let question = questions.entry((partition, silent)).or_insert((asked.term, asked.round));
                    *question = (*question).max((asked.term, asked.round));
                }
            }
        }
        for ((partition, to), (term, round)) in questions {
            let body = Message::Confirm { term, round };
            self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
        }
    }

    /// What a read of a partition that comes now has to wait for; `None` while it is not served.
    fn stands(&self, partition: PartitionId) -> Option<Asked> {
        let (term, index, members) = self.places.get(partition.0 as usize)?.replica.confirmable()?;
        Some(Asked { term, round: self.confirming.round, index, members })
    }

    fn is_confirmed(&self, read: &Waiting, now_ms: u64) -> Result<bool, Unconfirmed> {
        let mut open = None;
        for Want { partition, asked } in &read.wanted {
            let partition = *partition;
            let place = self.places.get(partition.0 as usize).filter(|place| place.corrupt.is_none());
            let Some(place) = place.filter(|place| place.replica.leads().is_some()) else {
                return Err(Unconfirmed::NotServed { partition });
            };
            // It activates a change of its own: asked when it serves again.
            let Some(asked) = asked.as_ref().filter(|asked| place.replica.serves() == Some(asked.term)) else {
                open = Some((partition, Vec::new()));
                continue;
            };
            if let Some(promised) = self.confirming.refused.get(&partition).filter(|promised| **promised > asked.term) {
                return Err(Unconfirmed::Deposed { partition, term: asked.term, promised: *promised });
            }
            let silent: Vec<u32> = self.confirming.silent(partition, asked).map(|ordinal| ordinal.0).collect();
            if !silent.is_empty() || place.applied < asked.index {
                open = Some((partition, silent));
            }
        }
        match open {
            Some((partition, silent)) if now_ms.saturating_sub(read.since_ms) >= PATIENCE_MS => {
                Err(Unconfirmed::NoAnswer { partition, silent })
            }
            open => Ok(open.is_none()),
        }
    }
}
