//! Transfer of a training state between workers: the files of a checkpoint in parts. Their hashes are checked before use.

use super::host::Key;
use super::links;
use crate::shared::Shared;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use engram_memory::Ordinal;
use engram_proto::v1;
use engram_train::Checkpoint;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Bytes per part.
const PART_BYTES: usize = 1 << 20;
/// Largest state: parameters and optimizer state of the largest model.
const MAX_BYTES: usize = 1 << 30;
/// Limit of one transfer: the largest state at 20 MB/s.
const DEADLINE: Duration = Duration::from_secs(60);
/// Name of the manifest among the files.
const MANIFEST: &str = "manifest.json";

/// Splits a checkpoint into messages.
pub(super) fn parts(checkpoint: Checkpoint) -> Vec<v1::TrainingStatePart> {
    let Checkpoint { manifest, files } = checkpoint;
    let files = std::iter::once((MANIFEST.to_owned(), manifest)).chain(files);
    files
        .flat_map(|(name, content)| {
            let content = Bytes::from(content);
            let starts = (0..content.len().max(1)).step_by(PART_BYTES);
            let part = move |start: usize| v1::TrainingStatePart {
                file: if start == 0 { name.clone() } else { String::new() },
                data: content.slice(start..content.len().min(start + PART_BYTES)),
            };
            starts.map(part).collect::<Vec<_>>()
        })
        .collect()
}

/// Fetches the state of a run from the first of `sources` that has it.
///
/// # Errors
/// No source returns a complete state.
pub(super) async fn fetch(shared: &Arc<Shared>, key: Key, sources: Vec<u32>) -> anyhow::Result<Checkpoint> {
    let mut last = anyhow::anyhow!("no member has the state");
    for source in sources {
        match timeout(DEADLINE, fetch_from(shared, key, Ordinal(source))).await {
            Ok(Ok(checkpoint)) => return Ok(checkpoint),
            Ok(Err(error)) => last = error.context(format!("worker {source}")),
            Err(_) => last = anyhow::anyhow!("worker {source}: the transfer took too long"),
        }
    }
    Err(last)
}

async fn fetch_from(shared: &Arc<Shared>, key: Key, source: Ordinal) -> anyhow::Result<Checkpoint> {
    let mut client = links::client(shared, source).await?;
    let request = v1::GetTrainingStateRequest { run: engram_proto::answers::identity(key.0.0), submitted_ms: key.1 };
    let mut parts = client.get_training_state(request).await?.into_inner();
    let (mut files, mut current, mut total) = (BTreeMap::<String, Vec<u8>>::new(), String::new(), 0);
    while let Some(part) = parts.message().await? {
        if !part.file.is_empty() {
            current = part.file;
        }
        total += part.data.len();
        if total > MAX_BYTES {
            bail!("the state has more than {MAX_BYTES} bytes");
        }
        files.entry(current.clone()).or_default().extend_from_slice(&part.data);
    }
    let manifest = files.remove(MANIFEST).context("the state has no manifest")?;
    let checkpoint = Checkpoint { manifest, files };
    checkpoint.verify()?;
    Ok(checkpoint)
}
