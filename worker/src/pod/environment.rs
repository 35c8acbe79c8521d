//! Settings of a pod: the operator's file and the variables that its template sets.

use super::settings::{PodInfo, Settings, ordinal_of};
use anyhow::{Context as _, Result};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;

/// An address outside of the pod's network (RFC 5737).
const REMOTE_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

impl Settings {
    /// Reads the operator's file.
    ///
    /// # Errors
    /// The file cannot be read, lacks a field, or requests a feature that this version does not have.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("failed to read the cluster's settings from {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is invalid", path.display()))
    }
}

impl PodInfo {
    /// Reads `ENGRAM_CLUSTER`, `POD_NAMESPACE`, `POD_NAME` and `POD_IP`, as the pod's template sets them. Without `POD_IP`: the
    /// source address of outgoing packets.
    ///
    /// # Errors
    /// A variable is missing or invalid.
    pub fn from_environment() -> Result<Self> {
        let read = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let cluster = read("ENGRAM_CLUSTER").context("ENGRAM_CLUSTER is not set; allowed: the cluster's name")?;
        let pod = read("POD_NAME").context("POD_NAME is not set; allowed: the pod's name, as <cluster>-worker-0")?;
        let address = match read("POD_IP") {
            Some(text) => text.parse().ok().with_context(|| format!("POD_IP: '{text}'; allowed: an IP address"))?,
            None => outgoing_address()
                .context("POD_IP is not set, and this pod has no route whose source address could be used")?,
        };
        Ok(Self { cluster, ordinal: ordinal_of(&pod)?, namespace: read("POD_NAMESPACE"), address })
    }
}

/// Returns the source address of packets to other networks; none is sent.
fn outgoing_address() -> std::io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(REMOTE_ADDRESS)?;
    Ok(socket.local_addr()?.ip())
}
