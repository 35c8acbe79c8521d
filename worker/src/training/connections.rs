//! Connections between the members of a generation.

use super::engine::Generation;
use super::reduce::Connections;
use engram_collective::transport::{Error, Tcp, TcpOptions};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::time::Duration;

/// Connects to all other members of a generation; each wait for a peer ends after `limit`.
///
/// # Errors
/// The first member that cannot be reached.
pub(super) fn connect(generation: &Generation, listener: &TcpListener, limit: Duration) -> Result<Connections, Error> {
    let Generation { number, members, rank, .. } = generation;
    let transport = if members.len() == 1 {
        None
    } else {
        let addresses = members.iter().enumerate().map(|(rank, (_, address))| resolve(rank, address));
        let addresses: Vec<SocketAddr> = addresses.collect::<Result<_, _>>()?;
        let options = TcpOptions { connect: limit, ..TcpOptions::default() };
        Some(Tcp::connect(*rank, *number, &addresses, listener, options)?)
    };
    let members = members.iter().map(|(id, _)| *id).collect();
    Ok(Connections { generation: *number, members, rank: *rank, transport })
}

/// Resolves the address of a rank.
fn resolve(rank: usize, address: &str) -> Result<SocketAddr, Error> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("{address} has no IP address"));
    let closed = |source| Error::Closed { rank, source: Some(source) };
    address.to_socket_addrs().map_err(closed)?.next().ok_or_else(|| closed(unknown()))
}
