//! How a client behaves. Every figure has a default that suits an interactive program beside its cluster.

use crate::network::Network;
use engram_memory::ClusterId;
use std::time::Duration;

/// Which listeners of the workers a client talks to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Plane {
    /// The client listener: any worker answers, forwarding what it does not own.
    #[default]
    Client,
    /// The peer listener: nothing is forwarded, messages may be larger. For workers themselves.
    Peer,
}

/// How reads are answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// At the primary, under its read leases: the latest state, as long as the rates of two clocks differ by less than 1 % over a
    /// second.
    #[default]
    Linearizable,
    /// At the primary, after every copy in sync has said that it leads: the latest state, whatever clocks do. Costs a round trip
    /// between workers, and waits where one of them is gone and not yet replaced.
    Confirmed,
    /// Of any copy that lags by at most so much, a copy that is no primary first: for quality, rank and digest. Answers say in their
    /// versions how far each one lags. Tells copies without a lag within the bound to ask their primary.
    Replica {
        /// Most lag, counted until the worker takes the read, in whole milliseconds; 0 asks a primary each time.
        max_lag: Duration,
    },
}

/// How a client behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// `host:port` of some workers of the cluster, at least one: the others are learnt from them.
    pub endpoints: Vec<String>,
    /// The cluster that must answer. Ports are reused: without it the first answer decides.
    pub cluster: Option<ClusterId>,
    /// Which listeners to talk to.
    pub plane: Plane,
    /// How long a write may take, retries included. A worker's restart takes a second or two: below that its clients see errors,
    /// above it a pause.
    pub write_deadline: Duration,
    /// How long a read may take, retries included.
    pub read_deadline: Duration,
    /// How long one attempt may take before the request is sent again. Lower finds a hanging worker sooner, and repeats
    /// requests to a slow one.
    pub attempt_deadline: Duration,
    /// How long a connection may take to come up.
    pub connect_deadline: Duration,
    /// Retries per request that are always allowed on average: a tenth keeps a cluster in trouble from being buried.
    pub retry_ratio: f64,
    /// Retries a second that are allowed whatever the traffic.
    pub retry_floor: f64,
    /// How connections are made. Over TCP by default; simulators have their own way.
    pub network: Network,
}

impl Options {
    /// Defaults, with these endpoints.
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
        }
    }

    /// The same, for this cluster only.
    #[must_use]
    pub fn of_cluster(mut self, cluster: ClusterId) -> Self {
        self.cluster = Some(cluster);
        self
    }
}
