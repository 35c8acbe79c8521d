//! Constructors of rows; peers and budgets are added to them.

use crate::row::{Better, Budget, Figure, Peer, Row, Workload};

impl Row {
    /// Creates a row whose lower figures are better.
    pub(crate) fn lower(title: impl Into<String>, memories: u32, unit: &str, ours: Figure) -> Self {
        Self::new(title.into(), memories, unit, Better::Lower, ours)
    }

    /// Creates a row whose higher figures are better.
    pub(crate) fn higher(title: impl Into<String>, memories: u32, unit: &str, ours: Figure) -> Self {
        Self::new(title.into(), memories, unit, Better::Higher, ours)
    }

    fn new(title: String, memories: u32, unit: &str, better: Better, ours: Figure) -> Self {
        Self {
            title,
            workloads: Vec::new(),
            memories: u64::from(memories),
            unit: unit.to_owned(),
            better,
            ours,
            peers: Vec::new(),
            budgets: Vec::new(),
        }
    }

    /// Adds a workload of peers.
    pub(crate) fn workload(mut self, name: &str) -> Self {
        self.workloads.push(Workload { name: name.to_owned(), remark: String::new() });
        self
    }

    /// Adds the figure of a peer.
    pub(crate) fn with_peer(mut self, name: &str, figure: Figure) -> Self {
        self.peers.push(Peer { name: name.to_owned(), figure });
        self
    }

    /// Adds budgets.
    pub(crate) fn with_budgets(mut self, budgets: impl IntoIterator<Item = Budget>) -> Self {
        self.budgets.extend(budgets);
        self
    }
}
