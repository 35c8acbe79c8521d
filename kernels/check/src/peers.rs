//! The same work, done by others on the same device.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::report::{Figure, Found, Peer, Row};
use crate::{child, machine};

/// Keys in the order of ids, u32, little-endian; smaller ones come first.
pub(crate) const KEYS: &str = "keys";
/// The slots that they belong to, u32.
pub(crate) const SLOTS: &str = "slots";
/// The slots as they are ranked, u32: what a peer must give, too.
pub(crate) const ORDER: &str = "order";

const CUB: &str = include_str!("../peers/cub_rank.cu");
const PYTHON: &str = include_str!("../peers/gpu_peer.py");
/// The row that CUB does the same work as.
const SORTED: &str = "sort";

/// What a Python peer prints.
#[derive(Deserialize)]
struct Printed {
    /// Why it cannot run here.
    #[serde(default)]
    skipped: Option<String>,
    #[serde(default)]
    version: String,
    #[serde(default)]
    rows: Vec<PrintedRow>,
}

#[derive(Deserialize)]
struct PrintedRow {
    workload: String,
    memories: u64,
    /// Milliseconds.
    #[serde(flatten)]
    figure: Figure,
}

/// CUB's sort, compiled here for the device's architecture. Its order must be ours before its time counts.
///
/// # Errors
/// When it does not compile or run, or gives another order.
pub(crate) fn cub(rows: &mut [Row], scratch: &Path, capability: &str, device: usize, repeats: usize) -> Result<Found> {
    let Some(nvcc) = machine::program("nvcc") else { return Ok(Found::skipped(machine::lacking("nvcc"))) };
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
    let figure: Figure = serde_json::from_str(&printed).context("cub_rank did not print its figure")?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("failed to read {}", path.display()));
    ensure!(read(&out)? == read(&scratch.join(ORDER))?, "CUB gives another order than ours: one of them is wrong");

    let row = rows.iter_mut().find(|row| row.workload == SORTED).context("there is no sort to stand beside")?;
    let ratio = figure.median / row.device.median;
    row.peers.push(Peer { name: "CUB".to_owned(), device: figure });
    Ok(Found::done(format!("the same order of {} memories; ours is {ratio:.2} times as fast", row.memories)))
}

/// A Python library, where it is installed.
///
/// # Errors
/// When it fails.
pub(crate) fn python(rows: &mut [Row], scratch: &Path, peer: &str, device: usize, repeats: usize) -> Result<Found> {
    let Some(python) = machine::program("python3") else { return Ok(Found::skipped(machine::lacking("python3"))) };
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

fn add(rows: &mut [Row], peer: &str, printed: &str) -> Result<Found> {
    let printed: Printed =
        serde_json::from_str(printed).with_context(|| format!("{peer} did not print its figures"))?;
    if let Some(why) = printed.skipped {
        return Ok(Found::skipped(why));
    }
    let mut beside = 0;
    for PrintedRow { workload, memories, figure } in printed.rows {
        for row in rows.iter_mut().filter(|row| row.workload == workload && row.memories == memories) {
            row.peers.push(Peer { name: peer.to_owned(), device: figure });
            beside += 1;
        }
    }
    ensure!(beside > 0, "{peer} did nothing that we do");
    Ok(Found::done(format!("{peer} {}: {beside} rows", printed.version)))
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
    fn figures_of_a_peer_stand_beside_the_same_work_of_the_same_size() {
        let mut rows = [row("rank", 10), row("rank", 20), row("top", 10), row("", 10)];
        let printed = r#"{"version": "2.9", "rows": [
            {"workload": "rank", "memories": 10, "best": 0.5, "median": 0.75, "repeats": 9},
            {"workload": "else", "memories": 10, "best": 1, "median": 1, "repeats": 1}]}"#;
        let found = add(&mut rows, "torch", printed).unwrap();
        assert_eq!(found.detail, "torch 2.9: 1 rows");
        let figure = Figure { best: 0.5, median: 0.75, repeats: 9 };
        assert_eq!(rows[0].peers, [Peer { name: "torch".to_owned(), device: figure }]);
        assert!(rows[1..].iter().all(|row| row.peers.is_empty()));
    }

    #[test]
    fn a_peer_that_is_not_there_is_skipped_and_one_that_did_nothing_failed() {
        let found = add(&mut [row("rank", 10)], "cupy", r#"{"skipped": "No module named 'cupy'"}"#).unwrap();
        assert_eq!(found.skipped.as_deref(), Some("No module named 'cupy'"));
        assert!(add(&mut [row("rank", 10)], "cupy", r#"{"version": "1", "rows": []}"#).is_err());
        assert!(add(&mut [row("rank", 10)], "cupy", "Segmentation fault").is_err());
    }
}
