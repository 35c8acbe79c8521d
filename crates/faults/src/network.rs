//! The links of a cluster: from each worker to every other worker and to the coordinator, each through its own proxy.
//!
//! Cuts are named by direction of traffic, from one node to another. A connection carries traffic both ways, so traffic
//! from `a` to `b` uses the forward direction of connections opened by `a` and the backward direction of those opened
//! by `b`.

use crate::proxy::{Condition, Counts, Direction, Flow, Link};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

/// A member of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// The coordinator. It opens no connections.
    Coordinator,
    /// A worker, by its ordinal.
    Worker(u32),
}

/// The links of a cluster, by connecting and listening node.
#[derive(Debug)]
pub struct Network {
    links: BTreeMap<(Node, Node), Link>,
}

impl Network {
    /// Opens a link from every worker to the peer listener of every other one, and to the coordinator. `seed`
    /// determines everything random.
    ///
    /// # Errors If no port is available.
    pub async fn open(peers: &[SocketAddr], coordinator: SocketAddr, seed: u64) -> io::Result<Self> {
        let mut draws = StdRng::seed_from_u64(seed);
        let mut links = BTreeMap::new();
        for from in 0..peers.len() as u32 {
            let others = (0..).zip(peers).filter(|(to, _)| *to != from).map(|(to, at)| (Node::Worker(to), *at));
            for (to, at) in others.chain([(Node::Coordinator, coordinator)]) {
                links.insert((Node::Worker(from), to), Link::open(at, draws.random()).await?);
            }
        }
        Ok(Self { links })
    }

    /// Returns the address at which `from` reaches `to`; `None` if it does not connect to it.
    pub fn address(&self, from: Node, to: Node) -> Option<SocketAddr> {
        self.links.get(&(from, to)).map(Link::address)
    }

    /// Sets the condition of all traffic from `from` to `to`, in connections opened by either.
    pub fn set(&self, from: Node, to: Node, condition: Condition) {
        for (ends, direction) in [((from, to), Direction::Forth), ((to, from), Direction::Back)] {
            if let Some(link) = self.links.get(&ends) {
                link.set(direction, condition);
            }
        }
    }

    /// Blocks traffic from `from` to `to`; the opposite direction works.
    pub fn cut(&self, from: Node, to: Node) {
        self.set(from, to, Condition { flow: Flow::BlackHole, ..Condition::default() });
    }

    /// Cuts a worker off from all other members, both ways.
    pub fn isolate(&self, node: Node) {
        for &(from, to) in self.links.keys().filter(|(from, to)| *from == node || *to == node) {
            self.cut(from, to);
            self.cut(to, from);
        }
    }

    /// Resets the connections between two nodes.
    pub fn reset(&self, a: Node, b: Node) {
        for ends in [(a, b), (b, a)] {
            if let Some(link) = self.links.get(&ends) {
                link.reset();
            }
        }
    }

    /// Restores all traffic. Connections that lost bytes are reset.
    pub fn restore(&self) {
        for link in self.links.values() {
            link.set(Direction::Forth, Condition::default());
            link.set(Direction::Back, Condition::default());
        }
    }

    /// Returns the counters of all links.
    pub fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for link in self.links.values() {
            sum.add(&link.counts());
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    async fn passes(from: &mut TcpStream, to: &mut TcpStream) -> bool {
        from.write_all(b"x").await.unwrap();
        tokio::time::timeout(Duration::from_millis(100), to.read_exact(&mut [0])).await.is_ok()
    }

    #[tokio::test]
    async fn a_one_way_cut_is_one_way_in_connections_of_either_side() {
        let listen = async || TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let (zero, one, coordinator) = (listen().await, listen().await, listen().await);
        let at = |listener: &TcpListener| listener.local_addr().unwrap();
        let network = Network::open(&[at(&zero), at(&one)], at(&coordinator), 1).await.unwrap();
        let [a, b] = [Node::Worker(0), Node::Worker(1)];
        assert_eq!(network.address(Node::Coordinator, a), None);
        // Worker 1 opened the connection; the cut is named from 0 to 1.
        let mut by_one = TcpStream::connect(network.address(b, a).unwrap()).await.unwrap();
        let (mut by_zero, _) = zero.accept().await.unwrap();
        assert!(passes(&mut by_one, &mut by_zero).await && passes(&mut by_zero, &mut by_one).await);
        network.cut(a, b);
        assert!(passes(&mut by_one, &mut by_zero).await, "from 1 to 0 works");
        assert!(!passes(&mut by_zero, &mut by_one).await, "from 0 to 1 is cut");
        network.restore();
        assert_eq!(network.counts().black_holes, 2, "one direction of each of the two links");
        network.isolate(b);
        assert_eq!(network.counts().black_holes, 2 + 6, "both directions of three links");
    }
}
