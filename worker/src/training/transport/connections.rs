//! Connections between the members of a generation.

use crate::training::step::reduce::Connections;
use crate::training::transport::secure::PeerTls;
use engram_collective::cost::Link;
use engram_collective::group::MemberId;
use engram_collective::measure::Network;
use engram_collective::transport::{Error, Secure, Tcp, TcpOptions, Wait, resolve};
use engram_identity::Keys;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A generation as a member sees it.
#[derive(Clone)]
pub(in crate::training) struct Generation {
    pub(in crate::training) number: u64,
    /// Members in rank order.
    pub(in crate::training) members: Vec<Peer>,
    pub(in crate::training) rank: usize,
    /// Set when the generation ends.
    pub(in crate::training) cancel: Arc<AtomicBool>,
}

/// A member of a generation.
#[derive(Clone)]
pub(in crate::training) struct Peer {
    pub(in crate::training) id: MemberId,
    /// Ordinal of its worker.
    pub(in crate::training) ordinal: u32,
    /// Where it accepts connections for reductions.
    pub(in crate::training) address: String,
}

/// What a member needs to connect to others.
pub(in crate::training) struct Connector {
    pub(in crate::training) listener: TcpListener,
    /// Keys of this worker, in a cluster with TLS.
    pub(in crate::training) keys: Option<Arc<Keys>>,
    /// Limit of the wait for a peer.
    pub(in crate::training) limit: Duration,
    /// TCP connections to each other member.
    pub(in crate::training) streams: usize,
    /// Whether members on one host exchange sums through shared memory.
    pub(in crate::training) shared_memory: bool,
}

impl Connector {
    /// Connects to all other members of a generation.
    ///
    /// # Errors
    /// The first member that cannot be reached, and those of `wait`.
    pub(in crate::training) fn connect(
        &self,
        generation: &Generation,
        wait: &mut Wait<'_>,
    ) -> Result<Connections, Error> {
        let Generation { number, members, rank, .. } = generation;
        let transport = if members.len() == 1 {
            None
        } else {
            let addresses: Vec<String> = members.iter().map(|peer| peer.address.clone()).collect();
            let addresses = resolve(*rank, &addresses, wait)?;
            let ordinals: Vec<u32> = members.iter().map(|peer| peer.ordinal).collect();
            let secure = self.keys.as_deref().map(|keys| PeerTls { keys, ordinals: &ordinals });
            let secure = secure.as_ref().map(|it| it as &dyn Secure);
            let options = TcpOptions {
                streams: self.streams,
                connect: self.limit,
                shared_memory: self.shared_memory,
                ..TcpOptions::default()
            };
            Some(Tcp::connect_within(*rank, *number, &addresses, &self.listener, secure, options, wait)?)
        };
        let network = Network::assumed(Link::LOOPBACK, members.len());
        let members = members.iter().map(|peer| peer.id).collect();
        let (accelerator, nccl) = (None, String::new());
        Ok(Connections { generation: *number, members, rank: *rank, transport, network, accelerator, nccl })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connects two members that have so many streams; returns the streams of each and the members that it reaches through shared memory.
    fn streams(streams: usize, shared_memory: bool) -> Vec<(usize, usize)> {
        let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let peer = |(id, listener): (usize, &TcpListener)| Peer {
            id: MemberId(id as u64),
            ordinal: id as u32,
            address: listener.local_addr().unwrap().to_string(),
        };
        let members: Vec<Peer> = listeners.iter().enumerate().map(peer).collect();
        std::thread::scope(|scope| {
            let connect = |(rank, listener): (usize, TcpListener)| {
                let generation = Generation { number: 1, members: members.clone(), rank, cancel: Arc::default() };
                scope.spawn(move || {
                    let limit = Duration::from_secs(60);
                    let connector = Connector { listener, keys: None, limit, streams, shared_memory };
                    let mut keep_waiting = |_| false;
                    let mut wait = Wait::new(limit, &generation.cancel, &mut keep_waiting);
                    let transport = connector.connect(&generation, &mut wait).unwrap().transport.unwrap();
                    (transport.streams(), transport.shared_connections())
                })
            };
            let threads: Vec<_> = listeners.into_iter().enumerate().map(connect).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn members_have_the_streams_of_the_run_and_one_through_shared_memory() {
        assert_eq!(streams(3, false), [(3, 0); 2]);
        assert_eq!(streams(1, false), [(1, 0); 2]);
        assert_eq!(streams(3, true), [(1, 1); 2]);
    }
}
