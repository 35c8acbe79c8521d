//! The one task that writes the map: merges what is heard and asked for within a few milliseconds into one compare-and-swap.

use crate::state::Wanted;
use crate::{Shared, last_resort};
use engram_mapstore::{Error, MapStore, News, with_causes};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{Instrument as _, Span};

/// What arrives within this time goes into one write.
const MERGE: Duration = Duration::from_millis(5);
/// Ten writes a second on average: the map may live in an API server that others need too.
const BETWEEN_WRITES: Duration = Duration::from_millis(100);
/// Writes that may follow each other at once after a pause, so that neither a failover waits nor a worker that is emptied: each
/// partition that moves pauses until its two writes are done.
const BURST: u32 = 20;
/// Of these, so many are kept for what somebody waits for: copies that are made after one failover do not hold up the next.
const KEPT: u32 = 18;
/// Wait after a failed write, and between reads of what others write in a row.
const RETRY: Duration = Duration::from_millis(200);
/// How often the map is read beside being written: a worker writes it by itself when it reaches no coordinator.
const READ_AGAIN: Duration = Duration::from_secs(1);
/// The same, where the store is told of what others write: whoever tells may miss something.
const READ_ANYWAY: Duration = Duration::from_secs(60);

pub(crate) async fn run(shared: Arc<Shared>) {
    let mut bucket = Bucket { free_at: Instant::now() };
    let mut read_at = Instant::now();
    loop {
        // Woken or not, it goes on: the timer's ticks come more often than this ends.
        let _ = timeout(READ_AGAIN, shared.reconsider.notified()).await;
        let believed = match shared.store.news() {
            News::Changed => RETRY,
            News::Untold => READ_AGAIN,
            News::Nothing => READ_ANYWAY,
        };
        if read_at.elapsed() >= believed || shared.state().is_behind() {
            read(&shared).await;
            read_orders(&shared).await;
            read_at = Instant::now();
        }
        sleep(MERGE).await;
        loop {
            bucket.wait(0).await;
            let writing = shared.writing.lock().await;
            let wanted = shared.state().wanted(&shared.options, shared.now_ms());
            let Some(wanted) = wanted else { break };
            if !wanted.is_urgent && !bucket.has(KEPT, Instant::now()) {
                shared.state().propose_again(wanted.proposals);
                drop(writing);
                tokio::select! {
                    () = bucket.wait(KEPT) => {}
                    () = shared.reconsider.notified() => sleep(MERGE).await,
                }
                continue;
            }
            bucket.take(Instant::now());
            let (cluster, name) = (shared.options.cluster, &shared.options.cluster_name);
            let span = tracing::debug_span!(
                "change map",
                engram.cluster.id = %cluster,
                engram.cluster.name = name,
                engram.map.version = tracing::field::Empty,
                outcome = tracing::field::Empty,
                otel.status_code = tracing::field::Empty,
            );
            write(&shared, wanted).instrument(span).await;
            drop(writing);
        }
        shared.publish();
    }
}

/// Takes no more proposals, and waits until those that were taken are written and workers were told: whoever proposed asks nobody else
/// while they may be.
pub(crate) async fn finish(shared: &Shared) {
    shared.state().close();
    shared.reconsider.notify_one();
    loop {
        let writing = shared.writing.lock().await;
        if !shared.state().has_proposals() {
            return;
        }
        drop(writing);
        sleep(MERGE).await;
    }
}

/// Allows bursts and bounds the average.
struct Bucket {
    /// When all tokens will be there again.
    free_at: Instant,
}

impl Bucket {
    /// Waits for a token beside so many others.
    async fn wait(&self, others: u32) {
        if let Some(at) = self.at(others) {
            sleep_until(at).await;
        }
    }

    /// Whether there is a token beside so many others.
    fn has(&self, others: u32, now: Instant) -> bool {
        self.at(others).is_none_or(|at| at <= now)
    }

    /// When there is: no more than the rest are missing then.
    fn at(&self, others: u32) -> Option<Instant> {
        self.free_at.checked_sub(BETWEEN_WRITES * (BURST - 1 - others))
    }

    fn take(&mut self, now: Instant) {
        self.free_at = self.free_at.max(now) + BETWEEN_WRITES;
    }
}

async fn write(shared: &Shared, wanted: Wanted) {
    let Wanted { expected, map, proposals, .. } = wanted;
    let began = Instant::now();
    let result = with_store(shared, move |store| store.compare_and_swap(expected, map)).await;
    let span = Span::current();
    match result {
        Some(Ok(map)) => {
            span.record("outcome", "written");
            span.record("engram.map.version", map.version);
            tracing::info!(version = map.version, ms = began.elapsed().as_millis() as u64, "partition map written");
            shared.state().set_map(Some(map), shared.now_ms());
            shared.publish();
        }
        // Somebody else wrote: decide again on what is there.
        Some(Err(Error::Conflict { found, .. })) => {
            span.record("outcome", "conflict");
            let mut state = shared.state();
            state.found(found.map(|map| *map), shared.now_ms());
            state.propose_again(proposals);
        }
        failed => {
            span.record("outcome", "failed");
            span.record("otel.status_code", "ERROR");
            if let Some(Err(error)) = failed {
                tracing::error!(error = with_causes(&error), "the partition map is not written");
            }
            shared.state().propose_again(proposals);
            sleep(RETRY).await;
            // It may have been written all the same.
            read(shared).await;
        }
    }
}

/// Reads the map that is there, if the store answers.
async fn read(shared: &Shared) {
    match with_store(shared, |store| store.get()).await {
        Some(Ok(map)) => shared.state().found(map, shared.now_ms()),
        Some(Err(error @ Error::Damaged { .. })) => shared.state().lose(error.to_string()),
        Some(Err(error)) => tracing::error!(error = with_causes(&error), "the partition map is not read"),
        None => {}
    }
}

/// Reads what a person ordered who wrote the map by rights of their own.
async fn read_orders(shared: &Shared) {
    if !shared.state().reads_orders() {
        return;
    }
    // Where they cannot be read the next time tells them.
    if let Some(Ok(orders)) = with_store(shared, |store| store.orders()).await {
        let mut state = shared.state();
        orders.iter().filter(|order| !state.orders().contains(order)).for_each(last_resort::tell);
        state.set_orders(orders);
    }
}

/// Does something with the store, where it may wait on a thread for that; `None`: it panicked.
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
    fn what_nobody_waits_for_leaves_room_for_a_failover_and_the_average_is_bounded() {
        let start = Instant::now();
        let mut bucket = Bucket { free_at: start };
        let mut written = 0;
        while bucket.has(KEPT, start) {
            bucket.take(start);
            written += 1;
        }
        assert_eq!(written, BURST - KEPT);
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
        assert_eq!(written, 2 * BURST, "no more than the bucket holds, however long it was quiet");
    }
}
