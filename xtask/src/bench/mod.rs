//! `cargo xtask bench`: measures one suite, runs peers with the same work on the same machine, and prints the budget table.
//!
//! Absolute times are not comparable between machines; ratios to a peer measured at the same time are. The measuring programs (package
//! engram-benchmarks, release) return rows as JSON; peers are Python programs in `benchmarks/peers`. This command measures nothing itself, and no
//! figure affects the exit status.

mod pages;
mod peers;
mod reduce;
mod rounds;
mod table;
mod transfer_queue;

pub(crate) use pages::TRAIN_TITLE;

#[path = "../../../benchmarks/src/row.rs"]
mod row;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::process;
use crate::results;
use crate::workspace::{self, Profile};
use row::Report;

#[derive(clap::Args)]
pub(crate) struct Options {
    suite: Suite,
    /// Peers that run the same workload (suites epoch, store, rank, recall, algebra, reduce, train, replay and federated)
    #[arg(long, value_delimiter = ',', default_value = "numpy", long_help = PEERS_HELP)]
    peers: Vec<Peers>,
    /// Rounds with peers, in turn; the median figure of each row is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Numbers of memories, one table line each: 100k, 1m, 10m, or plain numbers
    #[arg(long, value_delimiter = ',', default_value = "100k,1m,10m", value_parser = parse_count)]
    memories: Vec<u64>,
    /// Also write the rows, peers included, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Duration of the overload in seconds (suite overload)
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Also record some passes and write their timeline as Chrome trace JSON (suites epoch and recall, one size)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

const PEERS_HELP: &str = "Who else does the same work (suites epoch, store, rank, recall, algebra, reduce, train, replay and federated)

numpy downloads about 20 MB. torch is numpy and PyTorch: about 200 MB if download.pytorch.org is reachable; otherwise \
the package of PyPI, which for Linux on x86-64 brings the CUDA libraries along: about 3 GB to download and 5 GB on disk. \
gloo is PyTorch too, for the suites reduce and train; torchft adds its package, for train. cpprb, torchrl, reverb and transferqueue are for the suite replay, flwr for federated: torchrl and transferqueue bring PyTorch, reverb brings TensorFlow. torchdiffeq, torchode and diffrax are for the suite geodesic: they bring PyTorch or JAX. \
All go into virtual environments under target/peers, once. One that cannot be installed or run is reported as skipped.";

/// Rows of the max-plus matrices, and samples of the Fisher matrix.
const ALGEBRA_SIZES: [u64; 2] = [1_024, 10_000];
/// Clients of a federated run; the peer takes part at the first number only, since each of its clients is a process of Python.
const FEDERATED_CLIENTS: [u64; 2] = [8, 2_000];

#[derive(Clone, Copy, ValueEnum)]
enum Suite {
    /// One learning epoch in process, without a log: decay, 10,000 updates, quality vector of two groups
    Epoch,
    /// The store: updates by id, reads, log, recovery, memory per memory
    Store,
    /// Calls over gRPC on loopback
    Wire,
    /// Full ranking and the top 1,000
    Rank,
    /// Recall of the best matches of a vector of 384 elements
    Recall,
    /// Computations and passes over 1, 2 and 4 logical devices, and the overhead of devices; writes docs/results/devices.md
    Devices,
    /// Max-plus product of 1,024 x 1,024 and Fisher matrix of 10,000 samples and 1,000 parameters; sizes are fixed
    Algebra,
    /// All-reduce of 4 kB to 64 MB between two ranks, through shared memory and over loopback TCP; writes docs/results/reduce.md
    Reduce,
    /// Step of the reference model, efficiency, pauses for checkpoints and recovery on clusters of two workers; writes docs/results/train.md
    Train,
    /// Replay buffers of items of 256 B: sample, new priorities and insert, in process and over loopback; --memories are items
    Replay,
    /// Engram as the storage backend of TransferQueue against its in-memory store, put, get and clear of batches of 4 fields; sizes are fixed
    TransferQueue,
    /// Federated runs over real connections, 8 and 2,000 clients, and small updates alongside a slow upload; sizes are fixed
    Federated,
    /// Geodesics of a learned metric: features, gradients, paths, trainings, in CPU time of one thread; sizes are fixed
    Geodesic,
    /// Cost of replication, by number of replicas and durability mode
    Replication,
    /// Re-replication after a worker loses its disk: duration, and write latency meanwhile
    ReReplication,
    /// Backups under load: duration, and write latency meanwhile
    Backup,
    /// Twice as many requests as capacity: rejections, latency of accepted requests, memory
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
            Self::Devices => "devices",
            Self::Algebra => "algebra",
            Self::Reduce => "reduce",
            Self::Train => "train",
            Self::Replay => "replay",
            Self::TransferQueue => "transfer-queue",
            Self::Federated => "federated",
            Self::Geodesic => "geodesic",
            Self::Replication => "replication",
            Self::ReReplication => "re-replication",
            Self::Backup => "backup",
            Self::Overload => "overload",
        }
    }

    /// Returns the peers of those asked for that do this work.
    fn peers(self, asked: &[Peers]) -> Vec<peers::Kind> {
        let mut kinds: Vec<peers::Kind> = asked.iter().flat_map(|peers| peers.kinds()).copied().collect();
        kinds.retain(|kind| match self {
            Self::Replay => kind.is_replay_buffer(),
            Self::Geodesic => kind.is_solver(),
            Self::Federated => *kind == peers::Kind::Flower,
            Self::Reduce => *kind == peers::Kind::TorchTraining,
            Self::Train => matches!(kind, peers::Kind::TorchTraining | peers::Kind::TorchFt),
            // PyTorch has no faster way to the same product.
            Self::Algebra => *kind == peers::Kind::Numpy,
            Self::Epoch | Self::Store | Self::Rank | Self::Recall => {
                matches!(kind, peers::Kind::Numpy | peers::Kind::Torch)
            }
            _ => false,
        });
        // Several names stand for one program.
        let mut unique: Vec<peers::Kind> = Vec::new();
        kinds.into_iter().for_each(|kind| {
            if !unique.contains(&kind) {
                unique.push(kind);
            }
        });
        unique
    }
}

