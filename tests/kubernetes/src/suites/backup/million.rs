//! A backup of a million memories while clients write, restored on other workers and partitions. Reports the write latency meanwhile.

use super::{NAMESPACE, RUNS, allow, create, go, object, operator, ready, snapshot, storage};
use crate::cluster::Cluster;
use crate::suites::Check;
use crate::suites::faults::clients::runtime;
use crate::suites::helpers::service_in;
use anyhow::{Context, Result, ensure};
use engram_client::{Client, Options, Rows, Session, Signals, Updates};
use engram_memory::MemoryId;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

const MEMORIES: u64 = 1_000_000;
/// Memories given at once.
const ROWS: u64 = 10_000;
/// Updates of a write.
const UPDATES: u64 = 100;
/// From one write to the next, at least.
const PAUSE: Duration = Duration::from_millis(5);
/// How long writes are measured without a backup.
const QUIET: Duration = Duration::from_secs(10);
/// One backup is too short to measure write latency.
const BACKUPS: usize = 5;

pub(in crate::suites) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart, for backups", run: operator },
        Check { name: "a cluster has a million memories, and there is a storage", run: begins },
        Check { name: "backups are made while clients write", run: made },
        Check { name: "a cluster of other workers and partitions begins from the last with its digest", run: restored },
        Check { name: "the clusters of backups go", run: |it| go(it, &["large", "other"]).map(|()| String::new()) },
    ]
}

fn begins(cluster: &Cluster) -> Result<String> {
    storage(cluster)?;
    allow(cluster)?;
    // The writers are no pods, which alone get tokens and certificates.
    let spec = json!({ "capacity": { "memories": 2 * MEMORIES }, "tls": { "mode": "Disabled" } });
    create(cluster, &object("large", 3, 64, &spec))?;
    ready(cluster, "large", (3, 64))?;
    let began = Instant::now();
    with_session(cluster, async |session| {
        for first in (0..MEMORIES).step_by(ROWS as usize) {
            let ids: Vec<_> = (first..first + ROWS).map(MemoryId).collect();
            let weights = ids.iter().map(|id| (id.0 % 997) as f32 / 997.0).collect();
            session.upsert(Rows { ids, weights, ..Rows::default() }).await?;
        }
        Ok(())
    })?;
    Ok(format!("{MEMORIES} memories in {:.1} s", began.elapsed().as_secs_f64()))
}

fn made(cluster: &Cluster) -> Result<String> {
    let quiet = write_latencies_during(cluster, || {
        sleep(QUIET);
        Ok(())
    })?;
    let began = Instant::now();
    let meanwhile = write_latencies_during(cluster, || {
        for number in 0..BACKUPS {
            let status = snapshot(cluster, &format!("million-{number}"), "large")?;
            let output = &status["snapshot"];
            ensure!(status["phase"] == "Complete" && output["memories"] == MEMORIES, "{status:#}");
        }
        Ok(())
    })?;
    let took = began.elapsed().as_secs_f64() / BACKUPS as f64;
    Ok(format!("{took:.1} s each; a write before: {}, meanwhile: {}", summary(&quiet), summary(&meanwhile)))
}

fn restored(cluster: &Cluster) -> Result<String> {
    let name = format!("million-{}", BACKUPS - 1);
    let made = cluster.api().get(&format!("{RUNS}/{name}"))?["status"]["snapshot"].take();
    let place = super::place(cluster, &format!("s3://backups/{name}"))?;
    let spec = json!({ "capacity": { "memories": 2 * MEMORIES }, "bootstrap": { "snapshot": place } });
    let began = Instant::now();
    create(cluster, &object("other", 2, 100, &spec))?;
    ready(cluster, "other", (2, 100))?;
    let took = began.elapsed().as_secs_f64();
    let again = snapshot(cluster, "of-other", "other")?;
    let output = &again["snapshot"];
    ensure!((&output["digest"], &output["memories"]) == (&made["digest"], &made["memories"]), "{output}, and {made}");
    Ok(format!("Ready after {took:.1} s, digest {}", made["digest"]))
}

/// Does `work` while a client writes. Answers how long each write took, in ascending order.
fn write_latencies_during(cluster: &Cluster, work: impl FnOnce() -> Result<()>) -> Result<Vec<Duration>> {
    let is_done = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let done = Arc::clone(&is_done);
        let writer = scope.spawn(move || {
            with_session(cluster, async move |session| {
                let mut took = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    let first = took.len() as u64 * UPDATES % MEMORIES;
                    let ids = (first..first + UPDATES).map(|id| MemoryId(id * 7_919 % MEMORIES)).collect();
                    let began = Instant::now();
                    session.reinforce(Updates { ids, signals: Signals::Quality(0.75), ..Updates::default() }).await?;
                    took.push(began.elapsed());
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(took)
            })
        });
        let worked = work();
        is_done.store(true, Ordering::Relaxed);
        let mut took = writer.join().expect("the writer does not panic")?;
        worked?;
        took.sort_unstable();
        Ok(took)
    })
}

fn summary(took: &[Duration]) -> String {
    let of = |share: f64| took.get((took.len() as f64 * share) as usize).map_or(f64::NAN, |it| it.as_secs_f64() * 1e3);
    format!("p50 {:.1} ms, p99 {:.1} ms ({})", of(0.5), of(0.99), took.len())
}

/// Calls the cluster from the network of a node.
fn with_session<T: Send + 'static, F>(cluster: &Cluster, calls: impl FnOnce(Session) -> F + Send + 'static) -> Result<T>
where
    F: Future<Output = Result<T, engram_client::Error>> + Send + 'static,
{
    let endpoint = format!("{}:7443", service_in(cluster, NAMESPACE, "large")?);
    let runtime = runtime(cluster)?;
    let calling = async move { calls(Client::connect(Options::new([endpoint])).await?.session()).await };
    Ok(runtime.block_on(runtime.spawn(calling)).context("a client panicked")??)
}
