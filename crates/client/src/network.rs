//! Abstraction of the network: how connections are made.

use crate::plain;
use crate::token::Token;
use engram_identity::{ExpectedPeer, Keys, Roots, WatchedFiles, connect_anonymously_over};
use engram_memory::ClusterId;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use std::fmt;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::codegen::http::Uri;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

/// Creates connections, each with the deadlines and limits of its endpoint.
pub trait Dial: Send + Sync {
    /// Connects now.
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>>;

    /// Returns a channel that connects at its first use, and reconnects when it breaks.
    fn connect_lazy(&self, endpoint: Endpoint) -> Channel;
}

/// A bidirectional byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens streams to addresses that are not directly reachable over TCP.
pub trait StreamOpener: Send + Sync {
    /// Opens a stream to `host:port`.
    fn open(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Stream>>>;
}

/// How connections are made: over TCP, over TLS, or by a simulator.
#[derive(Clone, Default)]
pub struct Network(Transport);

#[derive(Clone, Default)]
enum Transport {
    #[default]
    Plaintext,
    Tls(Tls),
    WithToken(WithToken),
    Simulated(Arc<dyn Dial>),
}

impl Network {
    /// Creates a simulated network.
    pub fn simulated(dial: impl Dial + 'static) -> Self {
        Self(Transport::Simulated(Arc::new(dial)))
    }

    /// Uses TLS with the current certificate of `keys`; a process of the same cluster must answer.
    pub const fn with_tls(keys: Arc<Keys>, expected: ExpectedPeer) -> Self {
        Self(Transport::Tls(Tls { keys, expected }))
    }

    /// Uses TLS without a client certificate: a process of `cluster` must answer with a certificate signed by one of
    /// `roots`, and calls carry `token`.
    pub const fn with_token(
        token: Token,
        roots: Arc<WatchedFiles<Roots>>,
        cluster: ClusterId,
        expected: ExpectedPeer,
    ) -> Self {
        Self(Transport::WithToken(WithToken { token, roots, cluster, expected, opener: None }))
    }

    /// Opens streams with `opener`. Only effective if calls carry a token.
    #[must_use]
    pub fn with_opener(self, opener: Arc<dyn StreamOpener>) -> Self {
        match self.0 {
            Transport::WithToken(with_token) => {
                Self(Transport::WithToken(WithToken { opener: Some(opener), ..with_token }))
            }
            transport => Self(transport),
        }
    }

    /// Returns the `authorization` metadata of calls. It is only sent over TLS.
    pub fn authorization(&self) -> Option<AsciiMetadataValue> {
        match &self.0 {
            Transport::WithToken(with_token) => with_token.token.header(),
            _ => None,
        }
    }

    /// Returns the same network for another `expected` peer. Without TLS peers are not verified.
    #[must_use]
    pub fn for_peer(&self, expected: ExpectedPeer) -> Self {
        match &self.0 {
            Transport::Tls(tls) => Self(Transport::Tls(Tls { expected, ..tls.clone() })),
            Transport::WithToken(with_token) => {
                Self(Transport::WithToken(WithToken { expected, ..with_token.clone() }))
            }
            transport => Self(transport.clone()),
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// No listener responds within the endpoint's deadline, or, over TLS, the wrong peer.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, Error> {
        match &self.0 {
            Transport::Plaintext => plain::connect(endpoint).await,
            Transport::Tls(tls) => tls.connect(endpoint).await,
            Transport::WithToken(with_token) => with_token.connect(endpoint).await,
            Transport::Simulated(dial) => dial.connect(endpoint).await,
        }
    }

    /// Whether connections are encrypted.
    pub const fn is_secured(&self) -> bool {
        matches!(self.0, Transport::Tls(_) | Transport::WithToken(_))
    }

    /// Whether a simulator makes connections: host names are simulated, too.
    pub const fn is_simulated(&self) -> bool {
        matches!(self.0, Transport::Simulated(_))
    }

    /// Returns a channel that connects at its first use, and reconnects when it breaks.
    pub fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        match &self.0 {
            Transport::Plaintext => plain::connect_lazy(&endpoint),
            Transport::Tls(tls) => tls.connect_lazy(endpoint),
            Transport::WithToken(with_token) => with_token.connect_lazy(endpoint),
            Transport::Simulated(dial) => dial.connect_lazy(endpoint),
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Transport::Plaintext => "TCP",
            Transport::Tls(_) => "TLS",
            Transport::WithToken(_) => "TLS with a token",
            Transport::Simulated(_) => "simulated",
        })
    }
}

/// TLS connections with a certificate.
#[derive(Clone)]
struct Tls {
    keys: Arc<Keys>,
    expected: ExpectedPeer,
}

impl Tls {
    /// Connects to the address of `uri`; its scheme is ignored.
    fn open(&self, uri: &Uri) -> BoxFuture<'static, io::Result<TokioIo<TlsStream<TcpStream>>>> {
        let Self { keys, expected } = self.clone();
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        Box::pin(async move { Ok(TokioIo::new(engram_identity::connect(&keys, expected, &address).await?)) })
    }
}

impl Dial for Tls {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let tls = self.clone();
        Box::pin(async move { endpoint.connect_with_connector(service_fn(move |uri| tls.open(&uri))).await })
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        let tls = self.clone();
        endpoint.connect_with_connector_lazy(service_fn(move |uri| tls.open(&uri)))
    }
}

/// TLS connections with a token instead of a certificate.
#[derive(Clone)]
struct WithToken {
    token: Token,
    roots: Arc<WatchedFiles<Roots>>,
    cluster: ClusterId,
    expected: ExpectedPeer,
    opener: Option<Arc<dyn StreamOpener>>,
}

/// TLS over any stream.
type TokenStream = TokioIo<TlsStream<Box<dyn Stream>>>;

impl WithToken {
    fn open(&self, uri: &Uri) -> BoxFuture<'static, io::Result<TokenStream>> {
        let Self { roots, cluster, expected, opener, .. } = self.clone();
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        Box::pin(async move {
            let stream: Box<dyn Stream> = match opener {
                Some(opener) => opener.open(&address).await?,
                None => {
                    let stream = TcpStream::connect(&address).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
            };
            roots.reload_if_due();
            let roots = roots.current();
            Ok(TokioIo::new(connect_anonymously_over(&roots, cluster, expected, &address, stream).await?))
        })
    }
}

impl Dial for WithToken {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let with_token = self.clone();
        Box::pin(async move { endpoint.connect_with_connector(service_fn(move |uri| with_token.open(&uri))).await })
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        let with_token = self.clone();
        endpoint.connect_with_connector_lazy(service_fn(move |uri| with_token.open(&uri)))
    }
}
