//! Writers that send at half of what a cluster takes, on a schedule: a request counts from when it was due, so that one that waits makes
//! those behind it late too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_client::{Client, Session, Signals, Updates};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

use crate::population::{self, QUALITY};

/// Updates of a request, and writers that send them.
pub(super) const FEW: usize = 100;
const WRITERS: usize = 8;
/// How long is looked for the highest rate.
const FULL: Duration = Duration::from_secs(3);

/// What the writers of a cluster send.
pub(super) struct Load {
    sessions: Vec<Arc<Session>>,
    memories: u32,
    /// From one request of a writer to its next; zero: as soon as the last is answered.
    pause: Duration,
}

impl Load {
    /// Half of what is answered where each writer sends the next request as soon as the last is answered.
    pub(super) async fn half_of_what_is_taken(client: &Client, memories: u32) -> Result<Self> {
        let sessions = (0..WRITERS).map(|_| Arc::new(client.session())).collect();
        let full = Self { sessions, memories, pause: Duration::ZERO };
        let writers = full.start();
        sleep(FULL).await;
        let taken = writers.stop().await?.len() as f64 / FULL.as_secs_f64();
        Ok(Self { pause: Duration::from_secs_f64(2.0 * WRITERS as f64 / taken), ..full })
    }

    /// Requests a second.
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

/// Until it is stopped. Answers how many milliseconds each request took.
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

/// Writers under way.
pub(super) struct Writers {
    stop: watch::Sender<bool>,
    running: JoinSet<Result<Vec<f64>>>,
}

impl Writers {
    /// How many milliseconds their requests took.
    pub(super) async fn stop(mut self) -> Result<Vec<f64>> {
        self.stop.send_replace(true);
        let mut took_ms = Vec::new();
        while let Some(ended) = self.running.join_next().await {
            took_ms.extend(ended.context("a writer panicked")??);
        }
        Ok(took_ms)
    }
}
