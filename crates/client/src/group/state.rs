//! Copies of the state for members that join or missed a step: fetched in chunks from all members that have it, each chunk checked.
//!
//! ```text
//! request:   magic (8)  kind (1)  step (8)  digest (8)  chunk (4)
//! answer of a manifest:  found (1)  step (8)  digest (8)  bytes (8)  a checksum (8) per chunk
//! answer of a chunk:     found (1)  bytes (8)  content
//! ```
//!
//! The first member names the checksums. A chunk of another member that does not match, for example since buffers of a normalization differ, is
//! fetched from the first.

use super::secure::StateSocket;
use super::{PeerAddress, Security, State};
use engram_collective::group::Position;
use parking_lot::Mutex;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// First bytes of a request.
const MAGIC: [u8; 8] = *b"engrsta1";
const MANIFEST: u8 = 0;
const CHUNK: u8 = 1;
const REQUEST_BYTES: usize = 8 + 1 + 8 + 8 + 4;
/// Bytes of a chunk: a damaged one is fetched again in milliseconds.
const CHUNK_BYTES: usize = 1 << 20;
/// Largest state: parameters and optimizer state of the largest model that is meant for gradients over TCP.
const MAX_BYTES: u64 = 16 << 30;
/// Connections served at once: every other member may join at the same time.
const MAX_CONNECTIONS: usize = 64;
/// Limit of a read or write on a connection.
const IO_DEADLINE: Duration = Duration::from_secs(10);
/// How often the listener checks whether it should end: a thread that waits in `accept` cannot be interrupted.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(50);

/// The state of this process after some step.
#[derive(Debug, Clone)]
pub struct StateCopy {
    /// Where it is.
    pub position: Position,
    /// What a joiner installs.
    pub content: Arc<Vec<u8>>,
}

/// Copies the present state; `None` while there is none to copy. It may wait for a moment.
pub type Provide = Arc<dyn Fn() -> Option<StateCopy> + Send + Sync>;

struct Served {
    provide: Provide,
    last: Mutex<Option<(StateCopy, Vec<u64>)>>,
    /// Longest wait for a state that is not applied yet.
    patience: Duration,
    open: AtomicUsize,
    is_ending: AtomicBool,
    security: Security,
}

/// Offers the state of this process. Ends when it is dropped.
pub struct StateServer {
    served: Arc<Served>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for StateServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateServer").finish_non_exhaustive()
    }
}

impl StateServer {
    /// Starts to serve copies on a listener. A copy that is requested before it exists is waited for at most `patience`.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub fn start(listener: TcpListener, provide: Provide, patience: Duration, security: Security) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let last = Mutex::default();
        let (open, is_ending) = (AtomicUsize::new(0), AtomicBool::new(false));
        let served = Served { provide, last, patience, open, is_ending, security };
        let served = Arc::new(served);
        let thread = std::thread::Builder::new().name("group-state".into()).spawn({
            let served = Arc::clone(&served);
            move || served.accept(&listener)
        })?;
        Ok(Self { served, thread: Some(thread) })
    }
}

