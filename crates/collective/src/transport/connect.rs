//! Opens the connections of a rank to all others of its generation.
//!
//! A rank connects to those below it, then accepts those above it. Each handshake has a thread of its own, whose socket is shut down to end it: a
//! connection that says nothing delays no other one, and a generation that is over occupies no rank.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope, scope};
use std::time::{Duration, Instant};

use super::socket::{self, Socket};
use super::tcp::TcpOptions;
use super::{Error, Secure, Wait};

/// A peer may learn of the generation a little later: pause between attempts to connect to it.
const RETRY: Duration = Duration::from_millis(5);
/// How long a thread sleeps before it checks for cancellation.
const SLICE: Duration = Duration::from_millis(5);
/// How long it sleeps while a handshake is in progress.
const SHORT_SLICE: Duration = Duration::from_millis(1);
/// Most handshakes at once. One more ends the oldest: it is the most likely to be of a connection that says nothing.
const MAX_HANDSHAKES: usize = 256;

/// The connections to a peer.
type Slots = Vec<Option<Socket>>;
/// Rank and number of a connection that was accepted; `None` for one of another generation.
type Accepted = io::Result<Option<(usize, usize, Socket)>>;

/// A rank that opens its connections.
pub(super) struct Opening<'a> {
    pub(super) rank: usize,
    pub(super) generation: u64,
    pub(super) secure: Option<&'a dyn Secure>,
    pub(super) options: TcpOptions,
}

