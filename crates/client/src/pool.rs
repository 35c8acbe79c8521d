//! One connection per worker, made when it is first needed and made again when it broke.

use crate::network::Network;
use crate::options::Options;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

/// A worker that says nothing for this long is asked whether it is there.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// And given up when it does not say so for this long.
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes that may be on their way: one full message per stream, several per connection, or large batches stall on the
/// default of 64 KiB.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

#[derive(Debug)]
pub(crate) struct Pool {
    connect_deadline: Duration,
    network: Network,
    channels: Mutex<HashMap<String, Channel>>,
}

impl Pool {
    pub(crate) fn new(options: &Options) -> Self {
        let (connect_deadline, network) = (options.connect_deadline, options.network.clone());
        Self { connect_deadline, network, channels: Mutex::default() }
    }

    /// The connection to `address`; the error says what is wrong with the address.
    pub(crate) fn channel(&self, address: &str) -> Result<Channel, String> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| format!("'{address}' is not an address (host:port): {error}"))?;
        let endpoint = endpoint
            .connect_timeout(self.connect_deadline)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE_DEADLINE)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let channel = self.network.connect_lazy(endpoint);
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Drops the connections to addresses that the map no longer has.
    pub(crate) fn retain(&self, known: impl Fn(&str) -> bool) {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).retain(|address, _| known(address));
    }
}
