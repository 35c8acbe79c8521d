//! Accepts connections: a failed accept pauses, and some file descriptors stay in reserve for the store of the map.
//!
//! A connection that may not use a descriptor of the reserve is closed at once. Without the reserve, clients that keep connections open
//! could prevent every write of the map.

use futures::Stream;
use nix::sys::resource::{Resource, getrlimit};
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

/// File descriptors in reserve, at most a quarter of all: the map's file, or connections to the API server.
const RESERVED_DESCRIPTORS: u64 = 64;
/// Pause after a failed accept: descriptors become free when other connections end, which sends no notification.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of log lines about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Returns the accepted connections; the stream never ends and has no errors. `refused` counts connections and failed accepts for which
/// no descriptor was free.
pub(crate) fn incoming(
    listener: TcpListener,
    refused: Arc<AtomicU64>,
) -> impl Stream<Item = io::Result<TcpStream>> + Send {
    let listener = Arc::new(listener);
    let acceptor = Acceptor::new(refused, getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft));
    futures::stream::unfold((listener, acceptor), |(listener, mut acceptor)| async move {
        let accept = || {
            let listener = Arc::clone(&listener);
            async move {
                let (stream, _) = listener.accept().await?;
                // An error means that the connection has ended, which its first read reports.
                let _ = stream.set_nodelay(true);
                Ok(stream)
            }
        };
        let stream = acceptor.next(accept).await;
        Some((Ok(stream), (listener, acceptor)))
    })
}

struct Acceptor {
    refused: Arc<AtomicU64>,
    last_log: Option<Instant>,
    /// The lowest descriptor that no connection may use.
    reserved_from: u64,
}

impl Acceptor {
    fn new(refused: Arc<AtomicU64>, descriptors: u64) -> Self {
        let reserved_from = descriptors - (descriptors / 4).min(RESERVED_DESCRIPTORS);
        Self { refused, last_log: None, reserved_from }
    }

    /// Waits for a connection for which a descriptor is free.
    async fn next<F>(&mut self, accept: impl Fn() -> F) -> TcpStream
    where
        F: Future<Output = io::Result<TcpStream>>,
    {
        loop {
            let reason = match accept().await {
                Ok(stream) if !self.is_reserved(&stream) => return stream,
                Ok(_) => format!("{} file descriptors are in use, the rest is in reserve", self.reserved_from),
                Err(error) => {
                    sleep(PAUSE).await;
                    error.to_string()
                }
            };
            let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
            let now = Instant::now();
            if self.last_log.is_none_or(|last| now.saturating_duration_since(last) >= LOG_INTERVAL) {
                self.last_log = Some(now);
                tracing::warn!(reason, refused, "refused a connection");
            }
        }
    }

    /// Whether a connection uses a descriptor of the reserve. The kernel uses the lowest free one, so a high one means that few are left.
    fn is_reserved(&self, stream: &TcpStream) -> bool {
        u64::try_from(stream.as_raw_fd()).is_ok_and(|descriptor| descriptor >= self.reserved_from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    #[tokio::test(start_paused = true)]
    async fn an_accept_without_a_free_descriptor_pauses_instead_of_spinning() {
        let refused = Arc::new(AtomicU64::new(0));
        let mut acceptor = Acceptor::new(Arc::clone(&refused), 1 << 20);
        let exhausted = || std::future::ready(Err(io::Error::from_raw_os_error(nix::libc::EMFILE)));
        assert!(timeout(Duration::from_secs(10), acceptor.next(exhausted)).await.is_err());
        let refused = refused.load(Ordering::Relaxed);
        assert!((90..=100).contains(&refused), "{refused} accepts in 10 s");
    }

    #[tokio::test]
    async fn descriptors_of_the_reserve_serve_no_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, _) = accepted.unwrap();
        let acceptor = |descriptors| Acceptor::new(Arc::default(), descriptors);
        assert_eq!([64, 1 << 20].map(|all| acceptor(all).reserved_from), [48, (1 << 20) - RESERVED_DESCRIPTORS]);
        assert!(acceptor(0).is_reserved(&stream) && !acceptor(1 << 20).is_reserved(&stream));
    }
}
