//! Transfer of a training state between workers: the files of a checkpoint in parts. Their hashes are checked before use.
//!
//! While a group stops for a joiner, all members have the same state, and each sends a stripe of it. While the group trains, the joiner gets the present
//! state of one member.

use crate::shared::Shared;
use crate::training::host::Key;
use crate::training::transport::links;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use engram_client::group::{position_from_wire, position_to_wire};
use engram_collective::group::Position;
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
/// Longest wait for the next part of a stripe: then the state is fetched from one member at a time.
const SILENCE: Duration = Duration::from_secs(5);
/// Members that send stripes at once: more of them do not send faster than a joiner receives.
const MAX_STRIPES: usize = 8;
/// Name of the manifest among the files.
const MANIFEST: &str = "manifest.json";

/// The parts that one of `count` members sends of the state at a position.
#[derive(Debug, Clone, Copy)]
pub(in crate::training) struct Stripe {
    pub(in crate::training) position: Position,
    index: usize,
    count: usize,
}

impl Stripe {
    pub(in crate::training) fn from_wire(wire: v1::TrainingStateStripe) -> Self {
        let v1::TrainingStateStripe { position, index, count } = wire;
        Self { position: position_from_wire(position), index: index as usize, count: count.max(1) as usize }
    }

    const fn to_wire(self) -> v1::TrainingStateStripe {
        let Self { position, index, count } = self;
        v1::TrainingStateStripe { position: Some(position_to_wire(position)), index: index as u32, count: count as u32 }
    }
}

/// Splits a checkpoint into messages: all of it, or a stripe. The first stripe also has the manifest and what differs between members.
pub(in crate::training) fn parts(checkpoint: Checkpoint, stripe: Option<&Stripe>) -> Vec<v1::TrainingStatePart> {
    let (index, count) = stripe.map_or((0, 1), |it| (it.index, it.count));
    let Checkpoint { manifest, files } = checkpoint;
    let mut own = split(MANIFEST, manifest);
    let mut common = Vec::new();
    for (name, content) in files {
        let parts = if Checkpoint::is_common(&name) { &mut common } else { &mut own };
        parts.extend(split(&name, content));
    }
    if index > 0 {
        own.clear();
    }
    own.extend(common.into_iter().skip(index).step_by(count));
    own
}

/// Splits a file; one without content has one part.
fn split(file: &str, content: Vec<u8>) -> Vec<v1::TrainingStatePart> {
    let content = Bytes::from(content);
    let starts = (0..content.len().max(1)).step_by(PART_BYTES);
    let part = |start: usize| v1::TrainingStatePart {
        file: file.to_owned(),
        data: content.slice(start..content.len().min(start + PART_BYTES)),
        offset: start as u64,
    };
    starts.map(part).collect()
}

/// Fetches the state of a run: in stripes from all `sources` if they are at `position`, otherwise the present state of the first that has one.
///
/// # Errors
/// No source returns a complete state.
pub(in crate::training) async fn fetch(
    shared: &Arc<Shared>,
    key: Key,
    position: Position,
    sources: Vec<u32>,
) -> anyhow::Result<Checkpoint> {
    match timeout(DEADLINE, fetch_striped(shared, key, position, &sources)).await {
        Ok(Ok(checkpoint)) => return Ok(checkpoint),
        Ok(Err(error)) => {
            tracing::debug!(run = %key.0, error = format!("{error:#}"), "fetching the state from one member");
        }
        Err(_) => tracing::warn!(run = %key.0, "a transfer in stripes took too long"),
    }
    let mut last = anyhow::anyhow!("no member has the state");
    for source in sources {
        match timeout(DEADLINE, fetch_whole(shared, key, source)).await {
            Ok(Ok(checkpoint)) => return Ok(checkpoint),
            Ok(Err(error)) => last = error.context(format!("worker {source}")),
            Err(_) => last = anyhow::anyhow!("worker {source}: the transfer took too long"),
        }
    }
    Err(last)
}

async fn fetch_striped(
    shared: &Arc<Shared>,
    key: Key,
    position: Position,
    sources: &[u32],
) -> anyhow::Result<Checkpoint> {
    let count = sources.len().min(MAX_STRIPES);
    let stripes = sources.iter().take(count).enumerate().map(async |(index, source)| {
        let stripe = Stripe { position, index, count };
        fetch_parts(shared, key, *source, Some(stripe)).await.with_context(|| format!("worker {source}"))
    });
    let mut state = ReceivedState::default();
    for part in futures::future::try_join_all(stripes).await?.into_iter().flatten() {
        state.add(part)?;
    }
    let checkpoint = state.finish()?;
    tracing::info!(run = %key.0, step = position.step, members = count, "fetched a training state");
    Ok(checkpoint)
}

async fn fetch_whole(shared: &Arc<Shared>, key: Key, source: u32) -> anyhow::Result<Checkpoint> {
    let mut state = ReceivedState::default();
    for part in fetch_parts(shared, key, source, None).await? {
        state.add(part)?;
    }
    state.finish()
}

