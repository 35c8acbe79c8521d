//! TLS for accepted connections.

use crate::dial::{HANDSHAKE_TIMEOUT, intended_cluster};
use crate::material::Callers;
use crate::verify::name;
use crate::{ExpectedPeer, Keys, Name, Reason, Refusals, Role};
use engram_memory::ClusterId;
use futures::{FutureExt as _, Stream, StreamExt as _};
use rustls::server::Acceptor;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, TlsAcceptor};
use tonic::Extensions;
use tonic::transport::server::Connected;

/// Concurrent handshakes; further connections wait for one of them to end, a few seconds at most.
const HANDSHAKES: usize = 256;

/// An accepted TLS connection with its authenticated caller.
pub struct TlsConnection {
    stream: TlsStream<TcpStream>,
    caller: Caller,
    end: Option<Pin<Box<Sleep>>>,
}

impl TlsConnection {
    /// Whether its lifetime is over.
    fn has_expired(&mut self, cx: &mut Context<'_>) -> bool {
        self.end.as_mut().is_some_and(|end| end.is_elapsed() || end.as_mut().poll(cx).is_ready())
    }
}

/// The peer of a connection. Handlers find it among the extensions of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Caller {
    /// A plaintext caller: may do everything. A listener that authenticates its callers uses TLS.
    #[default]
    Plaintext,
    /// A TLS caller without a certificate: may only do what it authorizes otherwise.
    Anonymous,
    /// A process authenticated by its certificate.
    Authenticated(Arc<Name>),
}

impl Caller {
    /// Returns the caller of a request.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// Returns its name, if it is authenticated.
    pub fn name(&self) -> Option<&Name> {
        match self {
            Self::Authenticated(name) => Some(name),
            Self::Plaintext | Self::Anonymous => None,
        }
    }

    /// Whether it has one of these roles.
    pub fn is_any(&self, roles: &[Role]) -> bool {
        match self {
            Self::Plaintext => true,
            Self::Anonymous => false,
            Self::Authenticated(name) => roles.contains(&name.role),
        }
    }

    /// Whether it is the worker named as sender of a message.
    pub fn is_worker(&self, ordinal: u32) -> bool {
        let expected = ExpectedPeer::one(Role::Worker, ordinal);
        match self {
            Self::Plaintext => true,
            Self::Anonymous => false,
            Self::Authenticated(name) => expected.check(name.cluster, name).is_ok(),
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plaintext => f.write_str("a plaintext caller"),
            Self::Anonymous => f.write_str("a caller without a certificate"),
            Self::Authenticated(name) => f.write_str(&name.process()),
        }
    }
}

/// Performs TLS handshakes on connections, several at a time; failures are counted and dropped. A connection ends after
/// `lifetime`, even when busy: a certificate is only checked at its start. Without a lifetime it lasts until it breaks.
pub fn accept(
    incoming: impl Stream<Item = io::Result<TcpStream>> + Send,
    keys: Arc<Keys>,
    callers: Callers,
    lifetime: Option<Duration>,
) -> impl Stream<Item = io::Result<TlsConnection>> + Send {
    handshake_each(incoming, move |stream| {
        let keys = Arc::clone(&keys);
        async move {
            let accepting = TlsAcceptor::from(keys.server(callers)).accept(stream);
            finish_handshake(accepting, callers, lifetime, keys.refusals()).await
        }
    })
}

/// A connection to a listener shared by several clusters.
pub enum Entering {
    /// Plaintext: its caller may belong to a cluster without certificates.
    Clear(TcpStream),
    /// TLS, with the keys of the cluster that the caller named.
    Secured(Box<TlsConnection>),
}

