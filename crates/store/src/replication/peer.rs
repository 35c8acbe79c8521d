//! Messages between stores, and the interface that sends them.

use bytes::Bytes;
use engram_cluster::{Change, ExpectedEntry, replica};
use engram_memory::{DecayClock, Lsn, Ordinal, PartitionId, Term};

/// A message about one partition from one store to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// Partition.
    pub partition: PartitionId,
    /// The message.
    pub body: Message,
    /// Span of the primary that waits for the records of an append, if its trace is sampled.
    pub trace: Option<engram_trace::Context>,
}

/// Message between stores about a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Replication protocol; with [`replica::Message::Append`] the encoded records, one per LSN.
    Replica(replica::Message, Vec<Bytes>),
    /// A chunk of a state transfer.
    State(StateChunk),
    /// The sender no longer reads the partition, since it has seen another primary: its read lease is over.
    Release,
    /// A primary asks a member for its highest promise: see [`crate::Store::read_confirmed`].
    Confirm {
        /// Term of the primary.
        term: Term,
        /// Number of the query, repeated in the response.
        round: u64,
    },
    /// Response to `Confirm` with the highest promise.
    Confirmed {
        /// Queried term.
        term: Term,
        /// Number of the query.
        round: u64,
        /// Highest promised term.
        promised: Term,
    },
    /// A replica requests its primary's position: see [`crate::Store::read_replicas`].
    PositionRequest {
        /// Request time by the sender's clock, repeated in the response.
        requested_ms: u64,
    },
    /// Response to `PositionRequest`: every change acknowledged before the request is at or below this record.
    Position {
        /// Term of the primary.
        term: Term,
        /// LSN of the record.
        lsn: Lsn,
        /// Request time.
        requested_ms: u64,
    },
    /// Replica digest of the primary at a marker in the log, for followers to compare with theirs.
    Digest {
        /// Term of the primary.
        term: Term,
        /// LSN of the marker.
        lsn: Lsn,
        /// The digest.
        digest: u128,
    },
}

/// One chunk of a partition's committed state. The chunks of a transfer are sent in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateChunk {
    /// Term of the sending primary.
    pub term: Term,
    /// LSN of the last record in the state.
    pub lsn: Lsn,
    /// Term of that record.
    pub record_term: Term,
    /// Index of this chunk, from 0.
    pub index: u32,
    /// Number of chunks.
    pub count: u32,
    /// Decay clock.
    pub clock: DecayClock,
    /// Memories.
    pub memories: u64,
    /// Replica digest of the complete state.
    pub digest: u128,
    /// Kind of the chunk; 0 = the ledger, which comes first.
    pub kind: u32,
    /// Content, at most 1 MiB.
    pub bytes: Bytes,
}

impl Envelope {
    /// Creates an envelope outside a trace.
    pub const fn new(partition: PartitionId, body: Message) -> Self {
        Self { partition, body, trace: None }
    }

    /// Approximate memory size.
    pub fn bytes(&self) -> usize {
        const HEAD_BYTES: usize = 64;
        HEAD_BYTES
            + match &self.body {
                Message::Replica(_, records) => records.iter().map(|record| record.len() + 8).sum(),
                Message::State(piece) => piece.bytes.len(),
                Message::Digest { .. }
                | Message::Release
                | Message::Confirm { .. }
                | Message::Confirmed { .. }
                | Message::PositionRequest { .. }
                | Message::Position { .. } => 0,
            }
    }
}

/// A change of the map proposed by a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// Partition.
    pub partition: PartitionId,
    /// Expected current entry.
    pub expected: ExpectedEntry,
    /// The change.
    pub change: Change,
}

/// Sends the messages of a store. Called on the engine thread, so it must not block; messages that cannot be sent are dropped,
/// and recovered after the next [`crate::Handle::connect_peer`].
pub trait Peers: Send {
    /// Sends to the process that currently has this ordinal.
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>);

    /// Proposes changes of the map. Proposals are repeated until the map has changed.
    fn propose(&mut self, proposals: Vec<Proposal>);
}

/// Sends nothing: for a store without peers.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoPeers;

impl Peers for NoPeers {
    fn send(&mut self, _to: Ordinal, _envelopes: Vec<Envelope>) {}

    fn propose(&mut self, _proposals: Vec<Proposal>) {}
}
