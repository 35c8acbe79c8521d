//! What the services, the heartbeat and the pages of one worker share.

use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::runs::Runs;
use crate::view::View;
use engram_client::Client;
use engram_memory::{Member, Ordinal, PartitionId, Shape, Term};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::ActivateError;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// Activations under way at once: one, so that a newer map is compared with what the last one left.
const ACTIVATIONS: usize = 1;

/// One worker.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) shape: Shape,
    pub(crate) member: Member,
    pub(crate) engine: Engine,
    /// To the other workers, and to this one for what is asked of all.
    pub(crate) peers: Client,
    pub(crate) metrics: Metrics,
    /// The learning runs that are driven here.
    pub(crate) runs: Runs,
    pub(crate) view: watch::Sender<View>,
    /// Terms at which the store was told to serve, by partition.
    activated: Mutex<BTreeMap<PartitionId, Term>>,
    activating: Semaphore,
    /// Every partition that the map gives to this process is served.
    complete: AtomicBool,
    /// Set once: no request is taken any more.
    pub(crate) stopping: watch::Sender<bool>,
    /// Somebody asked for an orderly stop.
    pub(crate) asked_to_stop: tokio::sync::Notify,
    pub(crate) broadcast: RwLock<Option<v1::BroadcastQualityRequest>>,
    pub(crate) started: Instant,
    pub(crate) recovery: String,
    pub(crate) device: (String, usize),
    pub(crate) last_snapshot_ms: AtomicU64,
    /// Lateness of timers on the runtime of the services, in milliseconds.
    pub(crate) loop_lag_ms: AtomicU64,
}

/// What a worker is made of before it runs.
pub(crate) struct Parts {
    pub(crate) options: Options,
    pub(crate) member: Member,
    pub(crate) engine: Engine,
    pub(crate) peers: Client,
    pub(crate) recovery: String,
    pub(crate) device: (String, usize),
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { options, member, engine, peers, recovery, device } = parts;
        Self {
            shape: options.shape(),
            metrics: Metrics::new(&options.cluster_name, options.ordinal),
            options,
            member,
            engine,
            peers,
            runs: Runs::default(),
            view: watch::Sender::new(View::default()),
            activated: Mutex::default(),
            activating: Semaphore::new(ACTIVATIONS),
            complete: AtomicBool::new(false),
            stopping: watch::Sender::new(false),
            asked_to_stop: tokio::sync::Notify::new(),
            broadcast: RwLock::default(),
            started: Instant::now(),
            recovery,
            device,
            last_snapshot_ms: AtomicU64::new(0),
            loop_lag_ms: AtomicU64::new(0),
        }
    }

    pub(crate) const fn ordinal(&self) -> Ordinal {
        self.member.ordinal
    }

    pub(crate) const fn partitions(&self) -> u32 {
        self.shape.partitions
    }

    /// The partitions that are served here.
    pub(crate) fn served(&self) -> Vec<PartitionId> {
        let all = (0..self.partitions()).map(PartitionId);
        all.filter(|partition| self.engine.position(*partition).is_some()).collect()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Has a map, and serves all that it gives to this process.
    pub(crate) fn is_ready(&self) -> bool {
        self.complete.load(Ordering::Acquire) && !self.is_stopping()
    }

    /// What keeps the store from serving, if something does.
    pub(crate) fn fault(&self) -> Option<String> {
        self.engine.stats().fault
    }

    /// Takes what a coordinator says; whether it is news.
    pub(crate) fn hear(&self, reply: &v1::BeatReply) -> bool {
        let news = self.view.send_if_modified(|view| view.take(reply, self.options.cluster, self.shape.partitions));
        if news {
            let view = self.view.borrow();
            if let Some(map) = view.client_map(&self.options.cluster_name, self.shape.features.dimension) {
                self.peers.set_map(map);
            }
        }
        news
    }

    /// Serves what the map gives to this very process, and nothing else. Called at every change of the map.
    pub(crate) async fn follow_map(&self) {
        let _permit = self.activating.acquire().await.expect("the semaphore is never closed");
        let Some(map) = self.view.borrow().map.clone() else { return };
        let given: BTreeMap<PartitionId, Term> = map.served_by(&self.member).collect();
        let (wanted, dropped) = {
            let activated = self.activated.lock().unwrap_or_else(PoisonError::into_inner);
            let wanted = given.iter().filter(|(partition, term)| activated.get(partition) != Some(term));
            let wanted: Vec<(PartitionId, Term)> = wanted.map(|(partition, term)| (*partition, *term)).collect();
            let dropped: Vec<PartitionId> =
                activated.keys().filter(|partition| !given.contains_key(partition)).copied().collect();
            (wanted, dropped)
        };
        if !dropped.is_empty() {
            tracing::info!(partitions = dropped.len(), "the map gives partitions to others");
            self.engine.deactivate(dropped.clone()).await;
            self.activated.lock().unwrap_or_else(PoisonError::into_inner).retain(|it, _| !dropped.contains(it));
        }
        let mut served = true;
        if !wanted.is_empty() {
            let answers = self.engine.activate(wanted.clone()).await;
            let mut activated = self.activated.lock().unwrap_or_else(PoisonError::into_inner);
            for ((partition, term), answer) in wanted.iter().zip(answers) {
                match answer {
                    Ok(()) => {
                        activated.insert(*partition, *term);
                    }
                    // The coordinator raises the term when it hears this process; until then it waits.
                    Err(error @ ActivateError::Promised { .. }) => {
                        served = false;
                        tracing::info!(%error, "waits for a newer term");
                    }
                    Err(error) => {
                        served = false;
                        tracing::error!(%error, %partition, "failed to serve a partition");
                    }
                }
            }
            tracing::info!(partitions = activated.len(), version = map.version, "serves what the map gives");
        }
        let names_me = map.partitions.iter().any(|entry| entry.primary == self.member.ordinal);
        // A worker whose partitions still stand under its predecessor's incarnation has to wait for its own.
        let waits = names_me && given.is_empty();
        self.complete.store(served && !waits, Ordering::Release);
    }

    /// What to tell of a partition that is not served here.
    pub(crate) fn not_primary(&self, partition: PartitionId) -> Problem {
        let view = self.view.borrow();
        let owner = view.owner(partition);
        let text = match owner {
            Some(owner) if owner == self.ordinal() => {
                format!("partition {partition} is being activated on this worker")
            }
            Some(owner) => format!("partition {partition} is served by worker {owner}"),
            None => "the partition map is not known yet".to_owned(),
        };
        let mut problem = Problem::of(ProblemKind::NotPrimary, text).at(partition);
        problem.map_version = view.version();
        problem.primary = owner.map(|owner| owner.0);
        problem
    }

    /// Checks a partition number.
    pub(crate) fn check_partition(&self, partition: u32) -> Result<PartitionId, Problem> {
        if partition < self.partitions() {
            return Ok(PartitionId(partition));
        }
        let text = format!("partition: {partition} is not allowed; allowed: 0 to {}", self.partitions() - 1);
        Err(Problem::of(ProblemKind::Invalid, text))
    }
}
