//! `cargo xtask bench`: measures one suite, lets the peers do the same work on the same machine, and prints the budget table.
//!
//! Figures in milliseconds mean nothing from one machine to the next; ratios to a peer measured in the same minutes do. The
//! measuring programs (package engram-benchmarks, release) hand over rows as JSON; peers are Python programs in
//! `benchmarks/peers`. Nothing here measures anything, and no figure decides the exit status.

mod peers;
mod rounds;
mod table;

#[path = "../../../benchmarks/src/row.rs"]
mod row;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::process;
use crate::workspace::{self, Profile};
use row::Report;

#[derive(clap::Args)]
pub(crate) struct Options {
    suite: Suite,
    /// Who else does the same work (suites epoch, store, rank and recall)
    #[arg(long, default_value = "numpy", long_help = PEERS_HELP)]
    peers: Peers,
    /// With peers: how often everybody measures, in turn; the middle figure of each is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// How many memories, one table line each: 100k, 1m, 10m, or plain numbers
    #[arg(long, value_delimiter = ',', default_value = "100k,1m,10m", value_parser = parse_count)]
    memories: Vec<u64>,
    /// Also writes the rows, peers included, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// How long there are too many requests (suite overload)
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Also records some passes and writes their timeline as Chrome trace JSON (suites epoch and recall, one size)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

const PEERS_HELP: &str = "Who else does the same work (suites epoch, store, rank and recall)

numpy downloads about 20 MB. torch is numpy and PyTorch: about 200 MB where download.pytorch.org can be reached; otherwise \
the package of PyPI, which for Linux on x86-64 brings the CUDA libraries along: about 3 GB to download and 5 GB on disk. Both \
go into virtual environments under target/peers, once.";

#[derive(Clone, Copy, ValueEnum)]
enum Suite {
    /// One learning epoch in process, log off: decay, 10,000 updates, quality vector of two groups
    Epoch,
    /// The store: updates by id, reads, log, recovery, memory per memory
    Store,
    /// Calls over gRPC on loopback
    Wire,
    /// Full order and the best 1,000
    Rank,
    /// The memories most alike a vector of 384
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
}

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::Store => "store",
            Self::Wire => "wire",
            Self::Rank => "rank",
            Self::Recall => "recall",
            Self::Device => "device",
            Self::Replication => "replication",
            Self::Healing => "healing",
            Self::Backup => "backup",
            Self::Overload => "overload",
        }
    }

    fn has_python_peers(self) -> bool {
        matches!(self, Self::Epoch | Self::Store | Self::Rank | Self::Recall)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peers {
    None,
    Numpy,
    Torch,
}

impl Peers {
    fn kinds(self) -> &'static [peers::Kind] {
        match self {
            Self::None => &[],
            Self::Numpy => &[peers::Kind::Numpy],
            Self::Torch => &[peers::Kind::Numpy, peers::Kind::Torch],
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// When a program cannot be built, installed or run, or hands over something that is not a report.
pub(crate) fn run(options: &Options) -> Result<()> {
    let memories: Vec<String> = options.memories.iter().map(u64::to_string).collect();
    // Together with the binary: alone, its dependencies would have other features and be built once more.
    process::run(&mut Profile::Release.cargo("build", ["-p", "engram-cli", "-p", "engram-benchmarks"]))?;
    let program = Profile::Release.folder().join("engram-benchmarks");
    let mut ours = Command::new(program);
    ours.current_dir(workspace::root()).args([options.suite.name(), "--memories", &memories.join(",")]);
    // A disk: a temporary folder may lie in memory, where a sync costs nothing.
    ours.arg("--scratch").arg(workspace::target());
    ours.args(["--seconds", &options.seconds.to_string()]);
    if let Some(path) = &options.trace {
        ours.arg("--trace").arg(std::path::absolute(path).context("failed to name the file of the timeline")?);
    }
    let peers = if options.suite.has_python_peers() { options.peers.kinds() } else { &[] };

    let (mut reports, mut versions) = (Vec::new(), Vec::new());
    for round in 1..=if peers.is_empty() { 1 } else { options.rounds } {
        if !peers.is_empty() {
            eprintln!("round {round} of {}", options.rounds);
        }
        let mut report: Report =
            serde_json::from_str(&process::read(&mut ours)?).context("engram-benchmarks did not write a report")?;
        let add = |kind: &peers::Kind| peers::add(&mut report, *kind, options.suite.name(), &memories);
        versions = peers.iter().map(add).collect::<Result<_>>()?;
        reports.push(report);
    }
    let report = rounds::middle(reports).context("there is at least one round")?;

    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report).context("failed to write the rows as JSON")?;
        fs::write(path, text + "\n").with_context(|| format!("failed to write {}", path.display()))?;
    }
    println!("\n{}", machine(&report, &versions));
    print!("{}", table::render(&report.rows));
    Ok(())
}

/// What the figures depend on: processor, cores, threads, versions of the peers.
fn machine(report: &Report, versions: &[String]) -> String {
    let model = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parts = vec![
        model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        format!("{cores} cores"),
        format!("engram {} threads", report.threads),
    ];
    parts.extend_from_slice(versions);
    parts.join(", ")
}

/// Reads `250000`, `100k` or `10m`.
pub(crate) fn parse_count(text: &str) -> Result<u64> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.strip_suffix(['k', 'm']) {
        Some(digits) if lower.ends_with('k') => (digits, 1_000),
        Some(digits) => (digits, 1_000_000),
        None => (lower.as_str(), 1),
    };
    let number: u64 = digits.parse().with_context(|| format!("{text:?} is not a count like 250000, 100k or 10m"))?;
    match number.checked_mul(unit) {
        Some(count @ 1..=1_000_000_000) => Ok(count),
        _ => bail!("{text:?} is not between 1 and 1000m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_with_and_without_a_unit_and_refused_out_of_range() {
        assert_eq!(parse_count("100k").unwrap(), 100_000);
        assert_eq!(parse_count("10M").unwrap(), 10_000_000);
        assert_eq!(parse_count("7").unwrap(), 7);
        for bad in ["", "k", "-1", "0", "1.5m", "2000m", "99999999999999999999m"] {
            assert!(parse_count(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
