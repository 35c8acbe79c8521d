//! Transfer of a training state between workers: the files of a checkpoint in parts. Their hashes are checked before use.

use crate::shared::Shared;
use crate::training::host::Key;
use crate::training::transport::links;
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
pub(in crate::training) fn parts(checkpoint: Checkpoint) -> Vec<v1::TrainingStatePart> {
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
pub(in crate::training) async fn fetch(
    shared: &Arc<Shared>,
    key: Key,
    sources: Vec<u32>,
) -> anyhow::Result<Checkpoint> {
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
    let mut state = ReceivedState::default();
    while let Some(part) = parts.message().await? {
        state.add(part)?;
    }
    state.finish()
}

/// The parts of a state that have arrived.
#[derive(Debug, Default)]
struct ReceivedState {
    files: BTreeMap<String, Vec<u8>>,
    current: String,
    bytes: usize,
}

impl ReceivedState {
    fn add(&mut self, part: v1::TrainingStatePart) -> anyhow::Result<()> {
        if !part.file.is_empty() {
            self.current = part.file;
        }
        self.bytes += part.data.len();
        if self.bytes > MAX_BYTES {
            bail!("the state has more than {MAX_BYTES} bytes");
        }
        self.files.entry(self.current.clone()).or_default().extend_from_slice(&part.data);
        Ok(())
    }

    /// Returns the checkpoint, if every file is complete and has its hash.
    fn finish(mut self) -> anyhow::Result<Checkpoint> {
        let manifest = self.files.remove(MANIFEST).context("the state has no manifest")?;
        let checkpoint = Checkpoint { manifest, files: self.files };
        checkpoint.verify()?;
        Ok(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};

    fn receive(parts: impl IntoIterator<Item = v1::TrainingStatePart>) -> anyhow::Result<Checkpoint> {
        let mut state = ReceivedState::default();
        parts.into_iter().try_for_each(|part| state.add(part))?;
        state.finish()
    }

    #[test]
    fn state_with_a_flipped_bit_or_a_missing_part_is_refused() {
        let spec: TrainerSpec = serde_json::from_value(serde_json::json!({
            // Files of several parts.
            "model": { "inputs": 600, "layers": [{ "dense": 600 }, { "dense": 1 }] },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.1 },
        }))
        .unwrap();
        let mut trainer = Trainer::new(&spec).unwrap();
        trainer.step(&[], &SummationOrder::Rank { leaves: 1 }, &mut Alone).unwrap();
        let sent = trainer.checkpoint(1, 2, BTreeMap::new()).unwrap();
        let all = parts(sent.clone());
        assert!(all.len() > 5, "{} parts", all.len());
        assert_eq!(receive(all.clone()).unwrap(), sent);
        for damaged in 0..all.len() {
            let mut flipped = all.clone();
            let mut data = flipped[damaged].data.to_vec();
            let middle = data.len() / 2;
            data[middle] ^= 4;
            flipped[damaged].data = data.into();
            assert!(receive(flipped).is_err(), "bit of part {damaged}");
            let mut missing = all.clone();
            missing.remove(damaged);
            assert!(receive(missing).is_err(), "part {damaged}");
        }
    }
}
