//! Retries are applied once and acknowledged writes survive, whatever is restarted meanwhile.

use crate::harness::{Cluster, spec};
use engram_client::{GetOptions, Rows, Signals, Updates, WriteOutcome};
use engram_memory::{MemoryId, ONE, PartitionId, SessionId, edge, partition_of};
use engram_proto::v1::{self, Problem, ProblemKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const STEP: f32 = 1.0 / 4_096.0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_during_a_restart_are_applied_once() {
    let mut cluster = Cluster::start(spec(2, 8)).await;
    let client = cluster.client().await;
    let session = client.session();
    let ids: Vec<MemoryId> = (0..64).map(MemoryId).collect();
    let rows = Rows { ids: ids.clone(), weights: vec![0.0; 64], ..Rows::default() };
    session.upsert(rows).await.unwrap();

    let sent = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let (session, ids, sent) = (session.clone(), ids.clone(), Arc::clone(&sent));
            tokio::spawn(async move {
                // Until well after the restart, which some of these calls wait for.
                while sent.fetch_add(1, Ordering::Relaxed) < 1_200 {
                    let updates =
                        Updates { ids: ids.clone(), signals: Signals::Deltas(vec![STEP; 64]), ..Updates::default() };
                    session.reinforce(updates).await.unwrap();
                }
            })
        })
        .collect();
    while sent.load(Ordering::Relaxed) < 200 {
        tokio::task::yield_now().await;
    }
    cluster.stop_worker(1).await;
    cluster.start_worker(1).await;
    // Reads wait as well.
    assert_eq!(client.get(&ids, GetOptions::default()).await.unwrap().memories.len(), 64);
    for writer in writers {
        writer.await.unwrap();
    }
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    let step = edge::delta(STEP).unwrap() as u32;
    assert!(result.memories.iter().all(|memory| memory.weight.units() == 1_200 * step), "{:?}", result.memories[0]);
    assert!(1_200 * step < ONE, "no clamp hides a repeat");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_is_answered_and_a_closed_request_never_executed() {
    let cluster = Cluster::start(spec(2, 4)).await;
    let client = cluster.client().await;
    client.session().upsert(Rows { ids: vec![MemoryId(1)], ..Rows::default() }).await.unwrap();
    let partition = partition_of(MemoryId(1), 4).0;
    let opened = cluster.bare(0).await.open_session(v1::OpenSessionRequest {}).await.unwrap().into_inner();
    assert_eq!(opened.window, 64);
    let session = opened.session.unwrap();
    let request = move |seq| {
        let updates = v1::Updates { ids: vec![1], deltas: vec![0.125], ..Default::default() };
        let part = v1::ReinforcePart { partition: Some(partition), seq, updates: Some(updates) };
        v1::ApplyReinforcementRequest { session: Some(session), parts: vec![part] }
    };
    let weight =
        || async { client.get(&[MemoryId(1)], GetOptions::default()).await.unwrap().memories[0].weight.units() };
    // The same request through both workers, one of which forwards it, and many times at once.
    let mut calls = Vec::new();
    for attempt in 0..20 {
        let mut worker = cluster.bare(attempt % 2).await;
        calls.push(tokio::spawn(async move { worker.apply_reinforcement(request(1)).await }));
    }
    for call in calls {
        let reply = call.await.unwrap().unwrap().into_inner().parts.remove(0);
        let v1::partition_result::Result::Outcome(outcome) = reply.result.unwrap() else { panic!("refused") };
        assert_eq!((reply.seq, outcome.applied), (1, 1));
    }
    assert_eq!(weight().await, ONE / 8 * 5);

    let id = SessionId::from(session);
    let outcome = client.session().write_outcome(id, PartitionId(partition), 1).await.unwrap();
    assert!(matches!(outcome, WriteOutcome::Applied(outcome) if outcome.applied == 1));
    assert_eq!(
        client.session().write_outcome(id, PartitionId(partition), 2).await.unwrap(),
        WriteOutcome::NeverExecuted
    );
    // Through the worker that is not the primary, the outcome is the same.
    for ordinal in 0..2 {
        let request = v1::GetOutcomeRequest { session: Some(session), partition, seq: 2 };
        let response = cluster.bare(ordinal).await.get_outcome(request).await.unwrap().into_inner();
        assert_eq!(response.outcome, Some(v1::get_outcome_response::Outcome::NeverExecuted(true)));
    }
    // The request arrives late.
    let reply = cluster.bare(0).await.apply_reinforcement(request(2)).await.unwrap().into_inner().parts.remove(0);
    let Some(v1::partition_result::Result::Problem(problem)) = reply.result else { panic!("executed") };
    assert_eq!(problem.kind(), ProblemKind::AlreadyClosed);
    assert_eq!(weight().await, ONE / 8 * 5);
    let far = cluster.bare(1).await.apply_reinforcement(request(500)).await.unwrap().into_inner().parts.remove(0);
    assert!(matches!(far.result, Some(v1::partition_result::Result::Problem(Problem { kind, .. }))
        if kind == ProblemKind::OutOfWindow as i32));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_loses_nothing_acknowledged() {
    let mut cluster = Cluster::start(spec(1, 4)).await;
    let writers: Vec<_> = futures::future::join_all((0..4_u64).map(|_| cluster.bare(0))).await;
    let acknowledged = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0_u64..)
        .zip(writers)
        .map(|(writer, mut worker)| {
            let acknowledged = Arc::clone(&acknowledged);
            tokio::spawn(async move {
                let mut acknowledged_ids: Vec<u64> = Vec::new();
                for batch in 0.. {
                    let ids: Vec<u64> = (0..50).map(|row| writer << 40 | batch << 8 | row).collect();
                    let part = v1::UpsertPart { ids: ids.clone(), ..Default::default() };
                    let request = v1::UpsertRequest { session: None, parts: vec![part] };
                    // The first rejection ends the writer: the worker is stopping.
                    let Ok(reply) = worker.upsert(tokio_stream::iter([request])).await else { return acknowledged_ids };
                    for part in reply.into_inner().parts {
                        if let Some(v1::partition_result::Result::Outcome(_)) = part.result {
                            let of = PartitionId(part.partition);
                            acknowledged_ids.extend(ids.iter().filter(|id| partition_of(MemoryId(**id), 4) == of));
                        }
                    }
                    acknowledged.fetch_add(1, Ordering::Relaxed);
                }
                acknowledged_ids
            })
        })
        .collect();
    while acknowledged.load(Ordering::Relaxed) < 100 {
        tokio::task::yield_now().await;
    }
    cluster.stop_worker(0).await;
    let mut acknowledged_ids: Vec<u64> = Vec::new();
    for task in tasks {
        acknowledged_ids.extend(task.await.unwrap());
    }
    cluster.start_worker(0).await;
    let client = cluster.client().await;
    let ids: Vec<MemoryId> = acknowledged_ids.iter().copied().map(MemoryId).collect();
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    assert_eq!(result.missing, [], "of {} acknowledged", ids.len());
    assert!(ids.len() >= 5_000);
}
