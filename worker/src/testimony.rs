//! What this disk has seen of the partition map: kept beside the store, and told to a coordinator that asks, for the day on which
//! the map is lost.
//!
//! Nothing is served under it. It may be a little older than what was acted upon: promises are in the log, and show that.

use crate::shared::Shared;
use engram_cluster::PartitionMap;
use engram_cluster::rebuild::{Copy, Testimony};
use engram_coordinator::wire;
use engram_mapstore::Seen;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_store::ReplicaStatus;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Endpoint;

/// How long a coordinator may take: it asked, and waits.
const DEADLINE: Duration = Duration::from_secs(2);

/// Version of the newest map that the disk of this folder has seen, where `promised` says whether anything was ever promised
/// there; 0 = none.
pub(crate) fn seen_before(folder: &Path, promised: bool) -> u64 {
    match Seen::of(folder).read() {
        Ok(Some(map)) => map.version,
        Ok(None) => u64::from(promised),
        Err(error) => {
            tracing::warn!(%error, "what was seen of the partition map is not known");
            1
        }
    }
}

/// Keeps the newest map and tells what was seen. Ends when dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let seen = Seen::of(&shared.options.state_dir);
    // An unreadable one was told of at the start, and the next map takes its place.
    let mut newest = seen.read().ok().flatten().map(Arc::new);
    let (mut view, mut asked) = (shared.view.subscribe(), shared.testify.subscribe());
    view.mark_changed();
    let mut told = 0;
    loop {
        tokio::select! {
            changed = view.changed() => if changed.is_err() { return },
            changed = asked.changed() => if changed.is_err() { return },
        }
        let map = view.borrow_and_update().map.clone();
        if let Some(map) = map.filter(|map| newest.as_ref().is_none_or(|newest| newest.version < map.version)) {
            keep(&seen, Arc::clone(&map)).await;
            newest = Some(map);
        }
        let number = *asked.borrow_and_update();
        if number != told && number != 0 {
            tell(&shared, number, newest.as_deref()).await;
        }
        told = number;
    }
}

async fn keep(seen: &Seen, map: Arc<PartitionMap>) {
    let seen = seen.clone();
    match tokio::task::spawn_blocking(move || seen.write(&map)).await {
        Ok(Ok(())) => {}
        // The store goes on; a map that is lost now is proven by others alone.
        Ok(Err(error)) => tracing::warn!(%error, "the partition map that was seen could not be kept"),
        Err(error) => tracing::error!(%error, "keeping the partition map panicked"),
    }
}

/// Tells every coordinator: whoever did not ask takes no notice.
async fn tell(shared: &Shared, number: u64, seen: Option<&PartitionMap>) {
    let Ok(replicas) = shared.engine.replicas().await else { return };
    let copy = |replica: &ReplicaStatus| Copy {
        promised: replica.term,
        last: replica.last,
        last_term: replica.last_term,
        damaged: replica.role == "corrupt",
    };
    let testimony =
        Testimony { member: shared.member, seen: seen.cloned(), copies: replicas.iter().map(copy).collect() };
    let message = wire::testimony_to_proto(shared.options.cluster, number, &testimony);
    for address in &shared.roster.now() {
        let telling = async {
            let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
            let channel = shared.to_coordinators().connect(endpoint).await.map_err(|error| error.to_string())?;
            let mut client = CoordinatorServiceClient::new(channel);
            client.testify(message.clone()).await.map_err(|status| status.message().to_owned())
        };
        match timeout(DEADLINE, telling).await {
            Ok(Ok(_)) => tracing::info!(coordinator = address, "told what this disk has seen"),
            Ok(Err(reason)) => tracing::warn!(coordinator = address, reason, "could not tell what this disk has seen"),
            Err(_) => tracing::warn!(coordinator = address, "could not tell what this disk has seen: no answer"),
        }
    }
}
