//! The way to the processes of a cluster: straight over TCP, or through the API server of a Kubernetes.

use crate::error::said;
use crate::kubernetes::{Dialer, Forwarder};
use engram_api::ExitCode;
use engram_client::{Network, Stream, Token};
use engram_identity::{Expected, Followed, Keys, Role, Roots, token};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;

/// How addresses of a cluster are reached.
#[derive(Debug, Clone, Default)]
pub(crate) enum Route {
    /// As they stand.
    #[default]
    Direct,
    /// As they stand, over TLS; HTTP pages in clear.
    Secured(Arc<Keys>),
    /// The same, where calls carry a token.
    Carrying(Network),
    /// They are addresses of pods and Services, which mean nothing on this machine; over TLS where there is such a network.
    Forwarded(Arc<Forwarder>, Option<Network>),
}

impl Route {
    /// With the token in a file, to workers whom `authority` signed.
    ///
    /// # Errors
    /// A file cannot be read, or the token does not say for which cluster it is.
    pub(crate) fn carrying(authority: &Path, token: &Path) -> anyhow::Result<Self> {
        let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
        let roots = Followed::open("certificates of authorities", vec![authority.to_owned()], parse)?;
        let carried = Token::file(token)?;
        let Some(cluster) = token::cluster_of(&carried.text()) else {
            let message = format!(
                "--token-file: {} is for no cluster; needed: one audience, engram/<cluster id>",
                token.display()
            );
            return Err(said(ExitCode::Usage, message));
        };
        Ok(Self::Carrying(Network::carrying(carried, roots, cluster, Expected::any(Role::Worker))))
    }

    /// Opens a connection to `host:port`.
    ///
    /// # Errors
    /// Nobody is there.
    pub(crate) async fn open(&self, address: &str) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Direct | Self::Secured(_) | Self::Carrying(_) => Box::new(TcpStream::connect(address).await?),
            Self::Forwarded(forwarder, _) => Box::new(forwarder.open(address).await?),
        })
    }

    /// What is known better of why nobody was reached than that nobody was.
    pub(crate) fn failure(&self, error: anyhow::Error) -> anyhow::Error {
        match self {
            Self::Direct | Self::Secured(_) | Self::Carrying(_) => error,
            Self::Forwarded(forwarder, _) => forwarder.take_failure().unwrap_or(error),
        }
    }

    /// The same for the client library and for calls of gRPC.
    pub(crate) fn network(&self) -> Network {
        match self {
            Self::Direct => Network::default(),
            Self::Secured(keys) => Network::secured(Arc::clone(keys), Expected::any(Role::Worker)),
            Self::Carrying(network) | Self::Forwarded(_, Some(network)) => network.clone(),
            Self::Forwarded(forwarder, None) => Network::of(Dialer(Arc::clone(forwarder))),
        }
    }
}

/// Where a process listens, and the way there.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    /// `host:port`.
    pub(crate) address: String,
    /// How it is reached.
    pub(crate) route: Route,
}

impl Door {
    /// An address, reached this way.
    pub(crate) fn at(address: SocketAddr, route: &Route) -> Self {
        Self { address: address.to_string(), route: route.clone() }
    }
}

impl From<SocketAddr> for Door {
    fn from(address: SocketAddr) -> Self {
        Self { address: address.to_string(), route: Route::Direct }
    }
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}
