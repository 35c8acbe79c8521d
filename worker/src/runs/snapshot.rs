//! Runs of kind `Snapshot`: every partition is put into a storage or a volume by whoever leads it, and the manifest is written last.
//!
//! The driver may die at any await, and another goes on from the record. Each attempt has a folder of its own beside the manifest, so
//! that what an earlier one still sends overwrites nothing. Once all files of an attempt are there, the text of the manifest is recorded
//! *before* it is written: from then on every driver writes that text and no other, so that whichever is last, the manifest that lies
//! there names files that are whole and that nobody touches any more.

use super::record::Recorder;
use crate::runs::credentials;
use crate::shared::Shared;
use engram_api::{Code, Problem, SnapshotPlace};
use engram_learn::run::{LogError, Order, Phase, RunLog as _, RunState, SnapshotResult, SnapshotState, Status};
use engram_memory::RunId;
use engram_objects::{Credentials, Keys, Options};
use engram_proto::v1;
use engram_snapshot::{Entry, Manifest, Of, Place};
use futures::StreamExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Partitions that are on their way at once: one or two per worker keep the way to a storage busy.
const AT_ONCE: usize = 4;
/// How long one partition may take, failovers and tries included: half a GiB at 1 MB/s.
const PARTITION: Duration = Duration::from_secs(600);
/// Between attempts to write the record.
const RETRY: Duration = Duration::from_millis(200);

/// Drives one snapshot.
pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) run: RunId,
    pub(super) state: RunState,
    pub(super) version: u64,
    pub(super) place: SnapshotPlace,
    pub(super) status: watch::Sender<Status>,
    pub(super) orders: watch::Receiver<Order>,
}

/// Why a driver stops before the end of its run.
enum Stop {
    /// Another driver has the run.
    Superseded,
    Ordered(Order),
    Failed {
        code: String,
        message: String,
    },
}

impl From<Problem> for Stop {
    fn from(problem: Problem) -> Self {
        Self::Failed { code: problem.code().id().into(), message: problem.message().into() }
    }
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<Problem>() {
            Ok(problem) => problem.into(),
            Err(error) => Self::Failed { code: Code::StorageUnusable.id().into(), message: format!("{error:#}") },
        }
    }
}

impl Driver {
    /// Drives the run to its end, however long the cluster takes; dropped at any await, another driver can go on.
    pub(super) async fn run(mut self) {
        let began = (Instant::now(), self.state.elapsed_ms);
        let ended = self.drive().await;
        self.state.elapsed_ms = began.1 + began.0.elapsed().as_millis() as u64;
        let (phase, code, message) = match ended {
            Ok(()) => (Phase::Succeeded, String::new(), String::new()),
            Err(Stop::Superseded) => return,
            Err(Stop::Ordered(Order::Cancel)) => (Phase::Cancelled, String::new(), "cancelled".to_owned()),
            Err(Stop::Ordered(_)) => {
                self.state.suspended = true;
                (self.state.phase, String::new(), String::new())
            }
            Err(Stop::Failed { code, message }) => (Phase::Failed, code, message),
        };
        (self.state.phase, self.state.code, self.state.message) = (phase, code, message);
        if self.record().await.is_err() {
            return;
        }
        credentials::forget(&self.shared, self.run);
        let state = &self.state;
        self.status.send_modify(|status| {
            status.phase = state.told_phase();
            (status.code, status.message) = (state.code.clone(), state.message.clone());
            status.snapshot = state.snapshot.as_ref().and_then(|snapshot| snapshot.written.clone());
        });
    }

