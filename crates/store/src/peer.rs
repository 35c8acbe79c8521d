//! What stores say to each other, and the way out to them.

use bytes::Bytes;
use engram_cluster::{Change, Expected, replica};
use engram_memory::{DecayClock, Lsn, Ordinal, PartitionId, Term};

/// Something about one partition, from one store to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// Partition.
    pub partition: PartitionId,
    /// What is said.
    pub body: Message,
}

/// What is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The protocol; with [`replica::Message::Append`] the encoded records, one per lsn.
    Replica(replica::Message, Vec<Bytes>),
    /// A piece of a copy of the state.
    Copy(CopyPiece),
    /// The sender no longer reads the partition: it has seen another one lead. Its read lease is over.
    Release,
    /// A primary asks whether it still leads: see [`crate::Store::read_confirmed`].
    Confirm {
        /// Its term.
        term: Term,
        /// Number of the question; the answer repeats it.
        round: u64,
    },
    /// What the sender has promised, after it was asked.
    Confirmed {
        /// The term asked about.
        term: Term,
        /// The question.
        round: u64,
        /// The highest term promised.
        promised: Term,
    },
    /// A copy asks its primary where it stands: see [`crate::Store::read_copies`].
    AskPosition {
        /// When, by the clock of who asks; the answer repeats it.
        asked_ms: u64,
    },
    /// Every change that was acknowledged before the question is at or below a record.
    Position {
        /// Term of the primary.
        term: Term,
        /// The record.
        lsn: Lsn,
        /// The question.
        asked_ms: u64,
    },
    /// The replica digest of the primary at a marker in the log, for a copy to compare with its own.
    Digest {
        /// Term of the primary.
        term: Term,
        /// The marker.
        lsn: Lsn,
        /// The digest.
        digest: u128,
    },
}

/// One chunk of a partition's committed state. The pieces of a copy come in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPiece {
    /// Term of the primary that copies.
    pub term: Term,
    /// Last record in the state.
    pub lsn: Lsn,
    /// Term that wrote it.
    pub record_term: Term,
    /// Number of this piece, from 0.
    pub piece: u32,
    /// How many there are.
    pub pieces: u32,
    /// Decay clock.
    pub clock: DecayClock,
    /// Memories.
    pub memories: u64,
    /// Replica digest of the whole.
    pub digest: u128,
    /// Kind of the chunk; 0 = the ledger, which is piece 0.
    pub kind: u32,
    /// At most 1 MiB.
    pub chunk: Bytes,
}

impl Envelope {
    /// About the memory that it takes.
    pub fn bytes(&self) -> usize {
        const HEAD_BYTES: usize = 64;
        HEAD_BYTES
            + match &self.body {
                Message::Replica(_, records) => records.iter().map(|record| record.len() + 8).sum(),
                Message::Copy(piece) => piece.chunk.len(),
                Message::Digest { .. }
                | Message::Release
                | Message::Confirm { .. }
                | Message::Confirmed { .. }
                | Message::AskPosition { .. }
                | Message::Position { .. } => 0,
            }
    }
}

/// A change of the map that a replica asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// Partition.
    pub partition: PartitionId,
    /// What it expects to find.
    pub expected: Expected,
    /// The change.
    pub change: Change,
}

/// The way out of a store. Called on its thread, so it must not block; what cannot be sent is dropped, and made good after
/// the next [`crate::Handle::connected`].
pub trait Peers: Send {
    /// Sends to whoever is at a place now.
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>);

    /// Asks for changes of the map. They are asked for again until the map has moved on.
    fn propose(&mut self, proposals: Vec<Proposal>);
}

/// No way out: for a store that has no peers, and whose map nobody else changes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Peers for Alone {
    fn send(&mut self, _to: Ordinal, _envelopes: Vec<Envelope>) {}

    fn propose(&mut self, _proposals: Vec<Proposal>) {}
}
