//! Client options. Every value has a default that suits an interactive program close to its cluster.

use crate::network::Network;
use engram_memory::ClusterId;
use std::time::Duration;

/// Which listeners of the workers a client connects to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Plane {
    /// The client listener: any worker answers, forwarding what it does not own.
    #[default]
    Client,
    /// The peer listener: nothing is forwarded, messages may be larger. For workers themselves.
    Peer,
}

/// Consistency of reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// At the primary, under its read leases: the latest state, as long as the rates of two clocks differ by less than
    /// 1 % over a second.
    #[default]
    Linearizable,
    /// At the primary, after every in-sync replica has confirmed it: the latest state, independent of clocks. Costs a
    /// round trip between workers, and waits while one of them is dead and not yet replaced.
    Confirmed,
    /// At any replica that lags by at most `max_lag`, a backup first: for quality, rank and digest. Responses contain
    /// the lag of each partition. Replicas without a lag within the bound are skipped in favour of the primary.
    Replica {
        /// Maximum lag, measured when the worker receives the read, in whole milliseconds; 0 always reads at the
        /// primary.
        max_lag: Duration,
    },
}

/// Options of a client.
#[derive(Debug, Clone)]
pub struct Options {
    /// `host:port` of some workers of the cluster, at least one: the others are discovered.
    pub endpoints: Vec<String>,
    /// The expected cluster. Ports are reused: without it the first response decides.
    pub cluster: Option<ClusterId>,
    /// Which listeners to connect to.
    pub plane: Plane,
    /// How long a write may take, retries included. A worker's restart takes a second or two: with less, clients see
    /// errors; with more, a pause.
    pub write_deadline: Duration,
    /// How long a read may take, retries included.
    pub read_deadline: Duration,
    /// How long one attempt may take before the request is sent again. Lower detects a hanging worker sooner, and
    /// repeats requests to a slow one.
    pub attempt_deadline: Duration,
    /// How long a connection attempt may take.
    pub connect_deadline: Duration,
    /// Average number of retries allowed per request: a tenth prevents retry storms.
    pub retry_ratio: f64,
    /// Retries per second that are allowed regardless of the traffic.
    pub retry_floor: f64,
    /// How connections are made. TCP by default.
    pub network: Network,
    /// Key of a local cluster's owner: without it, runs may name only files below folders that the owner allowed.
    pub owner_key: OwnerKey,
}

/// Key of a local cluster's owner; empty = none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct OwnerKey(pub String);

impl std::fmt::Debug for OwnerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnerKey(redacted)")
    }
}

impl Options {
    /// Returns the defaults with these endpoints.
    pub fn new<E: Into<String>>(endpoints: impl IntoIterator<Item = E>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            cluster: None,
            plane: Plane::Client,
            write_deadline: Duration::from_secs(30),
            read_deadline: Duration::from_secs(30),
            attempt_deadline: Duration::from_secs(10),
            connect_deadline: Duration::from_secs(2),
            retry_ratio: 0.1,
            retry_floor: 20.0,
            network: Network::default(),
            owner_key: OwnerKey::default(),
        }
    }

    /// Sets the expected cluster.
    #[must_use]
    pub fn with_cluster(mut self, cluster: ClusterId) -> Self {
        self.cluster = Some(cluster);
        self
    }
}
