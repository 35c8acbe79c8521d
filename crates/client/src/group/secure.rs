//! TLS between the processes of a group, with the certificate that they share.

use engram_collective::transport::{Secure, Secured};
use engram_identity::{SharedCertificate, TlsSocket};
use parking_lot::Mutex;
use std::any::Any;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Application protocols: a connection to the other listener of a process fails.
const REDUCE: &[u8] = b"engram-group-reduce/1";
const STATE: &[u8] = b"engram-group-state/1";

/// How the connections between the processes of a group are secured.
#[derive(Debug, Clone, Default)]
pub struct Security {
    /// `None` in a cluster without TLS.
    shared: Option<Arc<Mutex<Option<SharedCertificate>>>>,
}

impl Security {
    /// Returns a security that requires a certificate, which the membership service sends.
    pub(super) fn required() -> Self {
        Self { shared: Some(Arc::default()) }
    }

    /// Keeps the certificate of the membership service; returns whether there is one if it is required.
    pub(super) fn receive(&self, received: Option<SharedCertificate>) -> bool {
        let Some(shared) = &self.shared else { return true };
        let is_there = received.is_some();
        *shared.lock() = received;
        is_there
    }

    /// Returns the present certificate, `None` if connections are plaintext.
    fn certificate(&self) -> io::Result<Option<SharedCertificate>> {
        let Some(shared) = &self.shared else { return Ok(None) };
        let missing = || io::Error::new(ErrorKind::NotConnected, "the membership service has sent no certificate yet");
        shared.lock().clone().map(Some).ok_or_else(missing)
    }

    /// Returns what secures the connections of a generation.
    pub(super) fn peers(&self) -> io::Result<Option<PeerTls>> {
        Ok(self.certificate()?.map(PeerTls))
    }

    /// Secures a connection for states that this process opened.
    pub(super) fn connect_state(&self, socket: TcpStream) -> io::Result<StateSocket> {
        Ok(match self.certificate()? {
            None => StateSocket::Plain(socket),
            Some(shared) => StateSocket::Secured(Box::new(TlsSocket::connect_shared(&shared, STATE, socket)?)),
        })
    }

    /// Secures a connection for states that this process accepted.
    pub(super) fn accept_state(&self, socket: TcpStream) -> io::Result<StateSocket> {
        Ok(match self.certificate()? {
            None => StateSocket::Plain(socket),
            Some(shared) => StateSocket::Secured(Box::new(TlsSocket::accept_shared(&shared, STATE, socket)?)),
        })
    }
}

/// Secures connections for reductions.
pub(super) struct PeerTls(SharedCertificate);

impl Secure for PeerTls {
    fn connect(&self, _rank: usize, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        Ok(Box::new(SecuredSocket(TlsSocket::connect_shared(&self.0, REDUCE, socket)?)))
    }

    fn accept(&self, socket: TcpStream) -> io::Result<Box<dyn Secured>> {
        Ok(Box::new(SecuredSocket(TlsSocket::accept_shared(&self.0, REDUCE, socket)?)))
    }

    /// The certificate is that of all members, which trust each other: any of them could send wrong sums as well.
    fn is_rank(&self, _connection: &dyn Secured, _rank: usize) -> bool {
        true
    }
}

/// A TLS connection between members of a group.
#[derive(Debug)]
pub struct SecuredSocket(pub TlsSocket);

impl Secured for SecuredSocket {
    fn socket(&self) -> &TcpStream {
        self.0.socket()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Read for SecuredSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for SecuredSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A connection over which a state is copied.
pub(super) enum StateSocket {
    Plain(TcpStream),
    Secured(Box<TlsSocket>),
}

impl Read for StateSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(into),
            Self::Secured(socket) => socket.read(into),
        }
    }
}

impl Write for StateSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Secured(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.flush(),
            Self::Secured(socket) => socket.flush(),
        }
    }
}
