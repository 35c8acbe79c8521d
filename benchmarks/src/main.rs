//! Measuring program of `cargo xtask bench`, built in release: measures one suite and writes the rows as JSON to standard output.
//!
//! Each suite measures one thing at a time in one process, with progress on standard error. xtask runs the peers and prints the table.
#![forbid(unsafe_code)]

mod algebra;
mod arena;
mod device;
mod epoch;
mod measure;
mod population;
mod profile;
mod rank;
mod recall;
mod replay;
mod row;
mod rows;
mod store;
mod training;
mod wire;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use engram_kernels::profiler::Recorder;

use row::Row;

#[derive(Parser)]
#[command(about = "Measures one suite and writes its rows as JSON (use `cargo xtask bench`)")]
struct Arguments {
    suite: Suite,
    /// Numbers of memories; one set of rows each
    #[arg(long, value_delimiter = ',', default_value = "100000,1000000,10000000")]
    memories: Vec<u32>,
    /// Threads for the passes over all memories; by default one per core
    #[arg(long)]
    threads: Option<usize>,
    /// Folder for logs and snapshots, on a disk of the kind to be measured; its new content is removed
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// Duration of the overload (suite overload)
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Also record some passes and write their timeline as Chrome trace JSON (suites epoch and recall, one size)
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
    /// Full ranking and the top 1,000 on the CPU device
    Rank,
    /// Recall of the best matches of a vector on the CPU device
    Recall,
    /// Computations and passes over 1, 2 and 4 logical devices; overhead of the device layer
    Devices,
    /// Max-plus product and Fisher matrix in process
    Algebra,
    /// Training step of the reference model; efficiency at two workers, pause for checkpoints and recovery
    Train,
    /// Replay buffers: sample, new priorities and insert, in process and over loopback
    Replay,
    /// Federated runs over real connections: rounds, bytes, memory of the server, a slow upload
    Federated,
    /// Cost of replication, by number of replicas and durability mode
    Replication,
    /// Re-replication after a worker loses its disk: duration, and write latency meanwhile
    ReReplication,
    /// Backups under load: duration, and write latency meanwhile
    Backup,
    /// Twice as many requests as capacity: rejections, latency of accepted requests, memory
    Overload,
    /// Not a suite: resident bytes of a process with a filled store
    #[value(hide = true)]
    Footprint,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let threads = arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let (sizes, scratch) = (&arguments.memories, &arguments.scratch);
    if arguments.trace.is_some() {
        let is_recorded = matches!(arguments.suite, Suite::Epoch | Suite::Recall);
        ensure!(
            is_recorded && sizes.len() == 1,
            "a timeline can only be recorded for the suites epoch and recall and one size"
        );
    }
    let recorder = arguments
        .trace
        .as_ref()
        .map(|_| Recorder::new(format!("CPU, {threads} threads"), Instant::now(), profile::PASSES));
    let of_each = |rows: &dyn Fn(u32, usize) -> anyhow::Result<Vec<Row>>| -> anyhow::Result<Vec<Row>> {
        Ok(sizes.iter().map(|&memories| rows(memories, threads)).collect::<Result<Vec<_>, _>>()?.concat())
    };
    let mut rows = match arguments.suite {
        Suite::Epoch => of_each(&|memories, threads| epoch::epoch_rows(memories, threads, recorder.clone()))?,
        Suite::Rank => of_each(&rank::rank_rows)?,
        Suite::Recall => of_each(&|memories, threads| recall::recall_rows(memories, threads, recorder.clone()))?,
        Suite::Devices => [device::pattern_rows()?, of_each(&device::device_rows)?].concat(),
        Suite::Algebra => algebra::algebra_rows(threads)?,
        Suite::Store => store::store_rows(sizes, threads, scratch)?,
        Suite::Wire => wire::rows(sizes, threads, scratch)?,
        Suite::Train => [training::train_rows(threads)?, wire::training(scratch)?].concat(),
        Suite::Replay => [of_each(&replay::replay_rows)?, wire::replay(sizes, threads, scratch)?].concat(),
        Suite::Federated => wire::federated(sizes, threads, scratch)?,
        Suite::Replication => wire::replication(sizes, threads, scratch)?,
        Suite::ReReplication => wire::re_replication(sizes, threads, scratch)?,
        Suite::Backup => wire::backup(sizes, threads, scratch)?,
        Suite::Overload => wire::overload(sizes, threads, Duration::from_secs(arguments.seconds), scratch)?,
        Suite::Footprint => {
            let memories = *sizes.first().context("no size specified")?;
            println!("{}", store::footprint::resident_when_filled(memories, scratch)?);
            return Ok(());
        }
    };
    if let (Some(recorder), Some(path)) = (&recorder, &arguments.trace) {
        profile::write(recorder, path)?;
    }
    // Sizes of one title are adjacent in the table.
    let titles: Vec<String> = rows.iter().map(|row| row.title.clone()).collect();
    rows.sort_by_key(|row| titles.iter().position(|title| *title == row.title));
    let report = row::Report { threads: u32::try_from(threads).context("too many threads")?, rows };
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &report).context("failed to write the rows")?;
    writeln!(out).context("failed to write the rows")
}
