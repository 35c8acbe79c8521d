//! Mutual TLS between the members of a group, with the certificates of their workers.

use engram_client::group::SecuredSocket;
use engram_collective::transport::{Secure, Secured};
use engram_identity::{ExpectedPeer, Keys, Role, TlsSocket};
use std::io;
use std::net::TcpStream;

/// Application protocol of reductions: a connection to another listener of a worker fails.
const PROTOCOL: &[u8] = b"engram-reduce/1";

/// Secures the connections of a generation.
pub(in crate::training) struct PeerTls<'a> {
    pub(in crate::training) keys: &'a Keys,
    /// Ordinals of the workers, by rank.
    pub(in crate::training) ordinals: &'a [u32],
}

impl Secure for PeerTls<'_> {
    fn connect(&self, rank: usize, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        let ordinal = self.ordinals.get(rank).copied().ok_or(io::ErrorKind::NotFound)?;
        let expected = ExpectedPeer::one(Role::Worker, ordinal);
        Ok(Box::new(SecuredSocket(TlsSocket::connect(self.keys, expected, PROTOCOL, socket)?)))
    }

    fn accept(&self, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        Ok(Box::new(SecuredSocket(TlsSocket::accept(self.keys, PROTOCOL, socket)?)))
    }

    fn is_rank(&self, connection: &dyn Secured, rank: usize) -> bool {
        let connection = connection.as_any().downcast_ref::<SecuredSocket>();
        let (Some(peer), Some(ordinal)) = (connection.and_then(|it| it.0.peer()), self.ordinals.get(rank)) else {
            return false;
        };
        ExpectedPeer::one(Role::Worker, *ordinal).check(self.keys.name().cluster, peer).is_ok()
    }
}
