//! The links of a cluster: from each worker to each other worker and to the coordinator, each through a proxy of its own.
//!
//! Cuts are said as people think of them, from one node to another; a connection carries traffic both ways, so that the way
//! from `a` to `b` is the forth way of what `a` dialled and the back way of what `b` dialled.

use crate::proxy::{Condition, Counts, Flow, Link, Direction};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

/// Who dials or listens inside a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// The coordinator. It dials nobody.
    Coordinator,
    /// A worker, by its ordinal.
    Worker(u32),
}

/// The links of a cluster, by who dials and who listens.
#[derive(Debug)]
pub struct Network {
    links: BTreeMap<(Node, Node), Link>,
}

impl Network {
    /// Opens a link from every worker to every other one, at its peer listener, and to the coordinator. What is random comes
    /// from `seed`.
    ///
    /// # Errors
    /// No port can be had.
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

    /// Where `from` finds `to`; `None` where it does not dial it.
    pub fn address(&self, from: Node, to: Node) -> Option<SocketAddr> {
        self.links.get(&(from, to)).map(Link::address)
    }

    /// Changes what happens to everything that goes from `from` to `to`, whoever dialled.
    pub fn set(&self, from: Node, to: Node, condition: Condition) {
        for (ends, way) in [((from, to), Direction::Forth), ((to, from), Direction::Back)] {
            if let Some(link) = self.links.get(&ends) {
                link.set(way, condition);
            }
        }
    }

    /// Lets nothing through from `from` to `to`; the other way goes on.
    pub fn cut(&self, from: Node, to: Node) {
        self.set(from, to, Condition { flow: Flow::BlackHole, ..Condition::default() });
    }

    /// Cuts a worker off from every other one and from the coordinator, both ways.
    pub fn isolate(&self, node: Node) {
        for &(from, to) in self.links.keys().filter(|(from, to)| *from == node || *to == node) {
            self.cut(from, to);
            self.cut(to, from);
        }
    }

    /// Ends the connections between two nodes by a reset.
    pub fn reset(&self, a: Node, b: Node) {
        for ends in [(a, b), (b, a)] {
            if let Some(link) = self.links.get(&ends) {
                link.reset();
            }
        }
    }

    /// Lets everything through again. A connection that lost bytes is reset.
    pub fn restore(&self) {
        for link in self.links.values() {
            link.set(Direction::Forth, Condition::default());
            link.set(Direction::Back, Condition::default());
        }
    }

    /// What happened on all links until now.
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

    async fn says(from: &mut TcpStream, to: &mut TcpStream) -> bool {
        from.write_all(b"x").await.unwrap();
        tokio::time::timeout(Duration::from_millis(100), to.read_exact(&mut [0])).await.is_ok()
    }

    #[tokio::test]
    async fn a_one_way_cut_is_one_way_whoever_dialled() {
        let listen = async || TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let (zero, one, coordinator) = (listen().await, listen().await, listen().await);
        let at = |listener: &TcpListener| listener.local_addr().unwrap();
        let network = Network::open(&[at(&zero), at(&one)], at(&coordinator), 1).await.unwrap();
        let [a, b] = [Node::Worker(0), Node::Worker(1)];
        assert_eq!(network.address(Node::Coordinator, a), None);
        // Worker 1 dialled worker 0; the cut is named from 0 to 1.
        let mut by_one = TcpStream::connect(network.address(b, a).unwrap()).await.unwrap();
        let (mut by_zero, _) = zero.accept().await.unwrap();
        assert!(says(&mut by_one, &mut by_zero).await && says(&mut by_zero, &mut by_one).await);
        network.cut(a, b);
        assert!(says(&mut by_one, &mut by_zero).await, "from 1 to 0 goes on");
        assert!(!says(&mut by_zero, &mut by_one).await, "from 0 to 1 is cut");
        network.restore();
        assert_eq!(network.counts().black_holes, 2, "one way of each of the two links");
        network.isolate(b);
        assert_eq!(network.counts().black_holes, 2 + 6, "both ways of three links");
    }
}
