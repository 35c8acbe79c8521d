//! Bodies of calls. A request body bounds the bytes and the time of messages that are not complete; a response body holds the permits
//! of its call until the client has read it.

use crate::service::connections::stalls::Answer;
use bytes::{Buf as _, Bytes};
use engram_proto::v1::{Problem, ProblemKind};
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;
use tonic::body::Body;

/// A request that sends nothing for this long while the worker waits for it is ended.
const REQUEST_SILENCE: Duration = Duration::from_secs(15);
/// Messages up to this size are not counted: they are bounded by the number of calls, and stay possible while large ones fill the
/// budget.
const SMALL_MESSAGE_BYTES: u64 = 64 << 10;
/// Maximum size of a chunk that is passed to the transport, which keeps at least one chunk of each answer that is not read.
const CHUNK_BYTES: usize = 32 << 10;
/// Size of the head of a message: a flag and the length.
const HEAD_BYTES: usize = 5;
/// Retry hint after too many calls, in milliseconds.
pub(crate) const RETRY_MS: u64 = 50;

/// Permits that a call holds until its response was read.
pub(crate) type CallPermits = Arc<Mutex<Vec<OwnedSemaphorePermit>>>;

/// Bounds of the requests of a listener.
#[derive(Debug, Clone)]
pub(crate) struct RequestBounds {
    /// Bytes of incomplete messages.
    pub(crate) bytes: Arc<Semaphore>,
    /// Calls whose request was read and that are executed.
    pub(crate) work: Arc<Semaphore>,
}

/// A request body.
pub(crate) struct RequestBody {
    inner: Body,
    bounds: RequestBounds,
    /// Permit while the request is not read completely.
    unread: Option<OwnedSemaphorePermit>,
    /// Where to put the permit of work, once the request was read; `None` for calls that need none.
    work: Option<CallPermits>,
    message: MessageFraming,
    held: Option<OwnedSemaphorePermit>,
    silence: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    pub(crate) fn new(
        inner: Body,
        bounds: RequestBounds,
        unread: OwnedSemaphorePermit,
        work: Option<CallPermits>,
    ) -> Self {
        let message = MessageFraming::default();
        Self { inner, bounds, unread: Some(unread), work, message, held: None, silence: None }
    }

    /// Counts received bytes.
    fn count_bytes(&mut self, chunk: &Bytes) -> Result<(), Problem> {
        let bytes = self.message.advance(chunk);
        if self.message.is_new {
            self.held = None;
        }
        if self.message.received <= SMALL_MESSAGE_BYTES {
            return Ok(());
        }
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&self.bounds.bytes).try_acquire_many_owned(count) else {
            let text = "the messages that clients are sending to this worker exceed its memory for them";
            return Err(Problem::of(ProblemKind::Overloaded, text).retry_after(RETRY_MS));
        };
        match &mut self.held {
            Some(held) => held.merge(permit),
            None => self.held = Some(permit),
        }
        Ok(())
    }

    /// The request was read completely.
    fn complete(&mut self) -> Result<(), Problem> {
        self.unread = None;
        let Some(permits) = self.work.take() else { return Ok(()) };
        let Ok(permit) = Arc::clone(&self.bounds.work).try_acquire_owned() else {
            return Err(too_many("calls are in flight"));
        };
        permits.lock().push(permit);
        Ok(())
    }
}