    async fn drive(&mut self) -> Result<(), Stop> {
        let url = self.place.address_of(&self.state.name);
        let keys = self.keys().await?;
        let credentials = keys.clone().map(Credentials::Keys);
        let options = Options { endpoint: self.place.endpoint.clone(), region: self.place.region.clone(), credentials };
        let place = Place::named(&url, &options, self.shared.options.snapshots.as_deref()).await?;
        let sealed = match self.state.snapshot.as_mut().and_then(|snapshot| snapshot.manifest.clone()) {
            Some(sealed) => sealed,
            None => self.gather(&place, &url, keys).await?,
        };
        self.tell("writes the manifest");
        place.put_manifest(&sealed).await?;
        let manifest = Manifest::parse(sealed.as_bytes(), &url)?;
        let attempt = self.state.snapshot.as_ref().map_or(0, |snapshot| snapshot.attempt);
        for earlier in 1..attempt {
            // What stays takes room and is named by no manifest.
            place.below(&self.folder(earlier)).remove_files().await;
        }
        let written = SnapshotResult {
            url,
            digest: manifest.digest.unwrap_or_default(),
            memories: manifest.memories,
            bytes: manifest.bytes,
            partitions: manifest.partitions,
        };
        self.state.snapshot = Some(SnapshotState { attempt, manifest: None, written: Some(written) });
        Ok(())
    }

    /// Has all partitions put into a folder of this attempt, and records the manifest, which nobody has written yet. Removes what it has
    /// put where that fails.
    async fn gather(&mut self, place: &Place, url: &str, keys: Option<Keys>) -> Result<String, Stop> {
        let begins = self.state.snapshot.is_none();
        if begins {
            if place.is_taken().await? {
                return Err(taken(url));
            }
        } else if place.has_manifest().await? {
            // Not of this run, which has not come so far.
            return Err(taken(url));
        }
        let attempt = self.state.snapshot.as_ref().map_or(1, |snapshot| snapshot.attempt + 1);
        self.state.snapshot = Some(SnapshotState { attempt, ..SnapshotState::default() });
        (self.state.phase, self.state.done) = (Phase::Running, 0);
        self.state.epochs = Some(self.shared.partitions().into());
        self.record().await?;
        let folder = self.folder(attempt);
        let attempted = place.below(&folder);
        attempted.make().await?;
        let gathered = self.put_all(url, &folder, keys).await;
        if gathered.is_err() {
            attempted.remove_files().await;
        }
        let mut manifest = gathered?;
        let sealed = manifest.text()?;
        self.state.snapshot = Some(SnapshotState { attempt, manifest: Some(sealed.clone()), written: None });
        self.record().await?;
        Ok(sealed)
    }

    async fn put_all(&mut self, url: &str, folder: &str, keys: Option<Keys>) -> Result<Manifest, Stop> {
        let options = &self.shared.options;
        let of = Of { cluster: options.cluster, name: &options.cluster_name, spec: &options.spec };
        let mut manifest = Manifest::new(url.rsplit('/').next().unwrap_or_default(), of)?;
        let place = v1::ObjectPlace {
            url: format!("{url}/{folder}"),
            endpoint: self.place.endpoint.clone().unwrap_or_default(),
            region: self.place.region.clone().unwrap_or_default(),
            credentials: keys.map(|keys| v1::ObjectCredentials {
                access_key_id: keys.id,
                secret_access_key: keys.secret,
                session_token: keys.token.unwrap_or_default(),
            }),
        };
        let peers = self.shared.peers.clone();
        let put = |partition: u32| {
            let (peers, place) = (peers.clone(), Some(place.clone()));
            async move { peers.put_partition(v1::PutPartitionRequest { partition, place }, PARTITION).await }
        };
        let mut puts = futures::stream::iter((0..self.shared.partitions()).map(put)).buffer_unordered(AT_ONCE);
        let mut orders = self.orders.clone();
        self.tell("");
        loop {
            let put = tokio::select! {
                put = puts.next() => put,
                Ok(order) = orders.wait_for(|order| *order != Order::GoOn) => return Err(Stop::Ordered(*order)),
            };
            let Some(put) = put else { break };
            let reply = put.map_err(|error| Stop::Failed { code: "ENG-0308".into(), message: error.to_string() })?;
            if !reply.code.is_empty() {
                return Err(Stop::Failed { code: reply.code, message: reply.message });
            }
            let entry: Entry = serde_json::from_str(&reply.entry_json)
                .map_err(|error| Stop::Failed { code: "ENG-0308".into(), message: error.to_string() })?;
            manifest.add(Entry { file: format!("{folder}/{}", entry.file), ..entry });
            self.state.done += 1;
            let (memories, bytes) = (manifest.memories as f64, manifest.bytes as f64);
            let done = self.state.done;
            self.status.send_modify(|status| {
                status.epoch = done;
                status.metrics.insert("memories".into(), memories);
                status.metrics.insert("bytes".into(), bytes);
            });
        }
        let map = self.shared.view.borrow().map.clone();
        let primaries = map.iter().flat_map(|map| &map.partitions).map(|entry| entry.primary);
        manifest.workers = primaries.collect::<std::collections::BTreeSet<_>>().len() as u32;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        manifest.created_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        Ok(manifest)
    }

