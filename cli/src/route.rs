//! The way to the processes of a cluster: straight over TCP, or through the API server of a Kubernetes.

use crate::kubernetes::{Dialer, Forwarder};
use engram_client::Network;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Bytes both ways, however they go.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// How addresses of a cluster are reached.
#[derive(Debug, Clone, Default)]
pub(crate) enum Route {
    /// As they stand.
    #[default]
    Direct,
    /// They are addresses of pods and Services, which mean nothing on this machine.
    Forwarded(Arc<Forwarder>),
}

impl Route {
    /// Opens a connection to `host:port`.
    ///
    /// # Errors
    /// Nobody is there.
    pub(crate) async fn open(&self, address: &str) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Direct => Box::new(TcpStream::connect(address).await?),
            Self::Forwarded(forwarder) => Box::new(forwarder.open(address).await?),
        })
    }

    /// What is known better of why nobody was reached than that nobody was.
    pub(crate) fn failure(&self, error: anyhow::Error) -> anyhow::Error {
        match self {
            Self::Direct => error,
            Self::Forwarded(forwarder) => forwarder.take_failure().unwrap_or(error),
        }
    }

    /// The same for the client library and for calls of gRPC.
    pub(crate) fn network(&self) -> Network {
        match self {
            Self::Direct => Network::default(),
            Self::Forwarded(forwarder) => Network::of(Dialer(Arc::clone(forwarder))),
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
