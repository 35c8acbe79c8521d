//! TLS on sockets that a thread reads and writes without a runtime, blocking or not.

use crate::material::Callers;
use crate::verify::name;
use crate::{ExpectedPeer, Keys, Name, SharedCertificate, dial};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::fmt;
use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Bytes that one read takes from the socket: TLS itself would ask for 4 KiB at a time.
const READ_BYTES: usize = 64 << 10;

/// A TLS connection over a socket. It reads and writes as the socket does: where that would block, so does this.
pub struct TlsSocket {
    socket: BufReader<TcpStream>,
    connection: Connection,
    /// `None` for a shared certificate.
    peer: Option<Name>,
}

impl fmt::Debug for TlsSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSocket").field("peer", &self.peer).finish_non_exhaustive()
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl TlsSocket {
    /// Performs the handshake on a blocking socket whose other end must be the `expected` process and accept
    /// connections of `protocol` (an ALPN name). The other end has accepted this process only once it has answered
    /// something.
    ///
    /// # Errors
    /// Another process or protocol answered, or the socket failed or timed out.
    pub fn connect(keys: &Keys, expected: ExpectedPeer, protocol: &[u8], socket: TcpStream) -> io::Result<Self> {
        let mut config = (*keys.client(expected)).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        let server_name = dial::server_name(keys.name().cluster);
        let connection = ClientConnection::new(Arc::new(config), server_name).map_err(invalid)?;
        Self::secure(connection.into(), protocol, socket)?.named()
    }

    /// Performs the handshake on a blocking socket that a listener for `protocol` accepted. The other end is an
    /// authenticated process of the same cluster, see [`Self::peer`].
    ///
    /// # Errors
    /// The caller has no valid certificate or uses another protocol, or the socket failed or timed out.
    pub fn accept(keys: &Keys, protocol: &[u8], socket: TcpStream) -> io::Result<Self> {
        let mut config = (*keys.server(Callers::Certified)).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        let connection = ServerConnection::new(Arc::new(config)).map_err(invalid)?;
        Self::secure(connection.into(), protocol, socket)?.named()
    }

    /// As [`Self::connect`], to a process that has the same shared certificate.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_shared(shared: &SharedCertificate, protocol: &[u8], socket: TcpStream) -> io::Result<Self> {
        // It is not checked: the certificate names nothing.
        let name = ServerName::try_from("group.engram").expect("it is a valid host name");
        let connection = ClientConnection::new(shared.dialer(protocol), name).map_err(invalid)?;
        Self::secure(connection.into(), protocol, socket)
    }

    /// As [`Self::accept`], from a process that has the same shared certificate.
    ///
    /// # Errors
    /// As [`Self::accept`].
    pub fn accept_shared(shared: &SharedCertificate, protocol: &[u8], socket: TcpStream) -> io::Result<Self> {
        let connection = ServerConnection::new(shared.listener(protocol)).map_err(invalid)?;
        Self::secure(connection.into(), protocol, socket)
    }

    fn secure(mut connection: Connection, protocol: &[u8], mut socket: TcpStream) -> io::Result<Self> {
        while connection.is_handshaking() {
            connection.complete_io(&mut socket)?;
        }
        if connection.alpn_protocol() != Some(protocol) {
            return Err(invalid("the peer uses another protocol"));
        }
        Ok(Self { socket: BufReader::with_capacity(READ_BYTES, socket), connection, peer: None })
    }

    /// Reads the name in the certificate of the peer.
    fn named(mut self) -> io::Result<Self> {
        let certificate = self.connection.peer_certificates().and_then(<[_]>::first);
        let certificate = certificate.ok_or_else(|| invalid("the peer has no certificate"))?;
        self.peer = Some(name(certificate).map_err(invalid)?);
        Ok(self)
    }

    /// Returns the authenticated process at the other end; `None` for a shared certificate, which names none.
    pub const fn peer(&self) -> Option<&Name> {
        self.peer.as_ref()
    }

    /// Returns the socket, to wait for it or to change its timeouts.
    pub fn socket(&self) -> &TcpStream {
        self.socket.get_ref()
    }

    /// Writes what is encrypted already.
    fn drain(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            if self.connection.write_tls(self.socket.get_mut())? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }
}

/// Whether an operation has to be repeated later.
fn is_blocked(result: &io::Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

impl Read for TlsSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
            if self.connection.read_tls(&mut self.socket)? == 0 {
                return Ok(0);
            }
            let processed = self.connection.process_new_packets().map_err(invalid);
            // An alert, or an answer to a change of keys.
            let drained = self.drain();
            processed?;
            if !is_blocked(&drained) {
                drained?;
            }
        }
    }
}

impl Write for TlsSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    /// Encrypts as many bytes as fit into a bounded buffer. They are sent by the next calls, at the latest by [`Write::flush`].
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.drain()?;
        let written = self.connection.writer().write_vectored(slices)?;
        let drained = self.drain();
        if !is_blocked(&drained) {
            drained?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain()
    }
}
