//! Connections between the members of a generation over TCP.

use super::engine::{Connect, Generation};
use super::{Security, Shared};
use engram_collective::message::{HEADER_BYTES, Tag};
use engram_collective::transport::{Error, Secure, Tcp, TcpOptions, Transport, Wait};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Connects members over TCP.
pub(super) struct TcpConnect {
    pub(super) listener: TcpListener,
    pub(super) shared: Arc<Shared>,
    pub(super) security: Security,
}

impl Connect for TcpConnect {
    fn connect(&mut self, generation: &Generation, limit: Duration) -> Result<Box<dyn Transport + Send>, Error> {
        let addresses = generation.members.iter().enumerate().map(|(rank, (_, it))| resolve(rank, &it.reduce));
        let addresses: Vec<SocketAddr> = addresses.collect::<Result<_, _>>()?;
        let options = TcpOptions { connect: limit, ..TcpOptions::default() };
        let closed = |source| Error::Closed { rank: generation.rank, source: Some(source) };
        let secure = self.security.peers().map_err(closed)?;
        let secure = secure.as_ref().map(|it| it as &dyn Secure);
        let tcp = Tcp::connect(generation.rank, generation.number, &addresses, &self.listener, secure, options)?;
        Ok(Box::new(Counted { tcp, shared: Arc::clone(&self.shared) }))
    }
}

fn resolve(rank: usize, address: &str) -> Result<SocketAddr, Error> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("{address} has no IP address"));
    let closed = |source| Error::Closed { rank, source: Some(source) };
    address.to_socket_addrs().map_err(closed)?.next().ok_or_else(|| closed(unknown()))
}

/// Counts the bytes of messages.
struct Counted {
    tcp: Tcp,
    shared: Arc<Shared>,
}

impl Transport for Counted {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn ranks(&self) -> usize {
        self.tcp.ranks()
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        let bytes = (HEADER_BYTES + payload.len()) as u64;
        self.shared.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.tcp.send(to, tag, payload, wait)
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        self.tcp.receive(tag, into, wait)
    }
}
