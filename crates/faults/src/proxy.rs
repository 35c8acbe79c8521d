//! One TCP link through user space, and what can be done to it.
//!
//! A link listens on loopback and passes every connection on to one upstream address. Each of its two ways has a
//! [`Condition`] of its own, so that a cut can be one-way. It needs no privileges and no kernel module.
//!
//! Invariants: bytes of a connection keep their order; a connection that lost bytes never goes on (it is reset when the way
//! passes again, since TCP never loses a part of a stream); what is buffered is bounded; every fault is counted.

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

/// Bytes that are passed on at once.
const CHUNK_BYTES: usize = 16 << 10;
/// Chunks between reader and writer of one way: what a slow way may hold beside the kernel's buffers.
const CHUNKS: usize = 16;
/// How long a connection to the upstream may take to come up.
const CONNECT: Duration = Duration::from_secs(2);

/// A way of a link, as seen from who dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From who dialled to who listens.
    Forth,
    /// From who listens to who dialled.
    Back,
}

/// What becomes of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flow {
    /// They go through.
    #[default]
    Pass,
    /// They stay where they are: the sender meets back-pressure.
    Hold,
    /// They are read and thrown away: the sender thinks that they went through.
    BlackHole,
}

/// What a way does to bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Condition {
    /// Whether they go through.
    pub flow: Flow,
    /// How long each chunk is on its way.
    pub delay: Duration,
    /// Up to so much longer, drawn anew for each chunk.
    pub jitter: Duration,
    /// At most so many bytes a second; `None` = as many as go.
    pub bytes_per_second: Option<u64>,
}

/// What happened on a link, or on several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// Connections taken.
    pub connections: u64,
    /// Bytes that arrived.
    pub passed_bytes: u64,
    /// Bytes thrown away.
    pub discarded_bytes: u64,
    /// Chunks that were on their way for longer than without the link.
    pub delayed_chunks: u64,
    /// Times that a way was made to hold.
    pub holds: u64,
    /// Times that a way was made a black hole.
    pub black_holes: u64,
    /// Connections ended by a reset.
    pub resets: u64,
    /// Bytes that arrived changed.
    pub flipped_bytes: u64,
}

impl Counts {
    /// Adds those of another link.
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

/// A link. It ends, with its connections, when it is dropped.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    forth: WayState,
    back: WayState,
    /// Raised to reset every connection.
    resets: watch::Sender<u64>,
    connections: AtomicU64,
    reset: AtomicU64,
}

#[derive(Debug, Default)]
struct WayState {
    condition: watch::Sender<Condition>,
    /// Bytes that shall be changed.
    to_flip: AtomicU64,
    passed: AtomicU64,
    discarded: AtomicU64,
    delayed: AtomicU64,
    holds: AtomicU64,
    black_holes: AtomicU64,
    flipped: AtomicU64,
}

