//! A connection between two processes of one host: two rings of bytes in memory that both have mapped.
//!
//! ```text
//! dialer                            acceptor
//! hello, asks for shared memory ──>
//!                               <── process, descriptor and token of an anonymous file
//! maps /proc/PROCESS/fd/DESCRIPTOR,
//! compares the token: 1, or 0   ──> from here on the rings; after a 0 the socket is used as before
//! ```
//!
//! The socket stays open: a byte in it wakes a peer that sleeps, and its end is that of the peer. The file has no name, so that nothing is left
//! behind by a killed process, and is sealed against truncation, so that no access to it can fail.

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher as _;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use nix::fcntl::{FcntlArg, SealFlag, fcntl, posix_fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

/// Bytes of a ring: what the executor sends ahead, in chunks of the usual size, so that a rank rarely waits to send. A processor caches most of it.
const RING: usize = 2 << 20;
/// Bytes before the rings.
const CONTROL: usize = 4 << 10;
const BYTES: usize = CONTROL + 2 * RING;
/// Bytes that are published at once: the other end reads them while the next ones are written.
const PIECE: usize = 64 << 10;
/// Offsets in the part of a side, 256 bytes each: bytes written, bytes read by the other side, and whether the side sleeps. Each in a cache line of
/// its own.
const WRITTEN: usize = 0;
const READ: usize = 64;
const SLEEPS: usize = 128;
const SIDE: usize = 256;
/// The token is at the end of the control page.
const TOKEN: usize = CONTROL - 16;

/// Where the other end finds the file.
pub(super) const OFFER_BYTES: usize = 4 + 4 + 16;

/// A file that is offered to a peer.
pub(super) struct Offer {
    file: File,
    token: [u8; 16],
}

fn region(file: File) -> io::Result<MmapRegion> {
    MmapRegion::from_file(FileOffset::new(file, 0), BYTES).map_err(io::Error::other)
}

impl Offer {
    /// Creates the file.
    ///
    /// # Errors
    /// The operating system has no memory for it.
    pub(super) fn create() -> io::Result<Self> {
        let descriptor: OwnedFd = memfd_create("engram-ring", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        // Reserved here: later a missing page would end the process.
        posix_fallocate(&descriptor, 0, BYTES as i64)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&descriptor, FcntlArg::F_ADD_SEALS(seals))?;
        let random = RandomState::new();
        let half = |index: u64| random.hash_one(index).to_le_bytes();
        let mut token = [0; 16];
        token[..8].copy_from_slice(&half(0));
        token[8..].copy_from_slice(&half(1));
        let file = File::from(descriptor);
        file.write_all_at(&token, TOKEN as u64)?;
        Ok(Self { file, token })
    }

    /// Returns what the other end needs to find the file.
    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[..4].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[4..8].copy_from_slice(&self.file.as_raw_fd().to_le_bytes());
        bytes[8..].copy_from_slice(&self.token);
        bytes
    }

    /// Uses the file, once the other end has it.
    pub(super) fn accept(self, socket: TcpStream) -> io::Result<SharedSocket> {
        SharedSocket::new(socket, region(self.file)?, 0)
    }
}

/// Maps the file that a peer offers.
///
/// # Errors
/// This process cannot open it, since the peer is on another host or belongs to another user, or it is not that file.
pub(super) fn open(offer: &[u8; OFFER_BYTES]) -> io::Result<MmapRegion> {
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| offer[at + index]));
    let path = format!("/proc/{}/fd/{}", number(0), number(4));
    let file = File::options().read(true).write(true).open(path)?;
    // Only an anonymous file has seals, so that no other one is ever written to.
    let sealed = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?).contains(SealFlag::F_SEAL_SHRINK);
    let mut token = [0; 16];
    file.read_exact_at(&mut token, TOKEN as u64)?;
    let is_offered = sealed && token == offer[8..] && file.metadata()?.len() == BYTES as u64;
    if is_offered { region(file) } else { Err(ErrorKind::InvalidData.into()) }
}

