//! A TCP link through user space with injectable faults.
//!
//! A link listens on loopback and passes every connection on to one upstream address. Each direction has its own
//! [`Condition`], so a cut can be one-way. It needs no privileges and no kernel module.
//!
//! Invariants: bytes of a connection keep their order; a connection that lost bytes never continues (it is reset once
//! the direction passes again, since TCP never loses part of a stream); buffers are bounded; every fault is counted.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Maximum bytes per chunk.
const CHUNK_BYTES: usize = 16 << 10;
/// Chunks between reader and writer of one direction: the buffer of a slow direction, besides those of the kernel.
const CHUNKS: usize = 16;
/// Time limit of connections to the upstream.
const CONNECT: Duration = Duration::from_secs(2);

/// Direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the downstream to the listening side.
    Forth,
    /// From the listening to the downstream side.
    Back,
}

/// What the proxy does with bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flow {
    /// They pass.
    #[default]
    Pass,
    /// They wait: the sender meets back-pressure.
    Hold,
    /// They are read and discarded: the sender sees them as sent.
    BlackHole,
}

/// Condition of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Condition {
    /// Whether bytes pass.
    pub flow: Flow,
    /// Delay of each chunk.
    pub delay: Duration,
    /// Maximum additional delay, drawn for each chunk.
    pub jitter: Duration,
    /// Rate limit; `None` = unlimited.
    pub bytes_per_second: Option<u64>,
}

/// Counters of one or several links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// Accepted connections.
    pub connections: u64,
    /// Delivered bytes.
    pub passed_bytes: u64,
    /// Discarded bytes.
    pub discarded_bytes: u64,
    /// Delayed chunks.
    pub delayed_chunks: u64,
    /// Times a direction was set to hold.
    pub holds: u64,
    /// Times a direction was set to discard.
    pub black_holes: u64,
    /// Connections reset.
    pub resets: u64,
    /// Corrupted bytes.
    pub flipped_bytes: u64,
}

impl Counts {
    /// Adds the counters of another link.
    pub fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.passed_bytes += other.passed_bytes;
        self.discarded_bytes += other.discarded_bytes;
        self.delayed_chunks += other.delayed_chunks;
        self.holds += other.holds;
        self.black_holes += other.black_holes;
        self.resets += other.resets;
        self.flipped_bytes += other.flipped_bytes;
    }
}

/// A link. Dropping it ends it with its connections.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    forth: DirectionState,
    back: DirectionState,
    /// Incremented to reset every connection.
    resets: watch::Sender<u64>,
    connections: AtomicU64,
    reset: AtomicU64,
}

#[derive(Debug, Default)]
struct DirectionState {
    condition: watch::Sender<Condition>,
    /// Bytes still to corrupt.
    to_flip: AtomicU64,
    passed: AtomicU64,
    discarded: AtomicU64,
    delayed: AtomicU64,
    holds: AtomicU64,
    black_holes: AtomicU64,
    flipped: AtomicU64,
}

impl Link {
    /// Listens on a free loopback port and passes connections on to `upstream`. `seed` determines everything random.
    ///
    /// # Errors If no port is available.
    ///
    /// # Panics Outside a tokio runtime.
    pub async fn open(upstream: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            forth: DirectionState::default(),
            back: DirectionState::default(),
            resets: watch::Sender::new(0),
            connections: AtomicU64::new(0),
            reset: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared), seed));
        Ok(Self { address, shared, accepting })
    }

    /// Returns the address to connect to instead of the upstream address.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the condition of a direction, for current and later connections.
    pub fn set(&self, direction: Direction, condition: Condition) {
        let state = self.shared.state(direction);
        state.condition.send_if_modified(|old| {
            match condition.flow {
                Flow::Hold if old.flow != Flow::Hold => state.holds.fetch_add(1, Ordering::Relaxed),
                Flow::BlackHole if old.flow != Flow::BlackHole => state.black_holes.fetch_add(1, Ordering::Relaxed),
                _ => 0,
            };
            std::mem::replace(old, condition) != condition
        });
    }

    /// Resets every connection.
    pub fn reset(&self) {
        self.shared.resets.send_modify(|generation| *generation += 1);
    }

    /// Flips one bit of the next byte in this direction.
    pub fn flip(&self, direction: Direction) {
        self.shared.state(direction).to_flip.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        let Shared { forth, back, connections, reset, .. } = &*self.shared;
        let sum = |of: fn(&DirectionState) -> &AtomicU64| {
            of(forth).load(Ordering::Relaxed) + of(back).load(Ordering::Relaxed)
        };
        Counts {
            connections: connections.load(Ordering::Relaxed),
            passed_bytes: sum(|state| &state.passed),
            discarded_bytes: sum(|state| &state.discarded),
            delayed_chunks: sum(|state| &state.delayed),
            holds: sum(|state| &state.holds),
            black_holes: sum(|state| &state.black_holes),
            resets: reset.load(Ordering::Relaxed),
            flipped_bytes: sum(|state| &state.flipped),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
        self.reset();
    }
}

