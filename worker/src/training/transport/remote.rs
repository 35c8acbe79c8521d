//! Copies of checkpoints in object storage or on a volume of the cluster.
//!
//! A copy is complete when `LATEST`, which is written last, names its folder. The folder of a copy has a random part in its name: two
//! workers that both take themselves for the first one, one of which has left the group, do not write into the same folder.

use crate::shared::Shared;
use crate::training::checkpoint::files::{MANIFEST, ModelFiles};
use anyhow::{Context as _, Result, ensure};
use engram_api::SnapshotLocation;
use engram_objects::Options;
use engram_snapshot::Location;
use engram_train::{Checkpoint, Manifest};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Handle;

const LATEST: &str = "LATEST";
/// Largest files: of `LATEST`, of a manifest, and of tensors. Models have at most 64 Mi parameters and optimizers keep two numbers for each.
const MAX_LATEST_BYTES: u64 = 256;
const MAX_MANIFEST_BYTES: u64 = 64 << 20;
const MAX_FILE_BYTES: u64 = 4 << 30;

/// Where the copies of a run are.
#[derive(Debug, Clone)]
pub(in crate::training) struct RemoteCheckpoints {
    location: Arc<Location>,
    runtime: Handle,
    /// Random part of the names of folders.
    writer: u32,
    keep: usize,
}

impl RemoteCheckpoints {
    /// Opens the location of the run called `name`.
    ///
    /// # Errors
    /// It is invalid, or there are no credentials.
    pub(in crate::training) async fn open(
        shared: &Shared,
        location: &SnapshotLocation,
        name: &str,
        keep: u64,
    ) -> Result<Self> {
        let options = Options {
            endpoint: location.endpoint.clone(),
            region: location.region.clone(),
            credentials: None,
            endpoint_owner: crate::runs::endpoint_owner(shared),
        };
        let address = location.address_of(name);
        let location = Location::resolve(&address, &options, shared.setup.options.snapshots.as_deref()).await;
        let location = location.context("failed to open spec.replay.checkpoint.location")?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        Ok(Self { location: Arc::new(location), runtime: Handle::current(), writer: rand::random(), keep })
    }

    /// Copies a checkpoint, and removes older copies. Called by the thread that writes checkpoints.
    ///
    /// # Errors
    /// The storage fails. `LATEST` then names the previous copy.
    pub(in crate::training) fn write(&self, step: u64, checkpoint: &Checkpoint, model: &ModelFiles) -> Result<()> {
        let put = async {
            let name = format!("step-{step}-{:08x}", self.writer);
            let folder = self.location.join(&name);
            self.location.create().await?;
            folder.create().await?;
            for (file, bytes) in &checkpoint.files {
                folder.put(file, bytes.clone()).await?;
            }
            for (file, text) in model.files() {
                folder.put(file, text.as_bytes().to_vec()).await?;
            }
            folder.put(MANIFEST, checkpoint.manifest.clone()).await?;
            self.location.put(LATEST, format!("{name}\n").into_bytes()).await?;
            self.forget_old(step, &name).await
        };
        self.runtime.block_on(put).with_context(|| format!("failed to copy the checkpoint of step {step}"))
    }

    /// Removes copies of earlier steps.
    async fn forget_old(&self, step: u64, newest: &str) -> Result<()> {
        let mut old: Vec<(u64, String)> =
            self.location.names().await?.into_iter().filter_map(|name| Some((step_of(&name)?, name))).collect();
        old.retain(|(other, name)| *other <= step && name != newest);
        old.sort_unstable();
        let surplus = old.len().saturating_sub(self.keep.saturating_sub(1));
        for (_, name) in old.into_iter().take(surplus) {
            self.location.join(&name).remove_files().await;
        }
        Ok(())
    }

    /// Reads the newest copy with its step; `None` if there is none. Must not be called by a thread of the runtime.
    ///
    /// # Errors
    /// The storage fails, or the copy is damaged.
    pub(in crate::training) fn read(&self) -> Result<Option<(u64, Checkpoint)>> {
        self.runtime.block_on(async {
            let Some(latest) = self.location.get(LATEST, MAX_LATEST_BYTES).await? else { return Ok(None) };
            let name = String::from_utf8(latest).unwrap_or_default();
            let step = step_of(name.trim());
            let step =
                step.with_context(|| format!("{}/{LATEST} names no checkpoint: {:?}", self.location, name.trim()))?;
            let folder = self.location.join(name.trim());
            let checkpoint = read(&folder).await.with_context(|| format!("failed to read the checkpoint {folder}"))?;
            tracing::info!(step, from = %folder, "restored a checkpoint");
            Ok(Some((step, checkpoint)))
        })
    }
}

async fn read(folder: &Location) -> Result<Checkpoint> {
    let manifest = folder.get(MANIFEST, MAX_MANIFEST_BYTES).await?.context("it has no manifest.json")?;
    let parsed: Manifest = serde_json::from_slice(&manifest).context("manifest.json is damaged")?;
    let mut files = BTreeMap::new();
    for entry in &parsed.files {
        let is_name = !entry.name.is_empty() && !entry.name.starts_with('.') && !entry.name.contains('/');
        ensure!(is_name, "manifest.json names a file {:?}", entry.name);
        let bytes = folder.get(&entry.name, MAX_FILE_BYTES.min(entry.bytes as u64)).await?;
        files.insert(entry.name.clone(), bytes.with_context(|| format!("{} does not exist", entry.name))?);
    }
    let checkpoint = Checkpoint { manifest, files };
    checkpoint.verify()?;
    Ok(checkpoint)
}

/// Returns the step of a folder: `step-1000-9f86d081`.
fn step_of(name: &str) -> Option<u64> {
    let (step, writer) = name.strip_prefix("step-")?.split_once('-')?;
    let is_writer = writer.len() == 8 && writer.bytes().all(|byte| byte.is_ascii_hexdigit());
    step.parse().ok().filter(|_| is_writer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_files_are_no_copies() {
        assert_eq!(step_of("step-1000-9f86d081"), Some(1000));
        for name in ["step-1000", "step-x-9f86d081", "step-1-../../a", "LATEST", "step-1-9f86d08"] {
            assert_eq!(step_of(name), None, "{name}");
        }
    }
}
