//! Measured figures with budgets and peers: the format in which a measuring program returns its results to `cargo xtask bench`, which prints the
//! table.
//!
//! `xtask` includes this file directly, so that neither side depends on the other's libraries.

use serde::{Deserialize, Serialize};

/// Results of one suite.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Threads of the measured code.
    pub(crate) threads: u32,
    /// Figures in display order. Rows with the same `title` are adjacent.
    pub(crate) rows: Vec<Row>,
}

/// One measured figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Display name: `learning epoch, 10,000 updates by slot`.
    pub(crate) title: String,
    /// Equivalent workloads in `benchmarks/peers`; empty if there are none.
    #[serde(default)]
    pub(crate) workloads: Vec<Workload>,
    /// Number of memories in the store.
    pub(crate) memories: u64,
    /// Unit of every figure of this row: `ms`, `us`, `M updates/s`.
    pub(crate) unit: String,
    /// Whether lower or higher figures are better.
    pub(crate) better: Better,
    /// The measured figure.
    pub(crate) ours: Figure,
    /// The same work, or a lower bound of it, measured for peers in the same run.
    #[serde(default)]
    pub(crate) peers: Vec<Peer>,
    /// Budgets of the row.
    #[serde(default)]
    pub(crate) budgets: Vec<Budget>,
}

/// A workload of peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// Name in `benchmarks/peers`: `rank-random-by-id`.
    pub(crate) name: String,
    /// Suffix of the peer's name in the table and in budgets: `, by id`.
    #[serde(default)]
    pub(crate) remark: String,
}

/// Direction of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Better {
    /// For durations.
    Lower,
    /// For rates.
    Higher,
}

/// Summary of all repeats.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The best repeat: the shortest time, or the highest rate.
    pub(crate) best: f64,
    /// The median of the repeats.
    pub(crate) median: f64,
    /// Number of repeats.
    pub(crate) repeats: u32,
}

/// Figure of a peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Name of the peer: `numpy`, `torch`, `tonic echo`, `memory read`.
    pub(crate) name: String,
    /// Figure in the unit of the row.
    pub(crate) figure: Figure,
}

/// Budget of a row. Medians are compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Budget {
    /// At least this many times better than a peer of the same run.
    Ratio {
        /// Name of the peer.
        peer: String,
        /// 6 means six times faster.
        at_least: f64,
    },
    /// At least this good, in the unit of the row.
    Absolute(f64),
}
