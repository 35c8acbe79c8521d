//! Data-parallel training on the workers: members of groups, and the connections of drivers to them.
//!
//! The driver of a run ([`crate::runs`]) hosts the membership of its group, whose record is part of the replicated state of the run.
//! Every worker of the cluster runs one member per run. A member is a task with the state machine of `engram_collective::group`, and a
//! thread that computes.
//!
//! ```text
//! driver ──Train stream──> host ──work──> engine ──TCP──> engines of other members
//!        <───reports─────       <─events─
//! ```
//!
//! Invariants: a step is committed on all members of a generation or on none; a member that is killed costs no step; members outlive
//! their driver and go on without one until the group must change.

mod checkpoint;
mod engine;
mod gpu;
mod host;
mod inbox;
mod metrics;
mod service;
mod serving;
mod slots;
mod step;
mod transport;

pub(crate) use metrics::{COMPRESSION_LEVEL, LEVELS, TrainingMetrics, algorithm_name, level_number};
pub(crate) use service::TrainingEndpoint;
pub(crate) use serving::predict::predict;
pub(crate) use transport::links::{LinkEvent, Links};

use crate::shared::Shared;
use checkpoint::files::CheckpointFolder;
use engram_collective::group::Position;
use engram_memory::RunId;
use engram_proto::v1;
use engram_train::job::Job;
use engram_train::{Checkpoint, NoiseSecret};
use host::{Inbound, Key, Settings};
use parking_lot::Mutex;
use serving::serve::Served;
use slots::Slots;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot, watch};
use transport::remote::RemoteCheckpoints;

/// Models of ended runs that are kept in memory for predictions.
const MAX_SERVED: usize = 16;

/// Members on this worker, and models for predictions.
pub(crate) struct Trainings {
    members: Slots<Key, mpsc::Sender<Inbound>>,
    served: Mutex<BTreeMap<Key, Arc<Served>>>,
    /// Number of members that run.
    running: watch::Sender<usize>,
}

impl Default for Trainings {
    fn default() -> Self {
        Self {
            members: Slots::new(|inbox| !inbox.is_closed()),
            served: Mutex::default(),
            running: watch::Sender::default(),
        }
    }
}

impl Trainings {
    /// Returns where to send messages for the member of a run, which is started if there is none.
    async fn member_inbox(
        &self,
        shared: &Arc<Shared>,
        start: &v1::StartTraining,
    ) -> anyhow::Result<mpsc::Sender<Inbound>> {
        let key = (engram_proto::answers::run_id(&start.run)?, start.submitted_ms);
        self.members.get_or_start(key, self.start(shared, start, key)).await
    }

    /// Starts the member of a run.
    async fn start(
        &self,
        shared: &Arc<Shared>,
        start: &v1::StartTraining,
        key: Key,
    ) -> anyhow::Result<mpsc::Sender<Inbound>> {
        let spec: engram_api::LearnerRunSpec = serde_json::from_str(&start.spec_json)?;
        let run = spec.replay.ok_or_else(|| anyhow::anyhow!("spec.replay is missing"))?;
        let table = (!start.table.is_empty()).then_some(&start.table[..]);
        let mut job = Job::with_table(&run, table)?;
        if let Some(secret) = NoiseSecret::new(&start.noise_secret) {
            job.set_noise_secret(secret);
        }
        let job = Arc::new(job);
        let warm_start = warm_start(shared, &run)?;
        let served = Arc::new(Served::new(run.serve_every, job.table().cloned()));
        let remote = match &run.checkpoint.location {
            Some(location) => Some(RemoteCheckpoints::open(shared, location, &start.name, run.checkpoint.keep).await?),
            None => None,
        };
        let settings = Settings { key, run, job, served: Arc::clone(&served), warm_start, remote };
        let inbox = host::start(shared, settings).await?;
        self.keep_served(key, served);
        Ok(inbox)
    }

    /// Completes when no member runs here.
    pub(crate) async fn ended(&self) {
        // An error means that this was dropped.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    fn keep_served(&self, key: Key, served: Arc<Served>) {
        let mut all = self.served.lock();
        while all.len() >= MAX_SERVED && !all.contains_key(&key) {
            // The one submitted first.
            let Some(oldest) = all.keys().min_by_key(|(_, submitted_ms)| *submitted_ms).copied() else { break };
            all.remove(&oldest);
        }
        all.insert(key, served);
    }

    /// Returns the model of the newest run with this id.
    fn served(&self, run: RunId) -> Option<Arc<Served>> {
        let all = self.served.lock();
        all.range((run, 0)..=(run, u64::MAX)).next_back().map(|(_, served)| Arc::clone(served))
    }

    /// Copies the state of a member; `None` if there is none, or if it is not at the position that may be named.
    async fn copy(&self, key: Key, at: Option<Position>) -> Option<Checkpoint> {
        let inbox = self.members.get(key).await?;
        let (reply, state) = oneshot::channel();
        inbox.send(Inbound::Copy(at, reply)).await.ok()?;
        state.await.ok()
    }
}

/// Returns the weights with which a run starts, if it names another run.
fn warm_start(shared: &Shared, run: &engram_api::ReplayRun) -> anyhow::Result<Option<Vec<Vec<u8>>>> {
    let Some(name) = &run.model.init.run else { return Ok(None) };
    let source = engram_learn::run::RunState::run_id(shared.setup.options.cluster, name);
    let missing = || {
        anyhow::anyhow!("spec.replay.model.init.run is {name}, of which worker {} has no checkpoint", shared.ordinal())
    };
    let checkpoint = CheckpointFolder::newest_of(&shared.setup.options.state_dir, source).ok_or_else(missing)?;
    Ok(Some(checkpoint.weights()?))
}
