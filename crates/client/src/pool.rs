//! One connection per worker, created at its first use and recreated when it breaks.

use crate::network::Network;
use crate::options::Options;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

/// Interval of HTTP/2 keepalives on an idle connection.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// How long the response to a keepalive may take.
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(5);
/// Flow-control windows: one full message per stream, several per connection; large batches stall with the default of
/// 64 KiB.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest HTTP/2 frame that is accepted, as by the workers.
const FRAME_BYTES: u32 = 64 << 10;

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

    /// Returns the connection to `address`; the error says why the address is invalid.
    pub(crate) fn channel(&self, address: &str) -> Result<Channel, String> {
        let mut channels = self.channels.lock();
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
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME_BYTES);
        let channel = self.network.connect_lazy(endpoint);
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Drops the connections to addresses that the map no longer contains.
    pub(crate) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.channels.lock().retain(|address, _| keep(address));
    }
}
