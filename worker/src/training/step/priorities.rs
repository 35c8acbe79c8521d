//! Priorities of the items of committed steps, set by a task of their own, so that no step waits for them.

use crate::buffers::Buffers;
use crate::shared::Shared;
use engram_train::buffer::priorities;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Queued updates: while one is made, the next waits; a further one is left out and counted.
const QUEUE: usize = 1;
/// Wait for the last updates at the end of a run: longer than a failover of their partitions.
const FINISH: Duration = Duration::from_secs(10);

/// Handles and errors of the items of a step.
struct Update {
    handles: Vec<u64>,
    errors: Vec<f32>,
}

/// What became of the items of updates.
#[derive(Debug, Default)]
struct Counts {
    changed: AtomicU64,
    stale: AtomicU64,
    skipped: AtomicU64,
}

/// Items since the last call of [`PriorityUpdates::take_counts`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::training) struct PriorityCounts {
    pub(in crate::training) changed: u64,
    /// Removed before.
    pub(in crate::training) stale: u64,
    /// Left out, because earlier updates were in progress or the cluster did not accept them.
    pub(in crate::training) skipped: u64,
}

/// The updates of a member.
pub(in crate::training) struct PriorityUpdates {
    runtime: Handle,
    queue: Option<mpsc::Sender<Update>>,
    task: Option<JoinHandle<()>>,
    counts: Arc<Counts>,
}

impl PriorityUpdates {
    /// Starts the task. Must be called within the runtime of the worker.
    pub(in crate::training) fn new(shared: &Arc<Shared>, buffer: String) -> Self {
        let (queue, updates) = mpsc::channel(QUEUE);
        let counts = Arc::<Counts>::default();
        let task = tokio::spawn(make_updates(Buffers::of_cluster(shared), buffer, updates, Arc::clone(&counts)));
        Self { runtime: Handle::current(), queue: Some(queue), task: Some(task), counts }
    }

    /// Queues an update; never waits.
    pub(in crate::training) fn queue(&self, handles: Vec<u64>, errors: Vec<f32>) {
        let items = handles.len() as u64;
        let queued = self.queue.as_ref().is_some_and(|queue| queue.try_send(Update { handles, errors }).is_ok());
        if !queued {
            self.counts.skipped.fetch_add(items, Ordering::Relaxed);
        }
    }

    /// Waits for the updates in progress, up to a limit; there are none afterwards.
    pub(in crate::training) fn finish(&mut self) {
        drop(self.queue.take());
        let Some(mut task) = self.task.take() else { return };
        let finished = self.runtime.block_on(async { tokio::time::timeout(FINISH, &mut task).await });
        if finished.is_err() {
            task.abort();
            tracing::warn!("stopped waiting for the priorities of the last training steps");
        }
    }

    pub(in crate::training) fn take_counts(&self) -> PriorityCounts {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        let Counts { changed, stale, skipped } = &*self.counts;
        PriorityCounts { changed: take(changed), stale: take(stale), skipped: take(skipped) }
    }
}

async fn make_updates(buffers: Buffers, buffer: String, mut updates: mpsc::Receiver<Update>, counts: Arc<Counts>) {
    while let Some(Update { handles, errors }) = updates.recv().await {
        let (handles, values) = priorities(&handles, &errors);
        match buffers.set_priorities(&buffer, &handles, &values).await {
            Ok(result) => {
                counts.changed.fetch_add(result.changed, Ordering::Relaxed);
                counts.stale.fetch_add(result.stale, Ordering::Relaxed);
            }
            Err(problem) => {
                tracing::warn!(buffer, error = problem.message, "failed to update priorities");
                counts.skipped.fetch_add(handles.len() as u64, Ordering::Relaxed);
            }
        }
    }
}
