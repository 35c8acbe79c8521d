//! The seam to the network: how connections are made.

use futures::future::BoxFuture;
use std::fmt;
use std::sync::Arc;
use tonic::transport::{Channel, Endpoint, Error};

/// Makes connections, each with the deadlines and limits of its endpoint.
pub trait Dial: Send + Sync {
    /// A connection that is there.
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>>;

    /// A connection that is made when it is first used, and made again when it broke.
    fn connect_lazy(&self, endpoint: Endpoint) -> Channel;
}

/// How connections are made: over TCP, or as a simulator says.
#[derive(Clone, Default)]
pub struct Network(Option<Arc<dyn Dial>>);

impl Network {
    /// A network of a simulator's.
    pub fn of(dial: impl Dial + 'static) -> Self {
        Self(Some(Arc::new(dial)))
    }

    /// Connects.
    ///
    /// # Errors
    /// Nobody answers within the endpoint's deadline.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, Error> {
        match &self.0 {
            Some(dial) => dial.connect(endpoint).await,
            None => endpoint.connect().await,
        }
    }

    /// Whether a simulator makes them: names are its own, too.
    pub const fn is_simulated(&self) -> bool {
        self.0.is_some()
    }

    /// A connection that is made when it is first used, and made again when it broke.
    pub fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        match &self.0 {
            Some(dial) => dial.connect_lazy(endpoint),
            None => endpoint.connect_lazy(),
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "simulated" } else { "TCP" })
    }
}
