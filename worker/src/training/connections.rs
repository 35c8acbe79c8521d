//! Connections between the members of a generation.

use super::reduce::Connections;
use super::secure::PeerTls;
use engram_collective::cost::Link;
use engram_collective::group::MemberId;
use engram_collective::measure::Network;
use engram_collective::transport::{Error, Secure, Tcp, TcpOptions, resolve};
use engram_identity::Keys;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A generation as a member sees it.
#[derive(Clone)]
pub(super) struct Generation {
    pub(super) number: u64,
    /// Members in rank order.
    pub(super) members: Vec<Peer>,
    pub(super) rank: usize,
    /// Set when the generation ends.
    pub(super) cancel: Arc<AtomicBool>,
}

/// A member of a generation.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) id: MemberId,
    /// Ordinal of its worker.
    pub(super) ordinal: u32,
    /// Where it accepts connections for reductions.
    pub(super) address: String,
}

/// What a member needs to connect to others.
pub(super) struct Connector {
    pub(super) listener: TcpListener,
    /// Keys of this worker, in a cluster with TLS.
    pub(super) keys: Option<Arc<Keys>>,
    /// Limit of the wait for a peer.
    pub(super) limit: Duration,
}

impl Connector {
    /// Connects to all other members of a generation.
    ///
    /// # Errors
    /// The first member that cannot be reached.
    pub(super) fn connect(&self, generation: &Generation) -> Result<Connections, Error> {
        let Generation { number, members, rank, .. } = generation;
        let transport = if members.len() == 1 {
            None
        } else {
            let addresses = members.iter().enumerate();
            // Peers of higher ranks connect to this one.
            let addresses =
                addresses.map(|(peer, it)| resolve(peer, &it.address, (peer < *rank).then_some(self.limit)));
            let addresses: Vec<SocketAddr> = addresses.collect::<Result<_, _>>()?;
            let ordinals: Vec<u32> = members.iter().map(|peer| peer.ordinal).collect();
            let secure = self.keys.as_deref().map(|keys| PeerTls { keys, ordinals: &ordinals });
            let secure = secure.as_ref().map(|it| it as &dyn Secure);
            let options = TcpOptions { connect: self.limit, ..TcpOptions::default() };
            Some(Tcp::connect(*rank, *number, &addresses, &self.listener, secure, options)?)
        };
        let network = Network::assumed(Link::LOOPBACK, members.len());
        let members = members.iter().map(|peer| peer.id).collect();
        Ok(Connections { generation: *number, members, rank: *rank, transport, network })
    }
}