impl Shared {
    const fn state(&self, direction: Direction) -> &DirectionState {
        match direction {
            Direction::Forth => &self.forth,
            Direction::Back => &self.back,
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, seed: u64) {
    let mut draws = StdRng::seed_from_u64(seed);
    loop {
        match listener.accept().await {
            Ok((downstream, _)) => {
                shared.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(connection(downstream, Arc::clone(&shared), draws.random()));
            }
            // Temporarily out of descriptors; clients wait in the backlog.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// How one direction of a connection ended.
enum End {
    /// The sender closed it, and everything arrived.
    Closed,
    /// The connection must not continue.
    Broken,
}

async fn connection(mut downstream: TcpStream, shared: Arc<Shared>, seed: u64) {
    let mut resets = shared.resets.subscribe();
    let connecting = tokio::time::timeout(CONNECT, TcpStream::connect(shared.upstream));
    let Ok(Ok(mut upstream)) = connecting.await else {
        return end_by_reset(&shared, &[&downstream]);
    };
    // Nagle's algorithm would add delay. An error means that the connection has ended.
    let _ = downstream.set_nodelay(true).and_then(|()| upstream.set_nodelay(true));
    let mut draws = StdRng::seed_from_u64(seed);
    let (forth_draws, back_draws) = (StdRng::from_rng(&mut draws), StdRng::from_rng(&mut draws));
    let broken = {
        let (downstream_reads, downstream_writes) = downstream.split();
        let (upstream_reads, upstream_writes) = upstream.split();
        let forth = pump(downstream_reads, upstream_writes, &shared.forth, forth_draws);
        let back = pump(upstream_reads, downstream_writes, &shared.back, back_draws);
        let both = async {
            let (mut forth, mut back) = (std::pin::pin!(forth), std::pin::pin!(back));
            tokio::select! {
                end = &mut forth => match end { End::Closed => back.await, End::Broken => End::Broken },
                end = &mut back => match end { End::Closed => forth.await, End::Broken => End::Broken },
            }
        };
        tokio::select! {
            end = both => matches!(end, End::Broken),
            // An error means that the link was dropped.
            _ = resets.changed() => true,
        }
    };
    if broken {
        end_by_reset(&shared, &[&downstream, &upstream]);
    }
}

fn end_by_reset(shared: &Shared, streams: &[&TcpStream]) {
    shared.reset.fetch_add(1, Ordering::Relaxed);
    for stream in streams {
        // One that has ended needs no reset.
        let _ = stream.set_zero_linger();
    }
}

/// A chunk in flight.
struct Chunk {
    bytes: Vec<u8>,
    due: Instant,
}

async fn pump(from: ReadHalf<'_>, to: WriteHalf<'_>, state: &DirectionState, draws: StdRng) -> End {
    let (queue, chunks) = mpsc::channel(CHUNKS);
    let (read, end) = tokio::join!(take(from, queue, state, draws), deliver(to, chunks, state));
    match (read, end) {
        (Ok(()), End::Closed) => End::Closed,
        _ => End::Broken,
    }
}

/// Reads until the sender closes or the receiver is gone.
async fn take(
    mut from: ReadHalf<'_>,
    queue: mpsc::Sender<Chunk>,
    state: &DirectionState,
    mut draws: StdRng,
) -> io::Result<()> {
    let mut condition = state.condition.subscribe();
    let mut last_due = Instant::now();
    loop {
        // The sender of the condition lives as long as the link, which outlives its connections.
        let _ = condition.wait_for(|condition| condition.flow != Flow::Hold).await;
        let mut bytes = vec![0; CHUNK_BYTES];
        let read = tokio::select! {
            read = from.read(&mut bytes) => read,
            _ = condition.changed() => continue,
            () = queue.closed() => return Ok(()),
        };
        let read = match read {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) => {
                // The other end notices when the direction passes again, which `deliver` waits for.
                return Err(error);
            }
        };
        bytes.truncate(read);
        let Condition { delay, jitter, .. } = *condition.borrow();
        let jitter = jitter.mul_f64(draws.random_range(0.0..=1.0));
        if !(delay + jitter).is_zero() {
            state.delayed.fetch_add(1, Ordering::Relaxed);
        }
        // A chunk never overtakes the previous one.
        last_due = last_due.max(Instant::now() + delay + jitter);
        flip(&mut bytes, state, &mut draws);
        if queue.send(Chunk { bytes, due: last_due }).await.is_err() {
            return Ok(());
        }
    }
}

fn flip(bytes: &mut [u8], state: &DirectionState, draws: &mut StdRng) {
    let wanted = state.to_flip.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |wanted| wanted.checked_sub(1));
    if wanted.is_ok() {
        let at = draws.random_range(0..bytes.len());
        bytes[at] ^= 1 << draws.random_range(0..8);
        state.flipped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes chunks when they are due and the direction passes.
async fn deliver(mut to: WriteHalf<'_>, mut chunks: mpsc::Receiver<Chunk>, state: &DirectionState) -> End {
    let mut condition = state.condition.subscribe();
    let mut lost = false;
    loop {
        let chunk = tokio::select! {
            chunk = chunks.recv() => chunk,
            // A connection with a gap ends as soon as the other side is reachable.
            _ = condition.wait_for(|condition| condition.flow == Flow::Pass), if lost => return End::Broken,
        };
        let Some(Chunk { bytes, due }) = chunk else { break };
        tokio::time::sleep_until(due).await;
        let now = *match condition.wait_for(|condition| condition.flow != Flow::Hold).await {
            Ok(now) => now,
            Err(_) => return End::Broken,
        };
        if now.flow == Flow::BlackHole {
            state.discarded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            lost = true;
            continue;
        }
        if lost || to.write_all(&bytes).await.is_err() {
            return End::Broken;
        }
        state.passed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if let Some(rate) = now.bytes_per_second {
            tokio::time::sleep(Duration::from_secs_f64(bytes.len() as f64 / rate.max(1) as f64)).await;
        }
    }
    // A close does not pass through a cut either.
    let _ = condition.wait_for(|condition| condition.flow == Flow::Pass).await;
    if lost || to.shutdown().await.is_err() { End::Broken } else { End::Closed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    /// Returns a link and both ends of a connection through it.
    async fn connected() -> (Link, TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let link = Link::open(listener.local_addr().unwrap(), 7).await.unwrap();
        let downstream = TcpStream::connect(link.address()).await.unwrap();
        let (taken, _) = listener.accept().await.unwrap();
        (link, downstream, taken)
    }

    async fn arrives(stream: &mut TcpStream, expected: &[u8]) {
        let mut bytes = vec![0; expected.len()];
        tokio::time::timeout(DEADLINE, stream.read_exact(&mut bytes)).await.unwrap().unwrap();
        assert_eq!(bytes, expected);
    }

    async fn is_reset(stream: &mut TcpStream) {
        let ended = tokio::time::timeout(DEADLINE, stream.read(&mut [0; 8])).await.unwrap();
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    /// Waits until the counters satisfy a condition.
    async fn counted(link: &Link, what: impl Fn(&Counts) -> bool) {
        let wait = async {
            while !what(&link.counts()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DEADLINE, wait).await.unwrap();
    }

    #[tokio::test]
    async fn bytes_and_closes_pass_in_order_with_delay_and_rate_limit() {
        let (link, mut downstream, mut taken) = connected().await;
        downstream.write_all(b"to the listener").await.unwrap();
        arrives(&mut taken, b"to the listener").await;
        let slow = Condition {
            delay: Duration::from_millis(5),
            jitter: Duration::from_millis(5),
            bytes_per_second: Some(10_000_000),
            ..Condition::default()
        };
        link.set(Direction::Back, slow);
        let long: Vec<u8> = (0..200_000_u32).map(|byte| byte as u8).collect();
        let (sent, ()) = tokio::join!(taken.write_all(&long), arrives(&mut downstream, &long));
        sent.unwrap();
        assert!(link.counts().delayed_chunks > 1);
        drop(taken);
        assert_eq!(downstream.read(&mut [0; 8]).await.unwrap(), 0, "an orderly close passes");
        let counts = link.counts();
        assert_eq!((counts.connections, counts.passed_bytes, counts.resets), (1, 200_015, 0));
    }

    #[tokio::test]
    async fn a_holding_direction_loses_nothing_and_the_other_works() {
        let (link, mut downstream, mut taken) = connected().await;
        link.set(Direction::Forth, Condition { flow: Flow::Hold, ..Condition::default() });
        downstream.write_all(b"waits").await.unwrap();
        taken.write_all(b"goes on").await.unwrap();
        arrives(&mut downstream, b"goes on").await;
        assert_eq!(link.counts().passed_bytes, 7);
        link.set(Direction::Forth, Condition::default());
        arrives(&mut taken, b"waits").await;
        assert_eq!(link.counts().holds, 1);
    }

    #[tokio::test]
    async fn a_connection_that_lost_bytes_is_reset() {
        let (link, mut downstream, mut taken) = connected().await;
        downstream.write_all(b"before").await.unwrap();
        arrives(&mut taken, b"before").await;
        link.set(Direction::Forth, Condition { flow: Flow::BlackHole, ..Condition::default() });
        downstream.write_all(b"lost").await.unwrap();
        counted(&link, |counts| counts.discarded_bytes == 4).await;
        taken.write_all(b"one-way").await.unwrap();
        arrives(&mut downstream, b"one-way").await;
        link.set(Direction::Forth, Condition::default());
        is_reset(&mut taken).await;
        is_reset(&mut downstream).await;
        assert_eq!((link.counts().black_holes, link.counts().resets), (1, 1));
    }

    #[tokio::test]
    async fn a_close_does_not_pass_a_cut() {
        let (link, downstream, mut taken) = connected().await;
        link.set(Direction::Forth, Condition { flow: Flow::BlackHole, ..Condition::default() });
        drop(downstream);
        taken.write_all(b"to no reader").await.unwrap();
        let received = tokio::time::timeout(Duration::from_millis(50), taken.read(&mut [0; 8])).await;
        assert!(received.is_err(), "nothing may arrive: {received:?}");
        link.set(Direction::Forth, Condition::default());
        let ended = tokio::time::timeout(DEADLINE, taken.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }

    #[tokio::test]
    async fn resets_and_flips_are_counted() {
        let (link, mut downstream, mut taken) = connected().await;
        link.flip(Direction::Forth);
        downstream.write_all(&[0; 64]).await.unwrap();
        let mut bytes = [0; 64];
        taken.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        link.reset();
        is_reset(&mut taken).await;
        is_reset(&mut downstream).await;
        assert_eq!((link.counts().flipped_bytes, link.counts().resets), (1, 1));
        // A link outlives its connections; without an upstream a connection is reset.
        let mut again = TcpStream::connect(link.address()).await.unwrap();
        is_reset(&mut again).await;
    }
}