async fn fetch_parts(
    shared: &Arc<Shared>,
    key: Key,
    source: u32,
    stripe: Option<Stripe>,
) -> anyhow::Result<Vec<v1::TrainingStatePart>> {
    let silence = if stripe.is_some() { SILENCE } else { DEADLINE };
    let mut client = links::client(shared, Ordinal(source)).await?;
    let request = v1::GetTrainingStateRequest {
        run: engram_proto::answers::identity(key.0.0),
        submitted_ms: key.1,
        stripe: stripe.map(Stripe::to_wire),
    };
    let silent = || format!("it sent nothing for {} s", silence.as_secs());
    let mut messages = timeout(silence, client.get_training_state(request)).await.with_context(silent)??.into_inner();
    let (mut parts, mut bytes) = (Vec::new(), 0);
    while let Some(part) = timeout(silence, messages.message()).await.with_context(silent)?? {
        bytes += part.data.len();
        if bytes > MAX_BYTES {
            bail!("the state has more than {MAX_BYTES} bytes");
        }
        parts.push(part);
    }
    Ok(parts)
}

/// The parts of a state that have arrived.
#[derive(Debug, Default)]
struct ReceivedState {
    files: BTreeMap<String, BTreeMap<u64, Bytes>>,
    bytes: usize,
}

impl ReceivedState {
    fn add(&mut self, part: v1::TrainingStatePart) -> anyhow::Result<()> {
        self.bytes += part.data.len();
        if self.bytes > MAX_BYTES {
            bail!("the state has more than {MAX_BYTES} bytes");
        }
        self.files.entry(part.file).or_default().insert(part.offset, part.data);
        Ok(())
    }

    /// Returns the checkpoint, if every file is complete and has its hash.
    fn finish(self) -> anyhow::Result<Checkpoint> {
        let joined = |(name, parts): (String, BTreeMap<u64, Bytes>)| {
            let mut content = Vec::with_capacity(parts.values().map(Bytes::len).sum());
            for (offset, data) in parts {
                if offset != content.len() as u64 {
                    bail!("{name}: bytes {} to {offset} are missing", content.len());
                }
                content.extend_from_slice(&data);
            }
            Ok((name, content))
        };
        let mut files = self.files.into_iter().map(joined).collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        let manifest = files.remove(MANIFEST).context("the state has no manifest")?;
        let checkpoint = Checkpoint { manifest, files };
        checkpoint.verify()?;
        Ok(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};
    use serde_json::json;

    /// The state of a member after a step of a model whose files have several parts, with what compression lost.
    fn state(seed: u64) -> Checkpoint {
        let spec: TrainerSpec = serde_json::from_value(json!({
            "model": { "inputs": 600, "layers": [{ "dense": 600 }, { "dense": 1 }] },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.1 },
            "compression": { "kind": "Bf16", "samples": 8 },
            "seed": seed,
        }))
        .unwrap();
        let mut trainer = Trainer::new(&spec).unwrap();
        trainer.step(&[], &SummationOrder::Rank { leaves: 1 }, &mut Alone).unwrap();
        trainer.checkpoint(1, 2, BTreeMap::new()).unwrap()
    }

    fn receive(parts: impl IntoIterator<Item = v1::TrainingStatePart>) -> anyhow::Result<Checkpoint> {
        let mut state = ReceivedState::default();
        parts.into_iter().try_for_each(|part| state.add(part))?;
        state.finish()
    }

    /// The stripe of one of three members.
    fn stripe(state: &Checkpoint, index: usize) -> Vec<v1::TrainingStatePart> {
        parts(state.clone(), Some(&Stripe { position: Position::default(), index, count: 3 }))
    }

    #[test]
    fn state_with_a_flipped_bit_or_a_missing_part_is_refused() {
        let sent = state(1);
        let all = parts(sent.clone(), None);
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

    #[test]
    fn stripes_of_all_members_are_the_state_of_the_first() {
        let (sent, mut other) = (state(1), state(1));
        let lost = other.files.iter_mut().find(|(name, _)| !Checkpoint::is_common(name)).unwrap().1;
        *lost.last_mut().unwrap() ^= 4;
        let stripes = [stripe(&sent, 0), stripe(&other, 1), stripe(&other, 2)];
        for of_member in &stripes {
            let common = of_member.iter().filter(|part| part.file != MANIFEST && Checkpoint::is_common(&part.file));
            assert!(common.count() >= 1, "each sends a share");
        }
        assert_eq!(receive(stripes.concat()).unwrap(), sent);
        let later = state(2);
        for changed in 0..3 {
            let mut absent = stripes.clone();
            absent[changed].clear();
            assert!(receive(absent.concat()).is_err(), "stripe {changed} is missing");
        }
        // The third stripe of this small state is zeros of the optimizer.
        for changed in 0..2 {
            let mut of_another = stripes.clone();
            of_another[changed] = stripe(&later, changed);
            assert!(receive(of_another.concat()).is_err(), "stripe {changed} is of another state");
        }
    }
}
