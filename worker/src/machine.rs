//! The seam to the machine: clocks, network and store of a worker. A simulator gives its own.

use engram_client::Network;
use engram_identity::{Caller, Secured};
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

/// A machine that is not the one of this process. There is no administration and no HTTP page on it, and no thread: beats are a
/// task like any other.
pub struct Machine {
    /// Its clocks.
    pub clock: Arc<dyn Clock>,
    /// How the worker reaches others.
    pub network: Network,
    /// The listener for clients.
    pub client: Listening,
    /// The listener for workers of the same cluster.
    pub peer: Listening,
    /// Opens and starts the store.
    pub open: Box<Open>,
}

/// Opens and starts a store that speaks to others as it is told.
pub type Open = dyn FnOnce(engram_store::Options, Box<dyn Peers>) -> Result<Opened, engram_store::Error> + Send;

/// A store that was started.
pub struct Opened {
    /// The way to it.
    pub store: Handle,
    /// What was found on its disk.
    pub recovery: Recovery,
    /// Since which of its processes nothing was lost on that disk.
    pub lossless_since: Incarnation,
    /// The device that passes over its memories, with its threads.
    pub device: (String, usize),
}

/// A listener that is bound.
pub struct Listening {
    /// Where.
    pub address: SocketAddr,
    /// What it accepts.
    pub incoming: BoxStream<'static, io::Result<Connection>>,
}

/// Bytes in both directions.
pub trait Bytes: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Bytes for T {}

/// An accepted connection.
pub enum Connection {
    /// Of the network of this machine.
    Tcp(TcpStream),
    /// Of the same, over TLS.
    Tls(Box<Secured>),
    /// Of a simulated one.
    Simulated(Pin<Box<dyn Bytes>>),
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        match self {
            Self::Tls(secured) => secured.connect_info(),
            Self::Tcp(_) | Self::Simulated(_) => Caller::Clear,
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
