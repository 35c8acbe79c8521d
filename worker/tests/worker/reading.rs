//! Reads are complete on any worker.

use crate::harness::{Cluster, recorded_run, replicated, spec};
use engram_client::{
    EpochUpdates, GetOptions, GroupSignal, QualityOptions, RankOptions, ReadMode, Rows, Signals, Updates,
};
use engram_memory::law::rank_order;
use engram_memory::{Group, LearningEpoch, MemoryId, ONE, Ordinal, Weight, key_id, mix64, partition_of};
use engram_proto::v1::{self, MemoryBatch, ProblemKind};
use std::time::Duration;
use tokio_stream::StreamExt as _;
use tonic::Streaming;

async fn drain(mut stream: Streaming<MemoryBatch>) -> Vec<(u64, u32)> {
    let mut rows = Vec::new();
    while let Some(batch) = stream.next().await {
        let batch = batch.unwrap();
        rows.extend(batch.ids.into_iter().zip(batch.weight_units));
    }
    rows
}

/// A client without a map uses any worker: it writes, reads and ranks the whole cluster through it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_worker_answers_any_client() {
    let cluster = Cluster::start(spec(3, 16)).await;
    let mut workers = Vec::new();
    for ordinal in 0..3 {
        workers.push(cluster.bare(ordinal).await);
    }
    let ids: Vec<u64> = (0..600).collect();
    let part = v1::UpsertPart { ids: ids.clone(), weights: vec![0.25; 600], ..Default::default() };
    let request = v1::UpsertRequest { session: None, parts: vec![part] };
    let written = workers[0].upsert(tokio_stream::iter([request])).await.unwrap().into_inner();
    let outcomes = written.parts.iter().map(|part| match part.result.as_ref().unwrap() {
        v1::partition_result::Result::Outcome(outcome) => outcome.created,
        other => panic!("{other:?}"),
    });
    assert_eq!(outcomes.sum::<u64>(), 600);
    assert_eq!(written.parts.len(), 16, "one record per partition");

    let updates = v1::Updates { ids: vec![5, 5, 77, 9_999], deltas: vec![0.5, 0.5, 0.125, 1.0], ..Default::default() };
    let part = v1::ReinforcePart { updates: Some(updates), ..Default::default() };
    let reply =
        workers[1].apply_reinforcement(v1::ApplyReinforcementRequest { session: None, parts: vec![part] }).await;
    let rejected: Vec<u64> = reply
        .unwrap()
        .into_inner()
        .parts
        .into_iter()
        .flat_map(|part| match part.result.unwrap() {
            v1::partition_result::Result::Outcome(outcome) => outcome.rejected_ids,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(rejected, [9_999], "an unknown id is reported, the rest applied");

    let digest = workers[0].get_digest(v1::GetDigestRequest::default()).await.unwrap().into_inner();
    assert_eq!(digest.memories, 600);
    for worker in &mut workers {
        let get = v1::GetMemoriesRequest { ids: vec![77, 5, 31_337], ..Default::default() };
        let mut batches = worker.get_memories(get).await.unwrap().into_inner();
        let (mut rows, mut missing) = (Vec::new(), Vec::new());
        while let Some(batch) = batches.next().await {
            let batch = batch.unwrap();
            rows.extend(batch.ids.iter().copied().zip(batch.weight_units));
            missing.extend(batch.missing);
        }
        rows.sort_unstable();
        assert_eq!(rows, [(5, ONE), (77, ONE / 8 * 3)], "duplicates are applied in order and clamped after each");
        assert_eq!(missing, [31_337]);

        let quality = worker.get_quality(v1::GetQualityRequest::default()).await.unwrap().into_inner();
        assert_eq!(quality.groups.iter().map(|group| group.count).sum::<u64>(), 600);
        assert_eq!(quality.versions.len(), 16);
        let same = worker.get_digest(v1::GetDigestRequest::default()).await.unwrap().into_inner();
        assert_eq!(same.digest, digest.digest);

        let rank = v1::RankRequest { limit: 3, ..Default::default() };
        let first = drain(worker.rank(rank).await.unwrap().into_inner()).await;
        assert_eq!(first, [(5, ONE), (77, ONE / 8 * 3), (0, ONE / 4)]);
        let scan = worker.scan_memories(v1::ScanMemoriesRequest::default()).await.unwrap().into_inner();
        let mut scanned: Vec<u64> = drain(scan).await.into_iter().map(|(id, _)| id).collect();
        scanned.sort_unstable();
        assert_eq!(scanned, ids);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merged_rank_equals_one_sorted_list() {
    let cluster = Cluster::start(spec(3, 8)).await;
    let client = cluster.client().await;
    let session = client.session();
    // Few distinct weights, so that most ties are broken by id; enough rows for several pages per worker.
    let rows: Vec<(MemoryId, f32, Group)> = (0..30_000_u64)
        .map(|seed| (MemoryId(mix64(seed)), (mix64(seed + 7) % 16) as f32 / 16.0, Group((seed % 3) as u8)))
        .collect();
    let insert = Rows {
        ids: rows.iter().map(|row| row.0).collect(),
        weights: rows.iter().map(|row| row.1).collect(),
        groups: rows.iter().map(|row| row.2).collect(),
        ..Rows::default()
    };
    session.upsert(insert).await.unwrap();
    let weight = |value: f32| Weight::from_units((value * ONE as f32) as u32).unwrap();
    let sorted = |group: Option<Group>| {
        let mut sorted: Vec<(Weight, MemoryId)> = rows
            .iter()
            .filter(|row| group.is_none_or(|group| row.2 == group))
            .map(|row| (weight(row.1), row.0))
            .collect();
        sorted.sort_by(|a, b| rank_order(*a, *b));
        sorted
    };
    for (limit, group) in [(0, None), (0, Some(Group(1))), (5_000, None), (10, Some(Group(2))), (1, None)] {
        let mut ranked = client.rank(RankOptions { limit, group, keys: false }).await.unwrap();
        let mut result = Vec::new();
        while let Some(rows) = ranked.next().await.unwrap() {
            result.extend(rows.into_iter().map(|memory| (memory.weight, memory.id)));
        }
        let mut expected = sorted(group);
        if limit > 0 {
            expected.truncate(limit as usize);
        }
        assert_eq!(result, expected, "limit {limit}, group {group:?}");
    }
    let top: Vec<MemoryId> = client.top(7, None).await.unwrap().into_iter().map(|memory| memory.id).collect();
    assert_eq!(top, sorted(None)[..7].iter().map(|(_, id)| *id).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_epoch_is_applied_once() {
    let cluster = Cluster::start(spec(2, 2)).await;
    let client = cluster.client().await;
    let run = recorded_run(&client, "driven").await;
    // More than one part per partition.
    let ids: Vec<MemoryId> = (0..60_000).map(MemoryId).collect();
    client.session().upsert(Rows { ids: ids.clone(), ..Rows::default() }).await.unwrap();
    let updates =
        || EpochUpdates::ById(Updates { ids: ids.clone(), signals: Signals::Quality(0.9), ..Updates::default() });

    let first = client.learn_epoch(run, LearningEpoch(1), 0.01, updates()).await.unwrap();
    assert_eq!(first.outcome.applied, 60_000);
    assert_eq!(first.quality.total().count, 60_000);
    assert_eq!(first.versions.len(), 2);
    let digest = client.digest().await.unwrap();
    let repeated = client.learn_epoch(run, LearningEpoch(1), 0.01, updates()).await.unwrap();
    assert_eq!(repeated.quality, first.quality, "a repeat is answered");
    assert_eq!(client.digest().await.unwrap().digest, digest.digest, "and not applied");

    let gap = client.learn_epoch(run, LearningEpoch(3), 0.01, EpochUpdates::None).await.unwrap_err();
    assert_eq!(gap.kind(), ProblemKind::EpochGap);
    assert_eq!(gap.problem().unwrap().expected_epoch, 2);

    let groups = EpochUpdates::ByGroup(vec![(Group(0), GroupSignal::Delta(0.25))]);
    let second = client.learn_epoch(run, LearningEpoch(2), 0.0, groups).await.unwrap();
    assert_eq!(second.outcome.applied, 60_000, "a group update addresses each of its memories");
    let quality = client.quality(QualityOptions { histogram_bits: Some(4), covered_updates: 0 }).await.unwrap();
    assert_eq!(quality.vector, second.quality);
    assert_eq!(quality.histogram.unwrap().total().iter().sum::<u64>(), 60_000);
    assert_eq!(cluster.peer_client().await.broadcast_quality(run, LearningEpoch(2), &second.quality).await, 2);
    let broadcast = client.quality(QualityOptions::default()).await.unwrap().broadcast.unwrap();
    assert_eq!(broadcast, (run, LearningEpoch(2), second.quality));

    // Through a worker that owns half of it, by a client without a map.
    let mut bare = cluster.bare(0).await;
    let parts = (0..2).map(|partition| v1::EpochPart { partition, part: 1, parts: 1, updates: None });
    let request = v1::LearnEpochRequest {
        run: run.0.to_be_bytes().to_vec().into(),
        epoch: 3,
        decay: 0.125,
        parts: parts.collect(),
    };
    let third = bare.learn_epoch(tokio_stream::iter([request])).await.unwrap().into_inner();
    assert!(third.problems.is_empty(), "{:?}", third.problems);
    assert_eq!(third.versions.len(), 2);
    assert_eq!(third.quality.iter().map(|group| group.count).sum::<u64>(), 60_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_features_and_payloads_come_back_as_they_went_in() {
    let mut spec = spec(2, 4);
    spec.features.dimension = 3;
    let cluster = Cluster::start(spec).await;
    let client = cluster.client().await;
    let session = client.session();
    let rows = Rows {
        features: vec![0.5, -1.25, 3.0, 1.0, 2.0, 4.0],
        payloads: Some([b"one".to_vec(), vec![7; 60_000]].into_iter().collect()),
        ..Rows::keyed(["alpha", "beta"])
    };
    session.upsert(rows).await.unwrap();
    let ids = [key_id(b"beta"), MemoryId(404), key_id(b"alpha")];
    let result = client.get(&ids, GetOptions { features: true, payloads: true }).await.unwrap();
    assert_eq!(result.missing, [MemoryId(404)]);
    let beta = &result.memories[0];
    assert_eq!((beta.key.as_deref(), beta.features.as_slice()), (Some("beta"), [1.0, 2.0, 4.0].as_slice()));
    assert_eq!((beta.payload.len(), result.memories[1].payload.as_ref()), (60_000, b"one".as_slice()));
    let mut scan = client.scan(GetOptions { features: true, payloads: false }).await.unwrap();
    let mut keys = Vec::new();
    while let Some(rows) = scan.next().await.unwrap() {
        keys.extend(rows.into_iter().filter_map(|memory| memory.key));
    }
    keys.sort();
    assert_eq!(keys, ["alpha", "beta"]);
    assert!(client.top(2, None).await.unwrap().iter().all(|memory| memory.key.is_some()));
    session.remove(vec![key_id(b"alpha")]).await.unwrap();
    assert_eq!(client.digest().await.unwrap().memories, 1);
    session.reinforce_groups(&[(Group(0), GroupSignal::Quality(1.0))]).await.unwrap();
    session.decay(0.05).await.unwrap();
    let weight = client.get(&[key_id(b"beta")], GetOptions::default()).await.unwrap().memories[0].weight;
    assert!((weight.to_f64() - 0.5).abs() < 1e-6, "+ 0.05, then - 0.05: {weight}");
}

/// Every read mode gives the same answers, and reads that a replica cannot answer are rejected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_are_answered_in_the_requested_mode() {
    let cluster = Cluster::start(replicated(2, 3, 12)).await;
    let client = cluster.client().await;
    let ids: Vec<MemoryId> = (0..900).map(MemoryId).collect();
    let weights = (0..900).map(|id| id as f32 / 1_024.0).collect();
    client.session().upsert(Rows { ids: ids.clone(), weights, ..Rows::default() }).await.unwrap();
    let (digest, first) = (client.digest().await.unwrap(), client.top(40, None).await.unwrap());
    let quality = client.quality(QualityOptions::default()).await.unwrap();

    let confirmed = client.with_read_mode(ReadMode::Confirmed);
    assert_eq!(confirmed.digest().await.unwrap(), digest);
    assert_eq!(confirmed.top(40, None).await.unwrap(), first);
    assert_eq!(confirmed.get(&ids, GetOptions::default()).await.unwrap().memories.len(), 900);

    let lagging = client.with_read_mode(ReadMode::Replica { max_lag: Duration::ZERO });
    let replicated = lagging.digest().await.unwrap();
    assert_eq!((replicated.digest, replicated.memories), (digest.digest, 900));
    let mut lags: Vec<_> = replicated.versions.iter().map(|version| (version.partition, version.lag_ms)).collect();
    lags.sort_unstable();
    assert_eq!(lags, (0..12).map(|partition| (partition, Some(0))).collect::<Vec<_>>());
    assert_eq!(lagging.top(40, None).await.unwrap(), first);
    assert_eq!(lagging.quality(QualityOptions::default()).await.unwrap().vector, quality.vector);
    let rejection = lagging.get(&ids, GetOptions::default()).await.unwrap_err();
    assert_eq!(rejection.kind(), ProblemKind::Invalid, "{rejection}");

    // A client without a map sets the mode in the request; a local read covers the replicas of one worker.
    let mut worker = cluster.bare(1).await;
    let read = |mode: v1::ReadMode, partitions| Some(v1::Read { mode: mode.into(), max_lag_ms: 60_000, partitions });
    for mode in [v1::ReadMode::Confirmed, v1::ReadMode::Replica] {
        let request = v1::GetDigestRequest { local: false, read: read(mode, Vec::new()) };
        assert_eq!(worker.get_digest(request).await.unwrap().into_inner().memories, 900, "{mode:?}");
    }
    let map = client.map().unwrap();
    let backup = (0..12).find(|at| {
        let (primary, in_sync) = (map.partitions[*at].primary, &map.in_sync[*at]);
        primary != Ordinal(1) && in_sync.contains(&Ordinal(1))
    });
    let absent = (0..12).find(|at| !map.in_sync[*at].contains(&Ordinal(1)));
    let (backup, absent) = (backup.unwrap() as u32, absent.unwrap() as u32);
    let request = v1::GetDigestRequest { local: true, read: read(v1::ReadMode::Replica, vec![backup, absent]) };
    let reply = worker.get_digest(request).await.unwrap().into_inner();
    let expected = ids.iter().filter(|id| partition_of(**id, 12).0 == backup).count();
    assert_eq!(reply.memories, expected as u64, "only the local replica is read");
    assert_eq!(reply.versions.iter().map(|version| version.partition).collect::<Vec<_>>(), [backup]);
}
