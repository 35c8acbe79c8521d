//! Engram as the storage backend of TransferQueue: a program of Python measures it and the in-memory store of TransferQueue in turn.

use std::process::Command;

use anyhow::{Context, Result};

use super::row::Report;
use super::{peers, rounds};
use crate::{process, python, workspace};

/// Returns the medians of the rounds, and the versions of the packages. Builds the release wheel, and installs it next to TransferQueue.
///
/// # Errors
/// A package cannot be installed, the wheel cannot be built, or a measurement fails.
pub(super) fn measure(count: u32) -> Result<(Report, Vec<String>)> {
    let environment = peers::install(peers::Kind::TransferQueue)?;
    python::install_release(&environment)?;
    let mut reports = Vec::new();
    for round in 1..=count {
        eprintln!("round {round} of {count}");
        let mut command = Command::new(&environment);
        command.current_dir(workspace::root().join("benchmarks/peers")).args(["transfer_queue_backend.py", "--json"]);
        // On disk: a temporary directory may be in memory, where a sync is free.
        command.args(["--rounds", "1", "--scratch"]).arg(workspace::target());
        command.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("ENGRAM_BIN");
        let text = process::read(&mut command)?;
        reports.push(serde_json::from_str(&text).context("transfer_queue_backend.py did not write a report")?);
    }
    let report = rounds::merge_rounds(reports).context("at least one round is required")?;
    Ok((report, vec!["TransferQueue 0.1.11 (Ray, two workers)".to_owned()]))
}
