//! Clients of the workers of clusters.

use std::time::Duration;

use engram_client::{Client, Error, Network, Options};
use engram_identity::{ExpectedPeer, Role};

use crate::context::{Context, Key};

/// Deadline of a request to the workers.
const DEADLINE: Duration = Duration::from_secs(10);

/// Returns a client of a cluster, by the addresses in its workers' heartbeats; `None` without a map or without workers.
///
/// # Errors
/// No worker responds.
pub(crate) async fn client(context: &Context, cluster: &Key) -> Result<Option<Client>, Error> {
    let Some((id, report)) = context.coordinators.report(cluster) else { return Ok(None) };
    let endpoints: Vec<String> =
        report.alive.into_iter().map(|(_, address)| address).filter(|address| !address.is_empty()).collect();
    if report.map.is_none() || endpoints.is_empty() {
        return Ok(None);
    }
    let mut options =
        Options { write_deadline: DEADLINE, read_deadline: DEADLINE, ..Options::new(endpoints).with_cluster(id) };
    if let Some(keys) = context.coordinators.operator_keys(cluster) {
        options.network = Network::with_tls(keys, ExpectedPeer::any(Role::Worker));
    }
    Client::connect(options).await.map(Some)
}