/// One end of a connection. Reads and writes do not block.
#[derive(Debug)]
pub(super) struct SharedSocket {
    socket: TcpStream,
    region: MmapRegion,
    side: usize,
    written: u64,
    read: u64,
    /// The peer ended, or the socket broke.
    ended: bool,
}

impl SharedSocket {
    /// Creates an end; `side` is 0 for the one that created the file, 1 for the other.
    pub(super) fn new(socket: TcpStream, region: MmapRegion, side: usize) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, region, side, written: 0, read: 0, ended: false })
    }

    /// Returns the socket, to wait for the peer.
    pub(super) const fn socket(&self) -> &TcpStream {
        &self.socket
    }

    fn counter(&self, side: usize, field: usize) -> &AtomicU64 {
        self.region.get_atomic_ref(side * SIDE + field).expect("it is an aligned place of the control page")
    }

    fn sleeps(&self, side: usize) -> &AtomicU32 {
        self.region.get_atomic_ref(side * SIDE + SLEEPS).expect("it is an aligned place of the control page")
    }

    /// Returns the place of a byte of a ring, and how many follow it before the end of the ring.
    const fn place(side: usize, position: u64) -> (usize, usize) {
        let at = position as usize % RING;
        (CONTROL + side * RING + at, RING - at)
    }

    /// Bytes that can be read.
    fn readable(&self) -> usize {
        let written = self.counter(1 - self.side, WRITTEN).load(Ordering::Acquire);
        // A damaged counter must not lead out of the ring.
        (written.wrapping_sub(self.read) as usize).min(RING)
    }

    /// Bytes that can be written.
    fn writable(&self) -> usize {
        let read = self.counter(self.side, READ).load(Ordering::Acquire);
        RING.saturating_sub(self.written.wrapping_sub(read) as usize)
    }

    /// Prepares to sleep on the socket; returns whether there is no reason to, since something can be read, or written if `write`.
    pub(super) fn is_ready(&self, write: bool) -> bool {
        self.sleeps(self.side).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_ready = self.ended || self.readable() > 0 || (write && self.writable() > 0);
        if is_ready {
            self.sleeps(self.side).store(0, Ordering::Relaxed);
        }
        is_ready
    }

    /// Ends a sleep: takes the wake-up bytes from the socket.
    pub(super) fn awake(&mut self) {
        self.sleeps(self.side).store(0, Ordering::Relaxed);
        let mut bytes = [0; 64];
        loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => self.ended = true,
                Ok(_) => continue,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => self.ended |= error.kind() != ErrorKind::WouldBlock,
            }
            return;
        }
    }

    /// Wakes the peer if it sleeps.
    fn wake(&mut self) {
        fence(Ordering::SeqCst);
        let sleeps = self.sleeps(1 - self.side);
        if sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0 {
            // A full socket wakes as well. If it has ended, a sleep finds that.
            let _ = self.socket.write(&[1]);
        }
    }
}

impl Read for SharedSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.readable().min(into.len());
        if length == 0 {
            return if self.ended || into.is_empty() { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) };
        }
        let mut done = 0;
        while done < length {
            let (place, left) = Self::place(1 - self.side, self.read);
            let part = (length - done).min(left).min(PIECE);
            let slice = self.region.get_slice(place, part).map_err(io::Error::other)?;
            slice.copy_to(&mut into[done..done + part]);
            done += part;
            self.read += part as u64;
            self.counter(1 - self.side, READ).store(self.read, Ordering::Release);
        }
        self.wake();
        Ok(done)
    }
}

