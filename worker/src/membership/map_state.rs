//! Last known partition map: kept in the state directory, and reported to a coordinator on request in case the map is lost.
//!
//! Nothing is served by it. It may be slightly older than the map acted upon; the promises in the log show that.

use crate::shared::Shared;
use engram_cluster::PartitionMap;
use engram_cluster::rebuild::{MapStateReport, ReplicaState};
use engram_mapstore::LastSeenMap;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_store::ReplicaStatus;
use engram_wire as wire;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Endpoint;

/// Deadline of a report.
const DEADLINE: Duration = Duration::from_secs(2);

/// Returns the version of the newest map recorded in this folder; 0 = none. `promised`: whether the store ever made a promise,
/// which implies a map.
pub(crate) fn seen_map_version(folder: &Path, promised: bool) -> u64 {
    match LastSeenMap::of(folder).read() {
        Ok(Some(map)) => map.version,
        Ok(None) => u64::from(promised),
        Err(error) => {
            tracing::warn!(%error, "failed to read the last known partition map");
            1
        }
    }
}

/// Records the newest map and reports it on request. Ends when dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let last_map = LastSeenMap::of(&shared.setup.options.state_dir);
    // An unreadable file was logged at the start and is replaced by the next map.
    let mut newest = last_map.read().ok().flatten().map(Arc::new);
    let (mut view, mut requests) = (shared.membership.subscribe(), shared.membership.map_state_requests());
    view.mark_changed();
    let mut last_request = 0;
    loop {
        tokio::select! {
            changed = view.changed() => if changed.is_err() { return },
            changed = requests.changed() => if changed.is_err() { return },
        }
        let map = view.borrow_and_update().map.clone();
        if let Some(map) = map.filter(|map| newest.as_ref().is_none_or(|newest| newest.version < map.version)) {
            persist(&last_map, Arc::clone(&map)).await;
            newest = Some(map);
        }
        let number = *requests.borrow_and_update();
        if number != last_request && number != 0 {
            report(&shared, number, newest.as_deref()).await;
        }
        last_request = number;
    }
}

async fn persist(last_map: &LastSeenMap, map: Arc<PartitionMap>) {
    let last_map = last_map.clone();
    match tokio::task::spawn_blocking(move || last_map.write(&map)).await {
        Ok(Ok(())) => {}
        // The store continues; if the map is lost now, only other workers can prove it.
        Ok(Err(error)) => tracing::warn!(%error, "failed to record the partition map"),
        Err(error) => tracing::error!(%error, "recording the partition map panicked"),
    }
}

/// Reports to every coordinator; those that did not request it ignore it.
async fn report(shared: &Shared, number: u64, last_map: Option<&PartitionMap>) {
    let Ok(replicas) = shared.engine.replicas().await else { return };
    let replica_state = |replica: &ReplicaStatus| ReplicaState {
        promised: replica.term,
        last: replica.last,
        last_term: replica.last_term,
        damaged: replica.role == "corrupt",
    };
    let state_report = MapStateReport {
        member: shared.setup.member,
        last_map: last_map.cloned(),
        replicas: replicas.iter().map(replica_state).collect(),
    };
    let message = wire::map_state_to_proto(shared.setup.options.cluster, number, &state_report);
    for address in &shared.membership.coordinators().addresses().current() {
        let call = async {
            let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
            let channel = shared.setup.to_coordinators().connect(endpoint).await.map_err(|error| error.to_string())?;
            let mut client = CoordinatorServiceClient::new(channel);
            client.report_map_state(message.clone()).await.map_err(|status| status.message().to_owned())
        };
        match timeout(DEADLINE, call).await {
            Ok(Ok(_)) => tracing::info!(coordinator = address, "reported map state"),
            Ok(Err(reason)) => tracing::warn!(coordinator = address, reason, "failed to report map state"),
            Err(_) => tracing::warn!(coordinator = address, "timed out reporting map state"),
        }
    }
}
