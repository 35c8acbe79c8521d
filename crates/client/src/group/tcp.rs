//! Connections between the members of a generation over TCP.

use super::engine::{Connect, Generation};
use super::{Security, Shared};
use engram_collective::message::{HEADER_BYTES, Tag};
use engram_collective::transport::{Error, Secure, Tcp, TcpOptions, Transport, Wait, resolve};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Connects members over TCP.
pub(super) struct TcpConnect {
    pub(super) listener: TcpListener,
    pub(super) shared: Arc<Shared>,
    pub(super) security: Security,
}

impl Connect for TcpConnect {
    fn connect(&mut self, generation: &Generation, wait: &mut Wait<'_>) -> Result<Box<dyn Transport + Send>, Error> {
        let Generation { number, members, rank, .. } = generation;
        let addresses: Vec<String> = members.iter().map(|(_, it)| it.reduce.clone()).collect();
        let addresses = resolve(*rank, &addresses, wait)?;
        let options = TcpOptions { connect: wait.limit(), ..TcpOptions::default() };
        let closed = |source| Error::Closed { rank: *rank, source: Some(source) };
        let secure = self.security.peers().map_err(closed)?;
        let secure = secure.as_ref().map(|it| it as &dyn Secure);
        let tcp = Tcp::connect_within(*rank, *number, &addresses, &self.listener, secure, options, wait)?;
        Ok(Box::new(Counted { tcp, shared: Arc::clone(&self.shared) }))
    }
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