/// Returns the problem of a call above the number of calls.
pub(crate) fn too_many(what: &str) -> Problem {
    Problem::of(ProblemKind::Overloaded, format!("too many {what} at this worker")).retry_after(RETRY_MS)
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            let silence = this.silence.get_or_insert_with(|| Box::pin(sleep(REQUEST_SILENCE)));
            if silence.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let text = format!("the client sent nothing for {} s", REQUEST_SILENCE.as_secs());
            return Poll::Ready(Some(Err(Status::deadline_exceeded(text))));
        };
        if let Some(silence) = &mut this.silence {
            silence.as_mut().reset(Instant::now() + REQUEST_SILENCE);
        }
        let counted = match &frame {
            None => this.complete(),
            Some(Ok(frame)) => frame.data_ref().map_or(Ok(()), |chunk| this.count_bytes(chunk)),
            Some(Err(_)) => Ok(()),
        };
        Poll::Ready(match counted {
            Ok(()) => frame,
            Err(problem) => Some(Err(problem.into_status())),
        })
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Position in a sequence of messages, each with a head.
#[derive(Debug, Default)]
struct MessageFraming {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    remaining: u64,
    /// Bytes of the current message so far.
    received: u64,
    /// A message began in the last chunk.
    is_new: bool,
}

impl MessageFraming {
    /// Passes a chunk; returns the bytes of it that belong to the last message that it touches.
    fn advance(&mut self, chunk: &Bytes) -> u64 {
        let (mut chunk, mut bytes) = (chunk.clone(), 0);
        self.is_new = false;
        while chunk.has_remaining() {
            if self.remaining == 0 && self.head_bytes == 0 {
                (self.received, self.is_new, bytes) = (0, true, 0);
            }
            if self.remaining > 0 {
                let part = self.remaining.min(chunk.remaining() as u64);
                chunk.advance(part as usize);
                self.remaining -= part;
                self.received += part;
                bytes += part;
                continue;
            }
            let part = (HEAD_BYTES - self.head_bytes).min(chunk.remaining());
            chunk.copy_to_slice(&mut self.head[self.head_bytes..self.head_bytes + part]);
            self.head_bytes += part;
            if self.head_bytes == HEAD_BYTES {
                self.head_bytes = 0;
                let [_, length @ ..] = self.head;
                self.remaining = u32::from_be_bytes(length).into();
            }
        }
        bytes
    }
}

/// A response body.
pub(crate) struct ResponseBody {
    inner: Body,
    /// Rest of a frame that was split.
    rest: Bytes,
    answer: Option<Answer>,
    _permits: CallPermits,
}

