//! One measured figure, its budget and what it is compared with: the form in which a measuring program hands its results to
//! `cargo xtask bench`, which prints the table.
//!
//! `xtask` includes this file as it is, so that neither side depends on the other's libraries.

use serde::{Deserialize, Serialize};

/// What one suite measured.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Threads that the measured code was given.
    pub threads: u32,
    /// The figures, in the order in which they are printed. Rows of one `title` follow each other.
    pub rows: Vec<Row>,
}

/// One measured figure.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// What was measured, for people: `learning epoch, 10,000 updates by slot`.
    pub title: String,
    /// The name under which peers measure the same work (`epoch-by-slot`); empty where they have nothing like it.
    #[serde(default)]
    pub workload: String,
    /// How many memories the store held.
    pub memories: u64,
    /// The unit of every figure of this row: `ms`, `us`, `M updates/s`.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
    /// What was measured.
    pub ours: Figure,
    /// The same work, or a floor under it, measured by others in the same run.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// What was promised.
    #[serde(default)]
    pub budgets: Vec<Budget>,
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// Times.
    Lower,
    /// Rates.
    Higher,
}

/// The figures of all repeats, summed up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// The best repeat: the shortest time, or the highest rate.
    pub best: f64,
    /// The median of the repeats.
    pub median: f64,
    /// How many repeats.
    pub repeats: u32,
}

/// What somebody else needed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// Who: `numpy`, `torch`, `tonic echo`, `memory read`.
    pub name: String,
    /// In the unit of the row.
    pub figure: Figure,
}

/// What was promised for a row. Medians are compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Budget {
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

impl Better {
    /// How many times as good `ours` is as `theirs`: above 1 is better.
    #[must_use]
    pub fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Self::Lower => theirs / ours,
            Self::Higher => ours / theirs,
        }
    }
}