impl Suite {
    /// Returns the names of the peers on the page of the suite that were not asked for.
    fn unrequested(self, asked: &[peers::Kind]) -> impl Iterator<Item = &'static str> {
        let compared: &[peers::Kind] = match self {
            Self::Train => &[peers::Kind::TorchTraining, peers::Kind::TorchFt],
            _ => &[],
        };
        compared.iter().filter(move |kind| !asked.contains(kind)).map(|kind| kind.name())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peers {
    None,
    Numpy,
    Torch,
    Gloo,
    Torchft,
    Cpprb,
    Torchrl,
    Reverb,
    Transferqueue,
    Torchdiffeq,
    Torchode,
    Diffrax,
    Flwr,
}

impl Peers {
    fn kinds(self) -> &'static [peers::Kind] {
        match self {
            Self::None => &[],
            Self::Numpy => &[peers::Kind::Numpy],
            Self::Torch => &[peers::Kind::Numpy, peers::Kind::Torch, peers::Kind::TorchTraining],
            Self::Gloo => &[peers::Kind::TorchTraining],
            Self::Torchft => &[peers::Kind::TorchFt],
            Self::Cpprb => &[peers::Kind::Cpprb],
            Self::Torchrl => &[peers::Kind::TorchRl],
            Self::Reverb => &[peers::Kind::Reverb],
            Self::Transferqueue => &[peers::Kind::TransferQueue],
            Self::Torchdiffeq => &[peers::Kind::TorchDiffEq],
            Self::Torchode => &[peers::Kind::TorchOde],
            Self::Diffrax => &[peers::Kind::Diffrax],
            Self::Flwr => &[peers::Kind::Flower],
        }
    }
}

/// Runs a suite and its peers, and prints the table.
///
/// # Errors
/// When a program cannot be built, installed or run, or returns an invalid report.
pub(crate) fn run(options: &Options) -> Result<()> {
    let sizes = match options.suite {
        Suite::Algebra => &ALGEBRA_SIZES[..],
        Suite::Federated => &FEDERATED_CLIENTS[..],
        _ => &options.memories,
    };
    let memories: Vec<String> = sizes.iter().map(u64::to_string).collect();
    if matches!(options.suite, Suite::TransferQueue) {
        let (report, versions) = transfer_queue::measure(options.rounds)?;
        return publish(options, &report, &memories, &versions, &[]);
    }
    let profile = Profile::of_tools()?;
    let mut measure = measuring_program(options, profile, &memories)?;
    let peers = options.suite.peers(&options.peers);

    let (mut reports, mut versions, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=if peers.is_empty() { 1 } else { options.rounds } {
        if !peers.is_empty() {
            eprintln!("round {round} of {}", options.rounds);
        }
        let mut report = measure()?;
        let add = |kind: &peers::Kind| peers::add_or_skip(&mut report, *kind, options.suite.name(), &memories);
        (versions, skipped) = (Vec::new(), Vec::new());
        for outcome in peers.iter().map(add).collect::<Result<Vec<_>>>()? {
            match outcome {
                peers::Outcome::Measured(version) => versions.push(version),
                peers::Outcome::Skipped(reason) => skipped.push(reason),
            }
        }
        reports.push(report);
    }
    let report = rounds::merge_rounds(reports).context("at least one round is required")?;
    skipped.extend(options.suite.unrequested(&peers).map(|name| format!("{name}: not requested")));
    publish(options, &report, &memories, &versions, &skipped)
}

/// Writes the rows where they are asked for, and prints the table and the peers without figures.
fn publish(
    options: &Options,
    report: &Report,
    memories: &[String],
    versions: &[String],
    skipped: &[String],
) -> Result<()> {
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(report).context("failed to write the rows as JSON")?;
        fs::write(path, text + "\n").with_context(|| format!("failed to write {}", path.display()))?;
    }
    write_page(options, report, memories, &machine(report, versions), skipped)?;
    println!("\n{}", machine(report, versions));
    print!("{}", table::render(&report.rows));
    skipped.iter().for_each(|reason| println!("not measured: {reason}"));
    Ok(())
}

