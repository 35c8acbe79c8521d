//! What `cargo xtask bench` runs, in release: measures one suite and writes the rows as JSON to standard output.
//!
//! Each suite measures in one process, one thing at a time, and says on standard error what it is at. Peers and the table are
//! xtask's.
#![forbid(unsafe_code)]

mod arena;
mod epoch;
mod measure;
mod rank;
mod row;

use std::io::Write;

use anyhow::Context;
use clap::{Parser, ValueEnum};

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
}

#[derive(Clone, Copy, ValueEnum)]
enum Suite {
    /// One learning epoch on the CPU device
    Epoch,
    /// Full order and the best 1,000 on the CPU device
    Rank,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let threads = arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let mut rows = Vec::new();
    for memories in arguments.memories {
        rows.extend(match arguments.suite {
            Suite::Epoch => epoch::rows(memories, threads)?,
            Suite::Rank => rank::rows(memories, threads)?,
        });
    }
    // One title's sizes stand together in the table.
    let titles: Vec<String> = rows.iter().map(|row| row.title.clone()).collect();
    rows.sort_by_key(|row| titles.iter().position(|title| *title == row.title));
    let report = row::Report { threads: u32::try_from(threads).context("too many threads")?, rows };
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &report).context("failed to write the rows")?;
    writeln!(out).context("failed to write the rows")
}
