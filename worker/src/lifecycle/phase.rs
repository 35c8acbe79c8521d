//! Where a worker is between its start and its stop, and the signs of life that health checks read.

use super::bootstrap::BootstrapProgress;
use engram_store::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Life of one worker process.
pub(crate) struct Lifecycle {
    clock: Arc<dyn Clock>,
    started: Instant,
    /// Start time by the clock of heartbeats and leases, in milliseconds.
    started_ms: u64,
    /// Set once: requests are rejected from then on.
    stopping: watch::Sender<bool>,
    /// Notified when an orderly stop is requested.
    stop_requested: Notify,
    /// Set if the process exits to be restarted at once.
    restart_requested: AtomicBool,
    bootstrap: BootstrapProgress,
    last_snapshot_ms: AtomicU64,
    /// When the heartbeat thread made progress last, by the clock of heartbeats and leases.
    heartbeat_turn_ms: AtomicU64,
    /// Delay of timers on the runtime of the services, in milliseconds.
    event_loop_lag_ms: AtomicU64,
}

impl Lifecycle {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        let started_ms = clock.elapsed_ms();
        Self {
            clock,
            started: Instant::now(),
            started_ms,
            stopping: watch::Sender::new(false),
            stop_requested: Notify::new(),
            restart_requested: AtomicBool::new(false),
            bootstrap: BootstrapProgress::default(),
            last_snapshot_ms: AtomicU64::new(0),
            heartbeat_turn_ms: AtomicU64::new(started_ms),
            event_loop_lag_ms: AtomicU64::new(0),
        }
    }

    /// Progress of loading a new disk.
    pub(crate) const fn bootstrap(&self) -> &BootstrapProgress {
        &self.bootstrap
    }

    /// Returns the time since the process opened its store.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the same by the clock of heartbeats and leases, in milliseconds.
    pub(crate) fn age_ms(&self) -> u64 {
        self.clock.elapsed_ms().saturating_sub(self.started_ms)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Returns a receiver that changes to true when the worker stops.
    pub(crate) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    /// Rejects requests from now on, and ends the tasks that wait for it.
    pub(crate) fn begin_stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Requests an orderly stop.
    pub(crate) fn request_stop(&self) {
        self.stop_requested.notify_one();
    }

    /// Requests an orderly stop after which the process is to be started again at once.
    pub(crate) fn request_restart(&self) {
        self.restart_requested.store(true, Ordering::Release);
        self.stop_requested.notify_one();
    }

    /// Waits until an orderly stop is requested.
    pub(crate) async fn stop_requested(&self) {
        self.stop_requested.notified().await;
    }

    pub(crate) fn is_restart_requested(&self) -> bool {
        self.restart_requested.load(Ordering::Acquire)
    }

    /// Records that the heartbeat thread makes progress.
    pub(crate) fn heartbeat_turned(&self) {
        self.heartbeat_turn_ms.store(self.clock.elapsed_ms(), Ordering::Relaxed);
    }

    /// Returns the time since the heartbeat thread made progress, in milliseconds.
    pub(crate) fn heartbeat_stalled_ms(&self) -> u64 {
        self.clock.elapsed_ms().saturating_sub(self.heartbeat_turn_ms.load(Ordering::Relaxed))
    }

    pub(crate) fn set_event_loop_lag(&self, lag: Duration) {
        self.event_loop_lag_ms.store(lag.as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns the delay of timers on the runtime of the services, in milliseconds.
    pub(crate) fn event_loop_lag_ms(&self) -> u64 {
        self.event_loop_lag_ms.load(Ordering::Relaxed)
    }

    /// Records that a snapshot was written now.
    pub(crate) fn snapshot_written(&self) {
        self.last_snapshot_ms.store(self.clock.now_ms(), Ordering::Relaxed);
    }

    /// Returns when the last snapshot was written, as Unix time in milliseconds; 0 = never.
    pub(crate) fn last_snapshot_ms(&self) -> u64 {
        self.last_snapshot_ms.load(Ordering::Relaxed)
    }
}
