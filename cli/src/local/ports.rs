//! Where the processes of a local cluster listen: on loopback, all ports looked at before anything starts.

use crate::error::problem;
use engram_api::{Code, Problem};
use engram_worker::Listen;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

/// First port of worker 0: client, peer and administration follow each other.
pub(crate) const BASE: u16 = 7_443;
/// Between the ports of one worker and of the next.
const STRIDE: u32 = 10;
/// From the first port to that of worker 0's HTTP page: 9090, where the first is the usual one.
const TO_HTTP: u32 = 9_090 - BASE as u32;
/// Free ports are taken from here: below those that systems give to outgoing connections, one of which could otherwise
/// sit on a worker's port when that worker is started again.
const FREE: std::ops::Range<u16> = 10_240..32_000;
/// Looks at that many before it gives up.
const ATTEMPTS: u32 = 10_000;

/// Ports that were free and are this process's as long as it lives: the UDP port of the same number is held, which nobody here talks to.
/// What listens on a port is another process, which comes later and may be started again: meanwhile the port looks free to any other
/// cluster of this machine that takes free ones.
type Claims = Arc<Mutex<Vec<UdpSocket>>>;

/// Where everybody listens.
#[derive(Debug, Clone)]
pub(crate) struct Ports {
    /// The coordinator.
    pub(crate) coordinator: SocketAddr,
    /// The workers, by ordinal.
    pub(crate) workers: Vec<Listen>,
    /// The first port of worker 0, from which the others follow; 0 = free ones.
    base: u16,
    claims: Claims,
}

impl Ports {
    /// Chooses ports for `workers` workers from `base` on, or free ones where it is 0; the coordinator gets a free one.
    /// All of them could be had a moment ago, and no other cluster takes the free ones while this value or a clone of it lives.
    ///
    /// # Errors
    /// ENG-0402 names a port that is in use; ENG-0103 where the last port would lie above 65535.
    pub(crate) fn choose(workers: u32, base: u16) -> anyhow::Result<Self> {
        // Held until all are chosen, so that none is chosen twice.
        let mut held = Vec::new();
        let mut listens = Vec::new();
        let claims = Claims::default();
        for worker in 0..workers {
            listens.push(one(&mut held, &claims, worker, workers, base)?);
        }
        Ok(Self { coordinator: free(&claims)?, workers: listens, base, claims })
    }

    /// Chooses ports for one more worker.
    ///
    /// # Errors
    /// As [`Ports::choose`].
    pub(crate) fn more(&self, worker: u32) -> anyhow::Result<Listen> {
        one(&mut Vec::new(), &self.claims, worker, worker + 1, self.base)
    }
}

fn one(held: &mut Vec<TcpListener>, claims: &Claims, worker: u32, workers: u32, base: u16) -> anyhow::Result<Listen> {
    if base == 0 {
        let next = || free(claims);
        return Ok(Listen { client: next()?, peer: next()?, admin: next()?, http: next()? });
    }
    let first = u32::from(base) + STRIDE * worker;
    let mut take = |port| fixed(held, worker, port, workers, base);
    Ok(Listen {
        client: take(first)?,
        peer: take(first + 1)?,
        admin: take(first + 2)?,
        http: take(u32::from(base) + TO_HTTP + worker)?,
    })
}

fn fixed(held: &mut Vec<TcpListener>, worker: u32, port: u32, workers: u32, base: u16) -> anyhow::Result<SocketAddr> {
    let port = u16::try_from(port).map_err(|_| {
        let message =
            format!("--port-base is {base}: worker {worker} of {workers} would listen on {port}; allowed: up to 65535");
        problem(Code::OutOfRange, message)
    })?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match TcpListener::bind(address) {
        Ok(listener) => {
            held.push(listener);
            Ok(address)
        }
        Err(error) => {
            Err(Problem::new(Code::PortInUse, format!("{address}, for worker {worker}, cannot be had: {error}"))
                .help("move the cluster:     --port-base N")
                .help("or take free ports:   --port-base 0")
                .into())
        }
    }
}

fn free(claims: &Claims) -> anyhow::Result<SocketAddr> {
    for _ in 0..ATTEMPTS {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, rand::random_range(FREE)));
        // The claim first: only who has it looks whether anybody listens there.
        if let Ok(claim) = UdpSocket::bind(address)
            && TcpListener::bind(address).is_ok()
        {
            claims.lock().unwrap_or_else(PoisonError::into_inner).push(claim);
            return Ok(address);
        }
    }
    Err(problem(Code::PortInUse, format!("no free port found between {} and {}", FREE.start, FREE.end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn all(ports: &Ports) -> BTreeSet<SocketAddr> {
        let workers = ports.workers.iter().flat_map(|it| [it.client, it.peer, it.admin, it.http]);
        workers.chain([ports.coordinator]).collect()
    }

    #[test]
    fn free_ports_are_distinct_and_on_loopback() {
        let ports = Ports::choose(5, 0).unwrap();
        assert_eq!(all(&ports).len(), 21);
        assert!(all(&ports).iter().all(|address| address.ip().is_loopback()));
    }

    /// Two of 60 workers each, of which nobody listens anywhere yet: chosen without claims, they would share ports.
    #[test]
    fn free_ports_of_two_clusters_are_distinct_before_anybody_listens() {
        let (one, other) = (Ports::choose(60, 0).unwrap(), Ports::choose(60, 0).unwrap());
        assert!(all(&one).is_disjoint(&all(&other)));
        assert!(one.workers.iter().all(|it| it.client != one.more(60).unwrap().client));
        let of_one = one.workers[0].client;
        assert!(UdpSocket::bind(of_one).is_err());
        drop(one);
        assert!(UdpSocket::bind(of_one).is_ok(), "a claim ends with who made it");
    }

    #[test]
    fn a_port_in_use_is_named_and_a_base_too_high_refused() {
        let ports = Ports::choose(1, 0).unwrap();
        let taken = TcpListener::bind(ports.workers[0].client).unwrap();
        let base = taken.local_addr().unwrap().port();
        let error = Ports::choose(1, base).unwrap_err();
        assert!(error.to_string().contains(&format!("127.0.0.1:{base}")), "{error}");
        assert_eq!(error.downcast_ref::<Problem>().unwrap().code(), Code::PortInUse);
        let error = Ports::choose(1, u16::MAX).unwrap_err();
        assert_eq!(error.downcast_ref::<Problem>().unwrap().code(), Code::OutOfRange);
    }
}
