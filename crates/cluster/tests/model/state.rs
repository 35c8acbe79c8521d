//! What the model remembers: the map, the nodes with their disks, what is under way.

use engram_cluster::replica::Message;
use engram_cluster::{Change, Entry, ExpectedEntry, Replica};
use engram_memory::{Incarnation, Lsn, Member, Ordinal, StoreId, Term};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A client's operation; the client asks for it for ever.
pub(crate) type Op = u8;

/// A record: the term that wrote it, and the operation. Its lsn is its place in the log, from 1.
pub(crate) type Record = (Term, Op);

/// The records up to an lsn.
pub(crate) fn up_to(log: &[Record], lsn: Lsn) -> &[Record] {
    &log[..(lsn.0 as usize).min(log.len())]
}

/// The last lsn of a log.
pub(crate) const fn end_of(log: &[Record]) -> Lsn {
    Lsn(log.len() as u64)
}

/// A place in the cluster, its disk, and the process that runs there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    /// The process's replica; `None` while nothing runs.
    pub(crate) replica: Option<Replica>,
    /// The process that runs, or the next one.
    pub(crate) me: Member,
    /// The log as a process sees it.
    pub(crate) log: Vec<Record>,
    /// The log after a loss of power.
    pub(crate) disk: Vec<Record>,
    /// Highest promise logged, and the highest that is durable.
    pub(crate) promise: Term,
    pub(crate) kept: Term,
    /// A snapshot: names of records up to here are forgotten at the next start, and they cannot be streamed.
    pub(crate) floor: Lsn,
    pub(crate) lossless_since: Incarnation,
    /// The last process ended in order, with everything durable.
    pub(crate) clean: bool,
    /// Followers that get records and commits, and the term at which they do.
    pub(crate) streams: BTreeSet<Ordinal>,
    pub(crate) streaming: Option<Term>,
    /// Who granted this process a read lease, with the disk.
    pub(crate) held: BTreeSet<(Ordinal, StoreId)>,
    /// To whom a read lease was granted that may not have ended.
    pub(crate) granted: BTreeSet<Member>,
}

impl Node {
    pub(crate) fn new(ordinal: u32) -> Self {
        let me = Member { ordinal: Ordinal(ordinal), store: StoreId(0), incarnation: Incarnation(1) };
        Self {
            replica: None,
            me,
            log: Vec::new(),
            disk: Vec::new(),
            promise: Term(0),
            kept: Term(0),
            floor: Lsn(0),
            lossless_since: Incarnation(1),
            clean: false,
            streams: BTreeSet::new(),
            streaming: None,
            held: BTreeSet::new(),
            granted: BTreeSet::new(),
        }
    }

    pub(crate) fn leads(&self) -> Option<Term> {
        self.replica.as_ref().and_then(Replica::primary_term)
    }

    pub(crate) fn serves(&self) -> Option<Term> {
        self.replica.as_ref().and_then(Replica::serving_term)
    }

    /// The process ends; what it had in memory is gone, what it had written is not.
    pub(crate) fn die(&mut self) {
        if self.replica.take().is_some() {
            self.me.incarnation.0 += 1;
        }
        self.streams.clear();
        self.streaming = None;
        self.held.clear();
    }
}

/// Something on the way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Envelope {
    pub(crate) from: Member,
    pub(crate) to: Ordinal,
    pub(crate) body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Body {
    /// With the records of an append, one per lsn.
    Replica(Message, Vec<Record>),
    /// The committed state.
    Copy(Term, Vec<Record>),
}

impl Body {
    pub(crate) fn term(&self) -> Term {
        match self {
            Self::Replica(message, _) => match message {
                Message::Open { term, .. }
                | Message::Opened { term, .. }
                | Message::Append { term, .. }
                | Message::Ack { term, .. }
                | Message::NotOpen { term }
                | Message::Rejected { term, .. } => *term,
            },
            Self::Copy(term, _) => *term,
        }
    }

    /// Whether a primary says it to a follower.
    pub(crate) fn is_from_primary(&self) -> bool {
        matches!(self, Self::Replica(Message::Open { .. } | Message::Append { .. }, _) | Self::Copy(..))
    }
}

/// What must not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Harm {
    Panicked,
    StaleRead,
    /// Two logs were committed that differ.
    Diverged,
    /// What was committed here was truncated, or replaced by less.
    Truncated,
}

/// What a process says of itself when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Statement {
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) nodes: Vec<Arc<Node>>,
    /// The entry as it is, behind those that somebody may read late.
    pub(crate) maps: Vec<Arc<Entry>>,
    /// What was sent and may arrive; never removed, because it may arrive twice, as long as it can change something.
    pub(crate) net: BTreeSet<Arc<Envelope>>,
    /// What was proposed and may be applied.
    pub(crate) proposals: BTreeSet<(ExpectedEntry, Change)>,
    /// What the coordinators were told last.
    pub(crate) stated: Vec<Statement>,
    /// The longest log that was committed anywhere: all of it may have been acknowledged.
    pub(crate) committed: Vec<Record>,
    pub(crate) harm: Option<Harm>,
    /// The in-sync set before the last activation, for planted mistakes alone.
    pub(crate) ousted: Vec<Member>,
    pub(crate) power: u8,
    pub(crate) kills: u8,
    pub(crate) stops: u8,
    pub(crate) disks: u8,
    pub(crate) hints: u8,
    pub(crate) departures: u8,
    pub(crate) drains: u8,
    pub(crate) doubts: u8,
    pub(crate) reconnects: u8,
    pub(crate) snapshots: u8,
    /// What has happened ([`seen`]).
    pub(crate) seen: u8,
}

impl World {
    pub(crate) fn entry(&self) -> &Arc<Entry> {
        self.maps.last().expect("a partition has an entry")
    }

    pub(crate) fn node(&mut self, ordinal: Ordinal) -> &mut Node {
        Arc::make_mut(&mut self.nodes[ordinal.0 as usize])
    }

    pub(crate) fn at(&self, ordinal: Ordinal) -> &Node {
        &self.nodes[ordinal.0 as usize]
    }

    pub(crate) fn holds_all_committed(&self, ordinal: Ordinal) -> bool {
        self.at(ordinal).log.starts_with(&self.committed)
    }
}

pub(crate) mod seen {
    pub(crate) const PROMOTED: u8 = 1;
    pub(crate) const ADDED: u8 = 2;
    pub(crate) const ROLLED_BACK: u8 = 4;
    pub(crate) const HANDED_OVER: u8 = 8;
    /// A restarted process serves because the one before it lost nothing.
    pub(crate) const KEPT_PLACE: u8 = 16;
    pub(crate) const COPIED: u8 = 32;
}
