//! Accepts connections within bounds: a maximum per listener, file descriptors in reserve, and no connection that stays silent.
//!
//! What no connection may use is left for the log, snapshots and connections to other workers, so that clients can't make the store
//! fail. A refused connection is closed at once: its client tries another worker.

use crate::machine::Connection;
use crate::service::connections::stalls::AnswerStalls;
use engram_identity::Caller;
use futures::Stream;
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

/// Maximum number of connections per listener. A client library holds one per worker, and an idle one takes some tens of KiB.
pub(crate) const MAX_CONNECTIONS: usize = 4_096;
/// File descriptors in reserve, at most a quarter of all: segments of the log, snapshots, connections to other workers.
const RESERVED_DESCRIPTORS: u64 = 128;
/// Pause after a failed accept: descriptors and memory become free when other connections end, which sends no notification.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval between log lines about refused connections and failed accepts.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// A gRPC connection that sends nothing for this long is closed. Every client library answers the keepalives of the server, which
/// are sent three times as often.
pub(crate) const GRPC_SILENCE: Duration = Duration::from_secs(30);
/// The same for HTTP, which has no keepalives: longer than the usual intervals between two reads of the metrics.
pub(crate) const HTTP_SILENCE: Duration = Duration::from_secs(300);

/// Connections of all listeners of a worker, for its metrics.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionCounters {
    /// Connections closed because of a bound.
    pub(crate) refused: Counter,
    /// Failed accepts.
    pub(crate) failed: Counter,
    open: Arc<AtomicUsize>,
    last_log: Arc<Mutex<Option<Instant>>>,
}

impl ConnectionCounters {
    /// Returns the number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns whether a line may be logged now.
    fn may_log(&self) -> bool {
        let (now, mut last) = (Instant::now(), self.last_log.lock());
        let may = last.is_none_or(|last| now.saturating_duration_since(last) >= LOG_INTERVAL);
        if may {
            *last = Some(now);
        }
        may
    }
}

/// A socket that accepts connections.
pub(crate) trait Accept: Send {
    /// An accepted connection.
    type Stream: AsRawFd + Send;

    /// Waits for a connection.
    fn accept_one(&self) -> impl Future<Output = io::Result<(Self::Stream, Option<SocketAddr>)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept_one(&self) -> io::Result<(TcpStream, Option<SocketAddr>)> {
        let (stream, address) = self.accept().await?;
        stream.set_nodelay(true)?;
        Ok((stream, Some(address)))
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept_one(&self) -> io::Result<(UnixStream, Option<SocketAddr>)> {
        Ok((self.accept().await?.0, None))
    }
}

/// Accepts the connections of one listener.
pub(crate) struct Acceptor<L> {
    listener: L,
    role: &'static str,
    counters: ConnectionCounters,
    /// Connections of this listener.
    open: Arc<AtomicUsize>,
    /// The lowest descriptor that no connection may use.
    reserved_from: u64,
}

impl<L: Accept> Acceptor<L> {
    pub(crate) fn new(listener: L, role: &'static str, counters: ConnectionCounters) -> Self {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        Self { listener, role, counters, open: Arc::default(), reserved_from: reserved_from(descriptors) }
    }

    /// Returns a handle that counts connections as open.
    pub(crate) fn tracker(&self) -> OpenTracker {
        OpenTracker([Arc::clone(&self.open), Arc::clone(&self.counters.open)])
    }

    /// Waits for a connection within the bounds.
    pub(crate) async fn next(&mut self) -> (L::Stream, Option<SocketAddr>) {
        loop {
            let (refused, reason) = match self.listener.accept_one().await {
                Ok((stream, address)) => match self.refusal(&stream) {
                    None => return (stream, address),
                    Some(reason) => (&self.counters.refused, reason),
                },
                // The client has gone already.
                Err(error) if is_of_client(&error) => continue,
                Err(error) => {
                    sleep(ACCEPT_PAUSE).await;
                    (&self.counters.failed, error.to_string())
                }
            };
            refused.inc();
            if self.counters.may_log() {
                let (refused, failed) = (self.counters.refused.get(), self.counters.failed.get());
                tracing::warn!(listener = self.role, reason, refused, failed, "refused a connection");
            }
        }
    }