    /// Who asks, where the specification names a Secret.
    async fn keys(&mut self) -> Result<Option<Keys>, Stop> {
        let mut orders = self.orders.clone();
        tokio::select! {
            keys = credentials::wait(&self.shared, self.run, self.place.secret_ref.as_ref(), &self.status) => Ok(keys),
            Ok(order) = orders.wait_for(|order| *order != Order::GoOn) => Err(Stop::Ordered(*order)),
        }
    }

    /// Where the files of an attempt lie, below the manifest.
    fn folder(&self, attempt: u32) -> String {
        format!("{:08x}-{attempt}", self.run.0 as u32)
    }

    fn tell(&self, message: &str) {
        let (phase, done, epochs) = (self.state.phase, self.state.done, self.state.epochs);
        self.status.send_modify(|status| {
            (status.phase, status.epoch, status.epochs) = (phase, done, epochs);
            message.clone_into(&mut status.message);
        });
    }

    /// Writes the record, as often as it takes.
    async fn record(&mut self) -> Result<(), Stop> {
        let recorder = Recorder { shared: Arc::clone(&self.shared) };
        loop {
            match recorder.record(self.run, self.version, self.state.encode(), None).await {
                Ok(()) => {
                    self.version += 1;
                    return Ok(());
                }
                // A write whose answer was lost finds itself here, too: whoever goes on reads the record anew.
                Err(LogError::Superseded) => return Err(Stop::Superseded),
                Err(LogError::Cluster(engram_learn::run::ClusterError::Temporary(_))) => {
                    tokio::time::sleep(RETRY).await;
                }
                Err(LogError::Cluster(error)) => {
                    return Err(Stop::Failed { code: "ENG-0308".into(), message: error.to_string() });
                }
            }
        }
    }
}

fn taken(url: &str) -> Stop {
    let message = format!("something is at {url} already; allowed: a place of its own for each snapshot");
    Problem::new(Code::Conflicting, message).into()
}

/// Puts one partition that is led here into a storage or a volume; `None` where it is not led here.
///
/// # Errors
/// The store, the storage or the volume fails.
pub(super) async fn put(shared: &Shared, message: v1::PutPartitionRequest) -> anyhow::Result<Option<Entry>> {
    use anyhow::Context as _;
    let place = message.place.unwrap_or_default();
    let said = |text: String| Some(text).filter(|text| !text.is_empty());
    let credentials = place.credentials.map(|it| Credentials::Keys(credentials::keys(it)));
    let options = Options { endpoint: said(place.endpoint), region: said(place.region), credentials };
    let place = Place::named(&place.url, &options, shared.options.snapshots.as_deref()).await?;
    let outgoing = outgoing(&shared.options.state_dir);
    std::fs::create_dir_all(&outgoing).with_context(|| format!("failed to make {}", outgoing.display()))?;
    let folder = tempfile::Builder::new().prefix("partition-").tempdir_in(&outgoing);
    let folder = folder.context("failed to make a folder for a partition")?;
    let partition = engram_memory::PartitionId(message.partition);
    let Some(info) = shared.engine.snapshot_one(partition, folder.path().to_owned()).await? else { return Ok(None) };
    let file = engram_store::snapshot_file::name(info.partition, info.lsn);
    let (path, name) = (folder.path().to_owned(), file.clone());
    let entry = tokio::task::spawn_blocking(move || Entry::of(&path, &name)).await??;
    place.put_file(&file, &folder.path().join(&file)).await?;
    Ok(Some(entry))
}

/// Where partitions lie that are on their way out; what a killed process left there goes at the next start.
pub(crate) fn outgoing(state_dir: &std::path::Path) -> std::path::PathBuf {
    state_dir.join("outgoing")
}
