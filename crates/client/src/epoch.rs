//! One learning epoch over all partitions: one stream per worker.
//!
//! The parts of a partition depend only on its updates, so that two drivers send equal parts and a repeat is
//! recognised.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::retry::Retry;
use crate::rows::{GroupSignal, Updates, groups_to_wire};
use engram_memory::{Group, LearningEpoch, MAX_IDS, Ordinal, Outcome, PartitionId, QualityVector, RunId};
use engram_proto::v1::{self, EpochPart};
use engram_proto::{answers, columns, split};
use engram_trace::{Span, in_span};
use futures::future::join_all;
use prost::Message as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Additional time of an attempt per message of its stream.
const PER_MESSAGE: Duration = Duration::from_millis(200);

/// What an epoch reinforces, after its decay.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum EpochUpdates {
    /// Nothing.
    #[default]
    None,
    /// Memories by id, in order.
    ById(Updates),
    /// Every memory of some groups, in order.
    ByGroup(Vec<(Group, GroupSignal)>),
}

/// What an epoch did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EpochReport {
    /// Counts over all partitions. If an epoch is sent again, parts applied before are not counted again.
    pub outcome: Outcome,
    /// Quality of all memories after the epoch.
    pub quality: QualityVector,
    /// Version of each partition.
    pub versions: Vec<v1::PartitionVersion>,
}

/// Header of an epoch.
#[derive(Debug, Clone, Copy)]
struct Epoch {
    run: RunId,
    n: LearningEpoch,
    decay: f64,
}

type Open = BTreeMap<PartitionId, Vec<EpochPart>>;

impl Client {
    /// Learns epoch `n` of a run on every partition: decay in [0, 1], then updates, then quality. A repeat is
    /// acknowledged, not applied: after an error the same epoch must be sent again, with the same updates.
    ///
    /// # Errors
    /// As for [`Error`]; columns are validated before anything is sent.
    pub async fn learn_epoch(
        &self,
        run: RunId,
        n: LearningEpoch,
        decay: f64,
        updates: EpochUpdates,
    ) -> Result<EpochReport, Error> {
        columns::decay("decay", decay).map_err(Error::invalid)?;
        let epoch = Epoch { run, n, decay };
        let mut span = Span::child_or_root("learn epoch").as_client();
        span.set("engram.run.epoch", n.0);
        let result = in_span(&span, self.learn_parts(epoch, updates)).await;
        span.note(&result);
        result
    }

    async fn learn_parts(&self, epoch: Epoch, updates: EpochUpdates) -> Result<EpochReport, Error> {
        let mut open = parts(updates, self.map()?.partition_count())?;
        let mut report = EpochReport::default();
        let mut retry = self.write();
        while !open.is_empty() {
            let map = self.map()?;
            let mut by_owner: BTreeMap<Ordinal, Open> = BTreeMap::new();
            for (partition, parts) in std::mem::take(&mut open) {
                let owner = map.owner(partition).expect("parts were made by a map of as many partitions");
                by_owner.entry(owner).or_default().insert(partition, parts);
            }
            let (map_now, retry_now) = (&map, &retry);
            let calls = by_owner.into_iter().map(|(owner, parts)| async move {
                (self.send_epoch(map_now, owner, epoch, &parts, retry_now).await, parts)
            });
            let mut failure_seen = None;
            for (response, mut parts) in join_all(calls).await {
                match response {
                    Ok(reply) => {
                        let remaining = note(&mut report, reply, &parts, &mut failure_seen)?;
                        parts.retain(|partition, _| remaining.contains(partition));
                    }
                    Err(failure) => failure_seen = Some(failure),
                }
                open.extend(parts);
            }
            if let Some(failure) = failure_seen {
                retry.after(self, failure).await?;
            }
        }
        report.versions.sort_unstable_by_key(|version| version.partition);
        Ok(report)
    }

    async fn send_epoch(
        &self,
        map: &Arc<Map>,
        owner: Ordinal,
        epoch: Epoch,
        parts: &Open,
        retry: &Retry,
    ) -> Result<v1::LearnEpochResponse, Failure> {
        let messages = messages(epoch, parts);
        let count = u32::try_from(messages.len()).unwrap_or(u32::MAX);
        let allowed = self.options().attempt_deadline + PER_MESSAGE * count;
        let deadline = retry.remaining().unwrap_or(Duration::from_millis(1)).min(allowed);
        let mut service = self.service_of(map, owner)?;
        let request = self.request(futures::stream::iter(messages), deadline);
        let call = async {
            let reply = timeout(deadline, service.learn_epoch(request)).await;
            reply.map_err(|_| Failure::timed_out())?.map_err(Failure::from)
        };
        Ok(self.while_owner(map, owner, call).await?.into_inner())
    }

    /// Sends every worker the global quality of an epoch, once; returns how many primaries received it. Other workers
    /// are not waited for: one whose node is gone would delay every epoch. Lost messages are superseded by the next
    /// epoch.
    pub async fn broadcast_quality(&self, run: RunId, n: LearningEpoch, quality: &QualityVector) -> usize {
        let Ok(map) = self.map() else { return 0 };
        let message = v1::BroadcastQualityRequest {
            run: answers::identity(run.0),
            epoch: n.0,
            quality: answers::quality_to_wire(quality),
        };
        let deadline = Duration::from_secs(2).min(self.options().attempt_deadline);
        let call = |owner| {
            let request = self.request(message.clone(), deadline);
            let service = self.service_of(&map, owner);
            async move {
                let mut service = service.ok()?;
                timeout(deadline, service.broadcast_quality(request)).await.ok()?.ok()
            }
        };
        let primaries = map.owners();
        for owner in map.workers.keys().filter(|owner| !primaries.contains(owner)) {
            tokio::spawn(call(*owner));
        }
        join_all(primaries.into_iter().map(call)).await.into_iter().flatten().count()
    }
}

