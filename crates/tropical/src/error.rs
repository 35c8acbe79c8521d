//! Errors of this crate.

/// Why an argument was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An entry is NaN or positive infinity.
    #[error("{name}[{row}][{column}]: {value} is not allowed; allowed: finite numbers and -inf")]
    Entry {
        /// Name of the argument.
        name: &'static str,
        /// Row of the entry.
        row: usize,
        /// Column of the entry.
        column: usize,
        /// The refused value.
        value: f32,
    },
    /// Two dimensions that must agree differ.
    #[error("{what}: {found} is not allowed; allowed: {expected}")]
    Dimension {
        /// The dimension, such as `rows of the right matrix`.
        what: &'static str,
        /// The dimension of the argument.
        found: usize,
        /// The dimension that fits.
        expected: usize,
    },
    /// A temperature that is not positive and finite.
    #[error("temperature: {0} is not allowed; allowed: a positive finite number")]
    Temperature(f32),
    /// No state sequence has a probability above zero.
    #[error("observations[{step}]: no state is reachable at this step")]
    Unreachable {
        /// First step at which every state has the value negative infinity.
        step: usize,
    },
    /// An argument that must not be empty is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
}

impl Error {
    pub(crate) fn dimension(what: &'static str, found: usize, expected: usize) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self::Dimension { what, found, expected }) }
    }
}