impl Write for SharedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.ended {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut free = self.writable();
        if free == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut done = 0;
        for bytes in slices {
            let mut rest = &bytes[..bytes.len().min(free)];
            free -= rest.len();
            while !rest.is_empty() {
                let (place, left) = Self::place(self.side, self.written);
                let (part, after) = rest.split_at(rest.len().min(left).min(PIECE));
                self.region.get_slice(place, part.len()).map_err(io::Error::other)?.copy_from(part);
                self.written += part.len() as u64;
                done += part.len();
                self.counter(self.side, WRITTEN).store(self.written, Ordering::Release);
                self.wake();
                rest = after;
            }
        }
        Ok(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    fn pair() -> (SharedSocket, SharedSocket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let acceptor = listener.accept().unwrap().0;
        // A byte that does not come fails the test.
        for socket in [&dialer, &acceptor] {
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        let offer = Offer::create().unwrap();
        let region = open(&offer.encode()).unwrap();
        (offer.accept(acceptor).unwrap(), SharedSocket::new(dialer, region, 1).unwrap())
    }

    #[test]
    fn bytes_pass_in_order_around_the_end_of_the_ring() {
        let (mut a, mut b) = pair();
        let sent: Vec<u8> = (0..3 * RING + 12_345).map(|at| (at * 31 % 251) as u8).collect();
        let (mut at, mut received, mut part) = (0, Vec::new(), vec![0; 300_000]);
        while received.len() < sent.len() {
            match a.write_vectored(&[
                IoSlice::new(&sent[at..(at + 7).min(sent.len())]),
                IoSlice::new(&sent[(at + 7).min(sent.len())..]),
            ]) {
                Ok(written) => at += written,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "the ring is full"),
            }
            let read = b.read(&mut part).unwrap();
            received.extend_from_slice(&part[..read]);
        }
        assert!(received == sent);
        assert_eq!(b.read(&mut part).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn peer_that_sleeps_is_awakened_by_bytes_space_and_the_end() {
        let (mut a, mut b) = pair();
        let has_byte = |socket: &SharedSocket| socket.socket().peek(&mut [0]).is_ok_and(|read| read == 1);
        assert!(!b.is_ready(false) && b.is_ready(true), "nothing to read, space to write");
        assert!(!b.is_ready(false));
        a.write_all(b"x").unwrap();
        b.socket().set_nonblocking(false).unwrap();
        assert!(has_byte(&b), "the writer wakes the reader");
        b.socket().set_nonblocking(true).unwrap();
        b.awake();
        assert!(b.is_ready(false));
        while a.write(&[0; 4096]).is_ok() {}
        assert!(!a.is_ready(true), "the ring is full");
        b.read_exact(&mut [0; 10]).unwrap();
        a.socket().set_nonblocking(false).unwrap();
        assert!(has_byte(&a), "the reader wakes the writer");
        a.socket().set_nonblocking(true).unwrap();
        a.awake();
        drop(a);
        b.socket().set_nonblocking(false).unwrap();
        assert!(b.socket().peek(&mut [0]).unwrap() == 0, "the end is seen");
        b.socket().set_nonblocking(true).unwrap();
        b.awake();
        let mut rest = Vec::new();
        // What was written before the end is still there.
        assert_eq!(b.read_to_end(&mut rest).unwrap(), RING - 10);
        assert_eq!(b.write(b"y").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn only_the_offered_file_is_mapped() {
        let offer = Offer::create().unwrap();
        let good = offer.encode();
        open(&good).unwrap();
        let mut other = good;
        other[12] ^= 1;
        assert!(open(&other).is_err(), "another token");
        // Other files of the right size and content, which would be overwritten.
        let unsealed = File::from(memfd_create("other", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        for file in [tempfile::tempfile().unwrap(), unsealed] {
            file.write_all_at(&good[8..], TOKEN as u64).unwrap();
            file.set_len(BYTES as u64).unwrap();
            let mut named = good;
            named[4..8].copy_from_slice(&file.as_raw_fd().to_le_bytes());
            assert!(open(&named).is_err(), "a file of the user");
        }
        let mut gone = good;
        gone[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(open(&gone).is_err(), "no such process");
    }
}
