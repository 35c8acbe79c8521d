//! What `cargo xtask bench` runs, in release: measures one suite and writes the rows as JSON to standard output.
//!
//! Each suite measures in one process, one thing at a time, and says on standard error what it is at. Peers and the table are
//! xtask's.
#![forbid(unsafe_code)]

mod arena;
mod device;
mod epoch;
mod measure;
mod population;
mod profile;
mod rank;
mod recall;
mod row;
mod rows;
mod store;
mod wire;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use engram_kernels::profiler::Recorder;

use row::Row;

#[derive(Parser)]
#[command(about = "Measures one suite and writes its rows as JSON (run it by `cargo xtask bench`)")]
struct Arguments {
    suite: Suite,
    /// How many memories; one set of rows each
    #[arg(long, value_delimiter = ',', default_value = "100000,1000000,10000000")]
    memories: Vec<u32>,
    /// Threads for the passes over all memories; by default one per core
    #[arg(long)]
    threads: Option<usize>,
    /// Folder for logs and snapshots, on the kind of disk that matters; what is written there is removed
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// How long there are too many requests (suite overload)
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Also records some passes and writes their timeline as Chrome trace JSON (suites epoch and recall, one size)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Suite {
    /// One learning epoch on the CPU device
    Epoch,
    /// The store in process: updates and reads by id, log, recovery, memory per memory
    Store,
    /// Calls over gRPC on loopback
    Wire,
    /// Full order and the best 1,000 on the CPU device
    Rank,
    /// The memories most alike a vector on the CPU device
    Recall,
    /// What the device layer adds: an empty batch, which device holds which partition, passes shared by several
    Device,
    /// What copies cost, by their number and the durability mode
    Replication,
    /// A worker loses its disk: until its copies are there again, and what writers feel meanwhile
    Healing,
    /// Backups under writes: how long they take, and what writers feel meanwhile
    Backup,
    /// Twice as many requests as are answered: what is refused and how, what the others feel, what memory it costs
    Overload,
    /// Not a suite: what is resident when this process has filled a store, in bytes
    #[value(hide = true)]
    Footprint,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let threads = arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let (sizes, scratch) = (&arguments.memories, &arguments.scratch);
    if arguments.trace.is_some() {
        let is_recorded = matches!(arguments.suite, Suite::Epoch | Suite::Recall);
        ensure!(is_recorded && sizes.len() == 1, "a timeline is recorded of the suites epoch and recall, of one size");
    }
    let recorder = arguments
        .trace
        .as_ref()
        .map(|_| Recorder::new(format!("CPU, {threads} threads"), Instant::now(), profile::PASSES));
    let of_each = |rows: &dyn Fn(u32, usize) -> anyhow::Result<Vec<Row>>| -> anyhow::Result<Vec<Row>> {
        Ok(sizes.iter().map(|&memories| rows(memories, threads)).collect::<Result<Vec<_>, _>>()?.concat())
    };
    let mut rows = match arguments.suite {
        Suite::Epoch => of_each(&|memories, threads| epoch::rows(memories, threads, recorder.clone()))?,
        Suite::Rank => of_each(&rank::rows)?,
        Suite::Recall => of_each(&|memories, threads| recall::rows(memories, threads, recorder.clone()))?,
        Suite::Device => of_each(&device::rows)?,
        Suite::Store => store::rows(sizes, threads, scratch)?,
        Suite::Wire => wire::rows(sizes, threads, scratch)?,
        Suite::Replication => wire::copies(sizes, threads, scratch)?,
        Suite::Healing => wire::healing(sizes, threads, scratch)?,
        Suite::Backup => wire::backup(sizes, threads, scratch)?,
        Suite::Overload => wire::overload(sizes, threads, Duration::from_secs(arguments.seconds), scratch)?,
        Suite::Footprint => {
            let memories = *sizes.first().context("no size was given")?;
            println!("{}", store::footprint::resident_when_filled(memories, scratch)?);
            return Ok(());
        }
    };
    if let (Some(recorder), Some(path)) = (&recorder, &arguments.trace) {
        profile::write(recorder, path)?;
    }
    // One title's sizes stand together in the table.
    let titles: Vec<String> = rows.iter().map(|row| row.title.clone()).collect();
    rows.sort_by_key(|row| titles.iter().position(|title| *title == row.title));
    let report = row::Report { threads: u32::try_from(threads).context("too many threads")?, rows };
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &report).context("failed to write the rows")?;
    writeln!(out).context("failed to write the rows")
}
