//! Replication: acknowledged writes are on every replica, and survive the death of a worker.

use crate::harness::{CLUSTER, Cluster, replicated, until};
use engram_client::{GetOptions, Rows, Signals, Updates};
use engram_memory::{ClusterId, MemoryId, partition_of};
use engram_proto::v1::peer_service_client::PeerServiceClient;
use engram_proto::v1::{self, Hello, PeerFrame};
use std::collections::BTreeMap;
use tonic::Code;
use tonic::transport::Channel;

/// Returns position and memories of every replica on a worker.
async fn replicas(cluster: &Cluster, ordinal: u32) -> BTreeMap<u32, (u64, u64)> {
    let status = cluster.status(ordinal).await;
    status.iter().map(|status| (status.partition, (status.lsn, status.memories))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_a_dead_primary_without_a_coordinator() {
    let mut cluster = Cluster::without_coordinator(replicated(2, 3, 6)).await;
    let client = cluster.client().await;
    let session = client.session();
    let ids: Vec<MemoryId> = (0..600).map(MemoryId).collect();
    let written = session.upsert(Rows { ids: ids.clone(), weights: vec![0.25; 600], ..Rows::default() }).await.unwrap();
    assert!(written.versions.iter().all(|version| version.replicas == 2), "{:?}", written.versions);
    let mut expected: BTreeMap<u32, u64> = BTreeMap::new();
    for id in &ids {
        *expected.entry(partition_of(*id, 6).0).or_default() += 1;
    }
    // A backup applies a record when it learns of the commit, with the next message.
    until("both replicas of each partition have applied everything", || async {
        let all = [replicas(&cluster, 0).await, replicas(&cluster, 1).await, replicas(&cluster, 2).await];
        expected.iter().all(|(partition, memories)| {
            let states: Vec<_> = all.iter().filter_map(|replicas| replicas.get(partition)).collect();
            states.len() == 2 && states[0] == states[1] && states[0].1 == *memories
        })
    })
    .await;

    cluster.kill_worker(1).await;
    // Reads and writes wait for the partitions of the dead worker, and find all acknowledged writes.
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    assert_eq!((result.memories.len(), result.missing.len()), (600, 0));
    let updates = Updates { ids: ids.clone(), signals: Signals::Deltas(vec![0.5; 600]), ..Updates::default() };
    session.reinforce(updates).await.unwrap();
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    assert!(result.memories.iter().all(|memory| memory.weight.to_f64() == 0.75), "{:?}", result.memories[0]);
    let served = [cluster.status(0).await, cluster.status(2).await].concat();
    assert_eq!(served.iter().filter(|status| status.primary).count(), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_over_breaking_links_reach_both_replicas_once() {
    let cluster = Cluster::without_coordinator(replicated(2, 2, 4)).await;
    let client = cluster.client().await;
    let session = client.session();
    let ids: Vec<MemoryId> = (0..64).map(MemoryId).collect();
    session.upsert(Rows { ids: ids.clone(), weights: vec![0.0; 64], ..Rows::default() }).await.unwrap();
    let link = &cluster.links[&(0, 1)];
    for round in 0..400 {
        let deltas = vec![1.0 / 1_024.0; 64];
        let updates = Updates { ids: ids.clone(), signals: Signals::Deltas(deltas), ..Updates::default() };
        let write = session.reinforce(updates);
        if round % 40 == 20 {
            // While a write is in flight.
            let (written, ()) = tokio::join!(write, async { link.reset() });
            written.unwrap();
        } else {
            let written = write.await.unwrap();
            assert!(written.versions.iter().all(|version| version.replicas == 2), "{:?}", written.versions);
        }
    }
    assert!(link.counts().connections > 10, "the connections use the proxy: {:?}", link.counts());
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    assert!(result.memories.iter().all(|memory| memory.weight.to_f64() == 400.0 / 1_024.0), "{:?}", result.memories[0]);
    until("both replicas are at the same record", || async {
        let (zero, one) = (replicas(&cluster, 0).await, replicas(&cluster, 1).await);
        zero.len() == 4 && zero == one
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_of_a_dead_worker_fail_over_and_are_re_replicated() {
    let mut cluster = Cluster::start(replicated(2, 3, 12)).await;
    let client = cluster.client().await;
    let session = client.session();
    let ids: Vec<MemoryId> = (0..2_000).map(MemoryId).collect();
    let rows = Rows { ids: ids.clone(), weights: vec![0.25; 2_000], ..Rows::default() };
    assert!(session.upsert(rows).await.unwrap().versions.iter().all(|version| version.replicas == 2));
    let before = client.digest().await.unwrap();

    cluster.kill_worker(0).await;
    // The first reads and writes wait for the partitions of the dead worker.
    let after = client.digest().await.unwrap();
    assert_eq!((after.digest, after.memories), (before.digest, 2_000), "all acknowledged writes are there");
    let deltas = Updates { ids: ids.clone(), signals: Signals::Deltas(vec![0.5; 2_000]), ..Updates::default() };
    session.reinforce(deltas).await.unwrap();
    let result = client.get(&ids, GetOptions::default()).await.unwrap();
    assert!(result.memories.iter().all(|memory| memory.weight.to_f64() == 0.75) && result.missing.is_empty());

    cluster.start_worker(0).await;
    until("every partition has two in-sync replicas again", || async {
        let mut fully_replicated = 0;
        for worker in 0..3 {
            let status = cluster.status(worker).await;
            fully_replicated +=
                status.iter().filter(|status| status.primary && status.in_sync == 2 && status.lag == 0).count();
        }
        fully_replicated == 12
    })
    .await;
    assert_eq!(client.quality(Default::default()).await.unwrap().vector.total().count, 2_000);
}

/// Returns the response of a worker to a foreign hello, as code and message.
async fn greet(channel: &Channel, hello: Option<Hello>) -> (Code, String) {
    let frame = PeerFrame { hello, ..PeerFrame::default() };
    let answer = PeerServiceClient::new(channel.clone()).exchange(tokio_stream::iter([frame])).await;
    let status = answer.err().unwrap();
    (status.code(), status.message().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_workers_are_rejected_with_both_sides_named() {
    let cluster = Cluster::without_coordinator(replicated(2, 2, 4)).await;
    let address = format!("http://{}", cluster.addresses(1).peer);
    let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
    let member = |ordinal| v1::MemberId { ordinal, store: vec![7; 16].into(), incarnation: 1 };
    let hello = |cluster: ClusterId, ordinal| Hello {
        cluster: cluster.0.to_be_bytes().to_vec().into(),
        member: Some(member(ordinal)),
        protocol_min: 1,
        protocol_max: 1,
        ..Hello::default()
    };
    let other = ClusterId(0xbad);
    let (code, text) = greet(&channel, Some(hello(other, 0))).await;
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.contains(&other.to_string()) && text.contains(&CLUSTER.to_string()), "{text}");
    let future = Hello { protocol_min: 8, protocol_max: 9, ..hello(CLUSTER, 0) };
    let (_, text) = greet(&channel, Some(future)).await;
    assert!(text.contains("supports 8 to 9, worker 1 1 to 1"), "{text}");
    let (_, text) = greet(&channel, Some(hello(CLUSTER, 5))).await;
    assert!(text.contains("worker 5 must not dial worker 1"), "{text}");
    assert_eq!(greet(&channel, None).await.0, Code::InvalidArgument);
    let short = Hello { cluster: vec![1, 2, 3].into(), ..hello(CLUSTER, 0) };
    assert!(greet(&channel, Some(short)).await.1.contains("found 3"));
    // Links of legitimate workers are unaffected.
    assert!(cluster.status(1).await.iter().all(|status| status.in_sync == 2));
}