/// Creates the parts of every partition; one without updates has an empty one.
fn parts(updates: EpochUpdates, partitions: u32) -> Result<Open, Error> {
    let part = |partition: u32, updates| EpochPart { partition, part: 1, parts: 1, updates };
    let all = |updates: Option<v1::Updates>| -> Open {
        (0..partitions).map(|partition| (PartitionId(partition), vec![part(partition, updates.clone())])).collect()
    };
    let updates = match updates {
        EpochUpdates::None => return Ok(all(None)),
        EpochUpdates::ByGroup(groups) => {
            let updates = groups_to_wire(&groups);
            columns::updates(updates.clone(), 1).map_err(Error::invalid)?;
            return Ok(all(Some(updates)));
        }
        EpochUpdates::ById(updates) => updates.into_wire(),
    };
    columns::check_updates(&updates).map_err(Error::invalid)?;
    let mut open = Open::new();
    for (partition, updates) in split::updates(&updates, partitions) {
        open.entry(partition).or_default().push(part(partition.0, Some(updates)));
    }
    for parts in open.values_mut() {
        let count = u32::try_from(parts.len()).expect("fewer parts than ids");
        for (number, part) in (1..).zip(parts) {
            (part.part, part.parts) = (number, count);
        }
    }
    for partition in 0..partitions {
        open.entry(PartitionId(partition)).or_insert_with(|| vec![part(partition, None)]);
    }
    Ok(open)
}

/// Packs parts into messages, those of a partition in order.
fn messages(epoch: Epoch, parts: &Open) -> Vec<v1::LearnEpochRequest> {
    let head = || v1::LearnEpochRequest {
        run: answers::identity(epoch.run.0),
        epoch: epoch.n.0,
        decay: epoch.decay,
        parts: Vec::new(),
    };
    let (mut messages, mut message, mut ids, mut bytes) = (Vec::new(), head(), 0, 0);
    for part in parts.values().flatten() {
        let rows = part.updates.as_ref().map_or(0, |updates| updates.ids.len());
        let size = part.encoded_len() + 8;
        if !message.parts.is_empty() && (ids + rows > MAX_IDS || bytes + size > Client::message_bytes()) {
            messages.push(std::mem::replace(&mut message, head()));
            (ids, bytes) = (0, 0);
        }
        (ids, bytes) = (ids + rows, bytes + size);
        message.parts.push(part.clone());
    }
    messages.push(message);
    messages
}

/// Merges a worker's response; returns the partitions to send again.
fn note(
    report: &mut EpochReport,
    reply: v1::LearnEpochResponse,
    sent: &Open,
    failure_seen: &mut Option<Failure>,
) -> Result<BTreeSet<PartitionId>, Error> {
    let mut remaining: BTreeSet<PartitionId> = sent.keys().copied().collect();
    for version in &reply.versions {
        remaining.remove(&PartitionId(version.partition));
    }
    for problem in reply.problems {
        let failure = Failure::of(problem);
        if !failure.retryable {
            return Err(Error::rejected(failure.problem));
        }
        *failure_seen = Some(failure);
    }
    if !remaining.is_empty() && failure_seen.is_none() {
        *failure_seen = Some(Failure::unavailable("a worker omitted partitions of an epoch"));
    }
    if let Some(outcome) = reply.outcome {
        report.outcome.merge(&outcome.try_into()?);
    }
    report.quality.merge(&answers::quality_from_wire(&reply.quality)?);
    report.versions.extend(reply.versions);
    Ok(remaining)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Signals;
    use engram_memory::MemoryId;

    #[test]
    fn parts_are_dense_and_in_order_and_messages_stay_within_limits() {
        let ids: Vec<_> = (0..200_000).map(MemoryId).collect();
        let updates = Updates { ids, signals: Signals::Quality(0.5), ..Updates::default() };
        let open = parts(EpochUpdates::ById(updates), 5).unwrap();
        let epoch = Epoch { run: RunId(1), n: LearningEpoch(1), decay: 0.0 };
        let mut next = [1_u32; 5];
        let mut rows = 0;
        for message in messages(epoch, &open) {
            assert!(message.encoded_len() < engram_proto::MAX_MESSAGE_BYTES);
            let ids = |part: &EpochPart| part.updates.as_ref().map_or(0, |updates| updates.ids.len());
            assert!(message.parts.iter().map(ids).sum::<usize>() <= MAX_IDS);
            for part in &message.parts {
                assert_eq!(part.part, next[part.partition as usize], "parts are dense and in order");
                next[part.partition as usize] += 1;
                rows += ids(part);
                assert_eq!(part.parts as usize, open[&PartitionId(part.partition)].len());
            }
        }
        assert_eq!(rows, 200_000);
        assert_eq!(parts(EpochUpdates::None, 7).unwrap().len(), 7, "a partition without updates decays, too");
    }
}
