//! Runs of kind `Snapshot`: the primary of every partition uploads it to a storage or a volume, and the manifest is written last.
//!
//! The driver may die at any await, and another continues from the record. Each attempt has a folder of its own next to the
//! manifest, so that late writes of an earlier attempt overwrite nothing. Once all files of an attempt are there, the manifest's
//! text is recorded *before* it is written: from then on every driver writes exactly that text, so the final manifest names files
//! that are complete and no longer change.

use crate::runs::credentials;
use crate::runs::frame::{Interruption, conclude, show_end, unless_ordered, write_record};
use crate::shared::Shared;
use engram_api::{Code, Problem, SnapshotLocation};
use engram_learn::run::{Order, Phase, RunState, SnapshotResult, SnapshotState, Status};
use engram_memory::RunId;
use engram_objects::{Credentials, Keys, Options};
use engram_proto::v1;
use engram_snapshot::{Entry, Location, Manifest, SourceCluster};
use engram_trace::{Span, in_span};
use futures::StreamExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Concurrent uploads: one or two per worker saturate the connection to a storage.
const MAX_CONCURRENT: usize = 4;
/// Deadline of one partition, failovers and retries included: half a GiB at 1 MB/s.
const PARTITION_DEADLINE: Duration = Duration::from_secs(600);

/// Driver of one snapshot run.
pub(in crate::runs) struct Driver {
    pub(in crate::runs) shared: Arc<Shared>,
    pub(in crate::runs) run: RunId,
    pub(in crate::runs) state: RunState,
    pub(in crate::runs) version: u64,
    pub(in crate::runs) location: SnapshotLocation,
    pub(in crate::runs) status: watch::Sender<Status>,
    pub(in crate::runs) orders: watch::Receiver<Order>,
}

impl From<anyhow::Error> for Interruption {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<Problem>() {
            Ok(problem) => problem.into(),
            Err(error) => Self::Failed { code: Code::StorageUnusable.id().into(), message: format!("{error:#}") },
        }
    }
}

