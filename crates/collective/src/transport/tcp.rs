//! TCP between the ranks of a generation: several connections per peer, one thread, no queue of its own.
//!
//! Sockets are not blocking. While a rank waits to send, it reads what arrives, so that two ranks that send to each other always make progress.
//! The chunk number of a message selects its connection. Connections are plaintext, or secured by a [`Secure`] of the caller. Between processes of
//! one user and host the payload passes through shared memory instead of the sockets ([`shared`](super::shared)).

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::connect::Opening;
use super::socket::Socket;
use super::{Error, MAX_PARKED_BYTES, Parked, Secure, Transport, Wait};
use crate::message::{self, HEADER_BYTES, Tag};

/// How long a thread sleeps before it checks for cancellation, in milliseconds.
const SLICE_MS: u16 = 5;

/// Settings of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpOptions {
    /// Connections per peer, at least 1 and the same on all ranks; one through shared memory. Links above 10 Gbit/s need 2 to 4.
    pub streams: usize,
    /// How long to poll for bytes before the thread sleeps: shortens small reductions, uses a processor meanwhile.
    pub spin: Duration,
    /// Limit for a connection that fails, and for the answer of a peer.
    pub connect: Duration,
    /// Whether payloads have a checksum between processes of one host, too, where they never leave its memory. Both ends must agree.
    pub checksum_local: bool,
    /// Whether processes of one user and host exchange payloads through shared memory: at least twice as fast as the loopback interface.
    pub shared_memory: bool,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            streams: 1,
            spin: Duration::from_micros(50),
            connect: Duration::from_secs(2),
            checksum_local: false,
            shared_memory: true,
        }
    }
}

/// Bytes that passed the sockets, headers included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// A message that is being read.
#[derive(Debug)]
struct Stream {
    socket: Socket,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that are here.
    header_read: usize,
    /// Tag and length, once the header is complete.
    message: Option<(Tag, usize)>,
    /// Payload that is read without a request.
    early: Vec<u8>,
    payload_read: usize,
    /// The peer ended the connection.
    ended: bool,
    /// The payload has no checksum, since both ends are on one host.
    local: bool,
}

/// What one attempt to read did.
enum Step {
    Nothing,
    Moved,
    Complete(Tag),
}

impl Stream {
    /// Reads the rest of the header; returns whether it is complete.
    fn read_header(&mut self, rank: usize, counters: &mut Counters) -> Result<Step, Error> {
        let read = read_some(&mut self.socket, &mut self.header[self.header_read..], rank)?;
        self.header_read += read;
        counters.received += read as u64;
        if self.header_read < HEADER_BYTES {
            return Ok(if read > 0 { Step::Moved } else { Step::Nothing });
        }
        let decoded = message::decode(&self.header).map_err(|source| Error::Message { rank, source })?;
        self.message = Some(decoded);
        self.payload_read = 0;
        Ok(Step::Moved)
    }

    fn verify(&self, payload: &[u8]) -> Result<Tag, message::Error> {
        if self.local {
            message::verify_local(&self.header, payload.len())
        } else {
            message::verify(&self.header, payload)
        }
    }

    fn finish(&mut self) {
        self.header_read = 0;
        self.message = None;
    }

    /// Reads a message that was not requested into a buffer of `parked`.
    fn read_early(&mut self, rank: usize, parked: &mut Parked, counters: &mut Counters) -> Result<Step, Error> {
        let Some((tag, length)) = self.message else { return self.read_header(rank, counters) };
        if self.payload_read == 0 && self.early.len() != length {
            let buffer = parked.buffer(length);
            parked.recycle(std::mem::replace(&mut self.early, buffer));
        }
        let read = read_some(&mut self.socket, &mut self.early[self.payload_read..], rank)?;
        self.payload_read += read;
        counters.received += read as u64;
        if self.payload_read < length {
            return Ok(if read > 0 { Step::Moved } else { Step::Nothing });
        }
        self.verify(&self.early).map_err(|source| Error::Message { rank, source })?;
        self.finish();
        parked.put(rank, tag, std::mem::take(&mut self.early))?;
        Ok(Step::Complete(tag))
    }
}

/// Reads what is here; 0 if nothing is.
fn read_some(socket: &mut Socket, into: &mut [u8], rank: usize) -> Result<usize, Error> {
    if into.is_empty() {
        return Ok(0);
    }
    match socket.read(into) {
        Ok(0) => Err(Error::Closed { rank, source: None }),
        Ok(read) => Ok(read),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(Error::Closed { rank, source: Some(error) }),
    }
}

