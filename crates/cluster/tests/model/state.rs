//! The state of the model: the map, the nodes with their disks, and messages in flight.

use engram_cluster::replica::Message;
use engram_cluster::{Change, Entry, ExpectedEntry, Replica};
use engram_memory::{Incarnation, Lsn, Member, Ordinal, StoreId, Term};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A client's operation; the client retries it forever.
pub(crate) type Op = u8;

/// A record: the term that wrote it, and the operation. Its lsn is its index in the log, from 1.
pub(crate) type Record = (Term, Op);

/// Returns the records up to an lsn.
pub(crate) fn up_to(log: &[Record], lsn: Lsn) -> &[Record] {
    &log[..(lsn.0 as usize).min(log.len())]
}

/// Returns the last lsn of a log.
pub(crate) const fn end_of(log: &[Record]) -> Lsn {
    Lsn(log.len() as u64)
}

/// A node: its disk, and its process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    /// The replica of the process; `None` while none runs.
    pub(crate) replica: Option<Replica>,
    /// The current process, or the next one.
    pub(crate) me: Member,
    /// The log as seen by a process.
    pub(crate) log: Vec<Record>,
    /// The log after a power loss.
    pub(crate) disk: Vec<Record>,
    /// The highest logged promise, and the highest durable one.
    pub(crate) promise: Term,
    pub(crate) kept: Term,
    /// Position of the snapshot: the history up to here is lost at the next start and cannot be streamed.
    pub(crate) floor: Lsn,
    pub(crate) lossless_since: Incarnation,
    /// The last process stopped in order, with everything durable.
    pub(crate) clean: bool,
    /// Followers that receive records and commits, and the term.
    pub(crate) streams: BTreeSet<Ordinal>,
    pub(crate) streaming: Option<Term>,
    /// Read leases held by this process: granter and its disk.
    pub(crate) held: BTreeSet<(Ordinal, StoreId)>,
    /// Read leases granted to others that may not have expired.
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

    /// Ends the process; memory is lost, written data is not.
    pub(crate) fn die(&mut self) {
        if self.replica.take().is_some() {
            self.me.incarnation.0 += 1;
        }
        self.streams.clear();
        self.streaming = None;
        self.held.clear();
    }
}

/// A message in flight.
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
    /// A snapshot of the committed state.
    Snapshot(Term, Vec<Record>),
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
            Self::Snapshot(term, _) => *term,
        }
    }

    /// Whether a primary sends it to a follower.
    pub(crate) fn is_from_primary(&self) -> bool {
        matches!(self, Self::Replica(Message::Open { .. } | Message::Append { .. }, _) | Self::Snapshot(..))
    }
}

/// Violations of safety.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Harm {
    Panicked,
    StaleRead,
    /// Two different logs were committed.
    Diverged,
    /// Committed records were truncated, or replaced by fewer.
    Truncated,
}

/// Report of a process at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ProcessReport {
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) nodes: Vec<Arc<Node>>,
    /// Entries that may still be read, the current one last.
    pub(crate) maps: Vec<Arc<Entry>>,
    /// Messages that may arrive; they stay, since they may arrive twice, as long as they can have an effect.
    pub(crate) net: BTreeSet<Arc<Envelope>>,
    /// Proposals that may be applied.
    pub(crate) proposals: BTreeSet<(ExpectedEntry, Change)>,
    /// The latest reports known to coordinators.
    pub(crate) reported: Vec<ProcessReport>,
    /// The longest log committed anywhere: all of it may have been acknowledged.
    pub(crate) committed: Vec<Record>,
    pub(crate) harm: Option<Harm>,
    /// The in-sync set before the last activation, used only by injected bugs.
    pub(crate) previous_isr: Vec<Member>,
    pub(crate) power: u8,
    pub(crate) kills: u8,
    pub(crate) stops: u8,
    pub(crate) disks: u8,
    pub(crate) learner_changes: u8,
    pub(crate) leavings: u8,
    pub(crate) transfers: u8,
    pub(crate) suspicions: u8,
    pub(crate) reconnects: u8,
    pub(crate) snapshots: u8,
    /// Events that have happened ([`reached`]).
    pub(crate) reached: u8,
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

pub(crate) mod reached {
    pub(crate) const PROMOTED: u8 = 1;
    pub(crate) const ADDED: u8 = 2;
    pub(crate) const ROLLED_BACK: u8 = 4;
    pub(crate) const TRANSFERRED: u8 = 8;
    /// A restarted process serves because the previous one lost nothing.
    pub(crate) const STAYED_ELIGIBLE: u8 = 16;
    pub(crate) const SNAPSHOT: u8 = 32;
}
