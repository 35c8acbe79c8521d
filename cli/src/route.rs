//! Connections to the processes of a cluster: direct TCP, or through the Kubernetes API server.

use crate::error::failure;
use crate::kubernetes::{Dialer, Forwarder};
use engram_api::ExitCode;
use engram_client::{Network, Stream, Token};
use engram_identity::{ExpectedPeer, Keys, Role, Roots, WatchedFiles, token};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;

/// How the addresses of a cluster are reached.
#[derive(Debug, Clone, Default)]
pub(crate) enum Route {
    /// TCP, plaintext.
    #[default]
    Direct,
    /// TCP with mutual TLS; HTTP pages are plaintext.
    Secured(Arc<Keys>),
    /// TCP with TLS; calls carry a token.
    Token(Network),
    /// Through the API server to addresses of pods and Services, which are not routable from here; with TLS if a network is given.
    Forwarded(Arc<Forwarder>, Option<Network>),
}

impl Route {
    /// Creates a route with the token of a file, to workers whose certificates are signed by `ca_file`.
    ///
    /// # Errors
    /// A file cannot be read, or the token has no cluster as audience.
    pub(crate) fn with_token(ca_file: &Path, token: &Path) -> anyhow::Result<Self> {
        let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
        let roots = WatchedFiles::open("CA certificates", vec![ca_file.to_owned()], parse)?;
        let token_source = Token::file(token)?;
        let Some(cluster) = token::cluster_of(&token_source.text()) else {
            let message = format!(
                "--token-file: the token in {} has no cluster as audience; required: one audience, engram/<cluster id>",
                token.display()
            );
            return Err(failure(ExitCode::Usage, message));
        };
        Ok(Self::Token(Network::with_token(token_source, roots, cluster, ExpectedPeer::any(Role::Worker))))
    }

    /// Opens a connection to `host:port`.
    ///
    /// # Errors
    /// The connection fails.
    pub(crate) async fn open(&self, address: &str) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Direct | Self::Secured(_) | Self::Token(_) => Box::new(TcpStream::connect(address).await?),
            Self::Forwarded(forwarder, _) => Box::new(forwarder.open(address).await?),
        })
    }

    /// Replaces a connection error by the reason that the API server gave, if any.
    pub(crate) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match self {
            Self::Direct | Self::Secured(_) | Self::Token(_) => error,
            Self::Forwarded(forwarder, _) => forwarder.take_failure().unwrap_or(error),
        }
    }

    /// Returns the network for the client library and for gRPC calls.
    pub(crate) fn network(&self) -> Network {
        match self {
            Self::Direct => Network::default(),
            Self::Secured(keys) => Network::with_tls(Arc::clone(keys), ExpectedPeer::any(Role::Worker)),
            Self::Token(network) | Self::Forwarded(_, Some(network)) => network.clone(),
            Self::Forwarded(forwarder, None) => Network::simulated(Dialer(Arc::clone(forwarder))),
        }
    }
}

/// Address of a process and the route to it.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// `host:port`.
    pub(crate) address: String,
    /// Route to the address.
    pub(crate) route: Route,
}

impl Endpoint {
    /// Creates an endpoint.
    pub(crate) fn at(address: SocketAddr, route: &Route) -> Self {
        Self { address: address.to_string(), route: route.clone() }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { address: address.to_string(), route: Route::Direct }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}
