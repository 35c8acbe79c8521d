//! All-reduce between two processes, through shared memory and over TCP on the loopback interface.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::row::{Better, Budget, Figure, Report, Row, Workload};
use crate::process;
use crate::workspace::Profile;

/// Title of the rows, and arguments of the program.
const TRANSPORTS: [(&str, &[&str]); 2] = [("shared memory", &[]), ("loopback TCP", &["tcp"])];
/// Suffix of the peer that splits a message over four connections.
const FOUR: &str = ", 4 connections";
/// Least ratio to either peer.
const FLOOR: f64 = 1.3;

/// What the program prints about a size.
#[derive(Deserialize)]
struct Line {
    bytes: u64,
    #[serde(flatten)]
    figure: Figure,
}

/// Builds the program; returns its path.
///
/// # Errors
/// The build fails.
pub(super) fn build(profile: Profile) -> Result<PathBuf> {
    process::run(&mut profile.cargo("build", ["-p", "engram-collective", "--example", "all_reduce"]))?;
    Ok(profile.folder().join("examples/all_reduce"))
}

/// Measures both transports once.
///
/// # Errors
/// The program fails, or its output is not valid.
pub(super) fn measure(program: &Path) -> Result<Report> {
    let mut rows = Vec::new();
    for (transport, arguments) in TRANSPORTS {
        let output = process::read(Command::new(program).args(arguments).env("ENGRAM_JSON", "1"))?;
        rows.extend(parse(transport, &output)?);
    }
    Ok(Report { threads: 1, rows })
}

/// Returns a row per line.
fn parse(transport: &str, output: &str) -> Result<Vec<Row>> {
    let row = |line: &str| -> Result<Row> {
        let Line { bytes, figure } =
            serde_json::from_str(line).with_context(|| format!("all_reduce printed {line:?}"))?;
        let workload = |name: &str, remark: &str| Workload { name: name.to_owned(), remark: remark.to_owned() };
        let floor = |peer: String| Budget::Ratio { peer, at_least: FLOOR };
        Ok(Row {
            title: format!("all-reduce of f32 over {transport}, 2 ranks, size: bytes"),
            workloads: vec![workload("all-reduce", ""), workload("all-reduce-4", FOUR)],
            memories: bytes,
            unit: "ms".to_owned(),
            better: Better::Lower,
            ours: figure,
            peers: Vec::new(),
            budgets: vec![floor("gloo".to_owned()), floor(format!("gloo{FOUR}"))],
        })
    };
    output.lines().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_becomes_a_row_of_its_transport() {
        let rows = parse("x", "{\"bytes\": 4096, \"best\": 0.5, \"median\": 0.75, \"repeats\": 9}\n").unwrap();
        assert_eq!((rows.len(), rows[0].memories, rows[0].ours.median, rows[0].ours.repeats), (1, 4096, 0.75, 9));
        assert!(rows[0].title.contains("over x,"));
        assert!(parse("x", "4 kB: 1 ms").is_err());
    }
}
