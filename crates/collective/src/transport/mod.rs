//! How tagged messages travel between the ranks of a generation: blocking, with a limit on every wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::message::{self, Tag};

mod address;
mod connect;
mod memory;
mod secure;
mod shared;
mod socket;
mod tcp;

pub use address::resolve;
pub use memory::{Memory, memory_group};
pub use secure::{Secure, Secured};
pub use tcp::{Counters, Tcp, TcpOptions};

/// Why a message did not pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection to a peer ended.
    #[error("connection to rank {rank} ended")]
    Closed {
        /// The peer.
        rank: usize,
        /// The cause, if the operating system gave one.
        #[source]
        source: Option<std::io::Error>,
    },
    /// A peer made no progress.
    #[error("rank {rank} made no progress for {} ms", .after.as_millis())]
    Stalled {
        /// The peer.
        rank: usize,
        /// The limit.
        after: Duration,
    },
    /// A message was damaged or has another version.
    #[error("message from rank {rank} is not valid")]
    Message {
        /// The sender.
        rank: usize,
        /// What is wrong.
        #[source]
        source: message::Error,
    },
    /// A message has another length than expected: the ranks disagree about the schedule.
    #[error("message from rank {rank}: {found} bytes are not allowed; allowed: {expected}")]
    Length {
        /// The sender.
        rank: usize,
        /// Its length in bytes.
        found: usize,
        /// The expected length in bytes.
        expected: usize,
    },
    /// More messages arrived early than the bound allows: the ranks disagree about the schedule.
    #[error("rank {rank} sent more than {limit} bytes that were not expected")]
    Overflow {
        /// The sender.
        rank: usize,
        /// The bound in bytes.
        limit: usize,
    },
    /// The reduction was cancelled, for a change of the generation.
    #[error("reduction was cancelled")]
    Cancelled,
}

impl Error {
    /// Returns the peer that failed, `None` for a cancelled reduction.
    pub const fn rank(&self) -> Option<usize> {
        match self {
            Self::Closed { rank, .. }
            | Self::Stalled { rank, .. }
            | Self::Message { rank, .. }
            | Self::Length { rank, .. }
            | Self::Overflow { rank, .. } => Some(*rank),
            Self::Cancelled => None,
        }
    }
}

/// How long to wait for a peer.
pub struct Wait<'a> {
    limit: Duration,
    cancel: &'a AtomicBool,
    keep_waiting: &'a mut dyn FnMut(usize) -> bool,
    since: Option<Instant>,
}

impl std::fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wait").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl<'a> Wait<'a> {
    /// Creates a wait of `limit` without any progress. Then `keep_waiting` is called with the rank of the peer: it reports the suspicion, and
    /// returns whether to wait once more, for a peer that is slow but alive. `cancel` ends the wait at once.
    pub fn new(limit: Duration, cancel: &'a AtomicBool, keep_waiting: &'a mut dyn FnMut(usize) -> bool) -> Self {
        Self { limit, cancel, keep_waiting, since: None }
    }

    /// Returns the limit without any progress.
    pub const fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns whether the wait was ended.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Bytes were moved.
    fn progress(&mut self) {
        self.since = None;
    }

    /// Nothing moved: returns for how long already.
    ///
    /// # Errors
    /// [`Error::Stalled`], [`Error::Cancelled`].
    fn idle(&mut self, rank: usize) -> Result<Duration, Error> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < self.limit {
            return Ok(waited);
        }
        if !(self.keep_waiting)(rank) {
            return Err(Error::Stalled { rank, after: self.limit });
        }
        self.since = None;
        Ok(Duration::ZERO)
    }
}

/// Connections of one rank to all others of its generation.
pub trait Transport {
    /// Own rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Sends a message of at most [`message::MAX_PAYLOAD_BYTES`]. Returns when the payload may be reused.
    ///
    /// # Errors
    /// The peer failed, or the reduction was cancelled; afterwards the transport must be dropped.
    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error>;

    /// Receives the message with this tag from the peer `tag.from` into a buffer of its exact length. Messages of other tags are kept for
    /// later. A transport belongs to one generation, so that no message of another one arrives.
    ///
    /// # Errors
    /// As [`Transport::send`].
    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error>;
}

/// Bytes of early messages that a rank keeps per peer: the executor sends only a few chunks ahead.
const MAX_PARKED_BYTES: usize = 16 << 20;

/// Messages that arrived before they were requested, with buffers that are used again.
#[derive(Debug, Default)]
struct Parked {
    messages: Vec<(Tag, Vec<u8>)>,
    free: Vec<Vec<u8>>,
    bytes: usize,
}

impl Parked {
    fn buffer(&mut self, length: usize) -> Vec<u8> {
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.resize(length, 0);
        buffer
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        self.free.push(buffer);
    }

    fn put(&mut self, rank: usize, tag: Tag, payload: Vec<u8>) -> Result<(), Error> {
        self.bytes += payload.len();
        self.messages.push((tag, payload));
        let limit = MAX_PARKED_BYTES;
        if self.bytes > limit { Err(Error::Overflow { rank, limit }) } else { Ok(()) }
    }

    /// Copies the message of a tag, if it is here.
    fn take(&mut self, tag: Tag, into: &mut [u8]) -> Result<bool, Error> {
        let Some(index) = self.messages.iter().position(|(it, _)| *it == tag) else { return Ok(false) };
        let (_, payload) = self.messages.swap_remove(index);
        self.bytes -= payload.len();
        let (found, expected) = (payload.len(), into.len());
        if found != expected {
            return Err(Error::Length { rank: usize::from(tag.from), found, expected });
        }
        into.copy_from_slice(&payload);
        self.recycle(payload);
        Ok(true)
    }
}
