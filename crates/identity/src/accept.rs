//! TLS on the connections that a listener accepts.

use crate::dial::{HANDSHAKE, meant};
use crate::material::Callers;
use crate::verify::name;
use crate::{Expected, Keys, Name, Reason, Refusals, Role};
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

/// Handshakes at a time; who comes later waits for one of them to end, a few seconds at most.
const HANDSHAKES: usize = 256;

/// A connection over TLS, from whoever its caller is.
pub struct Secured {
    stream: TlsStream<TcpStream>,
    caller: Caller,
    end: Option<Pin<Box<Sleep>>>,
}

impl Secured {
    /// Whether its time is over.
    fn has_ended(&mut self, cx: &mut Context<'_>) -> bool {
        self.end.as_mut().is_some_and(|end| end.is_elapsed() || end.as_mut().poll(cx).is_ready())
    }
}

/// Who is on the other side of a connection. Handlers find it among the extensions of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Caller {
    /// Somebody, in clear: may do everything. Who wants to know who it is, listens with TLS.
    #[default]
    Clear,
    /// Somebody without a certificate, over TLS: may do nothing but what it proves otherwise.
    Anonymous,
    /// The process that its certificate names.
    Known(Arc<Name>),
}

impl Caller {
    /// Who makes a call.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// Its name, if it is known.
    pub fn name(&self) -> Option<&Name> {
        match self {
            Self::Known(name) => Some(name),
            Self::Clear | Self::Anonymous => None,
        }
    }

    /// Whether it may do what these roles may.
    pub fn is_any(&self, roles: &[Role]) -> bool {
        match self {
            Self::Clear => true,
            Self::Anonymous => false,
            Self::Known(name) => roles.contains(&name.role),
        }
    }

    /// Whether it is the worker that a message says it is from.
    pub fn is_worker(&self, ordinal: u32) -> bool {
        let expected = Expected::one(Role::Worker, ordinal);
        match self {
            Self::Clear => true,
            Self::Anonymous => false,
            Self::Known(name) => expected.check(name.cluster, name).is_ok(),
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clear => f.write_str("a caller in clear"),
            Self::Anonymous => f.write_str("a caller without a certificate"),
            Self::Known(name) => f.write_str(&name.process()),
        }
    }
}

/// Puts TLS on connections, several at a time; those that fail are counted and dropped. A connection ends when it has lived for
/// `lifetime`, whatever goes on over it: a certificate is shown at its beginning alone. Without one it lasts until it breaks.
pub fn accept(
    incoming: impl Stream<Item = io::Result<TcpStream>> + Send,
    keys: Arc<Keys>,
    callers: Callers,
    lifetime: Option<Duration>,
) -> impl Stream<Item = io::Result<Secured>> + Send {
    each(incoming, move |stream| {
        let keys = Arc::clone(&keys);
        async move {
            let accepting = TlsAcceptor::from(keys.server(callers)).accept(stream);
            finished(accepting, callers, lifetime, keys.refusals()).await
        }
    })
}

/// A connection to a listener of several clusters.
pub enum Entering {
    /// In clear: its caller may belong to a cluster without certificates.
    Clear(TcpStream),
    /// Over TLS, with the keys of the cluster that its caller means.
    Secured(Box<Secured>),
}

/// The same for several clusters behind one listener, with certificates and without: each caller says which one it means, and is
/// answered with the keys that `keys_of` has for it. Callers need no certificate here, since who asks for its first one has none.
/// Connections last until they break.
pub fn accept_of<K>(
    incoming: impl Stream<Item = io::Result<TcpStream>> + Send,
    keys_of: K,
    refusals: Arc<Refusals>,
) -> impl Stream<Item = io::Result<Entering>> + Send
where
    K: Fn(ClusterId) -> Option<Arc<Keys>> + Clone + Send,
{
    each(incoming, move |stream| {
        let (keys_of, refusals) = (keys_of.clone(), Arc::clone(&refusals));
        async move {
            if !speaks_tls(&stream, &refusals).await? {
                return Some(Entering::Clear(stream));
            }
            let accepting = async {
                let begun = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
                let cluster = begun.client_hello().server_name().and_then(meant);
                match cluster.and_then(keys_of) {
                    Some(keys) => begun.into_stream(keys.server(Callers::Anyone)).await,
                    None => {
                        let unknown = rustls::CertificateError::ApplicationVerificationFailure;
                        Err(io::Error::other(rustls::Error::InvalidCertificate(unknown)))
                    }
                }
            };
            let secured = finished(accepting, Callers::Anyone, None, &refusals).await?;
            Some(Entering::Secured(Box::new(secured)))
        }
    })
}

/// The first byte of TLS: a record of a handshake. HTTP/2 in clear begins with a letter.
const HANDSHAKE_RECORD: u8 = 0x16;

/// Whether the caller begins with TLS; `None` where it says nothing in time, or goes.
async fn speaks_tls(stream: &TcpStream, refusals: &Refusals) -> Option<bool> {
    let mut first = [0];
    match timeout(HANDSHAKE, stream.peek(&mut first)).await {
        Ok(Ok(1)) => Some(first[0] == HANDSHAKE_RECORD),
        Ok(_) => None,
        Err(_) => {
            refusals.count(Reason::Timeout);
            None
        }
    }
}

/// Does what is to be done with each connection, several at a time.
fn each<T, F>(
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

/// Waits for a handshake, and looks at who is there.
async fn finished(
    handshake: impl Future<Output = io::Result<TlsStream<TcpStream>>>,
    callers: Callers,
    lifetime: Option<Duration>,
    refusals: &Refusals,
) -> Option<Secured> {
    let refused = |reason: Reason, error: &str| {
        refusals.count(reason);
        tracing::debug!(reason = reason.word(), error, "refused a connection");
        None
    };
    let stream = match timeout(HANDSHAKE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return refused(Reason::of(&error), &error.to_string()),
        Err(_) => return refused(Reason::Timeout, "too slow"),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).map(name);
    let caller = match (certificate, callers) {
        (Some(Ok(name)), _) => Caller::Known(Arc::new(name)),
        (Some(Err(error)), _) => return refused(Reason::OtherCluster, &error.to_string()),
        (None, Callers::Anyone) => Caller::Anonymous,
        (None, Callers::Certified) => return refused(Reason::NoCertificate, "no certificate"),
    };
    Some(Secured { stream, caller, end: lifetime.map(|lifetime| Box::pin(sleep(lifetime))) })
}

impl Connected for Secured {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Secured {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.has_ended(cx) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "this connection is too old")));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Secured {
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
            Self::Clear(_) => Caller::Clear,
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
