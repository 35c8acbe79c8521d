//! The only task that writes the map: merges inputs that arrive within a few milliseconds into one compare-and-swap.

use crate::state::MapUpdate;
use crate::{Shared, manual_recovery};
use engram_mapstore::{ChangeState, Error, MapStore, with_causes};
use engram_memory::{Member, Ordinal};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{Instrument as _, Span};

/// Inputs that arrive within this time go into one write.
const MERGE_WINDOW: Duration = Duration::from_millis(5);
/// Ten writes a second on average: the map may live in an API server shared with others.
const BETWEEN_WRITES: Duration = Duration::from_millis(100);
/// Writes that may follow each other immediately after a pause, so that neither a failover nor a drain waits: each
/// partition that moves pauses until its two writes are done.
const BURST: u32 = 20;
/// Writes of a burst that are reserved for urgent updates: re-replication after one failover must not delay the next.
const RESERVED: u32 = 18;
/// Wait after a failed write, and between reads after foreign writes.
const RETRY: Duration = Duration::from_millis(200);
/// Interval of map reads: workers write it themselves when they reach no coordinator.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of map reads where the store notifies of foreign writes: notifications may be lost.
const SLOW_READ_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) async fn run(shared: Arc<Shared>) {
    let mut bucket = Bucket { free_at: Instant::now() };
    let mut read_at = Instant::now();
    loop {
        // Continue whether notified or not: ticks of the detector come more often than this timeout.
        let _ = timeout(READ_INTERVAL, shared.reconsider.notified()).await;
        let max_age = match shared.store.change_state() {
            ChangeState::Changed => RETRY,
            ChangeState::Unknown => READ_INTERVAL,
            ChangeState::Unchanged => SLOW_READ_INTERVAL,
        };
        if read_at.elapsed() >= max_age || shared.state().is_behind() {
            read(&shared).await;
            read_orders(&shared).await;
            read_at = Instant::now();
        }
        sleep(MERGE_WINDOW).await;
        loop {
            bucket.wait(0).await;
            let writing = shared.writing.lock().await;
            let update = shared.state().next_map(&shared.options, shared.now_ms());
            let Some(update) = update else { break };
            if !update.is_urgent && !bucket.has(RESERVED, Instant::now()) {
                shared.state().requeue(update.proposals);
                drop(writing);
                tokio::select! {
                    () = bucket.wait(RESERVED) => {}
                    () = shared.reconsider.notified() => sleep(MERGE_WINDOW).await,
                }
                continue;
            }
            bucket.take(Instant::now());
            let (cluster, name) = (shared.options.cluster, &shared.options.cluster_name);
            let span = tracing::debug_span!(
                "write partition map",
                engram.cluster.id = %cluster,
                engram.cluster.name = name,
                engram.map.version = tracing::field::Empty,
                outcome = tracing::field::Empty,
                otel.status_code = tracing::field::Empty,
            );
            let _failovers = failover_spans(&shared, &update);
            write(&shared, update).instrument(span).await;
            drop(writing);
            shared.written.notify_waiters();
        }
        shared.publish();
        shared.written.notify_waiters();
    }
}

/// Returns the spans of the failovers that a map completes: of processes that were primary and are not in sync any more.
fn failover_spans(shared: &Shared, update: &MapUpdate) -> Vec<engram_trace::Span> {
    if !engram_trace::is_recording() {
        return Vec::new();
    }
    let before = shared.state().map().cloned();
    let entries = before.iter().flat_map(|map| map.entries());
    let replaced = entries.filter_map(|(partition, entry)| {
        let after = update.map.partitions.get(partition.0 as usize)?;
        let primary = entry.primary_member()?;
        (after.primary != entry.primary && !after.isr.contains(primary)).then_some((*primary, entry.primary))
    });
    let dead: BTreeMap<Member, Ordinal> = replaced.collect();
    let span = |(member, ordinal): (Member, Ordinal)| {
        let trace = engram_wire::failover_trace(shared.options.cluster, &member).child();
        let mut span = engram_trace::Span::agreed(trace, None, "write partition map");
        span.set("engram.worker.failed", ordinal.0);
        span.set("engram.map.version", update.map.version);
        span
    };
    dead.into_iter().map(span).collect()
}

/// Stops accepting proposals, and waits until the accepted ones are written and published.
pub(crate) async fn finish(shared: &Shared) {
    shared.state().close();
    shared.reconsider.notify_one();
    loop {
        // Created before the check, so that no notification is missed.
        let written = shared.written.notified();
        let writing = shared.writing.lock().await;
        if !shared.state().has_proposals() {
            return;
        }
        drop(writing);
        written.await;
    }
}