impl Drop for StateServer {
    fn drop(&mut self) {
        self.served.is_ending.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

impl Served {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while !self.is_ending.load(Ordering::Acquire) {
            let Ok((socket, _)) = listener.accept() else {
                // Nothing is here, or the process has no descriptors left.
                std::thread::sleep(ACCEPT_INTERVAL);
                continue;
            };
            if self.open.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
                self.open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let served = Arc::clone(self);
            let serve = move || {
                // The other end fetches from another member.
                let _ = served.serve(socket);
                served.open.fetch_sub(1, Ordering::AcqRel);
            };
            if std::thread::Builder::new().name("group-copy".into()).spawn(serve).is_err() {
                self.open.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    fn serve(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        limit(&socket)?;
        let mut socket = self.security.accept_state(socket)?;
        let mut request = [0; REQUEST_BYTES];
        loop {
            match socket.read_exact(&mut request) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            }
            if request[..8] != MAGIC {
                return Err(ErrorKind::InvalidData.into());
            }
            let position = Position { step: number(&request[9..17]), digest: number(&request[17..25]) };
            let index = u32::from_le_bytes(request[25..].try_into().expect("it has four bytes")) as usize;
            match request[8] {
                MANIFEST => self.send_manifest(&mut socket, position)?,
                _ => self.send_chunk(&mut socket, position, index)?,
            }
        }
    }

    fn send_manifest(&self, socket: &mut StateSocket, wanted: Position) -> io::Result<()> {
        let Some((copy, checksums)) = self.copy(wanted) else { return socket.write_all(&[0]) };
        let mut answer = vec![1];
        for value in [copy.position.step, copy.position.digest, copy.content.len() as u64].into_iter().chain(checksums)
        {
            answer.extend_from_slice(&value.to_le_bytes());
        }
        socket.write_all(&answer)
    }

    fn send_chunk(&self, socket: &mut StateSocket, position: Position, index: usize) -> io::Result<()> {
        let copy = self.copy(position).map(|(copy, _)| copy).filter(|copy| copy.position == position);
        let chunk = copy.as_ref().and_then(|copy| copy.content.chunks(CHUNK_BYTES).nth(index));
        let Some(chunk) = chunk else { return socket.write_all(&[0]) };
        let mut head = vec![1];
        head.extend_from_slice(&(chunk.len() as u64).to_le_bytes());
        socket.write_all(&head)?;
        socket.write_all(chunk)
    }

    /// Returns a copy at a position, or a later one.
    fn copy(&self, wanted: Position) -> Option<(StateCopy, Vec<u64>)> {
        let mut last = self.last.lock();
        if let Some(found) = last.as_ref().filter(|(copy, _)| copy.position == wanted) {
            return Some(found.clone());
        }
        let end = Instant::now() + self.patience;
        loop {
            if let Some(copy) = (self.provide)().filter(|copy| copy.position.step >= wanted.step) {
                let checksums = copy.content.chunks(CHUNK_BYTES).map(xxh3_64).collect();
                *last = Some((copy, checksums));
                return last.clone();
            }
            if Instant::now() >= end || self.is_ending.load(Ordering::Acquire) {
                return None;
            }
            // The caller applies a committed step when it gets to it, and cannot be waited for otherwise.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn limit(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(IO_DEADLINE))?;
    socket.set_write_timeout(Some(IO_DEADLINE))
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("it has eight bytes"))
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text.into())
}

/// A connection to a member that offers its state.
struct Source {
    address: String,
    socket: StateSocket,
}

impl Source {
    fn open(address: &str, patience: Duration, security: &Security) -> io::Result<Self> {
        let target: SocketAddr =
            address.to_socket_addrs()?.next().ok_or_else(|| invalid(format!("{address} has no IP address")))?;
        let socket = TcpStream::connect_timeout(&target, patience)?;
        limit(&socket)?;
        Ok(Self { address: address.to_owned(), socket: security.connect_state(socket)? })
    }

    fn request(&mut self, kind: u8, position: Position, chunk: usize) -> io::Result<bool> {
        let mut request = MAGIC.to_vec();
        request.push(kind);
        request.extend_from_slice(&position.step.to_le_bytes());
        request.extend_from_slice(&position.digest.to_le_bytes());
        request.extend_from_slice(&(chunk as u32).to_le_bytes());
        self.socket.write_all(&request)?;
        let mut found = [0];
        self.socket.read_exact(&mut found)?;
        Ok(found == [1])
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.socket.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn manifest(&mut self, position: Position) -> io::Result<(Position, usize, Vec<u64>)> {
        if !self.request(MANIFEST, position, 0)? {
            return Err(invalid(format!("{} has no state of step {}", self.address, position.step)));
        }
        let position = Position { step: self.number()?, digest: self.number()? };
        let bytes = self.number()?;
        if bytes > MAX_BYTES {
            return Err(invalid(format!("{} offers {bytes} bytes; allowed: at most {MAX_BYTES}", self.address)));
        }
        let chunks = (bytes as usize).div_ceil(CHUNK_BYTES);
        let checksums = (0..chunks).map(|_| self.number()).collect::<io::Result<_>>()?;
        Ok((position, bytes as usize, checksums))
    }

    /// Reads a chunk into its place; an error if it does not match.
    fn chunk(&mut self, position: Position, index: usize, checksum: u64, into: &mut [u8]) -> io::Result<()> {
        if !self.request(CHUNK, position, index)? {
            return Err(invalid(format!("{} has another state", self.address)));
        }
        if self.number()? != into.len() as u64 {
            return Err(invalid(format!("{} has another state", self.address)));
        }
        self.socket.read_exact(into)?;
        if xxh3_64(into) == checksum {
            Ok(())
        } else {
            Err(invalid(format!("chunk {index} of {} differs", self.address)))
        }
    }
}

/// Fetches the state at `position`, or a later one, in chunks from all `sources` at once.
///
/// # Errors
/// No source has a complete state.
pub fn fetch(
    position: Position,
    sources: &[PeerAddress],
    patience: Duration,
    security: &Security,
) -> io::Result<State> {
    let mut last = invalid("no member has the state");
    for (index, source) in sources.iter().enumerate() {
        match fetch_by(position, (&source.state, &sources[index + 1..]), patience, security) {
            Ok(state) => return Ok(state),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn fetch_by(
    position: Position,
    (first, others): (&str, &[PeerAddress]),
    patience: Duration,
    security: &Security,
) -> io::Result<State> {
    let mut first = Source::open(first, patience, security)?;
    let (position, bytes, checksums) = first.manifest(position)?;
    let mut content = vec![0; bytes];
    let helpers: Vec<Source> =
        others.iter().filter_map(|it| Source::open(&it.state, patience, security).ok()).collect();
    let streams = 1 + helpers.len();
    let mut parts: Vec<Vec<(usize, u64, &mut [u8])>> = (0..streams).map(|_| Vec::new()).collect();
    for (index, (chunk, checksum)) in content.chunks_mut(CHUNK_BYTES).zip(checksums).enumerate() {
        parts[index % streams].push((index, checksum, chunk));
    }
    let own = parts.remove(0);
    let missing = std::thread::scope(|scope| {
        let read = |mut source: Source, part: Vec<(usize, u64, &mut [u8])>| {
            // From the first failure on, the rest is left to the first source.
            let mut missing = Vec::new();
            for (index, checksum, chunk) in part {
                if !missing.is_empty() || source.chunk(position, index, checksum, chunk).is_err() {
                    missing.push((index, checksum));
                }
            }
            missing
        };
        let threads: Vec<_> =
            helpers.into_iter().zip(parts).map(|(source, part)| scope.spawn(move || read(source, part))).collect();
        for (index, checksum, chunk) in own {
            first.chunk(position, index, checksum, chunk)?;
        }
        let panicked = |_| invalid("a thread of the transfer panicked");
        threads.into_iter().map(|it| it.join().map_err(panicked)).collect::<io::Result<Vec<_>>>()
    })?;
    for (index, checksum) in missing.into_iter().flatten() {
        let start = index * CHUNK_BYTES;
        let end = (start + CHUNK_BYTES).min(bytes);
        first.chunk(position, index, checksum, &mut content[start..end])?;
    }
    Ok(State { position, content: Arc::new(content) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::SharedCertificate;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn serve(content: &Arc<Vec<u8>>, step: u64, security: &Security) -> (StateServer, PeerAddress) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = listener.local_addr().unwrap().to_string();
        let copy = StateCopy { position: Position { step, digest: step }, content: Arc::clone(content) };
        let provide: Provide = Arc::new(move || Some(copy.clone()));
        let server = StateServer::start(listener, provide, Duration::ZERO, security.clone()).unwrap();
        (server, PeerAddress { reduce: String::new(), state })
    }

    fn content() -> Arc<Vec<u8>> {
        Arc::new((0..5 * CHUNK_BYTES + 77).map(|at| (at % 251) as u8).collect())
    }

    #[test]
    fn state_is_complete_although_a_source_has_another_one_and_one_is_gone() {
        let (content, plain) = (content(), Security::default());
        let mut other = content.to_vec();
        // Two of its chunks differ.
        (other[CHUNK_BYTES + 5], other[4 * CHUNK_BYTES + 5]) = (255, 255);
        let (_first, first) = serve(&content, 7, &plain);
        let (_other, second) = serve(&Arc::new(other), 7, &plain);
        let (gone, third) = serve(&content, 7, &plain);
        drop(gone);
        let position = Position { step: 7, digest: 7 };
        let state = fetch(position, &[first.clone(), second, third.clone()], PATIENCE, &plain).unwrap();
        assert_eq!((state.position, *state.content == *content), (position, true));
        // A later state is as good; an earlier one is not.
        let earlier = fetch(Position { step: 6, digest: 1 }, &[third, first.clone()], PATIENCE, &plain).unwrap();
        assert_eq!(earlier.position, position);
        let later = fetch(Position { step: 8, digest: 1 }, &[first], PATIENCE, &plain);
        assert!(later.unwrap_err().to_string().contains("no state of step 8"));
    }

    #[test]
    fn secured_state_is_sent_to_processes_with_the_certificate_of_the_group_only() {
        let certificate = SharedCertificate::create().unwrap();
        let (security, other, early) = (Security::required(), Security::required(), Security::required());
        assert!(security.receive(Some(certificate)) && other.receive(Some(SharedCertificate::create().unwrap())));
        assert!(!early.receive(None), "a certificate is required");
        let (content, position) = (content(), Position { step: 7, digest: 7 });
        let (_server, address) = serve(&content, 7, &security);
        let fetched = |security: &Security| fetch(position, std::slice::from_ref(&address), PATIENCE, security);
        assert!(*fetched(&security).unwrap().content == *content);
        assert!(fetched(&other).is_err() && fetched(&early).is_err() && fetched(&Security::default()).is_err());
    }
}