    /// Returns why a connection is over a bound. The kernel uses the lowest free descriptor, so a high one means that few are left.
    fn refusal(&self, stream: &L::Stream) -> Option<String> {
        let descriptor = u64::try_from(stream.as_raw_fd()).unwrap_or_default();
        if descriptor >= self.reserved_from {
            return Some(format!("{} file descriptors are in use, the rest is in reserve", self.reserved_from));
        }
        let open = self.open.load(Ordering::Relaxed);
        (open >= MAX_CONNECTIONS).then(|| format!("{open} connections are open"))
    }
}

impl Acceptor<TcpListener> {
    /// Returns the accepted connections; the stream never ends and has no errors.
    pub(crate) fn into_stream(self) -> impl Stream<Item = io::Result<TcpStream>> + Send {
        futures::stream::unfold(self, |mut acceptor| async move { Some((Ok(acceptor.next().await.0), acceptor)) })
    }
}

impl Acceptor<UnixListener> {
    /// As [`Acceptor::into_stream`] of TCP.
    pub(crate) fn into_unix_stream(self) -> impl Stream<Item = io::Result<UnixStream>> + Send {
        futures::stream::unfold(self, |mut acceptor| async move { Some((Ok(acceptor.next().await.0), acceptor)) })
    }
}

impl axum::serve::Listener for Acceptor<TcpListener> {
    type Io = Bounded<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (stream, address) = self.next().await;
        let address = address.expect("a TCP connection has an address");
        (Bounded::new(stream, Some(HTTP_SILENCE), self.tracker().opened()), address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Returns the lowest descriptor in reserve.
const fn reserved_from(descriptors: u64) -> u64 {
    let quarter = descriptors / 4;
    descriptors - if quarter < RESERVED_DESCRIPTORS { quarter } else { RESERVED_DESCRIPTORS }
}

/// Returns whether an accept failed because of its client, not of this process.
fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted | NotConnected)
}

/// Counts the open connections of a listener, and of all.
#[derive(Debug, Clone, Default)]
pub(crate) struct OpenTracker([Arc<AtomicUsize>; 2]);

impl OpenTracker {
    /// Counts a connection while the returned value lives.
    pub(crate) fn opened(&self) -> OpenConnection {
        for open in &self.0 {
            open.fetch_add(1, Ordering::Relaxed);
        }
        OpenConnection(self.clone())
    }
}

/// An open connection.
#[derive(Debug)]
pub(crate) struct OpenConnection(OpenTracker);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        for open in &self.0.0 {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A connection that is counted, and ends when its client stays silent or stops to read its answers.
pub(crate) struct Bounded<C> {
    connection: C,
    silence: Option<(Duration, Pin<Box<Sleep>>)>,
    stalls: Arc<AnswerStalls>,
    _open: OpenConnection,
}

impl<C> Bounded<C> {
    pub(crate) fn new(connection: C, silence: Option<Duration>, open: OpenConnection) -> Self {
        let silence = silence.map(|silence| (silence, Box::pin(sleep(silence))));
        Self { connection, silence, stalls: Arc::default(), _open: open }
    }
}

/// What handlers know of their connection.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionInfo {
    pub(crate) caller: Caller,
    pub(crate) stalls: Arc<AnswerStalls>,
}

impl Connected for Bounded<Connection> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        ConnectionInfo { caller: self.connection.connect_info(), stalls: Arc::clone(&self.stalls) }
    }
}

impl Connected for Bounded<UnixStream> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        ConnectionInfo { caller: Caller::Plaintext, stalls: Arc::clone(&self.stalls) }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Bounded<C> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // Keepalives cause reads, so this is checked regularly on a connection that transports nothing else.
        if this.stalls.is_stalled(Instant::now()) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read an answer")));
        }
        if let Poll::Ready(read) = Pin::new(&mut this.connection).poll_read(cx, buf) {
            if let Some((silence, end)) = &mut this.silence {
                end.as_mut().reset(Instant::now() + *silence);
            }
            return Poll::Ready(read);
        }
        match &mut this.silence {
            None => Poll::Pending,
            Some((_, end)) => {
                ready!(end.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client is silent")))
            }
        }
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Bounded<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails as accept does when no descriptor is free.
    struct NoDescriptors;

    impl Accept for NoDescriptors {
        type Stream = UnixStream;

        async fn accept_one(&self) -> io::Result<(UnixStream, Option<SocketAddr>)> {
            Err(io::Error::from_raw_os_error(nix::libc::EMFILE))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_accept_without_a_free_descriptor_pauses_and_logs_once_a_minute() {
        let counters = ConnectionCounters::default();
        let mut acceptor = Acceptor::new(NoDescriptors, "client", counters.clone());
        let waited = tokio::time::timeout(Duration::from_secs(10), acceptor.next()).await;
        assert!(waited.is_err());
        assert!((90..=100).contains(&counters.failed.get()), "{} accepts in 10 s", counters.failed.get());
        assert!(!counters.may_log());
        tokio::time::advance(LOG_INTERVAL).await;
        assert!(counters.may_log() && !counters.may_log());
    }

    #[tokio::test]
    async fn descriptors_stay_in_reserve_and_open_connections_are_counted() {
        assert_eq!([reserved_from(64), reserved_from(1 << 20)], [48, (1 << 20) - RESERVED_DESCRIPTORS]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counters = ConnectionCounters::default();
        let mut acceptor = Acceptor::new(listener, "client", counters.clone());
        let _client = TcpStream::connect(address).await.unwrap();
        let (stream, _) = acceptor.next().await;
        assert_eq!(acceptor.refusal(&stream), None);
        let open: Vec<OpenConnection> = (0..MAX_CONNECTIONS).map(|_| acceptor.tracker().opened()).collect();
        assert!(acceptor.refusal(&stream).unwrap().contains("4096 connections"));
        drop(open);
        assert_eq!((acceptor.refusal(&stream), counters.open()), (None, 0));
        acceptor.reserved_from = 0;
        assert!(acceptor.refusal(&stream).unwrap().contains("in reserve"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_ends() {
        use tokio::io::AsyncReadExt as _;
        let (silent, _client) = tokio::io::duplex(64);
        let mut bounded = Bounded::new(silent, Some(GRPC_SILENCE), OpenTracker::default().opened());
        let error = bounded.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
