//! Membership of elastic groups of processes outside of the cluster.
//!
//! The primary of the partition of a group hosts its membership service, whose record is replicated in that partition. Processes connect to the
//! primary; when it changes, they connect to the next one, which continues from the record. Gradients never pass a worker.
//!
//! Invariants: a generation is recorded before it is published; of two hosts of one group the record of the older one is rejected.

mod formation;
mod host;
mod service;
mod state;

pub(crate) use service::GroupEndpoint;
pub(crate) use state::is_group;

use crate::shared::Shared;
use engram_memory::RunId;
use engram_proto::v1::Problem;
use host::{Host, HostEvent};
use state::GroupState;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Queued events of a host: reports of the largest group.
const EVENTS: usize = 1_024;

/// Groups hosted by this worker.
#[derive(Default)]
pub(crate) struct Groups {
    hosts: tokio::sync::Mutex<BTreeMap<RunId, mpsc::Sender<HostEvent>>>,
}

impl Groups {
    /// Returns where to send events for a group, whose host is started if there is none. `settings` are those of a new group.
    async fn host(
        &self,
        shared: &Arc<Shared>,
        run: RunId,
        settings: GroupState,
    ) -> Result<mpsc::Sender<HostEvent>, Problem> {
        let mut hosts = self.hosts.lock().await;
        if let Some(host) = hosts.get(&run).filter(|host| !host.is_closed()) {
            return Ok(host.clone());
        }
        hosts.retain(|_, host| !host.is_closed());
        let (events, received) = mpsc::channel(EVENTS);
        let host = Host::load(shared, run, settings, events.clone()).await?;
        tokio::spawn(host.run(received));
        hosts.insert(run, events.clone());
        Ok(events)
    }

    /// Returns where to send events for a group that is hosted here.
    async fn existing(&self, run: RunId) -> Option<mpsc::Sender<HostEvent>> {
        self.hosts.lock().await.get(&run).filter(|host| !host.is_closed()).cloned()
    }
}
