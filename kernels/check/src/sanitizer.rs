//! Runs a part under NVIDIA's compute-sanitizer.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::report::PartResult;
use crate::{child, machine};

/// Its tools: invalid accesses, hazards between threads of a block, incomplete barriers.
pub(crate) const TOOLS: [&str; 3] = [MEMCHECK, "racecheck", "synccheck"];
const MEMCHECK: &str = "memcheck";
/// Exit status for findings.
const FOUND: &str = "86";

/// Runs a part under a tool.
///
/// # Errors
/// Findings of the tool.
pub(crate) fn run(tool: &str, part: &mut Command) -> Result<PartResult> {
    const NAME: &str = "compute-sanitizer";
    let Some(program) = machine::program(NAME) else { return Ok(PartResult::skipped(machine::missing_program(NAME))) };
    let mut command = Command::new(program);
    command.args(["--tool", tool, "--error-exitcode", FOUND]);
    if tool == MEMCHECK {
        // It reports every driver error code, including the harmless "not ready" of a stream.
        command.args(["--report-api-errors", "no"]);
    }
    command.arg(part.get_program()).args(part.get_args());
    let said = child::run(&mut command)?;
    // It shares standard output with the program that it runs.
    let summary = said.out.lines().chain(said.last.lines()).filter(|line| line.contains("SUMMARY:"));
    let summary: Vec<String> = summary.map(|line| line.trim_start_matches('=').trim().to_owned()).collect();
    let out = said.out.clone();
    said.expect(tool).map_err(|error| error.context(report(&out)))?;
    // A tool that failed to attach also succeeds.
    ensure!(!summary.is_empty(), "{tool} gave no summary:\n{}", report(&out));
    ensure!(summary.iter().all(|line| line.contains("SUMMARY: 0 ")), "{}:\n{}", summary.join(", "), report(&out));
    Ok(PartResult::passed(summary.join(", ")))
}

/// Returns the first lines of the report.
fn report(out: &str) -> String {
    let lines = out.lines().filter(|line| line.starts_with("=========")).take(20);
    lines.collect::<Vec<_>>().join("\n")
}