#[derive(Debug, Default)]
struct Peer {
    streams: Vec<Stream>,
    parked: Parked,
}

/// The connections of one rank.
#[derive(Debug)]
pub struct Tcp {
    rank: usize,
    spin: Duration,
    /// By rank; the own entry has no streams.
    peers: Vec<Peer>,
    counters: Counters,
}

impl Tcp {
    /// As [`Self::connect_within`], without an end and without a peer that is waited for longer than the limit of `options`.
    ///
    /// # Errors
    /// As [`Self::connect_within`].
    pub fn connect(
        rank: usize,
        generation: u64,
        addresses: &[SocketAddr],
        listener: &TcpListener,
        secure: Option<&dyn Secure>,
        options: TcpOptions,
    ) -> Result<Self, Error> {
        let (never, mut keep_waiting) = (AtomicBool::new(false), |_| false);
        let mut wait = Wait::new(options.connect, &never, &mut keep_waiting);
        Self::connect_within(rank, generation, addresses, listener, secure, options, &mut wait)
    }

    /// Connects to all ranks of a generation. `addresses` has the address of each rank's listener; this rank connects to those below it and accepts
    /// those above it. Connections of other generations are closed. With `secure` every connection is secured before its first byte, and its other
    /// end must be the process of its rank. A peer that does not answer may still compute, or wait for another one: `wait` decides for how long it is
    /// waited for.
    ///
    /// # Errors
    /// [`Error::Closed`] for a lower rank that cannot be reached within the limit of `options`; [`Error::Stalled`] and [`Error::Cancelled`] as `wait` says.
    pub fn connect_within(
        rank: usize,
        generation: u64,
        addresses: &[SocketAddr],
        listener: &TcpListener,
        secure: Option<&dyn Secure>,
        options: TcpOptions,
        wait: &mut Wait<'_>,
    ) -> Result<Self, Error> {
        let sockets = Opening { rank, generation, secure, options }.open(addresses, listener, wait)?;
        let mut peers = Vec::with_capacity(addresses.len());
        for (peer, sockets) in sockets.into_iter().enumerate() {
            let streams: io::Result<Vec<Stream>> =
                sockets.into_iter().flatten().map(|it| stream(it, options.checksum_local)).collect();
            let streams = streams.map_err(|source| Error::Closed { rank: peer, source: Some(source) })?;
            peers.push(Peer { streams, parked: Parked::default() });
        }
        Ok(Self { rank, spin: options.spin, peers, counters: Counters::default() })
    }

    /// Returns the bytes that passed the connections.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the largest number of connections to a peer.
    pub fn streams(&self) -> usize {
        self.peers.iter().map(|peer| peer.streams.len()).max().unwrap_or(0)
    }

    /// Returns the number of peers that are reached through shared memory.
    pub fn shared_connections(&self) -> usize {
        let streams = self.peers.iter().flat_map(|peer| &peer.streams);
        streams.filter(|stream| matches!(stream.socket, Socket::Shared(_))).count()
    }

