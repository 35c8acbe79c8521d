//! One worker: updates in batches, single reads.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use engram_client::{GetOptions, Signals, Updates};
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::{GetMemoriesRequest, MemoryBatch};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::runtime::Runtime;

use super::cluster::{Cluster, Shape};
use super::echo::{Echo, connected};
use crate::measure;
use crate::population::{self, QUALITY, UPDATES};
use crate::row::{Budget, Row};

/// Batches per repeat.
const BATCHES: usize = 100;
/// Batches in flight.
const IN_FLIGHT: usize = 8;

pub(super) fn single_worker_rows(runtime: &Runtime, memories: u32, threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("wire: one worker, {memories} memories");
    let cluster = runtime.block_on(Cluster::start_filled(Shape::plain(1), memories, threads, scratch))?;
    let rows = vec![reinforce(runtime, &cluster, memories)?, read(runtime, &cluster, memories)?];
    runtime.block_on(cluster.stop())?;
    Ok(rows)
}

fn reinforce(runtime: &Runtime, cluster: &Cluster, memories: u32) -> Result<Row> {
    let session = cluster.client.session();
    let batches: Vec<Updates> = (0..BATCHES)
        .map(|number| {
            let ids = population::drawn(UPDATES, memories, number as u64);
            Updates { ids, signals: Signals::Qualities(vec![QUALITY; UPDATES]), ..Updates::default() }
        })
        .collect();
    let all = measure::milliseconds(|| {
        let calls = batches.iter().map(|batch| session.reinforce(batch.clone()));
        let answers = stream::iter(calls).buffer_unordered(IN_FLIGHT);
        let counted = answers.try_fold(0, async |sum, written| Ok(sum + written.outcome.applied));
        let applied = runtime.block_on(counted)?;
        ensure!(applied == (BATCHES * UPDATES) as u64, "{applied} updates were applied");
        Ok(())
    })?;
    let title =
        format!("reinforcement over gRPC, one worker, batches of 10,000, {IN_FLIGHT} in flight, one replica, sync");
    let rate = measure::millions_per_second(BATCHES * UPDATES, all);
    let budget = (memories >= 1_000_000).then_some(Budget::Absolute(2.0));
    Ok(Row::higher(title, memories, "M updates/s", rate).with_budgets(budget))
}

fn read(runtime: &Runtime, cluster: &Cluster, memories: u32) -> Result<Row> {
    let ids = population::drawn(UPDATES, memories, 0x0ead);
    let address = cluster.addresses.first().context("the cluster has a worker")?.client;
    let mut echo = runtime.block_on(async {
        let reply = one_reply(MemoryServiceClient::new(connected(address).await?), ids[0].0).await?;
        Echo::start(reply).await
    })?;
    let (mut request, mut echoed) = (ids.iter().cycle(), ids.iter().cycle());
    let options = GetOptions { features: false, payloads: false };
    let (ours, floor) = measure::side_by_side(
        || {
            let id = request.next().context("the ids repeat endlessly")?;
            let found = runtime.block_on(cluster.client.get(&[*id], options))?;
            ensure!(found.memories.len() == 1, "memory {id} is missing");
            Ok(())
        },
        || {
            let id = echoed.next().context("the ids repeat endlessly")?;
            let message = GetMemoriesRequest { ids: vec![id.0], ..GetMemoriesRequest::default() };
            let reply = runtime.block_on(echo.call(message))?;
            ensure!(reply.ids.len() == 1, "the echo lost its message");
            Ok(())
        },
    )?;
    let (ours, floor) = (measure::scaled(ours, 1e3), measure::scaled(floor, 1e3));
    // At most 1.3 times as slow.
    let budget = Budget::Ratio { peer: "tonic echo".to_owned(), at_least: 1.0 / 1.3 };
    let title = "read of one memory over gRPC, through the client library";
    Ok(Row::lower(title, memories, "us", ours).with_peer("tonic echo", floor).with_budgets([budget]))
}

/// Returns a worker's response in wire format.
async fn one_reply(mut client: MemoryServiceClient<tonic::transport::Channel>, id: u64) -> Result<MemoryBatch> {
    let message = GetMemoriesRequest { ids: vec![id], ..GetMemoriesRequest::default() };
    let mut batches = client.get_memories(message).await?.into_inner();
    batches.message().await?.context("the worker returned no batch")
}
