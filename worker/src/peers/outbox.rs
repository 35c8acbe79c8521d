//! Outgoing queue to one process: bounded by bytes, packed into frames when the connection accepts one.

use super::wire;
use engram_proto::v1::{Hello, PeerFrame};
use engram_store::peer::Envelope;
use futures::Stream;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Maximum number of queued bytes for one peer. A peer that exceeds it does not read: the stream is closed, and lost messages are
/// repeated once the next one is open.
const MAX_QUEUED_BYTES: usize = 64 << 20;
/// A frame takes queued envelopes up to this size, or one envelope. A store makes envelopes of at most 4 MiB, and a record has at
/// most 8 MiB: below the 16 MiB of a message.
const MAX_FRAME_BYTES: usize = 4 << 20;

/// Outgoing queue to one process.
#[derive(Debug)]
pub(super) struct Outbox {
    state: Mutex<OutboxState>,
    sent: Counter,
}

#[derive(Debug, Default)]
struct OutboxState {
    hello: Option<Hello>,
    queued: VecDeque<Envelope>,
    bytes: usize,
    closed: bool,
    waker: Option<Waker>,
}

/// Why an outbox rejects envelopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum OutboxError {
    #[error("{bytes} bytes are queued; allowed: {MAX_QUEUED_BYTES}")]
    Bytes { bytes: usize },
    #[error("the stream is closed")]
    Closed,
}

impl Outbox {
    /// Creates an outbox whose first frame carries the hello; `sent` counts bytes.
    pub(super) fn new(hello: Hello, sent: Counter) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(OutboxState { hello: Some(hello), ..OutboxState::default() }), sent })
    }

    fn state(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock()
    }

    /// Queues envelopes, which are sent in order. Never blocks.
    pub(super) fn push(&self, envelopes: Vec<Envelope>) -> Result<(), OutboxError> {
        let mut state = self.state();
        if state.closed {
            return Err(OutboxError::Closed);
        }
        let bytes = state.bytes + envelopes.iter().map(Envelope::bytes).sum::<usize>();
        if bytes > MAX_QUEUED_BYTES {
            return Err(OutboxError::Bytes { bytes });
        }
        state.bytes = bytes;
        state.queued.extend(envelopes);
        state.wake();
        Ok(())
    }

    /// Ends the stream and drops queued envelopes.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.bytes = 0;
        state.queued = VecDeque::new();
        state.wake();
    }

    /// Returns the stream of frames for a connection.
    pub(super) fn frames(self: &Arc<Self>) -> Frames {
        Frames(Arc::clone(self))
    }
}

impl OutboxState {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Takes queued envelopes for one frame.
    fn take(&mut self) -> (Vec<Envelope>, usize) {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(envelope) =
            self.queued.pop_front_if(|next| taken.is_empty() || bytes + next.bytes() <= MAX_FRAME_BYTES)
        {
            bytes += envelope.bytes();
            taken.push(envelope);
        }
        self.bytes -= bytes;
        (taken, bytes)
    }
}

/// Stream of the frames of an [`Outbox`]. Closes the outbox when dropped.
pub(super) struct Frames(Arc<Outbox>);

impl Stream for Frames {
    type Item = PeerFrame;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<PeerFrame>> {
        let (hello, envelopes, bytes) = {
            let mut state = self.0.state();
            if state.closed {
                return Poll::Ready(None);
            }
            // The receiver has not accepted the hello yet, so nothing else is sent with it.
            let hello = state.hello.take();
            let (envelopes, bytes) = if hello.is_some() { (Vec::new(), 0) } else { state.take() };
            if hello.is_none() && envelopes.is_empty() {
                state.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            (hello, envelopes, bytes)
        };
        self.0.sent.inc_by(bytes as u64);
        // Encodes outside the lock: the engine must not wait for it.
        Poll::Ready(Some(PeerFrame { hello, messages: envelopes.into_iter().map(wire::encode).collect() }))
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use engram_cluster::replica;
    use engram_memory::{Lsn, PartitionId, Term};
    use engram_store::peer::Message;
    use futures::{FutureExt as _, StreamExt as _};
    use prost::Message as _;

    fn record(lsn: u64, bytes: usize) -> Envelope {
        let runs = vec![(Lsn(lsn), Term(1))];
        let append = replica::Message::Append { term: Term(1), after: Lsn(lsn - 1), runs, commit: Lsn(0) };
        let records = vec![Bytes::from(vec![7; bytes])];
        Envelope::new(PartitionId(0), Message::Replica(append, records))
    }

    #[test]
    fn queued_envelopes_are_sent_in_order_in_frames_within_their_limit() {
        let outbox = Outbox::new(Hello::default(), Counter::default());
        let mut frames = outbox.frames();
        let envelope = record(1, 10);
        outbox.push(vec![envelope.clone()]).unwrap();
        let first = frames.next().now_or_never().unwrap().unwrap();
        assert!(first.hello.is_some() && first.messages.is_empty(), "the hello is sent alone");
        let second = frames.next().now_or_never().unwrap().unwrap();
        assert_eq!(second.messages, [wire::encode(envelope)]);
        assert!(frames.next().now_or_never().is_none());

        // The largest envelope of a store follows almost a frame of others.
        let sizes: Vec<usize> =
            (0..1_000).map(|_| 3_000).chain([4 << 20]).chain([1_000; 10]).chain([8 << 20]).collect();
        let all: Vec<Envelope> = sizes.iter().zip(1..).map(|(size, lsn)| record(lsn, *size)).collect();
        for envelope in all.clone() {
            outbox.push(vec![envelope]).unwrap();
        }
        let (mut read, mut count) = (Vec::new(), 0);
        while let Some(Some(frame)) = frames.next().now_or_never() {
            assert!(frame.encoded_len() <= engram_proto::MAX_PEER_MESSAGE_BYTES && frame.hello.is_none());
            count += 1;
            read.extend(frame.messages.into_iter().map(|message| wire::decode(message, 1).unwrap()));
        }
        assert!(read == all && count <= 6, "{} envelopes in {count} frames", read.len());
        assert_eq!(outbox.state().bytes, 0);
    }

    #[test]
    fn the_outbox_of_a_peer_that_does_not_read_is_bounded() {
        let outbox = Outbox::new(Hello::default(), Counter::default());
        let fits = (1..=100).filter(|lsn| outbox.push(vec![record(*lsn, 1 << 20)]).is_ok()).count();
        assert_eq!(fits, 63, "64 MiB less the overhead of envelopes");
        assert!(matches!(outbox.push(vec![record(1, 1 << 20)]), Err(OutboxError::Bytes { .. })));
        drop(outbox.frames());
        assert_eq!(outbox.push(vec![record(1, 1)]), Err(OutboxError::Closed));
        assert!(outbox.state().queued.is_empty(), "unsent envelopes are dropped");
    }
}