/// Accepts connections for several clusters behind one listener, with and without certificates: each caller names a
/// cluster, and is served with the keys that `keys_of` returns for it. Callers need no certificate here, since a worker
/// that requests its first one has none. Connections last until they break.
pub fn accept_for_clusters<K>(
    incoming: impl Stream<Item = io::Result<TcpStream>> + Send,
    keys_of: K,
    refusals: Arc<Refusals>,
) -> impl Stream<Item = io::Result<Entering>> + Send
where
    K: Fn(ClusterId) -> Option<Arc<Keys>> + Clone + Send,
{
    handshake_each(incoming, move |stream| {
        let (keys_of, refusals) = (keys_of.clone(), Arc::clone(&refusals));
        async move {
            if !speaks_tls(&stream, &refusals).await? {
                return Some(Entering::Clear(stream));
            }
            let accepting = async {
                let handshake = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
                let cluster = handshake.client_hello().server_name().and_then(intended_cluster);
                match cluster.and_then(keys_of) {
                    Some(keys) => handshake.into_stream(keys.server(Callers::Anyone)).await,
                    None => {
                        let unknown = rustls::CertificateError::ApplicationVerificationFailure;
                        Err(io::Error::other(rustls::Error::InvalidCertificate(unknown)))
                    }
                }
            };
            let secured = finish_handshake(accepting, Callers::Anyone, None, &refusals).await?;
            Some(Entering::Secured(Box::new(secured)))
        }
    })
}

/// First byte of a TLS handshake record. Plaintext HTTP/2 starts with a letter.
const HANDSHAKE_RECORD: u8 = 0x16;

/// Whether the caller speaks TLS; `None` if it sends nothing in time or disconnects.
async fn speaks_tls(stream: &TcpStream, refusals: &Refusals) -> Option<bool> {
    let mut first = [0];
    match timeout(HANDSHAKE_TIMEOUT, stream.peek(&mut first)).await {
        Ok(Ok(1)) => Some(first[0] == HANDSHAKE_RECORD),
        Ok(_) => None,
        Err(_) => {
            refusals.count(Reason::Timeout);
            None
        }
    }
}

/// Runs `secure` on every connection, several at a time.
fn handshake_each<T, F>(
    incoming: impl Stream<Item = io::Result<TcpStream>> + Send,
    secure: impl Fn(TcpStream) -> F + Send,
) -> impl Stream<Item = io::Result<T>> + Send
where
    T: Send,
    F: Future<Output = Option<T>> + Send,
{
    let handshakes = incoming.map(move |accepted| match accepted {
        Ok(stream) => secure(stream).map(|secured| secured.map(Ok)).left_future(),
        Err(error) => futures::future::ready(Some(Err(error))).right_future(),
    });
    handshakes.buffer_unordered(HANDSHAKES).filter_map(futures::future::ready)
}

/// Waits for a handshake, and authenticates the peer.
async fn finish_handshake(
    handshake: impl Future<Output = io::Result<TlsStream<TcpStream>>>,
    callers: Callers,
    lifetime: Option<Duration>,
    refusals: &Refusals,
) -> Option<TlsConnection> {
    let reject = |reason: Reason, error: &str| {
        refusals.count(reason);
        tracing::debug!(reason = reason.as_str(), error, "rejected a connection");
        None
    };
    let stream = match timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return reject(Reason::of(&error), &error.to_string()),
        Err(_) => return reject(Reason::Timeout, "too slow"),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).map(name);
    let caller = match (certificate, callers) {
        (Some(Ok(name)), _) => Caller::Authenticated(Arc::new(name)),
        (Some(Err(error)), _) => return reject(Reason::OtherCluster, &error.to_string()),
        (None, Callers::Anyone) => Caller::Anonymous,
        (None, Callers::Certified) => return reject(Reason::NoCertificate, "no certificate"),
    };
    Some(TlsConnection { stream, caller, end: lifetime.map(|lifetime| Box::pin(sleep(lifetime))) })
}

impl Connected for TlsConnection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for TlsConnection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.has_expired(cx) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "connection exceeded its maximum lifetime",
            )));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Entering {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        match self {
            Self::Clear(_) => Caller::Plaintext,
            Self::Secured(secured) => secured.connect_info(),
        }
    }
}

impl AsyncRead for Entering {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Clear(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Secured(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Entering {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Clear(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Clear(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secured(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secured(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
