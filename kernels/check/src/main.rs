//! The whole check of a real GPU: `cargo xtask gpu-check` builds it, and packs it for a machine without a Rust toolchain.
//!
//! The fatbins and the programs of the peers are inside, so this one file is all that is carried. Every part runs as a process of its own,
//! this program again: what breaks a device, or the part itself, ends with that process and is told as a failure of that part. What a
//! machine lacks is skipped with the reason; without a GPU nothing is done, and why is an error.
#![forbid(unsafe_code)]

mod child;
mod machine;
mod parts;
mod peers;
mod report;
mod run;
mod sanitizer;
mod table;

// The tests of the kernels, on the real device: what differs from the law panics.
#[allow(clippy::unwrap_used)]
#[path = "../../tests/naive/mod.rs"]
mod naive;
#[path = "../../tests/numbers/mod.rs"]
mod numbers;
#[path = "../../tests/past/mod.rs"]
mod past;
#[path = "../../tests/story/mod.rs"]
mod story;
#[path = "../../tests/twins/mod.rs"]
mod twins;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "engram-gpu-check",
    about = "Checks and measures Engram's kernels on the GPU of this machine",
    version,
    args_conflicts_with_subcommands = true,
    max_term_width = 100
)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What is to be done.
#[derive(Args, Clone)]
struct Options {
    /// Which GPU, by its number
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Updates of the random histories, all together: 100k, 10m, 1g, or a plain number
    #[arg(long, default_value = "1g", value_parser = parse_count)]
    updates: u64,
    /// Random arenas through which every pass is compared with the law
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Processes, each with a context of its own, and drivers within one process, that use the GPU at the same time
    #[arg(long, default_value_t = 4)]
    contexts: u32,
    /// Memories that the passes are timed over: at 64m a pass reads 320 MB, more than any cache
    #[arg(long, default_value = "64m", value_parser = parse_count)]
    memories: u64,
    /// Memories that rankings are timed over, beside CUB
    #[arg(long, default_value = "10m", value_parser = parse_count)]
    ranked: u64,
    /// Runs of each pass, at most; the median counts
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Waits for minutes instead of 2 s before a device counts as one that does not answer
    #[arg(long)]
    patient: bool,
    /// Where the results go, as JSON
    #[arg(long, value_name = "FILE", default_value = "gpu-check.json")]
    json: PathBuf,
    /// Only these, by the first part of their names: passes, several, history, drivers, failures, sanitizer, bench
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Prints the table of results that were written before
    Table {
        /// As written by --json
        file: PathBuf,
    },
    /// Runs one part, and prints what it found as JSON
    #[command(hide = true)]
    Part(parts::Part),
}

fn main() -> ExitCode {
    let Arguments { options, command } = Arguments::parse();
    let outcome = match command {
        None => run::run(&options),
        Some(Command::Table { file }) => print_table(&file),
        Some(Command::Part(part)) => parts::run(&part),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engram-gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_table(file: &std::path::Path) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("failed to read {}", file.display()))?;
    let report = serde_json::from_str(&text).with_context(|| format!("{} is no result", file.display()))?;
    print!("{}", table::markdown(&report));
    Ok(())
}

/// Reads `250000`, `100k`, `10m` or `1g`.
fn parse_count(text: &str) -> Result<u64> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.char_indices().last() {
        Some((end, 'k')) => (&lower[..end], 1_000),
        Some((end, 'm')) => (&lower[..end], 1_000_000),
        Some((end, 'g')) => (&lower[..end], 1_000_000_000),
        _ => (&lower[..], 1),
    };
    let number: u64 =
        digits.parse().with_context(|| format!("{text:?} is not a count like 250000, 100k, 10m or 1g"))?;
    match number.checked_mul(unit) {
        Some(count) if count > 0 => Ok(count),
        _ => bail!("{text:?} is not a count"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_with_and_without_a_unit() {
        let read = |text| parse_count(text).unwrap();
        assert_eq!([read("100k"), read("10M"), read("1g"), read("7")], [100_000, 10_000_000, 1_000_000_000, 7]);
        for bad in ["", "k", "-1", "0", "1.5m", "99999999999999g"] {
            assert!(parse_count(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
