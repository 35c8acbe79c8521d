//! Ports of the processes of a local cluster, on loopback, all checked before the first process starts.

use crate::error::{failure, problem};
use engram_api::{Code, ExitCode, Problem};
use engram_worker::Listen;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

/// Default first port of worker 0: client, peer and admin port are consecutive.
pub(crate) const BASE: u16 = 7_443;
/// Distance between the ports of two workers.
const STRIDE: u32 = 10;
/// Distance from the first port to the HTTP port of worker 0: 9090 by default.
const TO_HTTP: u32 = 9_090 - BASE as u32;
/// Range of free ports: below the ephemeral range, so that an outgoing connection cannot take the port of a restarting worker.
const FREE: std::ops::Range<u16> = 10_240..32_000;
/// File descriptors with which every local cluster starts.
const NEEDED_FILES: u32 = 4_096;
/// Attempts to find a free port.
const ATTEMPTS: u32 = 10_000;

/// Reservations of free ports, held as UDP sockets with the same number. The TCP listeners belong to child processes that start later
/// and may restart; meanwhile another local cluster would consider the ports free.
type Reservations = Arc<Mutex<Vec<UdpSocket>>>;

/// Listen addresses of a local cluster.
#[derive(Debug, Clone)]
pub(crate) struct Ports {
    pub(crate) coordinator: SocketAddr,
    /// By ordinal.
    pub(crate) workers: Vec<Listen>,
    /// First port of worker 0; 0 = free ports.
    base: u16,
    reservations: Reservations,
}

impl Ports {
    /// Chooses ports for `workers` workers from `base` on, or free ports if it is 0. The coordinator gets a free port. Free ports stay
    /// reserved while this value or a clone of it lives.
    ///
    /// # Errors
    /// ENG-0402 names a port that is in use; ENG-0103 if the last port exceeds 65535.
    pub(crate) fn choose(workers: u32, base: u16) -> anyhow::Result<Self> {
        // Holds the listeners, so that no port is chosen twice.
        let mut held = Vec::new();
        let mut listens = Vec::new();
        let reservations = Reservations::default();
        for worker in 0..workers {
            listens.push(worker_ports(&mut held, &reservations, worker, workers, base)?);
        }
        Ok(Self { coordinator: free_port(&reservations)?, workers: listens, base, reservations })
    }

    /// Chooses ports for an additional worker.
    ///
    /// # Errors
    /// As [`Ports::choose`].
    pub(crate) fn for_worker(&self, worker: u32) -> anyhow::Result<Listen> {
        worker_ports(&mut Vec::new(), &self.reservations, worker, worker + 1, self.base)
    }
}

fn worker_ports(
    held: &mut Vec<TcpListener>,
    reservations: &Reservations,
    worker: u32,
    workers: u32,
    base: u16,
) -> anyhow::Result<Listen> {
    if base == 0 {
        let next = || free_port(reservations);
        return Ok(Listen { client: next()?, peer: next()?, admin: next()?, http: next()? });
    }
    let first = u32::from(base) + STRIDE * worker;
    let mut take = |port| fixed_port(held, worker, port, workers, base);
    Ok(Listen {
        client: take(first)?,
        peer: take(first + 1)?,
        admin: take(first + 2)?,
        http: take(u32::from(base) + TO_HTTP + worker)?,
    })
}

fn fixed_port(
    held: &mut Vec<TcpListener>,
    worker: u32,
    port: u32,
    workers: u32,
    base: u16,
) -> anyhow::Result<SocketAddr> {
    let port = u16::try_from(port).map_err(|_| {
        let message =
            format!("--port-base is {base}: worker {worker} of {workers} would use port {port}; allowed: up to 65535");
        problem(Code::OutOfRange, message)
    })?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match TcpListener::bind(address) {
        Ok(listener) => {
            held.push(listener);
            Ok(address)
        }
        Err(error) => {
            Err(Problem::new(Code::PortInUse, format!("failed to bind {address} for worker {worker}: {error}"))
                .help("use other ports: --port-base N")
                .help("use free ports: --port-base 0")
                .into())
        }
    }
}

fn free_port(reservations: &Reservations) -> anyhow::Result<SocketAddr> {
    for _ in 0..ATTEMPTS {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, rand::random_range(FREE)));
        // Reserves first, so that two clusters never check the same port.
        let reserved = UdpSocket::bind(address).and_then(|reservation| TcpListener::bind(address).map(|_| reservation));
        match reserved {
            Ok(reservation) => {
                reservations.lock().unwrap_or_else(PoisonError::into_inner).push(reservation);
                return Ok(address);
            }
            // No other port changes that.
            Err(error) if is_out_of_descriptors(&error) => return Err(out_of_descriptors(&error)),
            Err(_) => {}
        }
    }
    Err(problem(Code::PortInUse, format!("no free port found from {} to {}", FREE.start, FREE.end)))
}

fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::EMFILE | Errno::ENFILE))
}

/// Describes a bind that failed for want of file descriptors.
fn out_of_descriptors(error: &std::io::Error) -> anyhow::Error {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    let message = format!(
        "failed to reserve ports: {error}; this process may open {limit} files, and a local cluster needs about {NEEDED_FILES}: \
         raise the limit with `ulimit -n {NEEDED_FILES}`"
    );
    failure(ExitCode::Failed, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::time::{Duration, Instant};

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

    /// Without reservations two clusters of 60 workers would share ports.
    #[test]
    fn free_ports_of_two_clusters_are_distinct_before_they_listen() {
        let (one, other) = (Ports::choose(60, 0).unwrap(), Ports::choose(60, 0).unwrap());
        assert!(all(&one).is_disjoint(&all(&other)));
        assert!(one.workers.iter().all(|it| it.client != one.for_worker(60).unwrap().client));
        let of_one = one.workers[0].client;
        assert!(UdpSocket::bind(of_one).is_err());
        drop(one);
        // A child process that another test starts holds inherited sockets until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(30);
        while UdpSocket::bind(of_one).is_err() {
            assert!(Instant::now() < deadline, "a reservation ends with its owner");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn ports_in_use_are_named_and_too_high_bases_rejected() {
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
