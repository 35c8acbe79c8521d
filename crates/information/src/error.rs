//! Errors of this crate.

/// Why an argument was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A number that is not finite.
    #[error("{name}[{index}]: {value} is not allowed; allowed: finite numbers")]
    NotFinite {
        /// Name of the argument.
        name: &'static str,
        /// Flat index.
        index: usize,
        /// The refused value.
        value: f64,
    },
    /// A number out of its range.
    #[error("{name}: {value:?} is not allowed; allowed: {allowed}")]
    Range {
        /// Name of the argument.
        name: &'static str,
        /// The refused value.
        value: f64,
        /// The range.
        allowed: &'static str,
    },
    /// Two dimensions that must agree differ.
    #[error("{what}: {found} is not allowed; allowed: {expected}")]
    Dimension {
        /// The dimension.
        what: &'static str,
        /// The dimension of the argument.
        found: usize,
        /// The dimension that fits.
        expected: usize,
    },
    /// Partial sums do not cover every leaf exactly once.
    #[error("leaf {leaf} is covered {times} times by the partial sums; allowed: once")]
    Coverage {
        /// First leaf with another count.
        leaf: usize,
        /// How often it is covered.
        times: usize,
    },
    /// The matrix has no inverse at this damping.
    #[error("damping: {damping:?} is not allowed for a singular Fisher matrix; allowed: a positive number")]
    Singular {
        /// The refused damping.
        damping: f64,
    },
}

impl Error {
    pub(crate) fn dimension(what: &'static str, found: usize, expected: usize) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self::Dimension { what, found, expected }) }
    }

    pub(crate) fn finite(name: &'static str, values: impl IntoIterator<Item = f64>) -> Result<(), Self> {
        let refused = values.into_iter().enumerate().find(|(_, value)| !value.is_finite());
        refused.map_or(Ok(()), |(index, value)| Err(Self::NotFinite { name, index, value }))
    }
}