impl Opening<'_> {
    /// Connects to all ranks; returns the connections by rank.
    ///
    /// # Errors
    /// [`Error::Closed`] for a lower rank that refused connections for the whole limit; those of `wait`.
    pub(super) fn open(
        &self,
        addresses: &[SocketAddr],
        listener: &TcpListener,
        wait: &mut Wait<'_>,
    ) -> Result<Vec<Slots>, Error> {
        let streams = self.options.streams.max(1);
        let empty = || (0..streams).map(|_| None).collect::<Slots>();
        let mut slots: Vec<Slots> = addresses.iter().map(|_| empty()).collect();
        for (peer, address) in addresses.iter().enumerate().take(self.rank) {
            for stream in 0..streams {
                let socket = self.dial((peer, stream), *address, wait)?;
                slots[peer][stream] = Some(socket);
                if is_complete(&slots[peer]) {
                    break;
                }
            }
        }
        self.accept(listener, &mut slots, wait)?;
        Ok(slots)
    }

    /// Connects to a listener until it accepts the generation.
    fn dial(&self, (peer, stream): (usize, usize), address: SocketAddr, wait: &mut Wait<'_>) -> Result<Socket, Error> {
        let mut failing_since = None;
        loop {
            match self.attempt((peer, stream), address, wait)? {
                Ok(socket) => {
                    wait.progress();
                    return Ok(socket);
                }
                // No answer at all, which `wait` has reported.
                Err(error) if error.kind() == ErrorKind::TimedOut => failing_since = None,
                Err(error) => {
                    let since = *failing_since.get_or_insert_with(Instant::now);
                    if since.elapsed() + RETRY >= self.options.connect {
                        return Err(Error::Closed { rank: peer, source: Some(error) });
                    }
                    std::thread::sleep(RETRY);
                }
            }
        }
    }

    /// Makes one attempt to connect. An attempt without an answer ends at the limit, since the next one reaches a host that came back sooner; one that is
    /// connected waits until the peer accepts: it may still compute.
    fn attempt(
        &self,
        (peer, stream): (usize, usize),
        address: SocketAddr,
        wait: &mut Wait<'_>,
    ) -> Result<io::Result<Socket>, Error> {
        if wait.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let end = Instant::now() + self.options.connect;
        let tcp = match socket::begin(address) {
            Ok(tcp) => tcp,
            Err(error) => return Ok(Err(error)),
        };
        loop {
            match socket::is_connected(&tcp, SLICE) {
                Ok(true) => break,
                Ok(false) => {
                    wait.idle(peer)?;
                }
                Err(error) => return Ok(Err(error)),
            }
            if Instant::now() >= end {
                return Ok(Err(ErrorKind::TimedOut.into()));
            }
        }
        let secure = self.secure.map(|secure| (secure, peer));
        let hello = socket::hello(self.generation, self.rank, stream);
        let shared = self.options.shared_memory;
        scope(|scope| {
            let mut handshakes = Handshakes::new(scope);
            let started = handshakes.start(tcp, move |tcp| socket::greet(tcp, secure, hello, shared));
            if let Err(error) = started {
                return Ok(Err(error));
            }
            loop {
                if let Some((_, result)) = handshakes.finished(SLICE) {
                    return Ok(result);
                }
                wait.idle(peer)?;
            }
        })
    }

    /// Accepts the higher ranks. One that is not there is reported by `wait`: it may compute, or wait for another one itself.
    fn accept(&self, listener: &TcpListener, slots: &mut [Slots], wait: &mut Wait<'_>) -> Result<(), Error> {
        let (secure, generation) = (self.secure, self.generation);
        let (shared, limit) = (self.options.shared_memory, self.options.connect);
        let missing = |slots: &[Slots]| (self.rank + 1..slots.len()).find(|&peer| !is_complete(&slots[peer]));
        // Numbers of the handshakes of the connections.
        let mut numbers: Vec<Vec<u64>> = slots.iter().map(|it| vec![0; it.len()]).collect();
        scope(|scope| {
            let mut handshakes = Handshakes::<Accepted>::new(scope);
            while let Some(peer) = missing(slots) {
                let mut has_more = false;
                while let Some((number, result)) = handshakes.finished(Duration::ZERO) {
                    // Otherwise another generation, or a connection that ended: the peer tries again.
                    if let Ok(Some((from, stream, socket))) = result
                        && let Some(slot) = slots.get_mut(from).filter(|_| from > self.rank)
                        && let Some(slot) = slot.get_mut(stream)
                        // A peer that tries again has given up its earlier connection.
                        && numbers[from][stream] < number
                    {
                        (*slot, numbers[from][stream]) = (Some(socket), number);
                        has_more = true;
                    }
                }
                if has_more {
                    wait.progress();
                    continue;
                }
                wait.idle(peer)?;
                let slice = if handshakes.is_empty() { SLICE } else { SHORT_SLICE };
                if socket::has_connection(listener, slice)
                    && let Ok((tcp, _)) = listener.accept()
                {
                    let receive = move |tcp| socket::receive(tcp, secure, generation, (shared, limit));
                    // Without a thread for it the peer tries again.
                    let _ = handshakes.start(tcp, receive);
                }
            }
            Ok(())
        })
    }
}

/// Whether all connections to a peer are open: one that has the first of them through shared memory opens no other.
fn is_complete(slots: &[Option<Socket>]) -> bool {
    matches!(slots.first(), Some(Some(Socket::Shared(_)))) || slots.iter().all(Option::is_some)
}

/// Handshakes in progress, and the results of those that ended. Dropping it ends the rest.
struct Handshakes<'scope, 'env, T> {
    scope: &'scope Scope<'scope, 'env>,
    sender: Sender<(u64, T)>,
    results: Receiver<(u64, T)>,
    /// The oldest first.
    open: VecDeque<(u64, TcpStream)>,
    last: u64,
}

