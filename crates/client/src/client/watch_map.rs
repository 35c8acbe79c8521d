//! Background task that watches the map.
//!
//! Without it an idle client's addresses would be as old as its last failed call. After a rolling restart of all
//! workers it would know no live address, and the next call would wait for connections to dead processes.

use super::Core;
use engram_proto::v1;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::sleep;

/// How long a worker may hold a request without news.
const HOLD: Duration = Duration::from_secs(25);
/// Limit of one request.
const DEADLINE: Duration = Duration::from_secs(30);
/// Minimum interval between two requests: limits the rate when the map changes continuously.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum interval after repeated failures.
const MAX_PAUSE: Duration = Duration::from_secs(5);

impl Core {
    /// Watches the map as long as this client exists.
    pub(super) fn watch_map(self: &Arc<Self>) {
        let task = tokio::spawn(watch_map(Arc::downgrade(self)));
        if self.watcher.set(task.abort_handle()).is_err() {
            task.abort();
        }
    }

    /// Chooses the next worker: another live one than `before`, or else an endpoint.
    fn choose_other(&self, before: &str) -> Option<String> {
        let map = self.map.borrow().clone();
        let alive = map.iter().flat_map(|map| map.workers.values()).filter(|worker| worker.alive);
        let addresses = alive.map(|worker| worker.address(self.options.plane));
        let mut addresses: Vec<&str> = addresses.filter(|address| !address.is_empty() && *address != before).collect();
        if addresses.is_empty() {
            addresses.extend(self.options.endpoints.iter().map(String::as_str));
        }
        let chosen = rand::random_range(0..addresses.len().max(1));
        addresses.get(chosen).map(|address| (*address).to_owned())
    }
}

/// Waits at one worker for news, and switches to another when there was none for a while, or it does not respond.
async fn watch_map(client: Weak<Core>) {
    let (mut address, mut brought_news) = (String::new(), false);
    // Last received version and stamp; 0 = none.
    let (mut version, mut stamp) = (0, 0);
    let mut pause = PAUSE;
    loop {
        sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        let Some(core) = client.upgrade() else { return };
        if !brought_news {
            let Some(other) = core.choose_other(&address) else { return };
            address = other;
        }
        let message =
            v1::GetPartitionMapRequest { newer_than: version, wait_ms: HOLD.as_millis() as u32, known_stamp: stamp };
        let call = core.map_call(&address, message, DEADLINE);
        // A dropped client must not wait for the response.
        drop(core);
        let response = match call {
            Ok(call) => call.await,
            Err(failure) => Err(failure),
        };
        let Some(core) = client.upgrade() else { return };
        let received = response.and_then(|reply| {
            let stamp = reply.stamp;
            core.map_of(&address, reply).map(|map| (stamp, map))
        });
        match received {
            Ok((new_stamp, map)) => {
                brought_news = new_stamp != stamp || map.version > version;
                (version, stamp) = (map.version, new_stamp);
                core.set_map(map);
                pause = PAUSE;
            }
            Err(failure) => {
                tracing::debug!(
                    worker = address,
                    reason = failure.problem.message,
                    "failed to watch the map, trying another worker"
                );
                brought_news = false;
                pause = (pause * 2).min(MAX_PAUSE);
            }
        }
    }
}
