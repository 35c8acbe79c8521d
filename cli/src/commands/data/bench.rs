//! `engram bench`: a bounded load on the running cluster. It changes no weight: memories that are there are reinforced by 0,
//! which goes the whole way through session, log and apply.

use crate::args::Context;
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

/// Memories that take part, at most.
const SAMPLE: usize = 1 << 20;
/// Batches in flight at once: enough to keep the log busy while answers travel.
const IN_FLIGHT: usize = 4;

/// Measure the running cluster: reinforcement throughput, latency of reads
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram bench
  engram bench --seconds 10 --batch 1000

No weight changes: memories that are there are reinforced by 0, which is logged and applied like any other update. Numbers to
compare with others come from `cargo xtask bench`.")]
pub(crate) struct Arguments {
    /// Seconds per measurement
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// Updates per batch
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    batch: u64,
}

/// One line of the result.
struct Measured {
    what: String,
    /// Things a second, and what they are.
    rate: (f64, &'static str),
    /// Seconds that single calls took, ascending.
    calls: Vec<f64>,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
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

    let mut table = Table::new(&["measured", ">rate", "of", ">p50 ms", ">p99 ms", ">calls"]);
    for line in &lines {
        let ms = |quantile| format!("{:.3}", line.quantile(quantile) * 1_000.0);
        let (rate, of) = line.rate;
        table.row([
            line.what.clone(),
            count(rate as u64),
            of.into(),
            ms(0.5),
            ms(0.99),
            count(line.calls.len() as u64),
        ]);
    }
    let items: Vec<Value> = lines.iter().map(Measured::object).collect();
    let memories = ids.len();
    if context.output.is_structured() {
        let value = json!({ "apiVersion": API_VERSION, "kind": "Bench", "memories": memories, "items": items });
        context.output.value(&value)?;
    } else {
        context.output.text(&table.render(&context.output))?;
        context.output.note(format!("over {} memories, {} s each", count(memories as u64), arguments.seconds));
    }
    Ok(ExitCode::Ok)
}

/// Some memories of the cluster.
async fn sample(client: &Client) -> anyhow::Result<Vec<MemoryId>> {
    let mut scan = client.scan(GetOptions::default()).await?;
    let mut ids = Vec::new();
    while ids.len() < SAMPLE
        && let Some(memories) = scan.next().await?
    {
        ids.extend(memories.iter().map(|memory| memory.id));
    }
    if ids.is_empty() {
        let message = "the cluster has no memories to measure with; insert some, or run examples/synthetic.yaml";
        return Err(problem(Code::MemoryNotFound, message));
    }
    ids.truncate(SAMPLE);
    Ok(ids)
}

async fn reinforce(client: &Client, ids: &[MemoryId], batch: usize, length: Duration) -> Result<Measured, Error> {
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
        let Some(answer) = open.next().await else { break };
        let (took, count) = answer?;
        calls.push(took.as_secs_f64());
        updates += count;
    }
    let rate = updates as f64 / began.elapsed().as_secs_f64();
    Ok(Measured::of(format!("reinforce {} at once", count(batch as u64)), (rate, "updates/s"), calls))
}

async fn reads<F, A>(what: &str, length: Duration, mut call: F) -> Result<Measured, Error>
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
    Ok(Measured::of(what.into(), (rate, "calls/s"), calls))
}

impl Measured {
    fn of(what: String, rate: (f64, &'static str), mut calls: Vec<f64>) -> Self {
        calls.sort_unstable_by(f64::total_cmp);
        Self { what, rate, calls }
    }

    /// The time that this share of the calls did not exceed.
    fn quantile(&self, share: f64) -> f64 {
        let last = self.calls.len().saturating_sub(1);
        self.calls.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
    }

    fn object(&self) -> Value {
        json!({
            "name": self.what, "rate": self.rate.0, "unit": self.rate.1, "p50Seconds": self.quantile(0.5),
            "p99Seconds": self.quantile(0.99), "calls": self.calls.len(),
        })
    }
}
