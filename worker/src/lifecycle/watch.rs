//! What a running worker watches: its served partitions and its store.

use crate::runs::Runs;
use crate::service::Memories;
use crate::shared::Shared;
use engram_proto::v1::memory_service_server::MemoryServiceServer;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Shortest interval between two passes over the served partitions: they change in bursts, and a partition that was just activated
/// does not announce that its runs can be read.
const SERVED_PAUSE: Duration = Duration::from_millis(20);
/// Interval between checks of the store and of timer delays, which are found only by being late.
const TICK: Duration = Duration::from_millis(250);

/// Watches the served partitions: drives their runs and updates the health status.
pub(super) async fn follow_served(shared: Arc<Shared>, health: tonic_health::server::HealthReporter) {
    let mut view = shared.membership.subscribe();
    let (mut serving, mut driver_ends) = (shared.engine.serving_changes(), shared.runs.driver_ends());
    let (mut served, mut ready, mut reconciled) = (Vec::new(), None, false);
    loop {
        let Ok(changed) = view.has_changed() else { return };
        view.mark_unchanged();
        serving.mark_unchanged();
        driver_ends.mark_unchanged();
        let now = shared.served();
        if now != served {
            tracing::info!(partitions = now.len(), before = served.len(), "served partitions changed");
            let new = now.iter().filter(|partition| served.binary_search(partition).is_err());
            shared.metrics.promotions.inc_by(new.count() as u64);
        }
        if changed || now != served || !reconciled || shared.runs.is_unattended() {
            served = now;
            reconciled = Runs::reconcile(&shared).await;
        }
        if ready.replace(shared.is_ready()) != Some(shared.is_ready()) {
            if shared.is_ready() {
                health.set_serving::<MemoryServiceServer<Memories>>().await;
            } else {
                health.set_not_serving::<MemoryServiceServer<Memories>>().await;
            }
        }
        sleep(SERVED_PAUSE).await;
        if !reconciled || shared.runs.is_unattended() {
            continue;
        }
        let remaining = shared.settles_in();
        tokio::select! {
            // The map may change long before the store serves a new assignment, whose promise must be durable first.
            _ = view.changed() => {}
            _ = serving.changed() => {}
            _ = driver_ends.changed() => {}
            () = sleep(remaining.unwrap_or_default()), if remaining.is_some() => {}
        }
    }
}

/// Watches the store and timer delays; returns when the store fails.
pub(super) async fn watch_store(shared: &Shared) -> String {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut snapshots, mut damaged, mut damaged_payloads) = (0, 0, 0);
    let (mut fallbacks, mut disabled_count) = (0, 0);
    loop {
        let due = Instant::now() + TICK;
        ticks.tick().await;
        let lag = Instant::now().saturating_duration_since(due);
        shared.lifecycle.set_event_loop_lag(lag);
        let stats = shared.engine.stats();
        if stats.snapshots > snapshots {
            snapshots = stats.snapshots;
            shared.lifecycle.snapshot_written();
        }
        if stats.damaged_snapshots > damaged {
            damaged = stats.damaged_snapshots;
            tracing::warn!(damaged, damage = stats.damage.as_deref(), "scrubbing found a damaged snapshot");
        }
        if stats.damaged_payloads > damaged_payloads {
            damaged_payloads = stats.damaged_payloads;
            tracing::warn!(damaged_payloads, damage = stats.damage.as_deref(), "found a damaged payload of an item");
        }
        if let Some(gpu) = &stats.gpu {
            let disabled = || gpu.devices.iter().filter(|device| device.given_up.is_some());
            if disabled().count() > disabled_count {
                disabled_count = disabled().count();
                let left = gpu.at_work().count();
                tracing::error!(
                    gpu = gpu.name,
                    why = gpu.given_up,
                    left,
                    "disabled a GPU after an error; the remaining devices run all passes"
                );
            } else if gpu.fallbacks > fallbacks && gpu.at_work().next().is_some() {
                tracing::warn!(
                    gpu = gpu.name,
                    passes = gpu.fallbacks,
                    "GPU is out of memory for a pass; the CPU ran its part"
                );
            }
            fallbacks = gpu.fallbacks;
        }
        if let Some(fault) = stats.fault {
            return fault;
        }
    }
}
