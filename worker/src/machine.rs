//! Abstraction of the machine: clocks, network and store of a worker. A simulator provides its own.

use engram_client::Network;
use engram_identity::{Caller, TlsConnection};
use engram_memory::Incarnation;
use engram_store::peer::Peers;
use engram_store::{Clock, Handle, Recovery};
use futures::stream::BoxStream;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

/// A machine other than that of this process. It has no administration, no HTTP listener and no threads: heartbeats are a task.
pub struct Machine {
    /// Clocks.
    pub clock: Arc<dyn Clock>,
    /// Outgoing network.
    pub network: Network,
    /// Listener for clients.
    pub client: Listener,
    /// Listener for workers of the same cluster.
    pub peer: Listener,
    /// Opens and starts the store.
    pub open: Box<OpenStore>,
}

/// Opens and starts a store that sends through the given channels.
pub type OpenStore =
    dyn FnOnce(engram_store::Options, Box<dyn Peers>) -> Result<OpenedStore, engram_store::Error> + Send;

/// A started store.
pub struct OpenedStore {
    /// Handle of the store.
    pub store: Handle,
    /// Result of recovery.
    pub recovery: Recovery,
    /// First incarnation since which no write to the disk was lost.
    pub lossless_since: Incarnation,
    /// Name and threads of its device.
    pub device: (String, usize),
}

/// A bound listener.
pub struct Listener {
    /// Bound address.
    pub address: SocketAddr,
    /// Accepted connections.
    pub incoming: BoxStream<'static, io::Result<Connection>>,
}

/// A bidirectional byte stream.
pub trait Bytes: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Bytes for T {}

/// An accepted connection.
pub enum Connection {
    /// Plaintext TCP.
    Tcp(TcpStream),
    /// TLS over TCP.
    Tls(Box<TlsConnection>),
    /// Simulated.
    Simulated(Pin<Box<dyn Bytes>>),
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        match self {
            Self::Tls(secured) => secured.connect_info(),
            Self::Tcp(_) | Self::Simulated(_) => Caller::Plaintext,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Simulated(stream) => stream.as_mut().poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Simulated(stream) => stream.as_mut().poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Self::Simulated(stream) => stream.as_mut().poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Simulated(stream) => stream.as_mut().poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Self::Simulated(stream) => stream.as_mut().poll_write_vectored(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
            Self::Simulated(stream) => stream.is_write_vectored(),
        }
    }
}
