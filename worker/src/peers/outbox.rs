//! What waits to be sent to one process: bounded by bytes, packed into frames when the connection takes one.

use super::wire;
use engram_proto::v1::{Hello, PeerFrame};
use engram_store::peer::Envelope;
use futures::Stream;
use prometheus_client::metrics::counter::Counter;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Bytes that may wait for one peer. More is a peer that does not read: the stream is cut, and what was lost is made good after
/// the next one is open.
const MOST_BYTES: usize = 64 << 20;
/// A frame takes what waits up to here, or one envelope, which a store makes of at most 4 MiB and a record of 8 MiB: below the
/// 16 MiB of a message.
const FRAME_BYTES: usize = 4 << 20;

/// The way out to one process.
#[derive(Debug)]
pub(super) struct Outbox {
    state: Mutex<State>,
    sent: Counter,
}

#[derive(Debug, Default)]
struct State {
    hello: Option<Hello>,
    waiting: VecDeque<Envelope>,
    bytes: usize,
    closed: bool,
    waker: Option<Waker>,
}

/// Why an outbox takes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Full {
    #[error("{bytes} bytes wait to be sent; allowed: {MOST_BYTES}")]
    Bytes { bytes: usize },
    #[error("the stream is closed")]
    Closed,
}

impl Outbox {
    /// An outbox whose first frame says hello; `sent` counts bytes.
    pub(super) fn new(hello: Hello, sent: Counter) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { hello: Some(hello), ..State::default() }), sent })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds envelopes; they go out in order. Never blocks.
    pub(super) fn push(&self, envelopes: Vec<Envelope>) -> Result<(), Full> {
        let mut state = self.state();
        if state.closed {
            return Err(Full::Closed);
        }
        let bytes = state.bytes + envelopes.iter().map(Envelope::bytes).sum::<usize>();
        if bytes > MOST_BYTES {
            return Err(Full::Bytes { bytes });
        }
        state.bytes = bytes;
        state.waiting.extend(envelopes);
        state.wake();
        Ok(())
    }

    /// Ends the stream, and forgets what waits.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.bytes = 0;
        state.waiting = VecDeque::new();
        state.wake();
    }

    /// The frames, for a connection.
    pub(super) fn frames(self: &Arc<Self>) -> Frames {
        Frames(Arc::clone(self))
    }
}

impl State {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// What waits, as much as a frame takes.
    fn take(&mut self) -> (Vec<Envelope>, usize) {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(envelope) =
            self.waiting.pop_front_if(|next| taken.is_empty() || bytes + next.bytes() <= FRAME_BYTES)
        {
            bytes += envelope.bytes();
            taken.push(envelope);
        }
        self.bytes -= bytes;
        (taken, bytes)
    }
}

/// The frames of an [`Outbox`]. Dropped, it closes it: nobody takes any more.
pub(super) struct Frames(Arc<Outbox>);

impl Stream for Frames {
    type Item = PeerFrame;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<PeerFrame>> {
        let (hello, envelopes, bytes) = {
            let mut state = self.0.state();
            if state.closed {
                return Poll::Ready(None);
            }
            // Whoever reads a hello has not let anything in yet: nothing else comes with it.
            let hello = state.hello.take();
            let (envelopes, bytes) = if hello.is_some() { (Vec::new(), 0) } else { state.take() };
            if hello.is_none() && envelopes.is_empty() {
                state.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            (hello, envelopes, bytes)
        };
        self.0.sent.inc_by(bytes as u64);
        // Encoded outside the lock: the engine must not wait for it.
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
        Envelope { partition: PartitionId(0), body: Message::Replica(append, records) }
    }

    #[test]
    fn what_waits_goes_out_in_order_packed_into_frames_within_their_limit() {
        let outbox = Outbox::new(Hello::default(), Counter::default());
        let mut frames = outbox.frames();
        let envelope = record(1, 10);
        outbox.push(vec![envelope.clone()]).unwrap();
        let first = frames.next().now_or_never().unwrap().unwrap();
        assert!(first.hello.is_some() && first.messages.is_empty(), "nothing is said before the hello was heard");
        let second = frames.next().now_or_never().unwrap().unwrap();
        assert_eq!(second.messages, [wire::encode(envelope)]);
        assert!(frames.next().now_or_never().is_none());

        // The largest envelope that a store makes stands behind almost a frame of others.
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
    fn a_peer_that_does_not_read_fills_its_outbox_and_no_more() {
        let outbox = Outbox::new(Hello::default(), Counter::default());
        let fits = (1..=100).filter(|lsn| outbox.push(vec![record(*lsn, 1 << 20)]).is_ok()).count();
        assert_eq!(fits, 63, "64 MiB less what envelopes take");
        assert!(matches!(outbox.push(vec![record(1, 1 << 20)]), Err(Full::Bytes { .. })));
        drop(outbox.frames());
        assert_eq!(outbox.push(vec![record(1, 1)]), Err(Full::Closed));
        assert!(outbox.state().waiting.is_empty(), "what was not sent is not kept");
    }
}