/// Measures a suite once.
type Measure = Box<dyn FnMut() -> Result<Report>>;

/// Builds the program that measures the suite, and returns what runs it.
fn measuring_program(options: &Options, profile: Profile, memories: &[String]) -> Result<Measure> {
    let report = |mut command: Command| -> Measure {
        Box::new(move || {
            serde_json::from_str(&process::read(&mut command)?).context("the measuring program did not write a report")
        })
    };
    if matches!(options.suite, Suite::Reduce) {
        let program = reduce::build(profile)?;
        return Ok(Box::new(move || reduce::measure(&program)));
    }
    if matches!(options.suite, Suite::Geodesic) {
        process::run(&mut profile.cargo("build", ["-p", "engram-geodesic", "--example", "benchmark"]))?;
        return Ok(report(Command::new(profile.folder().join("examples/benchmark"))));
    }
    // Together with the binary: otherwise its dependencies would have other features and be built again.
    process::run(&mut profile.cargo("build", ["-p", "engram-cli", "-p", "engram-benchmarks"]))?;
    let mut ours = Command::new(profile.folder().join("engram-benchmarks"));
    ours.current_dir(workspace::root()).args([options.suite.name(), "--memories", &memories.join(",")]);
    // On disk: a temporary directory may be in memory, where a sync is free.
    ours.arg("--scratch").arg(workspace::target());
    ours.args(["--seconds", &options.seconds.to_string()]);
    if let Some(path) = &options.trace {
        ours.arg("--trace").arg(std::path::absolute(path).context("failed to resolve the path of the timeline")?);
    }
    Ok(report(ours))
}

/// Writes the page of the suite, if it has one that a command writes.
fn write_page(
    options: &Options,
    report: &Report,
    memories: &[String],
    machine: &str,
    skipped: &[String],
) -> Result<()> {
    let commit = || -> Result<String> {
        let mut git = Command::new("git");
        process::read(git.args(["rev-parse", "--short", "HEAD"]).current_dir(workspace::root()))
    };
    let has_peers = report.rows.iter().any(|row| !row.peers.is_empty());
    let (name, page) = match options.suite {
        Suite::Devices => ("devices", pages::devices(report, memories, machine, commit()?.trim())),
        // Without a peer there is nothing to compare.
        Suite::Algebra if has_peers => ("algebra", pages::algebra(report, machine, commit()?.trim())),
        Suite::Reduce if has_peers => ("reduce", pages::reduce(report, machine, commit()?.trim())),
        Suite::Train if has_peers => {
            let names: Vec<String> =
                options.peers.iter().filter_map(Peers::to_possible_value).map(|it| it.get_name().to_owned()).collect();
            let page = pages::train(report, &names, machine, commit()?.trim(), skipped);
            return results::replace_section("train.md", TRAIN_TITLE, pages::TRAIN_SECTION, &page);
        }
        _ => return Ok(()),
    };
    let path = workspace::root().join("docs/results").join(format!("{name}.md"));
    fs::write(&path, page).with_context(|| format!("failed to write {}", path.display()))
}

/// Returns what the figures depend on: processor, cores, threads, versions of the peers.
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

/// Parses `250000`, `100k` or `10m`.
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
    fn counts_are_parsed_with_and_without_unit_and_range_checked() {
        assert_eq!(parse_count("100k").unwrap(), 100_000);
        assert_eq!(parse_count("10M").unwrap(), 10_000_000);
        assert_eq!(parse_count("7").unwrap(), 7);
        for bad in ["", "k", "-1", "0", "1.5m", "2000m", "99999999999999999999m"] {
            assert!(parse_count(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