    /// Reads what arrives without a request, except from the connection with index `except.1` of rank `except.0`; returns whether anything moved.
    fn read_all(&mut self, except: Option<(usize, usize)>) -> Result<bool, Error> {
        let mut moved = false;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            for (index, stream) in peer.streams.iter_mut().enumerate() {
                // A peer that is far ahead is read later: its next send waits.
                let full = peer.parked.bytes + message::MAX_PAYLOAD_BYTES > MAX_PARKED_BYTES;
                if stream.ended || full || except == Some((rank, index)) {
                    continue;
                }
                match stream.read_early(rank, &mut peer.parked, &mut self.counters) {
                    Ok(step) => moved |= !matches!(step, Step::Nothing),
                    // A peer that is done may leave. If something is missing, the request for it fails.
                    Err(Error::Closed { .. }) => stream.ended = true,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(moved)
    }

    /// Sleeps until something may be read, or written to a peer.
    fn sleep(&mut self, writable: Option<(usize, usize)>, waited: Duration) {
        if waited < self.spin {
            // Two ranks may share a processor.
            std::thread::yield_now();
            return;
        }
        let mut fds = Vec::with_capacity(16);
        let mut is_ready = false;
        for (rank, peer) in self.peers.iter().enumerate() {
            for (index, stream) in peer.streams.iter().enumerate().filter(|(_, it)| !it.ended) {
                let is_writable = writable == Some((rank, index));
                let mut flags = PollFlags::POLLIN;
                match &stream.socket {
                    Socket::Shared(shared) => is_ready |= shared.is_ready(is_writable),
                    _ => flags.set(PollFlags::POLLOUT, is_writable),
                }
                fds.push(PollFd::new(stream.socket.tcp().as_fd(), flags));
            }
        }
        if !is_ready {
            // An error is found again by the next read or write.
            poll(&mut fds, PollTimeout::from(SLICE_MS)).ok();
        }
        for stream in self.peers.iter_mut().flat_map(|peer| &mut peer.streams) {
            if let Socket::Shared(shared) = &mut stream.socket {
                shared.awake();
            }
        }
    }

    /// Sends the encrypted bytes that a secured connection still has.
    fn flush(&mut self, to: usize, index: usize, wait: &mut Wait<'_>) -> Result<(), Error> {
        loop {
            match self.peers[to].streams[index].socket.flush() {
                Ok(()) => return Ok(()),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if !self.read_all(None)? {
                        let waited = wait.idle(to)?;
                        self.sleep(Some((to, index)), waited);
                    }
                }
                Err(error) => return Err(Error::Closed { rank: to, source: Some(error) }),
            }
        }
    }

    fn stream_of(&self, peer: usize, tag: Tag) -> usize {
        usize::from(tag.chunk) % self.peers[peer].streams.len()
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        let index = self.stream_of(to, tag);
        let header = if self.peers[to].streams[index].local {
            message::local_header(tag, payload.len())
        } else {
            message::header(tag, payload)
        };
        let total = HEADER_BYTES + payload.len();
        let mut sent = 0;
        while sent < total {
            let rest = [
                IoSlice::new(&header[sent.min(HEADER_BYTES)..]),
                IoSlice::new(&payload[sent.saturating_sub(HEADER_BYTES)..]),
            ];
            match self.peers[to].streams[index].socket.write_vectored(&rest) {
                Ok(written) => {
                    sent += written;
                    self.counters.sent += written as u64;
                    wait.progress();
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if !self.read_all(None)? {
                        let waited = wait.idle(to)?;
                        self.sleep(Some((to, index)), waited);
                    }
                }
                Err(error) => return Err(Error::Closed { rank: to, source: Some(error) }),
            }
        }
        self.flush(to, index, wait)
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        let rank = usize::from(tag.from);
        if self.peers[rank].parked.take(tag, into)? {
            return Ok(());
        }
        let index = self.stream_of(rank, tag);
        loop {
            let Peer { streams, parked } = &mut self.peers[rank];
            let stream = &mut streams[index];
            let step = match stream.message {
                // The requested message is read where it belongs.
                Some((found, length)) if found == tag && stream.early.len() != length => {
                    if length != into.len() {
                        return Err(Error::Length { rank, found: length, expected: into.len() });
                    }
                    let read = read_some(&mut stream.socket, &mut into[stream.payload_read..], rank)?;
                    stream.payload_read += read;
                    self.counters.received += read as u64;
                    if stream.payload_read == length {
                        stream.verify(into).map_err(|source| Error::Message { rank, source })?;
                        stream.finish();
                        wait.progress();
                        return Ok(());
                    }
                    if read > 0 { Step::Moved } else { Step::Nothing }
                }
                _ => stream.read_early(rank, parked, &mut self.counters)?,
            };
            match step {
                Step::Complete(found) if found == tag => {
                    parked.take(tag, into)?;
                    wait.progress();
                    return Ok(());
                }
                Step::Complete(_) | Step::Moved => wait.progress(),
                // Other peers may wait to send: without this, ranks could wait for each other in a circle.
                Step::Nothing if self.read_all(Some((rank, index)))? => wait.progress(),
                Step::Nothing => {
                    let waited = wait.idle(rank)?;
                    self.sleep(None, waited);
                }
            }
        }
    }
}

fn stream(socket: Socket, checksum_local: bool) -> io::Result<Stream> {
    let local = matches!(socket, Socket::Shared(_)) || socket.tcp().peer_addr()?.ip().is_loopback();
    let local = local && !checksum_local;
    socket.tcp().set_nonblocking(true)?;
    Ok(Stream {
        socket,
        header: [0; HEADER_BYTES],
        header_read: 0,
        message: None,
        early: Vec::new(),
        payload_read: 0,
        ended: false,
        local,
    })
}
