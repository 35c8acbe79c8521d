//! Writers that send at half of capacity, on a schedule: the latency of a request counts from when it was due, so that a delay also affects those
//! after it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_client::{Client, Session, Signals, Updates};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

use crate::population::{self, QUALITY};

/// Updates of a request, and number of writers.
pub(super) const FEW: usize = 100;
const WRITERS: usize = 8;
/// Duration of the capacity measurement.
const FULL: Duration = Duration::from_secs(3);

/// Load of the writers of a cluster.
pub(super) struct Load {
    sessions: Vec<Arc<Session>>,
    memories: u32,
    /// Interval between the requests of a writer; zero: send after each response.
    pause: Duration,
}

impl Load {
    /// Returns half of the capacity, measured with writers that send after each response.
    pub(super) async fn at_half_capacity(client: &Client, memories: u32) -> Result<Self> {
        let sessions = (0..WRITERS).map(|_| Arc::new(client.session())).collect();
        let full = Self { sessions, memories, pause: Duration::ZERO };
        let writers = full.start();
        sleep(FULL).await;
        let taken = writers.stop().await?.len() as f64 / FULL.as_secs_f64();
        Ok(Self { pause: Duration::from_secs_f64(2.0 * WRITERS as f64 / taken), ..full })
    }

    /// Returns the requests per second.
    pub(super) fn per_second(&self) -> f64 {
        WRITERS as f64 / self.pause.as_secs_f64()
    }

    pub(super) fn start(&self) -> Writers {
        let stop = watch::Sender::new(false);
        let mut running = JoinSet::new();
        for (number, session) in self.sessions.iter().enumerate() {
            running.spawn(write(Arc::clone(session), self.memories, self.pause, number, stop.subscribe()));
        }
        Writers { stop, running }
    }
}

/// Sends requests until stopped, and returns their latencies in milliseconds.
async fn write(
    session: Arc<Session>,
    memories: u32,
    pause: Duration,
    number: usize,
    stopped: watch::Receiver<bool>,
) -> Result<Vec<f64>> {
    let mut took_ms = Vec::new();
    let mut schedule = interval(pause.max(Duration::from_nanos(1)));
    while !*stopped.borrow() {
        let due = schedule.tick().await.into_std();
        let begun = if pause.is_zero() { Instant::now() } else { due };
        let ids = population::drawn(FEW, memories, (number + took_ms.len() * WRITERS) as u64);
        let updates = Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() };
        let written = session.reinforce(updates).await?;
        ensure!(written.outcome.applied == FEW as u64, "{} updates were applied", written.outcome.applied);
        took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(took_ms)
}

/// Running writers.
pub(super) struct Writers {
    stop: watch::Sender<bool>,
    running: JoinSet<Result<Vec<f64>>>,
}

impl Writers {
    /// Stops the writers and returns the latencies in milliseconds.
    pub(super) async fn stop(mut self) -> Result<Vec<f64>> {
        self.stop.send_replace(true);
        let mut took_ms = Vec::new();
        while let Some(ended) = self.running.join_next().await {
            took_ms.extend(ended.context("a writer panicked")??);
        }
        Ok(took_ms)
    }
}
