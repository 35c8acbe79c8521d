//! `engram bench`: measures a running cluster under a bounded load. Weights do not change: existing memories are reinforced by 0,
//! which takes the full path through session, log and state machine.

use crate::context::Context;
use crate::error::problem;
use crate::output::{Table, count};
use crate::progress::Progress;
use crate::target;
use engram_api::{API_VERSION, Code, ExitCode};
use engram_client::{Client, Error, GetOptions, QualityOptions, Signals, Updates};
use engram_memory::MemoryId;
use futures::stream::{FuturesUnordered, StreamExt as _};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Largest number of memories in the sample.
const SAMPLE: usize = 1 << 20;
/// Batches in flight: keeps the log busy during round trips.
const IN_FLIGHT: usize = 4;

/// Measure update throughput and read latency of a running cluster
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram bench
  engram bench --seconds 10 --batch 1000

Weights do not change: existing memories are reinforced by 0, which is logged and applied like any other update. For
comparisons with other systems see `cargo xtask bench`.")]
pub(crate) struct Bench {
    /// Seconds per measurement
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// Updates per batch
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    batch: u64,
}

/// Result of one measurement.
struct Measurement {
    name: String,
    /// Rate per second and its unit.
    rate: (f64, &'static str),
    /// Latencies of single calls in seconds, ascending.
    calls: Vec<f64>,
}

pub(crate) async fn run(arguments: &Bench, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    let ids = sample(&client).await?;
    let length = Duration::from_secs(arguments.seconds);
    let mut progress = Progress::new(&context.output, "measurements", Some(4));
    let mut lines = vec![reinforce(&client, &ids, arguments.batch as usize, length).await?];
    progress.set(1, "reads");
    let mut turn = ids.iter().cycle();
    lines.push(
        reads("get one memory", length, || {
            let id = *turn.next().expect("a cycle of at least one id does not end");
            let client = client.clone();
            async move { client.get(&[id], GetOptions::default()).await.map(drop) }
        })
        .await?,
    );
    progress.set(2, "rank");
    lines.push(reads("top 100", length, || async { client.top(100, None).await.map(drop) }).await?);
    progress.set(3, "quality");
    lines.push(reads("quality", length, || async { client.quality(QualityOptions::default()).await.map(drop) }).await?);
    progress.set(4, "");
    drop(progress);

    let mut table = Table::new(&["measurement", ">rate", "unit", ">p50 ms", ">p99 ms", ">calls"]);
    for line in &lines {
        let ms = |quantile| format!("{:.3}", line.quantile(quantile) * 1_000.0);
        let (rate, unit) = line.rate;
        table.row([
            line.name.clone(),
            count(rate as u64),
            unit.into(),
            ms(0.5),
            ms(0.99),
            count(line.calls.len() as u64),
        ]);
    }
    let items: Vec<Value> = lines.iter().map(Measurement::object).collect();
    let memories = ids.len();
    if context.output.is_structured() {
        let value = json!({ "apiVersion": API_VERSION, "kind": "Bench", "memories": memories, "items": items });
        context.output.value(&value)?;
    } else {
        context.output.text(&table.render(&context.output))?;
        context.output.note(format!("{} memories, {} s per measurement", count(memories as u64), arguments.seconds));
    }
    Ok(ExitCode::Ok)
}

/// Returns the ids of up to [`SAMPLE`] memories.
async fn sample(client: &Client) -> anyhow::Result<Vec<MemoryId>> {
    let mut scan = client.scan(GetOptions::default()).await?;
    let mut ids = Vec::new();
    while ids.len() < SAMPLE
        && let Some(memories) = scan.next().await?
    {
        ids.extend(memories.iter().map(|memory| memory.id));
    }
    if ids.is_empty() {
        let message = "the cluster has no memories; insert some, or run examples/synthetic.yaml";
        return Err(problem(Code::MemoryNotFound, message));
    }
    ids.truncate(SAMPLE);
    Ok(ids)
}

async fn reinforce(client: &Client, ids: &[MemoryId], batch: usize, length: Duration) -> Result<Measurement, Error> {
    let session = client.session();
    let mut turn = ids.iter().copied().cycle();
    let (began, mut calls, mut updates) = (Instant::now(), Vec::new(), 0_u64);
    let mut open = FuturesUnordered::new();
    loop {
        while open.len() < IN_FLIGHT && began.elapsed() < length {
            let ids: Vec<MemoryId> = turn.by_ref().take(batch).collect();
            let (session, sent) = (session.clone(), Instant::now());
            let count = ids.len() as u64;
            let update = Updates { signals: Signals::Deltas(vec![0.0; ids.len()]), ids, ..Updates::default() };
            open.push(async move { session.reinforce(update).await.map(|_| (sent.elapsed(), count)) });
        }
        let Some(response) = open.next().await else { break };
        let (latency, count) = response?;
        calls.push(latency.as_secs_f64());
        updates += count;
    }
    let rate = updates as f64 / began.elapsed().as_secs_f64();
    Ok(Measurement::new(format!("reinforce {} per batch", count(batch as u64)), (rate, "updates/s"), calls))
}

async fn reads<F, A>(name: &str, length: Duration, mut call: F) -> Result<Measurement, Error>
where
    F: FnMut() -> A,
    A: Future<Output = Result<(), Error>>,
{
    let (began, mut calls) = (Instant::now(), Vec::new());
    while began.elapsed() < length {
        let sent = Instant::now();
        call().await?;
        calls.push(sent.elapsed().as_secs_f64());
    }
    let rate = calls.len() as f64 / began.elapsed().as_secs_f64();
    Ok(Measurement::new(name.into(), (rate, "calls/s"), calls))
}

impl Measurement {
    fn new(name: String, rate: (f64, &'static str), mut calls: Vec<f64>) -> Self {
        calls.sort_unstable_by(f64::total_cmp);
        Self { name, rate, calls }
    }

    /// Returns a quantile of the latencies in seconds.
    fn quantile(&self, quantile: f64) -> f64 {
        let last = self.calls.len().saturating_sub(1);
        self.calls.get((last as f64 * quantile).round() as usize).copied().unwrap_or(0.0)
    }

    fn object(&self) -> Value {
        json!({
            "name": self.name, "rate": self.rate.0, "unit": self.rate.1, "p50Seconds": self.quantile(0.5),
            "p99Seconds": self.quantile(0.99), "calls": self.calls.len(),
        })
    }
}