impl ResponseBody {
    pub(crate) fn new(inner: Body, answer: Option<Answer>, permits: CallPermits) -> Self {
        Self { inner, rest: Bytes::new(), answer, _permits: permits }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let frame = if this.rest.is_empty() {
            match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    this.answer.iter().for_each(|answer| answer.set_waiting(None));
                    return Poll::Pending;
                }
            }
        } else {
            Some(Ok(Frame::data(std::mem::take(&mut this.rest))))
        };
        this.answer.iter().for_each(|answer| answer.set_waiting(Some(Instant::now())));
        Poll::Ready(frame.map(|frame| {
            frame.map(|frame| match frame.into_data() {
                Ok(mut data) if data.len() > CHUNK_BYTES => {
                    this.rest = data.split_off(CHUNK_BYTES);
                    Frame::data(data)
                }
                Ok(data) => Frame::data(data),
                Err(trailers) => trailers,
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.inner.size_hint() } else { SizeHint::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::connections::stalls::{AnswerStalls, MAX_STALL};
    use futures::StreamExt as _;
    use std::future::poll_fn;

    fn bounds(bytes: usize, work: usize) -> RequestBounds {
        RequestBounds { bytes: Arc::new(Semaphore::new(bytes)), work: Arc::new(Semaphore::new(work)) }
    }

    fn permit() -> OwnedSemaphorePermit {
        Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap()
    }

    /// Returns a request body of these chunks; it never ends after them unless `ends`.
    fn request(chunks: Vec<Bytes>, ends: bool, bounds: &RequestBounds, work: Option<CallPermits>) -> RequestBody {
        let frames = futures::stream::iter(chunks.into_iter().map(|chunk| Ok::<_, Status>(Frame::data(chunk))));
        let frames = if ends { frames.boxed() } else { frames.chain(futures::stream::pending()).boxed() };
        RequestBody::new(Body::new(http_body_util::StreamBody::new(frames)), bounds.clone(), permit(), work)
    }

    async fn next(
        body: &mut (impl http_body::Body<Data = Bytes, Error = Status> + Unpin),
    ) -> Option<Result<Bytes, Status>> {
        let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await;
        frame.map(|frame| frame.map(|frame| frame.into_data().unwrap()))
    }

    fn message(length: u32, sent: usize) -> Bytes {
        let mut bytes = vec![0];
        bytes.extend(length.to_be_bytes());
        bytes.resize(HEAD_BYTES + sent, 1);
        bytes.into()
    }

    #[tokio::test]
    async fn incomplete_messages_are_bounded_over_all_calls_and_small_ones_remain_possible() {
        let bounds = bounds(1 << 20, 9);
        let large = || request(vec![message(4 << 20, 700 << 10)], false, &bounds, None);
        let (mut first, mut second) = (large(), large());
        assert!(next(&mut first).await.unwrap().is_ok());
        let status = next(&mut second).await.unwrap().unwrap_err();
        assert_eq!(Problem::from_status(&status).unwrap().kind(), ProblemKind::Overloaded);
        let mut small = request(vec![message(1_000, 1_000), message(2_000, 2_000)], true, &bounds, None);
        assert!(next(&mut small).await.unwrap().is_ok() && next(&mut small).await.unwrap().is_ok());
        drop(first);
        assert_eq!(bounds.bytes.available_permits(), 1 << 20);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_request_ends_and_a_complete_one_needs_a_permit_of_work() {
        let bounds = bounds(1 << 20, 1);
        let mut silent = request(vec![message(10, 4)], false, &bounds, None);
        assert!(next(&mut silent).await.unwrap().is_ok());
        assert_eq!(next(&mut silent).await.unwrap().unwrap_err().code(), tonic::Code::DeadlineExceeded);
        let (first, second) = (CallPermits::default(), CallPermits::default());
        let complete = |permits: &CallPermits| request(vec![message(4, 4)], true, &bounds, Some(Arc::clone(permits)));
        let mut body = complete(&first);
        assert!(next(&mut body).await.unwrap().is_ok());
        assert_eq!(bounds.work.available_permits(), 1, "an incomplete request uses no permit of work");
        assert!(next(&mut body).await.is_none());
        assert_eq!(bounds.work.available_permits(), 0);
        let mut body = complete(&second);
        assert!(next(&mut body).await.unwrap().is_ok());
        let status = next(&mut body).await.unwrap().unwrap_err();
        assert_eq!(Problem::from_status(&status).unwrap().kind(), ProblemKind::Overloaded);
    }

    #[test]
    fn messages_are_counted_across_chunks() {
        let mut framing = MessageFraming::default();
        let all = [message(3, 3), message(0, 0), message(7, 7)].concat();
        for chunk in all.chunks(2) {
            framing.advance(&Bytes::copy_from_slice(chunk));
        }
        assert_eq!((framing.received, framing.remaining, framing.head_bytes), (7, 0, 0));
    }

    #[tokio::test]
    async fn an_unread_answer_keeps_its_permits_and_stalls() {
        let stalls = Arc::new(AnswerStalls::default());
        let frames = futures::stream::iter([Ok::<_, Status>(Frame::data(Bytes::from(vec![0; 3 * CHUNK_BYTES])))]);
        let inner = Body::new(http_body_util::StreamBody::new(frames));
        let mut body = ResponseBody::new(inner, Some(stalls.begin()), CallPermits::default());
        assert_eq!(next(&mut body).await.unwrap().unwrap().len(), CHUNK_BYTES);
        assert!(stalls.is_stalled(Instant::now() + MAX_STALL), "two chunks wait for the client");
        while next(&mut body).await.is_some() {}
        drop(body);
        assert!(!stalls.is_stalled(Instant::now() + MAX_STALL));
    }
}
