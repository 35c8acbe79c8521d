//! Complete check of a real GPU: `cargo xtask gpu-check` builds it, and packages it for a machine without a Rust toolchain.
//!
//! The fatbins and the peer programs are embedded, so this file is all that has to be copied. Every part runs in its own process, so that a crash
//! of the device or the part is reported as a failure of that part. Checks that the machine does not support are skipped with the reason;
//! without a GPU the check fails.
#![forbid(unsafe_code)]

mod child;
mod machine;
mod parts;
mod peers;
mod report;
mod run;
mod sanitizer;
mod table;

// The tests of the kernels, on the real device. Differences from the reference device panic.
#[path = "../../tests/device_comparison/mod.rs"]
mod device_comparison;
#[path = "../../tests/pass_checks/mod.rs"]
mod pass_checks;
#[path = "../../tests/random_history/mod.rs"]
mod random_history;
#[path = "../../tests/random_numbers/mod.rs"]
mod random_numbers;
#[allow(clippy::unwrap_used)]
#[path = "../../tests/reference_device/mod.rs"]
mod reference_device;

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

/// Options of the check.
#[derive(Args, Clone)]
struct Options {
    /// Index of the GPU
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Total updates of the random histories: 100k, 10m, 1g, or a plain number
    #[arg(long, default_value = "1g", value_parser = parse_count)]
    updates: u64,
    /// Number of random arenas that compare every pass with the reference device
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Number of concurrent processes, and of drivers within one process, that use the GPU
    #[arg(long, default_value_t = 4)]
    contexts: u32,
    /// Memories of the timed passes: at 64m a pass reads 320 MB, more than any cache
    #[arg(long, default_value = "64m", value_parser = parse_count)]
    memories: u64,
    /// Memories of the timed rankings, which are compared with CUB
    #[arg(long, default_value = "10m", value_parser = parse_count)]
    ranked: u64,
    /// Maximum runs of each pass; the median is reported
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Wait for minutes instead of 2 s before a device counts as hung
    #[arg(long)]
    long_deadline: bool,
    /// Output file for the results, as JSON
    #[arg(long, value_name = "FILE", default_value = "gpu-check.json")]
    json: PathBuf,
    /// Run only checks whose names start with one of these: passes, training, multiple-devices, history, drivers, failures, sanitizer, bench
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Prints the table of a results file
    Table {
        /// Results file written by --json
        file: PathBuf,
    },
    /// Runs one part, and prints its result as JSON
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
    let report = serde_json::from_str(&text).with_context(|| format!("{} is not a results file", file.display()))?;
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
