//! One measured figure, its budget and what it is compared with: the form in which a measuring program hands its results to
//! `cargo xtask bench`, which prints the table.
//!
//! `xtask` includes this file as it is, so that neither side depends on the other's libraries.

use serde::{Deserialize, Serialize};

/// What one suite measured.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Threads that the measured code was given.
    pub(crate) threads: u32,
    /// The figures, in the order in which they are printed. Rows of one `title` follow each other.
    pub(crate) rows: Vec<Row>,
}

/// One measured figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What was measured, for people: `learning epoch, 10,000 updates by slot`.
    pub(crate) title: String,
    /// What the peers in `benchmarks/peers` call the same work; empty where they have nothing like it.
    #[serde(default)]
    pub(crate) workloads: Vec<Workload>,
    /// How many memories the store held.
    pub(crate) memories: u64,
    /// The unit of every figure of this row: `ms`, `us`, `M updates/s`.
    pub(crate) unit: String,
    /// Which way is better.
    pub(crate) better: Better,
    /// What was measured.
    pub(crate) ours: Figure,
    /// The same work, or a floor under it, measured by others in the same run.
    #[serde(default)]
    pub(crate) peers: Vec<Peer>,
    /// What was promised.
    #[serde(default)]
    pub(crate) budgets: Vec<Budget>,
}

/// The same work, done by a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// The name in `benchmarks/peers`: `rank-random-by-id`.
    pub(crate) name: String,
    /// What the table and the budgets add to the peer's name: `, by id`.
    #[serde(default)]
    pub(crate) remark: String,
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Better {
    /// Times.
    Lower,
    /// Rates.
    Higher,
}

/// The figures of all repeats, summed up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The best repeat: the shortest time, or the highest rate.
    pub(crate) best: f64,
    /// The median of the repeats.
    pub(crate) median: f64,
    /// How many repeats.
    pub(crate) repeats: u32,
}

/// What somebody else needed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Who: `numpy`, `torch`, `tonic echo`, `memory read`.
    pub(crate) name: String,
    /// In the unit of the row.
    pub(crate) figure: Figure,
}

/// What was promised for a row. Medians are compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Budget {
    /// At least this many times as good as a peer of the same run.
    Ratio {
        /// The peer's name.
        peer: String,
        /// 6 means: six times as fast.
        at_least: f64,
    },
    /// At least this good, in the unit of the row.
    Absolute(f64),
}
