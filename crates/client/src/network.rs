//! The seam to the network: how connections are made.

use crate::plain;
use crate::token::Token;
use engram_identity::{Expected, Followed, Keys, Roots, connect_anonymously_over};
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

/// Makes connections, each with the deadlines and limits of its endpoint.
pub trait Dial: Send + Sync {
    /// A connection that is there.
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>>;

    /// A connection that is made when it is first used, and made again when it broke.
    fn connect_lazy(&self, endpoint: Endpoint) -> Channel;
}

/// Bytes both ways, however they go.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens ways for bytes to addresses that are not reached over TCP from here.
pub trait Open: Send + Sync {
    /// A way to `host:port`.
    fn open(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Stream>>>;
}

/// How connections are made: over TCP, over TLS, or as a simulator says.
#[derive(Clone, Default)]
pub struct Network(Way);

#[derive(Clone, Default)]
enum Way {
    #[default]
    Clear,
    Secured(Secured),
    Carrying(Carrying),
    Given(Arc<dyn Dial>),
}

impl Network {
    /// A network of a simulator's.
    pub fn of(dial: impl Dial + 'static) -> Self {
        Self(Way::Given(Arc::new(dial)))
    }

    /// TLS, where a process of the cluster that `keys` are of must answer, with the certificate that they hold at that moment.
    pub const fn secured(keys: Arc<Keys>, expected: Expected) -> Self {
        Self(Way::Secured(Secured { keys, expected }))
    }

    /// TLS, where a process of `cluster` must answer with a certificate that leads to `roots`; calls carry `token`, and no certificate
    /// is shown.
    pub const fn carrying(token: Token, roots: Arc<Followed<Roots>>, cluster: ClusterId, expected: Expected) -> Self {
        Self(Way::Carrying(Carrying { token, roots, cluster, expected, opener: None }))
    }

    /// The same over ways that `opener` opens. Without effect but where calls carry a token.
    #[must_use]
    pub fn through(self, opener: Arc<dyn Open>) -> Self {
        match self.0 {
            Way::Carrying(carrying) => Self(Way::Carrying(Carrying { opener: Some(opener), ..carrying })),
            way => Self(way),
        }
    }

    /// What calls carry as `authorization`, over TLS alone: in clear it would be anybody's.
    pub fn authorization(&self) -> Option<AsciiMetadataValue> {
        match &self.0 {
            Way::Carrying(carrying) => carrying.token.header(),
            _ => None,
        }
    }

    /// The same network towards others: over TLS `expected` must answer. Without TLS nobody can tell.
    #[must_use]
    pub fn to(&self, expected: Expected) -> Self {
        match &self.0 {
            Way::Secured(secured) => Self(Way::Secured(Secured { expected, ..secured.clone() })),
            Way::Carrying(carrying) => Self(Way::Carrying(Carrying { expected, ..carrying.clone() })),
            way => Self(way.clone()),
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// Nobody answers within the endpoint's deadline, or, over TLS, not who should.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, Error> {
        match &self.0 {
            Way::Clear => plain::connect(endpoint).await,
            Way::Secured(secured) => secured.connect(endpoint).await,
            Way::Carrying(carrying) => carrying.connect(endpoint).await,
            Way::Given(dial) => dial.connect(endpoint).await,
        }
    }

    /// Whether a simulator makes them: names are its own, too.
    pub const fn is_simulated(&self) -> bool {
        matches!(self.0, Way::Given(_))
    }

    /// A connection that is made when it is first used, and made again when it broke.
    pub fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        match &self.0 {
            Way::Clear => plain::connect_lazy(&endpoint),
            Way::Secured(secured) => secured.connect_lazy(endpoint),
            Way::Carrying(carrying) => carrying.connect_lazy(endpoint),
            Way::Given(dial) => dial.connect_lazy(endpoint),
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Way::Clear => "TCP",
            Way::Secured(_) => "TLS",
            Way::Carrying(_) => "TLS with a token",
            Way::Given(_) => "simulated",
        })
    }
}

/// Connections over TLS.
#[derive(Clone)]
struct Secured {
    keys: Arc<Keys>,
    expected: Expected,
}

impl Secured {
    /// To the address of `uri`; its scheme says nothing here.
    fn open(&self, uri: &Uri) -> BoxFuture<'static, io::Result<TokioIo<TlsStream<TcpStream>>>> {
        let Self { keys, expected } = self.clone();
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        Box::pin(async move { Ok(TokioIo::new(engram_identity::connect(&keys, expected, &address).await?)) })
    }
}

impl Dial for Secured {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let secured = self.clone();
        Box::pin(async move { endpoint.connect_with_connector(service_fn(move |uri| secured.open(&uri))).await })
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        let secured = self.clone();
        endpoint.connect_with_connector_lazy(service_fn(move |uri| secured.open(&uri)))
    }
}

/// Connections over TLS of whoever has a token and no certificate.
#[derive(Clone)]
struct Carrying {
    token: Token,
    roots: Arc<Followed<Roots>>,
    cluster: ClusterId,
    expected: Expected,
    opener: Option<Arc<dyn Open>>,
}

/// TLS over whatever way leads there.
type Opened = TokioIo<TlsStream<Box<dyn Stream>>>;

impl Carrying {
    fn open(&self, uri: &Uri) -> BoxFuture<'static, io::Result<Opened>> {
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
            roots.look_if_due();
            let roots = roots.current();
            Ok(TokioIo::new(connect_anonymously_over(&roots, cluster, expected, &address, stream).await?))
        })
    }
}

impl Dial for Carrying {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let carrying = self.clone();
        Box::pin(async move { endpoint.connect_with_connector(service_fn(move |uri| carrying.open(&uri))).await })
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        let carrying = self.clone();
        endpoint.connect_with_connector_lazy(service_fn(move |uri| carrying.open(&uri)))
    }
}