impl<'scope, 'env, T: Send + 'scope> Handshakes<'scope, 'env, T> {
    fn new(scope: &'scope Scope<'scope, 'env>) -> Self {
        let (sender, results) = channel();
        Self { scope, sender, results, open: VecDeque::new(), last: 0 }
    }

    fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Starts a handshake. They are numbered from 1.
    fn start(&mut self, tcp: TcpStream, handshake: impl FnOnce(TcpStream) -> T + Send + 'scope) -> io::Result<()> {
        if self.open.len() >= MAX_HANDSHAKES
            && let Some((_, oldest)) = self.open.pop_front()
        {
            end(&oldest);
        }
        self.last += 1;
        let (number, sender) = (self.last, self.sender.clone());
        let open = tcp.try_clone()?;
        // Without a receiver the rank has all connections, or has given up.
        let work = move || drop(sender.send((number, handshake(tcp))));
        Builder::new().name("handshake".into()).spawn_scoped(self.scope, work)?;
        self.open.push_back((number, open));
        Ok(())
    }

    /// Returns the number and the result of a handshake that ended, waiting at most `limit` for it.
    fn finished(&mut self, limit: Duration) -> Option<(u64, T)> {
        let (number, result) = self.results.recv_timeout(limit).ok()?;
        self.open.retain(|(it, _)| *it != number);
        Some((number, result))
    }
}

impl<T> Drop for Handshakes<'_, '_, T> {
    fn drop(&mut self) {
        self.open.iter().for_each(|(_, socket)| end(socket));
    }
}

/// Ends the reads and writes of another thread. An error means that the connection has ended.
fn end(socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::super::Tcp;
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Far longer than any test may take.
    const PATIENT: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_secs(20);

    fn listeners(ranks: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
        let listeners: Vec<TcpListener> = (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        (listeners, addresses)
    }

    fn options(connect: Duration) -> TcpOptions {
        TcpOptions { connect, ..TcpOptions::default() }
    }

    #[test]
    fn cancellation_ends_a_rank_that_connects_and_one_that_accepts() {
        // Rank 0 does not accept, and ranks 1 and 2 are not there.
        let (listeners, addresses) = listeners(3);
        for rank in [1, 0] {
            let (cancel, started) = (AtomicBool::new(false), Instant::now());
            scope(|scope| {
                let connect = || {
                    let mut keep_waiting = |_| true;
                    let mut wait = Wait::new(PATIENT, &cancel, &mut keep_waiting);
                    let options = options(PATIENT);
                    Tcp::connect_within(rank, 1, &addresses, &listeners[rank], None, options, &mut wait)
                };
                let thread = scope.spawn(connect);
                std::thread::sleep(Duration::from_millis(30));
                cancel.store(true, Ordering::Relaxed);
                let result = thread.join().unwrap();
                assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
            });
            assert!(started.elapsed() < SOON, "rank {rank}: {:?}", started.elapsed());
        }
    }

    #[test]
    fn peer_that_connects_late_is_reported_and_waited_for() {
        let (listeners, addresses) = listeners(2);
        for late in [1, 0] {
            let (never, reports) = (AtomicBool::new(false), channel());
            let connect = |rank: usize, limit: Duration, reports: Option<Sender<usize>>| {
                let mut keep_waiting = |peer| {
                    let _ = reports.as_ref().map(|it| it.send(peer));
                    true
                };
                let mut wait = Wait::new(limit, &never, &mut keep_waiting);
                let options = options(limit);
                Tcp::connect_within(rank, 1, &addresses, &listeners[rank], None, options, &mut wait).map(drop)
            };
            scope(|scope| {
                let early = scope.spawn(|| connect(1 - late, Duration::from_millis(20), Some(reports.0)));
                // More than twice the limit.
                for _ in 0..3 {
                    assert_eq!(reports.1.recv_timeout(SOON), Ok(late));
                }
                connect(late, PATIENT, None).unwrap();
                early.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn silent_connection_delays_no_other_one() {
        let (listeners, addresses) = listeners(2);
        let silent: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(addresses[0]).unwrap()).collect();
        let started = Instant::now();
        scope(|scope| {
            let connect = |rank: usize| Tcp::connect(rank, 1, &addresses, &listeners[rank], None, options(PATIENT));
            let threads = [0, 1].map(|rank| scope.spawn(move || connect(rank).map(drop)));
            threads.into_iter().for_each(|it| it.join().unwrap().unwrap());
        });
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        drop(silent);
    }
}
