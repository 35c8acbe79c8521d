//! NVIDIA's compute-sanitizer over a part.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::report::Found;
use crate::{child, machine};

/// What it looks for: accesses outside of memory, hazards between threads of a block, barriers that not all meet.
pub(crate) const TOOLS: [&str; 3] = [MEMCHECK, "racecheck", "synccheck"];
const MEMCHECK: &str = "memcheck";
/// How it ends when it found something.
const FOUND: &str = "86";

/// Runs a part under a tool.
///
/// # Errors
/// What it found.
pub(crate) fn run(tool: &str, part: &mut Command) -> Result<Found> {
    const NAME: &str = "compute-sanitizer";
    let Some(program) = machine::program(NAME) else { return Ok(Found::skipped(machine::lacking(NAME))) };
    let mut command = Command::new(program);
    command.args(["--tool", tool, "--error-exitcode", FOUND]);
    if tool == MEMCHECK {
        // Every code of the driver is looked at here, and that a stream is not ready yet is none.
        command.args(["--report-api-errors", "no"]);
    }
    command.arg(part.get_program()).args(part.get_args());
    let said = child::run(&mut command)?;
    // It writes to the standard output of what it runs.
    let summary = said.out.lines().chain(said.last.lines()).filter(|line| line.contains("SUMMARY:"));
    let summary: Vec<String> = summary.map(|line| line.trim_start_matches('=').trim().to_owned()).collect();
    let out = said.out.clone();
    said.expect(tool).map_err(|error| error.context(report(&out)))?;
    // A tool that could not watch ends well, too.
    ensure!(!summary.is_empty(), "{tool} gave no summary:\n{}", report(&out));
    ensure!(summary.iter().all(|line| line.contains("SUMMARY: 0 ")), "{}:\n{}", summary.join(", "), report(&out));
    Ok(Found::done(summary.join(", ")))
}

/// The first of what it said.
fn report(out: &str) -> String {
    let lines = out.lines().filter(|line| line.starts_with("=========")).take(20);
    lines.collect::<Vec<_>>().join("\n")
}
