//! Memory per memory: what is resident in a process that has done nothing but fill its store, log on.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::logged::Logged;
use crate::measure::once;
use crate::row::{Budget, Row};

const MIB: f64 = (1 << 20) as f64;

/// Sizes between which the promise is made.
const PROMISED: (u32, u32) = (1_000_000, 10_000_000);

/// What a child process measures of itself: fills a store and answers how many bytes are resident then.
///
/// # Errors
/// When the store fails, or the system does not tell.
pub(crate) fn resident_when_filled(memories: u32, scratch: &Path) -> Result<u64> {
    let store = Logged::filled(memories, 1, scratch)?;
    let bytes = resident()?;
    store.end()?;
    Ok(bytes)
}

/// One process for each of `sizes`; the slope between the two largest, and what is left without memories.
pub(super) fn rows(sizes: &[u32], scratch: &Path) -> Result<Vec<Row>> {
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
        let beside = low - slope * f64::from(fewer);
        let promised = |bound| ((fewer, more) == PROMISED).then_some(Budget::Absolute(bound));
        rows.extend([
            Row::lower(format!("memory per memory, from {fewer} memories on"), more, "B", once(slope))
                .promised(promised(24.0)),
            Row::lower("memory of the process beside its memories", more, "MiB", once(beside / MIB))
                .promised(promised(32.0)),
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
