//! The Python peers: installed into virtual environments of their own, run, and their figures added to the rows.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::row::{Figure, Peer, Report};
use crate::{process, tools, workspace};

/// PyTorch's own index has packages for the CPU alone, a tenth of the size of PyPI's.
const TORCH_CPU_INDEX: &str = "https://download.pytorch.org/whl/cpu";

/// How long PyTorch's index may take to answer before PyPI is asked instead.
const REACH: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Numpy,
    Torch,
}

/// What a peer prints.
#[derive(Deserialize)]
struct Measured {
    peer: String,
    version: String,
    threads: u32,
    rows: Vec<MeasuredRow>,
}

#[derive(Deserialize)]
struct MeasuredRow {
    workload: String,
    memories: u64,
    /// Milliseconds.
    #[serde(flatten)]
    figure: Figure,
}

/// Lets one peer do the work of `suite` and adds its figures to the rows of the same workload and size.
///
/// Returns its name, version and threads, for people.
///
/// # Errors
/// When it cannot be installed or run.
pub(super) fn add(report: &mut Report, kind: Kind, suite: &str, memories: &[String]) -> Result<String> {
    let program = match kind {
        Kind::Numpy => "numpy_peer.py",
        Kind::Torch => "torch_peer.py",
    };
    let mut command = Command::new(install(kind)?);
    command.current_dir(workspace::root().join("benchmarks/peers")).args([program, suite, "--memories"]).args(memories);
    // No `__pycache__` in the checkout.
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let measured: Measured = serde_json::from_str(&process::read(&mut command)?)
        .with_context(|| format!("{program} did not print its figures"))?;
    for row in &mut report.rows {
        let scale = if row.unit == "us" { 1e3 } else { 1.0 };
        for workload in &row.workloads {
            let same = |other: &&MeasuredRow| other.workload == workload.name && other.memories == row.memories;
            if let Some(MeasuredRow { figure, .. }) = measured.rows.iter().find(same) {
                let Figure { best, median, repeats } = *figure;
                let figure = Figure { best: best * scale, median: median * scale, repeats };
                row.peers.push(Peer { name: format!("{}{}", measured.peer, workload.remark), figure });
            }
        }
    }
    let threads = if measured.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", measured.threads) };
    Ok(format!("{} {} ({threads})", measured.peer, measured.version))
}

fn install(kind: Kind) -> Result<std::path::PathBuf> {
    match kind {
        Kind::Numpy => tools::python("peers/numpy", "numpy", &["numpy"]),
        Kind::Torch if cpu_index_answers() => {
            tools::python("peers/torch", "torch", &["torch", "--index-url", TORCH_CPU_INDEX])
        }
        Kind::Torch => tools::python("peers/torch", "torch", &["torch"]),
    }
}

/// Whether PyTorch's own index can be reached from here.
fn cpu_index_answers() -> bool {
    let mut probe = Command::new("python3");
    let program = format!("import urllib.request as r; r.urlopen('{TORCH_CPU_INDEX}/torch/', timeout=10)");
    process::capture_within(probe.args(["-c", &program]), REACH).is_ok_and(|output| output.status.success())
}