/// Token bucket: allows bursts and bounds the average rate.
struct Bucket {
    /// When all tokens are available again.
    free_at: Instant,
}

impl Bucket {
    /// Waits for a token while `others` tokens stay in reserve.
    async fn wait(&self, others: u32) {
        if let Some(at) = self.at(others) {
            sleep_until(at).await;
        }
    }

    /// Whether a token is available while `others` stay in reserve.
    fn has(&self, others: u32, now: Instant) -> bool {
        self.at(others).is_none_or(|at| at <= now)
    }

    /// Returns when one is available.
    fn at(&self, others: u32) -> Option<Instant> {
        self.free_at.checked_sub(BETWEEN_WRITES * (BURST - 1 - others))
    }

    fn take(&mut self, now: Instant) {
        self.free_at = self.free_at.max(now) + BETWEEN_WRITES;
    }
}

async fn write(shared: &Shared, update: MapUpdate) {
    let MapUpdate { expected, map, proposals, .. } = update;
    let started = Instant::now();
    let result = with_store(shared, move |store| store.compare_and_swap(expected, map)).await;
    let span = Span::current();
    match result {
        Some(Ok(map)) => {
            span.record("outcome", "written");
            span.record("engram.map.version", map.version);
            tracing::info!(version = map.version, ms = started.elapsed().as_millis() as u64, "partition map written");
            shared.state().set_map(Some(map), shared.now_ms());
            shared.publish();
        }
        // Another writer was faster: decide again on the current map.
        Some(Err(Error::Conflict { found, .. })) => {
            span.record("outcome", "conflict");
            let mut state = shared.state();
            state.map_read(found.map(|map| *map), shared.now_ms());
            state.requeue(proposals);
        }
        failed => {
            span.record("outcome", "failed");
            span.record("otel.status_code", "ERROR");
            if let Some(Err(error)) = failed {
                tracing::error!(error = with_causes(&error), "failed to write the partition map");
            }
            shared.state().requeue(proposals);
            sleep(RETRY).await;
            // It may have been written nevertheless.
            read(shared).await;
        }
    }
}

/// Reads the current map, if the store responds.
async fn read(shared: &Shared) {
    match with_store(shared, |store| store.get()).await {
        Some(Ok(map)) => shared.state().map_read(map, shared.now_ms()),
        Some(Err(error @ Error::Damaged { .. })) => shared.state().lose(error.to_string()),
        Some(Err(error)) => tracing::error!(error = with_causes(&error), "failed to read the partition map"),
        None => {}
    }
}

/// Reads orders that callers wrote with their own permissions.
async fn read_orders(shared: &Shared) {
    if !shared.state().reads_orders() {
        return;
    }
    // On failure the next round reads them.
    if let Some(Ok(orders)) = with_store(shared, |store| store.overrides()).await {
        let mut state = shared.state();
        orders.iter().filter(|order| !state.orders().contains(order)).for_each(manual_recovery::log_order);
        state.set_orders(orders);
    }
}

/// Runs `work` with the store, on a blocking thread if it may wait; `None`: it panicked.
pub(crate) async fn with_store<T: Send + 'static>(
    shared: &Shared,
    work: impl FnOnce(&dyn MapStore) -> Result<T, Error> + Send + 'static,
) -> Option<Result<T, Error>> {
    let store = Arc::clone(&shared.store);
    if !store.may_wait() {
        return Some(work(&*store));
    }
    let done = tokio::task::spawn_blocking(move || work(&*store)).await;
    done.inspect_err(|error| tracing::error!(%error, "the map store panicked")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_urgent_writes_leave_tokens_for_a_failover_and_the_rate_is_bounded() {
        let start = Instant::now();
        let mut bucket = Bucket { free_at: start };
        let mut written = 0;
        while bucket.has(RESERVED, start) {
            bucket.take(start);
            written += 1;
        }
        assert_eq!(written, BURST - RESERVED);
        while bucket.has(0, start) {
            bucket.take(start);
            written += 1;
        }
        assert_eq!(written, BURST, "a failover has its writes at once");
        let later = start + 2 * BURST * BETWEEN_WRITES;
        while bucket.has(0, later) {
            bucket.take(later);
            written += 1;
        }
        assert_eq!(written, 2 * BURST, "no more than the bucket holds, however long it was idle");
    }
}
