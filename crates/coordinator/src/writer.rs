//! The one task that writes the map: merges what is heard within a few milliseconds into one compare-and-swap.

use crate::Shared;
use engram_cluster::{Decision, PartitionMap, decide};
use engram_mapstore::{Error, MapStore};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// What arrives within this time goes into one write.
const MERGE: Duration = Duration::from_millis(10);
/// At most this many writes in any second: the map may live in an API server that others need too.
const WRITES_PER_SECOND: usize = 10;
/// Wait after a failed write.
const RETRY: Duration = Duration::from_millis(200);

pub(crate) async fn run(shared: Arc<Shared>, store: Arc<dyn MapStore>) {
    let mut written = VecDeque::with_capacity(WRITES_PER_SECOND);
    loop {
        shared.reconsider.notified().await;
        sleep(MERGE).await;
        while let Some((expected, map)) = wanted(&shared) {
            if written.len() == WRITES_PER_SECOND {
                let oldest: Instant = written.pop_front().expect("it is full");
                sleep_until(oldest + Duration::from_secs(1)).await;
            }
            written.push_back(Instant::now());
            write(&shared, &store, expected, map).await;
        }
        shared.publish();
    }
}

/// The map that should be written, with the version it replaces.
fn wanted(shared: &Shared) -> Option<(Option<u64>, PartitionMap)> {
    let mut state = shared.state();
    let (decision, conditions) = decide(state.map(), &state.observed(&shared.options));
    state.set_conditions(conditions);
    let current = state.map();
    match decision {
        Decision::Keep => None,
        Decision::Create(map) => Some((None, map)),
        Decision::Change(changes) => {
            let mut map = current.expect("an entry is changed in a map that is there").clone();
            for (partition, entry) in changes {
                map.partitions[partition.0 as usize] = entry;
            }
            Some((Some(map.version), map))
        }
    }
}

async fn write(shared: &Shared, store: &Arc<dyn MapStore>, expected: Option<u64>, map: PartitionMap) {
    let task = {
        let store = Arc::clone(store);
        tokio::task::spawn_blocking(move || store.compare_and_swap(expected, map))
    };
    match task.await {
        Ok(Ok(map)) => {
            tracing::info!(version = map.version, "partition map written");
            shared.state().set_map(Some(map));
            shared.publish();
        }
        // Somebody else wrote: decide again on what is there.
        Ok(Err(Error::Conflict { found, .. })) => shared.state().set_map(found.map(|map| *map)),
        Ok(Err(error)) => {
            tracing::error!(%error, "failed to write the partition map");
            sleep(RETRY).await;
        }
        Err(panicked) => {
            tracing::error!(error = %panicked, "the map store panicked");
            sleep(RETRY).await;
        }
    }
}
