//! Memory per memory: resident bytes of a process with a filled store and log.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::logged::Logged;
use crate::measure::once;
use crate::row::{Budget, Row};

const MIB: f64 = (1 << 20) as f64;

/// Sizes between which the budget applies.
const PROMISED: (u32, u32) = (1_000_000, 10_000_000);

/// Fills a store and returns the resident bytes of this process; runs in a child process.
///
/// # Errors
/// When the store fails, or the system does not report memory use.
pub(crate) fn resident_when_filled(memories: u32, scratch: &Path) -> Result<u64> {
    let store = Logged::create_filled(memories, 1, scratch)?;
    let bytes = resident()?;
    store.end()?;
    Ok(bytes)
}

/// Measures one process for each of `sizes`: the slope between the two largest, and the remainder.
pub(super) fn footprint_rows(sizes: &[u32], scratch: &Path) -> Result<Vec<Row>> {
    let mut measured = Vec::new();
    for &memories in sizes {
        eprintln!("store: resident memory with {memories} memories");
        measured.push((memories, child(memories, scratch)? as f64));
    }
    let total = |&(memories, bytes): &(u32, f64)| {
        Row::lower("resident memory of a process and its store", memories, "MiB", once(bytes / MIB))
    };
    let mut rows: Vec<Row> = measured.iter().map(total).collect();

    measured.sort_by_key(|(memories, _)| *memories);
    measured.dedup_by_key(|(memories, _)| *memories);
    if let [.., (fewer, low), (more, high)] = measured[..] {
        let slope = (high - low) / f64::from(more - fewer);
        let overhead = low - slope * f64::from(fewer);
        let promised = |bound| ((fewer, more) == PROMISED).then_some(Budget::Absolute(bound));
        rows.extend([
            Row::lower(format!("memory per memory, from {fewer} memories on"), more, "B", once(slope))
                .with_budgets(promised(24.0)),
            Row::lower("memory of the process without its memories", more, "MiB", once(overhead / MIB))
                .with_budgets(promised(32.0)),
        ]);
    }
    Ok(rows)
}

fn child(memories: u32, scratch: &Path) -> Result<u64> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut child = Command::new(program);
    child.args(["footprint", "--memories", &memories.to_string(), "--scratch"]).arg(scratch);
    let output = child.output().context("failed to start a child process")?;
    ensure!(output.status.success(), "a child process failed: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{text:?} is not a number of bytes"))
}

fn resident() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("failed to read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS is not a number of kB")?;
    Ok(kibibytes << 10)
}