impl Link {
    /// Listens on a free port of loopback and passes connections on to `upstream`. What is random comes from `seed`.
    ///
    /// # Errors
    /// No port can be had.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn open(upstream: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            forth: WayState::default(),
            back: WayState::default(),
            resets: watch::Sender::new(0),
            connections: AtomicU64::new(0),
            reset: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared), seed));
        Ok(Self { address, shared, accepting })
    }

    /// Where to connect to instead of the upstream address.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what a way does, for connections that are there and for later ones.
    pub fn set(&self, way: Direction, condition: Condition) {
        let state = self.shared.way(way);
        state.condition.send_if_modified(|old| {
            match condition.flow {
                Flow::Hold if old.flow != Flow::Hold => state.holds.fetch_add(1, Ordering::Relaxed),
                Flow::BlackHole if old.flow != Flow::BlackHole => state.black_holes.fetch_add(1, Ordering::Relaxed),
                _ => 0,
            };
            std::mem::replace(old, condition) != condition
        });
    }

    /// Ends every connection by a reset.
    pub fn reset(&self) {
        self.shared.resets.send_modify(|generation| *generation += 1);
    }

    /// Changes one bit of the next byte that goes this way.
    pub fn flip(&self, way: Direction) {
        self.shared.way(way).to_flip.fetch_add(1, Ordering::Relaxed);
    }

    /// What happened until now.
    pub fn counts(&self) -> Counts {
        let Shared { forth, back, connections, reset, .. } = &*self.shared;
        let sum =
            |of: fn(&WayState) -> &AtomicU64| of(forth).load(Ordering::Relaxed) + of(back).load(Ordering::Relaxed);
        Counts {
            connections: connections.load(Ordering::Relaxed),
            passed_bytes: sum(|way| &way.passed),
            discarded_bytes: sum(|way| &way.discarded),
            delayed_chunks: sum(|way| &way.delayed),
            holds: sum(|way| &way.holds),
            black_holes: sum(|way| &way.black_holes),
            resets: reset.load(Ordering::Relaxed),
            flipped_bytes: sum(|way| &way.flipped),
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
    const fn way(&self, way: Direction) -> &WayState {
        match way {
            Direction::Forth => &self.forth,
            Direction::Back => &self.back,
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, seed: u64) {
    let mut draws = StdRng::seed_from_u64(seed);
    loop {
        match listener.accept().await {
            Ok((dialled, _)) => {
                shared.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(connection(dialled, Arc::clone(&shared), draws.random()));
            }
            // Out of descriptors for a moment; the dialler waits in the backlog.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// How a way of a connection ended.
enum End {
    /// Its sender closed it in order, and all of it arrived.
    Closed,
    /// It must not go on.
    Broken,
}

async fn connection(mut dialled: TcpStream, shared: Arc<Shared>, seed: u64) {
    let mut resets = shared.resets.subscribe();
    let connecting = tokio::time::timeout(CONNECT, TcpStream::connect(shared.upstream));
    let Ok(Ok(mut upstream)) = connecting.await else {
        return end_by_reset(&shared, &[&dialled]);
    };
    // A link that waits for more would be a fault of its own. An error means that the connection has ended.
    let _ = dialled.set_nodelay(true).and_then(|()| upstream.set_nodelay(true));
    let mut draws = StdRng::seed_from_u64(seed);
    let (forth_draws, back_draws) = (StdRng::from_rng(&mut draws), StdRng::from_rng(&mut draws));
    let broken = {
        let (dialled_reads, dialled_writes) = dialled.split();
        let (upstream_reads, upstream_writes) = upstream.split();
        let forth = pump(dialled_reads, upstream_writes, &shared.forth, forth_draws);
        let back = pump(upstream_reads, dialled_writes, &shared.back, back_draws);
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
        end_by_reset(&shared, &[&dialled, &upstream]);
    }
}

fn end_by_reset(shared: &Shared, streams: &[&TcpStream]) {
    shared.reset.fetch_add(1, Ordering::Relaxed);
    for stream in streams {
        // One that has ended needs no reset.
        let _ = stream.set_zero_linger();
    }
}

/// A chunk on its way.
struct Chunk {
    bytes: Vec<u8>,
    due: Instant,
}

async fn pump(from: ReadHalf<'_>, to: WriteHalf<'_>, way: &WayState, draws: StdRng) -> End {
    let (queue, chunks) = mpsc::channel(CHUNKS);
    let (read, end) = tokio::join!(take(from, queue, way, draws), deliver(to, chunks, way));
    match (read, end) {
        (Ok(()), End::Closed) => End::Closed,
        _ => End::Broken,
    }
}

/// Reads until the sender closes, or the receiver is gone.
async fn take(mut from: ReadHalf<'_>, queue: mpsc::Sender<Chunk>, way: &WayState, mut draws: StdRng) -> io::Result<()> {
    let mut condition = way.condition.subscribe();
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
                // The other end hears of it when the way passes again, which `deliver` waits for.
                return Err(error);
            }
        };
        bytes.truncate(read);
        let Condition { delay, jitter, .. } = *condition.borrow();
        let jitter = jitter.mul_f64(draws.random_range(0.0..=1.0));
        if !(delay + jitter).is_zero() {
            way.delayed.fetch_add(1, Ordering::Relaxed);
        }
        // A chunk never overtakes the one before it.
        last_due = last_due.max(Instant::now() + delay + jitter);
        flip(&mut bytes, way, &mut draws);
        if queue.send(Chunk { bytes, due: last_due }).await.is_err() {
            return Ok(());
        }
    }
}

fn flip(bytes: &mut [u8], way: &WayState, draws: &mut StdRng) {
    let wanted = way.to_flip.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |wanted| wanted.checked_sub(1));
    if wanted.is_ok() {
        let at = draws.random_range(0..bytes.len());
        bytes[at] ^= 1 << draws.random_range(0..8);
        way.flipped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes what was read, when it is due and the way passes.
async fn deliver(mut to: WriteHalf<'_>, mut chunks: mpsc::Receiver<Chunk>, way: &WayState) -> End {
    let mut condition = way.condition.subscribe();
    let mut lost = false;
    loop {
        let chunk = tokio::select! {
            chunk = chunks.recv() => chunk,
            // A connection with a gap ends as soon as the other side can be told.
            _ = condition.wait_for(|condition| condition.flow == Flow::Pass), if lost => return End::Broken,
        };
        let Some(Chunk { bytes, due }) = chunk else { break };
        tokio::time::sleep_until(due).await;
        let now = *match condition.wait_for(|condition| condition.flow != Flow::Hold).await {
            Ok(now) => now,
            Err(_) => return End::Broken,
        };
        if now.flow == Flow::BlackHole {
            way.discarded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            lost = true;
            continue;
        }
        if lost || to.write_all(&bytes).await.is_err() {
            return End::Broken;
        }
        way.passed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if let Some(rate) = now.bytes_per_second {
            tokio::time::sleep(Duration::from_secs_f64(bytes.len() as f64 / rate.max(1) as f64)).await;
        }
    }
    // An end is no more heard through a cut than bytes are.
    let _ = condition.wait_for(|condition| condition.flow == Flow::Pass).await;
    if lost || to.shutdown().await.is_err() { End::Broken } else { End::Closed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    /// A link, and a connection through it seen from both ends.
    async fn connected() -> (Link, TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let link = Link::open(listener.local_addr().unwrap(), 7).await.unwrap();
        let dialled = TcpStream::connect(link.address()).await.unwrap();
        let (taken, _) = listener.accept().await.unwrap();
        (link, dialled, taken)
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

    /// Waits until the link has counted something.
    async fn counted(link: &Link, what: impl Fn(&Counts) -> bool) {
        let wait = async {
            while !what(&link.counts()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DEADLINE, wait).await.unwrap();
    }

    #[tokio::test]
    async fn bytes_and_ends_go_through_in_order_with_delay_and_at_a_rate() {
        let (link, mut dialled, mut taken) = connected().await;
        dialled.write_all(b"to the listener").await.unwrap();
        arrives(&mut taken, b"to the listener").await;
        let slow = Condition {
            delay: Duration::from_millis(5),
            jitter: Duration::from_millis(5),
            bytes_per_second: Some(10_000_000),
            ..Condition::default()
        };
        link.set(Direction::Back, slow);
        let long: Vec<u8> = (0..200_000_u32).map(|byte| byte as u8).collect();
        let (sent, ()) = tokio::join!(taken.write_all(&long), arrives(&mut dialled, &long));
        sent.unwrap();
        assert!(link.counts().delayed_chunks > 1);
        drop(taken);
        assert_eq!(dialled.read(&mut [0; 8]).await.unwrap(), 0, "an orderly end is one on the other side too");
        let counts = link.counts();
        assert_eq!((counts.connections, counts.passed_bytes, counts.resets), (1, 200_015, 0));
    }

    #[tokio::test]
    async fn a_way_that_holds_loses_nothing_and_the_other_way_goes_on() {
        let (link, mut dialled, mut taken) = connected().await;
        link.set(Direction::Forth, Condition { flow: Flow::Hold, ..Condition::default() });
        dialled.write_all(b"waits").await.unwrap();
        taken.write_all(b"goes on").await.unwrap();
        arrives(&mut dialled, b"goes on").await;
        assert_eq!(link.counts().passed_bytes, 7);
        link.set(Direction::Forth, Condition::default());
        arrives(&mut taken, b"waits").await;
        assert_eq!(link.counts().holds, 1);
    }

    #[tokio::test]
    async fn a_connection_that_lost_bytes_is_reset_and_never_goes_on_with_a_gap() {
        let (link, mut dialled, mut taken) = connected().await;
        dialled.write_all(b"before").await.unwrap();
        arrives(&mut taken, b"before").await;
        link.set(Direction::Forth, Condition { flow: Flow::BlackHole, ..Condition::default() });
        dialled.write_all(b"lost").await.unwrap();
        counted(&link, |counts| counts.discarded_bytes == 4).await;
        taken.write_all(b"one-way").await.unwrap();
        arrives(&mut dialled, b"one-way").await;
        link.set(Direction::Forth, Condition::default());
        is_reset(&mut taken).await;
        is_reset(&mut dialled).await;
        assert_eq!((link.counts().black_holes, link.counts().resets), (1, 1));
    }

    #[tokio::test]
    async fn an_end_is_not_heard_through_a_cut() {
        let (link, dialled, mut taken) = connected().await;
        link.set(Direction::Forth, Condition { flow: Flow::BlackHole, ..Condition::default() });
        drop(dialled);
        taken.write_all(b"to nobody").await.unwrap();
        let heard = tokio::time::timeout(Duration::from_millis(50), taken.read(&mut [0; 8])).await;
        assert!(heard.is_err(), "nothing may be heard: {heard:?}");
        link.set(Direction::Forth, Condition::default());
        let ended = tokio::time::timeout(DEADLINE, taken.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }

    #[tokio::test]
    async fn resets_and_flips_are_done_when_asked_for_and_counted() {
        let (link, mut dialled, mut taken) = connected().await;
        link.flip(Direction::Forth);
        dialled.write_all(&[0; 64]).await.unwrap();
        let mut bytes = [0; 64];
        taken.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        link.reset();
        is_reset(&mut taken).await;
        is_reset(&mut dialled).await;
        assert_eq!((link.counts().flipped_bytes, link.counts().resets), (1, 1));
        // A link outlives its connections, and nobody behind it is a reset.
        let mut again = TcpStream::connect(link.address()).await.unwrap();
        is_reset(&mut again).await;
    }
}