impl Driver {
    /// Drives the run to its end, however long the cluster takes. If dropped at any await, another driver can continue.
    pub(in crate::runs) async fn run(mut self) {
        let started = (Instant::now(), self.state.elapsed_ms);
        let mut span = Span::root("snapshot");
        span.set("engram.run.name", self.state.name.clone());
        span.link_agreed(engram_wire::run_trace(self.run));
        let result = in_span(&span, self.drive()).await;
        if let Err(Interruption::Failed { message, .. }) = &result {
            span.fail(message);
        }
        drop(span);
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        if conclude(&mut self.state, result).is_none() {
            return;
        }
        self.state.metrics.extend(self.status.borrow().metrics.clone());
        if self.record().await.is_err() {
            return;
        }
        credentials::forget(&self.shared, self.run);
        let written = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.written.clone());
        self.status.send_modify(|status| status.snapshot = written);
        show_end(&self.status, &self.state);
    }

    async fn drive(&mut self) -> Result<(), Interruption> {
        let url = self.location.address_of(&self.state.name);
        let keys = self.keys().await?;
        let credentials = keys.clone().map(Credentials::Keys);
        let options = Options {
            endpoint: self.location.endpoint.clone(),
            region: self.location.region.clone(),
            credentials,
            endpoint_owner: crate::runs::endpoint_owner(&self.shared),
        };
        let location = Location::resolve(&url, &options, self.shared.setup.options.snapshots.as_deref()).await?;
        let manifest_text = match self.state.snapshot.as_mut().and_then(|snapshot| snapshot.manifest.clone()) {
            Some(manifest_text) => manifest_text,
            None => self.upload_attempt(&location, &url, keys).await?,
        };
        self.set_message("writing the manifest");
        location.put_manifest(&manifest_text).await?;
        let manifest = Manifest::parse(manifest_text.as_bytes(), &url)?;
        let attempt = self.state.snapshot.as_ref().map_or(0, |snapshot| snapshot.attempt);
        for earlier in 1..attempt {
            // Leftovers take space and are in no manifest.
            location.join(&self.folder(earlier)).remove_files().await;
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

    /// Uploads all partitions into a folder of this attempt and records the manifest, which has not been written yet. Removes the
    /// files of a failed attempt.
    async fn upload_attempt(
        &mut self,
        location: &Location,
        url: &str,
        keys: Option<Keys>,
    ) -> Result<String, Interruption> {
        let begins = self.state.snapshot.is_none();
        if begins {
            if location.is_occupied().await? {
                return Err(already_taken(url));
            }
        } else if location.has_manifest().await? {
            // The manifest is not of this run, which has not written one yet.
            return Err(already_taken(url));
        }
        let attempt = self.state.snapshot.as_ref().map_or(1, |snapshot| snapshot.attempt + 1);
        self.state.snapshot = Some(SnapshotState { attempt, ..SnapshotState::default() });
        (self.state.phase, self.state.done) = (Phase::Running, 0);
        self.state.epochs = Some(self.shared.partitions().into());
        self.record().await?;
        let folder = self.folder(attempt);
        let attempt_folder = location.join(&folder);
        attempt_folder.create().await?;
        let attempt_result = self.upload_all(url, &folder, keys).await;
        if attempt_result.is_err() {
            attempt_folder.remove_files().await;
        }
        let mut manifest = attempt_result?;
        let manifest_text = manifest.text()?;
        self.state.snapshot = Some(SnapshotState { attempt, manifest: Some(manifest_text.clone()), written: None });
        self.record().await?;
        Ok(manifest_text)
    }

    async fn upload_all(&mut self, url: &str, folder: &str, keys: Option<Keys>) -> Result<Manifest, Interruption> {
        let options = &self.shared.setup.options;
        let source = SourceCluster { cluster: options.cluster, name: &options.cluster_name, spec: &options.spec };
        let mut manifest = Manifest::new(url.rsplit('/').next().unwrap_or_default(), source)?;
        let location = v1::ObjectLocation {
            url: format!("{url}/{folder}"),
            endpoint: self.location.endpoint.clone().unwrap_or_default(),
            region: self.location.region.clone().unwrap_or_default(),
            credentials: keys.map(|keys| v1::ObjectCredentials {
                access_key_id: keys.id,
                secret_access_key: keys.secret,
                session_token: keys.token.unwrap_or_default(),
            }),
        };
        let peers = self.shared.client.clone();
        let put = |partition: u32| {
            let (peers, location) = (peers.clone(), Some(location.clone()));
            async move { peers.put_partition(v1::PutPartitionRequest { partition, location }, PARTITION_DEADLINE).await }
        };
        let mut puts = futures::stream::iter((0..self.shared.partitions()).map(put)).buffer_unordered(MAX_CONCURRENT);
        let mut orders = self.orders.clone();
        self.set_message("");
        loop {
            let put = tokio::select! {
                put = puts.next() => put,
                Ok(order) = orders.wait_for(|order| *order != Order::Continue) => return Err(Interruption::Ordered(*order)),
            };
            let Some(put) = put else { break };
            let reply =
                put.map_err(|error| Interruption::Failed { code: "ENG-0308".into(), message: error.to_string() })?;
            if !reply.code.is_empty() {
                return Err(Interruption::Failed { code: reply.code, message: reply.message });
            }
            let entry: Entry = serde_json::from_str(&reply.entry_json)
                .map_err(|error| Interruption::Failed { code: "ENG-0308".into(), message: error.to_string() })?;
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
        let map = self.shared.membership.view().map.clone();
        let primaries = map.iter().flat_map(|map| &map.partitions).map(|entry| entry.primary);
        manifest.workers = primaries.collect::<std::collections::BTreeSet<_>>().len() as u32;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        manifest.created_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        Ok(manifest)
    }

    /// Returns the credentials, if the specification names a Secret.
    async fn keys(&self) -> Result<Option<Keys>, Interruption> {
        let keys = credentials::wait(&self.shared, self.run, self.location.secret_ref.as_ref(), &self.status);
        unless_ordered(&self.orders, keys).await
    }

    /// Returns the folder of an attempt, relative to the manifest.
    fn folder(&self, attempt: u32) -> String {
        format!("{:08x}-{attempt}", self.state.identity(self.run).0 as u32)
    }

    fn set_message(&self, message: &str) {
        let (phase, done, epochs) = (self.state.phase, self.state.done, self.state.epochs);
        self.status.send_modify(|status| {
            (status.phase, status.epoch, status.epochs) = (phase, done, epochs);
            message.clone_into(&mut status.message);
        });
    }

    async fn record(&mut self) -> Result<(), Interruption> {
        write_record(&self.shared, (self.run, &mut self.version), &self.state, None).await
    }
}

fn already_taken(url: &str) -> Interruption {
    let message = format!("{url} is not empty; allowed: a location of its own for each snapshot");
    Problem::new(Code::Conflicting, message).into()
}

/// Uploads one partition whose primary is this worker to a storage or a volume; `None` if it is not.
///
/// # Errors
/// The store, the storage or the volume fails.
pub(in crate::runs) async fn put(shared: &Shared, message: v1::PutPartitionRequest) -> anyhow::Result<Option<Entry>> {
    use anyhow::Context as _;
    let location = message.location.unwrap_or_default();
    let non_empty = |text: String| Some(text).filter(|text| !text.is_empty());
    let credentials = location.credentials.map(|it| Credentials::Keys(credentials::keys(it)));
    let options = Options {
        endpoint: non_empty(location.endpoint),
        region: non_empty(location.region),
        credentials,
        endpoint_owner: crate::runs::endpoint_owner(shared),
    };
    let location = Location::resolve(&location.url, &options, shared.setup.options.snapshots.as_deref()).await?;
    let outgoing = outgoing(&shared.setup.options.state_dir);
    std::fs::create_dir_all(&outgoing).with_context(|| format!("failed to create {}", outgoing.display()))?;
    let folder = tempfile::Builder::new().prefix("partition-").tempdir_in(&outgoing);
    let folder = folder.context("failed to create a folder for a partition")?;
    let partition = engram_memory::PartitionId(message.partition);
    let Some(info) = shared.engine.snapshot_one(partition, folder.path().to_owned()).await? else { return Ok(None) };
    let file = engram_store::snapshot_file::name(info.partition, info.lsn);
    let (path, name) = (folder.path().to_owned(), file.clone());
    let entry = tokio::task::spawn_blocking(move || Entry::of(&path, &name)).await??;
    location.put_file(&file, &folder.path().join(&file)).await?;
    Ok(Some(entry))
}

/// Returns the folder of partitions being uploaded. The next start removes leftovers of a killed process.
pub(crate) fn outgoing(state_dir: &std::path::Path) -> std::path::PathBuf {
    state_dir.join("outgoing")
}
