//! A connection to a peer: plaintext, secured by the caller, or through shared memory; and how it is opened.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, SockRef, Type};

use super::shared::{self, OFFER_BYTES, Offer, SharedSocket};
use super::{Secure, Secured};

/// First bytes of a connection.
const MAGIC: [u8; 8] = *b"engrred2";
/// Magic, generation, rank, stream, and whether shared memory is requested.
const HELLO_BYTES: usize = 8 + 8 + 2 + 2 + 1;
const ACCEPTED: u8 = 1;
/// The generation is accepted, and an offer of shared memory follows.
const OFFERED: u8 = 2;
/// Congestion control between two processes of one host, which every kernel has. Nothing is lost to congestion there, and a pace, as that of bbr,
/// makes reductions of 16 MB take 1.6 times as long.
const LOCAL_CONGESTION: &[u8] = b"reno";

/// A connection to a peer.
#[derive(Debug)]
pub(super) enum Socket {
    Plain(TcpStream),
    Secured(Box<dyn Secured>),
    Shared(SharedSocket),
}

impl Socket {
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Secured(secured) => secured.socket(),
            Self::Shared(shared) => shared.socket(),
        }
    }

    /// Whether both ends are at the same address: then they may be on one host.
    fn is_local(&self) -> io::Result<bool> {
        Ok(self.tcp().peer_addr()?.ip() == self.tcp().local_addr()?.ip())
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(into),
            Self::Secured(secured) => secured.read(into),
            Self::Shared(shared) => shared.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write_vectored(slices),
            Self::Secured(secured) => secured.write_vectored(slices),
            Self::Shared(shared) => shared.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Secured(secured) => secured.flush(),
            Self::Shared(shared) => shared.flush(),
        }
    }
}

pub(super) fn hello(generation: u64, rank: usize, stream: usize) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&generation.to_le_bytes());
    bytes[16..18].copy_from_slice(&(rank as u16).to_le_bytes());
    bytes[18..20].copy_from_slice(&(stream as u16).to_le_bytes());
    bytes
}

/// Sets the options of a socket at the start of a connection: blocking, each read and write limited.
fn prepared(socket: TcpStream, limit: Option<Duration>) -> io::Result<TcpStream> {
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(limit)?;
    socket.set_write_timeout(limit)?;
    if socket.peer_addr()?.ip() == socket.local_addr()?.ip() {
        // A host may forbid the choice: then the connection is slower.
        let _ = SockRef::from(&socket).set_tcp_congestion(LOCAL_CONGESTION);
    }
    Ok(socket)
}

/// Begins to connect to an address.
pub(super) fn begin(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::EINPROGRESS as i32) => {}
        result => result?,
    }
    Ok(socket.into())
}

/// Waits until a socket is connected, at most `limit`; returns whether it is.
pub(super) fn is_connected(socket: &TcpStream, limit: Duration) -> io::Result<bool> {
    if !is_ready(socket, PollFlags::POLLOUT, limit)? {
        return Ok(false);
    }
    socket.take_error()?.map_or(Ok(true), Err)
}

/// Waits until a listener has a connection, at most `limit`; returns whether it has one.
pub(super) fn has_connection(listener: &TcpListener, limit: Duration) -> bool {
    is_ready(listener, PollFlags::POLLIN, limit).unwrap_or(false)
}

fn is_ready(socket: &impl AsFd, flags: PollFlags, limit: Duration) -> io::Result<bool> {
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(socket.as_fd(), flags)], timeout) {
        Err(Errno::EINTR) => Ok(false),
        result => Ok(result? > 0),
    }
}

/// Greets a peer over a connected socket; returns once it has accepted the generation. `secure` has the rank that must answer. `shared` requests
/// shared memory on one host.
pub(super) fn greet(
    tcp: TcpStream,
    secure: Option<(&dyn Secure, usize)>,
    mut hello: [u8; HELLO_BYTES],
    shared: bool,
) -> io::Result<Socket> {
    // The peer accepts once it has computed. The caller ends the wait.
    let tcp = prepared(tcp, None)?;
    let mut socket = match secure {
        Some((secure, rank)) => Socket::Secured(secure.connect(rank, tcp)?),
        None => Socket::Plain(tcp),
    };
    hello[HELLO_BYTES - 1] = u8::from(shared && socket.is_local()?);
    socket.write_all(&hello)?;
    socket.flush()?;
    let mut answer = [0];
    socket.read_exact(&mut answer)?;
    match answer {
        [ACCEPTED] => Ok(socket),
        [OFFERED] => open_offer(socket),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Reads an offer of shared memory. If it is for another host, the connection remains as it is.
fn open_offer(mut socket: Socket) -> io::Result<Socket> {
    let mut offer = [0; OFFER_BYTES];
    socket.read_exact(&mut offer)?;
    let region = shared::open(&offer).ok();
    socket.write_all(&[u8::from(region.is_some())])?;
    socket.flush()?;
    let Some(region) = region else { return Ok(socket) };
    Ok(Socket::Shared(SharedSocket::new(socket.tcp().try_clone()?, region, 1)?))
}

/// Accepts a generation, and offers shared memory if it is requested and there is some.
fn answer(mut socket: Socket, shared: bool) -> io::Result<Socket> {
    let Some(offer) = shared.then(Offer::create).and_then(Result::ok) else {
        socket.write_all(&[ACCEPTED])?;
        socket.flush()?;
        return Ok(socket);
    };
    socket.write_all(&[OFFERED])?;
    socket.write_all(&offer.encode())?;
    socket.flush()?;
    let mut reply = [0];
    socket.read_exact(&mut reply)?;
    if reply != [1] {
        return Ok(socket);
    }
    Ok(Socket::Shared(offer.accept(socket.tcp().try_clone()?)?))
}

/// Receives the hello of an accepted connection and answers it; `None` if it belongs to another generation, or is not of the process of its rank.
/// Offers shared memory if `shared`; each read may take `limit`.
pub(super) fn receive(
    tcp: TcpStream,
    secure: Option<&dyn Secure>,
    generation: u64,
    (shared, limit): (bool, Duration),
) -> io::Result<Option<(usize, usize, Socket)>> {
    let tcp = prepared(tcp, Some(limit))?;
    let mut socket = match secure {
        Some(secure) => Socket::Secured(secure.accept(tcp)?),
        None => Socket::Plain(tcp),
    };
    let mut bytes = [0; HELLO_BYTES];
    socket.read_exact(&mut bytes)?;
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    if bytes[..8] != MAGIC || bytes[8..16] != generation.to_le_bytes() {
        return Ok(None);
    }
    if let (Some(secure), Socket::Secured(secured)) = (secure, &socket)
        && !secure.is_rank(&**secured, number(16))
    {
        return Ok(None);
    }
    let is_shared = shared && bytes[HELLO_BYTES - 1] == 1 && socket.is_local()?;
    Ok(Some((number(16), number(18), answer(socket, is_shared)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_within_a_host_is_not_paced() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limit = Duration::from_secs(5);
        let dialed = prepared(TcpStream::connect(listener.local_addr().unwrap()).unwrap(), Some(limit)).unwrap();
        let accepted = prepared(listener.accept().unwrap().0, Some(limit)).unwrap();
        for socket in [dialed, accepted] {
            let name = SockRef::from(&socket).tcp_congestion().unwrap();
            assert!(name.starts_with(LOCAL_CONGESTION), "{}", String::from_utf8_lossy(&name));
        }
    }
}
