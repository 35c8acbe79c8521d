//! Python peers: installs them into virtual environments, runs them, and adds their figures to the rows.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::row::{Figure, Peer, Report};
use crate::{process, tools, workspace};

/// PyTorch's own index has CPU-only packages, a tenth of the size of PyPI's.
const TORCH_CPU_INDEX: &str = "https://download.pytorch.org/whl/cpu";

/// Timeout of PyTorch's index, after which PyPI is used.
const REACH: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Numpy,
    Torch,
    /// PyTorch as the peer of trainings, with gloo as its transport.
    TorchTraining,
    TorchFt,
    Cpprb,
    TorchRl,
    Reverb,
    TransferQueue,
    TorchDiffEq,
    TorchOde,
    Diffrax,
    Flower,
}

impl Kind {
    pub(super) fn is_replay_buffer(self) -> bool {
        matches!(self, Self::Cpprb | Self::TorchRl | Self::Reverb | Self::TransferQueue)
    }

    /// Whether it solves differential equations.
    pub(super) fn is_solver(self) -> bool {
        matches!(self, Self::TorchDiffEq | Self::TorchOde | Self::Diffrax)
    }

    /// Returns the name of the peer.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::TorchFt => "torchft",
            Self::TorchTraining => "torch",
            _ => self.program().last().copied().unwrap_or_default(),
        }
    }

    /// Returns the program, and its first argument if it plays several peers.
    fn program(self) -> &'static [&'static str] {
        match self {
            Self::Numpy => &["numpy_peer.py"],
            Self::Torch => &["torch_peer.py"],
            Self::TorchTraining => &["training_peer.py"],
            Self::TorchFt => &["torchft_peer.py"],
            Self::Cpprb => &["replay_peer.py", "cpprb"],
            Self::TorchRl => &["replay_peer.py", "torchrl"],
            Self::Reverb => &["replay_peer.py", "reverb"],
            Self::TransferQueue => &["replay_peer.py", "transferqueue"],
            Self::TorchDiffEq => &["geodesic_peer.py", "torchdiffeq"],
            Self::TorchOde => &["geodesic_peer.py", "torchode"],
            Self::Diffrax => &["geodesic_peer.py", "diffrax"],
            Self::Flower => &["federated_peer.py"],
        }
    }
}

/// What became of a peer.
pub(super) enum Outcome {
    /// Its name, version and threads.
    Measured(String),
    /// Its name, and why it has no figures.
    Skipped(String),
}

/// As [`add`], but a replay buffer, solver or torchft that cannot be installed or run is reported as skipped: their packages depend on the machine.
///
/// # Errors
/// As [`add`], for other peers.
pub(super) fn add_or_skip(report: &mut Report, kind: Kind, suite: &str, memories: &[String]) -> Result<Outcome> {
    match add(report, kind, suite, memories) {
        Err(error) if kind.is_replay_buffer() || kind.is_solver() || kind == Kind::TorchFt => {
            let name = kind.name();
            eprintln!("skipped {name}: {error:#}");
            Ok(Outcome::Skipped(format!("{name}: {}", line(&format!("{error:#}")))))
        }
        other => other.map(Outcome::Measured),
    }
}

/// Returns a message as one line.
fn line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Output of a peer.
#[derive(Deserialize)]
struct PeerReport {
    peer: String,
    version: String,
    threads: u32,
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

/// Runs one peer for `suite` and adds its figures to the rows of the same workload and size.
///
/// Returns its name, version and threads for display.
///
/// # Errors
/// When it cannot be installed or run.
pub(super) fn add(report: &mut Report, kind: Kind, suite: &str, memories: &[String]) -> Result<String> {
    let program = kind.program();
    let mut command = Command::new(install(kind)?);
    command
        .current_dir(workspace::root().join("benchmarks/peers"))
        .args(program)
        .args([suite, "--memories"])
        .args(memories);
    // No `__pycache__` in the checkout.
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let measured: PeerReport = serde_json::from_str(&process::read(&mut command)?)
        .with_context(|| format!("failed to parse the output of {}", program.join(" ")))?;
    for row in &mut report.rows {
        let scale = if row.unit == "us" { 1e3 } else { 1.0 };
        for workload in &row.workloads {
            let same = |other: &&PeerRow| other.workload == workload.name && other.memories == row.memories;
            if let Some(PeerRow { figure, .. }) = measured.rows.iter().find(same) {
                let Figure { best, median, repeats } = *figure;
                let figure = Figure { best: best * scale, median: median * scale, repeats };
                row.peers.push(Peer { name: format!("{}{}", measured.peer, workload.remark), figure });
            }
        }
    }
    let threads = if measured.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", measured.threads) };
    Ok(format!("{} {} ({threads})", measured.peer, measured.version))
}

pub(super) fn install(kind: Kind) -> Result<std::path::PathBuf> {
    match kind {
        Kind::Numpy => tools::python("peers/numpy", "numpy", &["numpy"]),
        Kind::Torch | Kind::TorchTraining if cpu_index_answers() => {
            tools::python("peers/torch", "torch", &["torch", "--index-url", TORCH_CPU_INDEX])
        }
        Kind::Torch | Kind::TorchTraining => tools::python("peers/torch", "torch", &["torch"]),
        Kind::TorchFt => {
            install(Kind::Torch)?;
            tools::python("peers/torch", "torchft", &["torchft-nightly==2026.10.26"])
        }
        Kind::Flower => tools::python("peers/flwr", "flwr", &["flwr==1.42.0", "numpy"]),
        Kind::Cpprb => tools::python("peers/cpprb", "cpprb", &["cpprb==11.0.0"]),
        // In one environment: PyTorch is large.
        Kind::TorchRl if cpu_index_answers() => {
            let index = ["torch", "torchrl", "tensordict", "--extra-index-url", TORCH_CPU_INDEX];
            tools::python("peers/torch-replay", "torchrl", &index)
        }
        Kind::TorchRl => tools::python("peers/torch-replay", "torchrl", &["torch", "torchrl", "tensordict"]),
        Kind::TorchDiffEq | Kind::TorchOde => {
            install(Kind::Torch)?;
            tools::python("peers/torch", "torchdiffeq, torchode", &["torchdiffeq", "torchode"])
        }
        Kind::Diffrax => tools::python("peers/diffrax", "diffrax", &["diffrax", "jax"]),
        Kind::Reverb => tools::python("peers/reverb", "reverb", &["dm-reverb[tensorflow]==0.14.0"]),
        Kind::TransferQueue => tools::python("peers/torch-replay", "transfer_queue", &["TransferQueue==0.1.11"]),
    }
}

/// Returns whether PyTorch's own index is reachable.
fn cpu_index_answers() -> bool {
    let mut probe = Command::new("python3");
    let program = format!("import urllib.request as r; r.urlopen('{TORCH_CPU_INDEX}/torch/', timeout=10)");
    process::capture_within(probe.args(["-c", &program]), REACH).is_ok_and(|output| output.status.success())
}
