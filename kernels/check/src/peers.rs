//! Peers that do the same work on the same device, for comparison.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::report::{Figure, PartResult, Peer, Row};
use crate::{child, machine};

/// Keys in the order of ids, u32, little-endian; smaller ones come first.
pub(crate) const KEYS: &str = "keys";
/// Slots of the keys, u32.
pub(crate) const SLOTS: &str = "slots";
/// Ranked slots, u32: the output expected of a peer.
pub(crate) const ORDER: &str = "order";

const CUB: &str = include_str!("../peers/cub_rank.cu");
const PYTHON: &str = include_str!("../peers/gpu_peer.py");
/// Workload of the row that CUB is compared with.
const SORTED: &str = "sort";

/// Output of a Python peer.
#[derive(Deserialize)]
struct PeerOutput {
    /// Reason why it cannot run here.
    #[serde(default)]
    skipped: Option<String>,
    #[serde(default)]
    version: String,
    #[serde(default)]
    rows: Vec<PeerRow>,
}

#[derive(Deserialize)]
struct PeerRow {
    workload: String,
    memories: u64,
    /// Milliseconds.
    #[serde(flatten)]
    figure: Figure,
}

/// Runs CUB's sort, compiled for the device's architecture. Its order must be the same before its time counts.
///
/// # Errors
/// When it fails to compile or run, or returns another order.
pub(crate) fn cub(
    rows: &mut [Row],
    scratch: &Path,
    capability: &str,
    device: usize,
    repeats: usize,
) -> Result<PartResult> {
    let Some(nvcc) = machine::program("nvcc") else { return Ok(PartResult::skipped(machine::missing_program("nvcc"))) };
    let source = scratch.join("cub_rank.cu");
    let program = scratch.join("cub_rank");
    fs::write(&source, CUB).context("failed to write cub_rank.cu")?;
    let mut compile = Command::new(nvcc);
    compile.args(["-std=c++17", "-O3", &format!("-arch=sm_{capability}"), "-o"]).arg(&program).arg(&source);
    child::run(&mut compile)?.expect("nvcc")?;

    let out = scratch.join("cub-order");
    let mut run = Command::new(&program);
    run.args([scratch.join(KEYS), scratch.join(SLOTS), out.clone()]).args([device.to_string(), repeats.to_string()]);
    let printed = child::run(&mut run)?.expect("cub_rank")?;
    let figure: Figure = serde_json::from_str(&printed).context("failed to parse the output of cub_rank")?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("failed to read {}", path.display()));
    ensure!(read(&out)? == read(&scratch.join(ORDER))?, "CUB returned another order: one of the two is wrong");

    let row = rows.iter_mut().find(|row| row.workload == SORTED).context("there is no sort to compare with")?;
    let ratio = figure.median / row.device.median;
    row.peers.push(Peer { name: "CUB".to_owned(), device: figure });
    Ok(PartResult::passed(format!("same order of {} memories; Engram is {ratio:.2} times as fast", row.memories)))
}

/// Runs a Python peer, if it is installed.
///
/// # Errors
/// When it fails.
pub(crate) fn python(
    rows: &mut [Row],
    scratch: &Path,
    peer: &str,
    device: usize,
    repeats: usize,
) -> Result<PartResult> {
    let Some(python) = machine::program("python3") else {
        return Ok(PartResult::skipped(machine::missing_program("python3")));
    };
    let source = scratch.join("gpu_peer.py");
    fs::write(&source, PYTHON).context("failed to write gpu_peer.py")?;
    let mut run = Command::new(python);
    run.arg(&source).arg(peer).args(["--device", &device.to_string(), "--repeats", &repeats.to_string()]);
    for row in rows.iter().filter(|row| !row.workload.is_empty()) {
        run.arg(format!("{}:{}", row.workload, row.memories));
    }
    let printed = child::run(&mut run)?.expect(peer)?;
    add(rows, peer, &printed)
}

fn add(rows: &mut [Row], peer: &str, printed: &str) -> Result<PartResult> {
    let printed: PeerOutput =
        serde_json::from_str(printed).with_context(|| format!("failed to parse the output of {peer}"))?;
    if let Some(why) = printed.skipped {
        return Ok(PartResult::skipped(why));
    }
    let mut matched = 0;
    for PeerRow { workload, memories, figure } in printed.rows {
        for row in rows.iter_mut().filter(|row| row.workload == workload && row.memories == memories) {
            row.peers.push(Peer { name: peer.to_owned(), device: figure });
            matched += 1;
        }
    }
    ensure!(matched > 0, "{peer} has no comparable workload");
    Ok(PartResult::passed(format!("{peer} {}: {matched} rows", printed.version)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(workload: &str, memories: u64) -> Row {
        let figure = Figure { best: 1.0, median: 2.0, repeats: 20 };
        Row {
            pass: format!("the pass {workload}"),
            workload: workload.to_owned(),
            memories,
            bytes: 4_000_000,
            device: figure,
            call: Figure { median: 3.0, ..figure },
            of_copy: Some(0.875),
            promised_ms: None,
            peers: Vec::new(),
        }
    }

    #[test]
    fn peer_figures_match_rows_by_workload_and_size() {
        let mut rows = [row("rank", 10), row("rank", 20), row("top", 10), row("", 10)];
        let printed = r#"{"version": "2.9", "rows": [
            {"workload": "rank", "memories": 10, "best": 0.5, "median": 0.75, "repeats": 9},
            {"workload": "else", "memories": 10, "best": 1, "median": 1, "repeats": 1}]}"#;
        let result = add(&mut rows, "torch", printed).unwrap();
        assert_eq!(result.detail, "torch 2.9: 1 rows");
        let figure = Figure { best: 0.5, median: 0.75, repeats: 9 };
        assert_eq!(rows[0].peers, [Peer { name: "torch".to_owned(), device: figure }]);
        assert!(rows[1..].iter().all(|row| row.peers.is_empty()));
    }

    #[test]
    fn missing_peer_is_skipped_and_peer_without_results_fails() {
        let result = add(&mut [row("rank", 10)], "cupy", r#"{"skipped": "No module named 'cupy'"}"#).unwrap();
        assert_eq!(result.skipped.as_deref(), Some("No module named 'cupy'"));
        assert!(add(&mut [row("rank", 10)], "cupy", r#"{"version": "1", "rows": []}"#).is_err());
        assert!(add(&mut [row("rank", 10)], "cupy", "Segmentation fault").is_err());
    }
}
