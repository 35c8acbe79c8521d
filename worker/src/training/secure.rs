//! Mutual TLS between the members of a group, with the certificates of their workers.

use engram_collective::transport::{Secure, Secured};
use engram_identity::{ExpectedPeer, Keys, Role, TlsSocket};
use std::any::Any;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// Application protocol of reductions: a connection to another listener of a worker fails.
const PROTOCOL: &[u8] = b"engram-reduce/1";

/// Secures the connections of a generation.
pub(super) struct PeerTls<'a> {
    pub(super) keys: &'a Keys,
    /// Ordinals of the workers, by rank.
    pub(super) ordinals: &'a [u32],
}

#[derive(Debug)]
struct Connection(TlsSocket);

impl Secure for PeerTls<'_> {
    fn connect(&self, rank: usize, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        let ordinal = self.ordinals.get(rank).copied().ok_or(io::ErrorKind::NotFound)?;
        let expected = ExpectedPeer::one(Role::Worker, ordinal);
        Ok(Box::new(Connection(TlsSocket::connect(self.keys, expected, PROTOCOL, socket)?)))
    }

    fn accept(&self, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        Ok(Box::new(Connection(TlsSocket::accept(self.keys, PROTOCOL, socket)?)))
    }

    fn is_rank(&self, connection: &dyn Secured, rank: usize) -> bool {
        let (Some(connection), Some(ordinal)) =
            (connection.as_any().downcast_ref::<Connection>(), self.ordinals.get(rank))
        else {
            return false;
        };
        ExpectedPeer::one(Role::Worker, *ordinal).check(self.keys.name().cluster, connection.0.peer()).is_ok()
    }
}

impl Secured for Connection {
    fn socket(&self) -> &TcpStream {
        self.0.socket()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
