//! Errors of this crate.

use thiserror::Error;

/// An argument or an input is outside what is allowed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Error {
    /// A number lies outside its range.
    #[error("{field} is {value:?}, must be {allowed}")]
    Range {
        /// Name of the argument or field.
        field: &'static str,
        /// The value received.
        value: f64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A length differs from what the other arguments imply.
    #[error("{field} has {actual} values, must have {expected}")]
    Length {
        /// Name of the argument or field.
        field: &'static str,
        /// Number of values received.
        actual: usize,
        /// Number of values required.
        expected: usize,
    },
    /// An axis is not strictly increasing.
    #[error("{axis} must be strictly increasing, but value {index} is {value:?}")]
    Order {
        /// Name of the axis.
        axis: &'static str,
        /// Position of the first value that is not above its predecessor.
        index: usize,
        /// That value.
        value: f64,
    },
    /// A cell of a CSV text is missing or is not a finite number.
    #[error("csv line {line} ({row}), column {column:?}: {problem}")]
    Cell {
        /// Line of the text, counted from 1.
        line: usize,
        /// Name of the row: the value of its first cell.
        row: String,
        /// Name of the column: its header.
        column: String,
        /// What is wrong.
        problem: String,
    },
    /// A CSV text as a whole is not a table of spectra.
    #[error("csv: {0}")]
    Table(String),
    /// Encoded bytes can not be decoded.
    #[error("{object}: {problem}")]
    Encoding {
        /// What was decoded.
        object: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A cached value belongs to another metric.
    #[error("{object} belongs to metric version {found:032x}, but the metric is at version {expected:032x}")]
    Stale {
        /// What is stale.
        object: &'static str,
        /// Version found in the object.
        found: u128,
        /// Version of the metric in use.
        expected: u128,
    },
    /// A file can not be read or written.
    #[error("failed to {action}: {problem}")]
    File {
        /// What failed, with the name of the file.
        action: String,
        /// Error of the operating system.
        problem: String,
    },
    /// The engine does not support the operation.
    #[error("engine {engine} does not support {operation}")]
    Unsupported {
        /// Name of the engine.
        engine: &'static str,
        /// The operation.
        operation: &'static str,
    },
    /// A geodesic was not found.
    #[error(
        "{engine} did not solve the geodesic from {start:?} to {end:?} at wavelength {wavelength:?}: residual {residual:e}"
    )]
    NotSolved {
        /// Name of the engine.
        engine: &'static str,
        /// Normalised concentration at the start.
        start: f64,
        /// Normalised concentration at the end.
        end: f64,
        /// Normalised wavelength.
        wavelength: f64,
        /// Distance of the end point.
        residual: f64,
    },
    /// A report lacks results.
    #[error("report is incomplete: {0}")]
    Incomplete(String),
}

/// Refuses values that are not finite or lie outside `[low, high]`.
pub(crate) fn in_range(
    field: &'static str,
    value: f64,
    low: f64,
    high: f64,
    allowed: &'static str,
) -> Result<(), Error> {
    if value.is_finite() && value >= low && value <= high {
        Ok(())
    } else {
        Err(Error::Range { field, value, allowed })
    }
}

/// Refuses an axis with fewer than `least` values, with values that are not finite, or that is not strictly increasing.
pub(crate) fn increasing(axis: &'static str, values: &[f64], least: usize) -> Result<(), Error> {
    if values.len() < least {
        return Err(Error::Length { field: axis, actual: values.len(), expected: least });
    }
    for (index, &value) in values.iter().enumerate() {
        if !value.is_finite() || (index > 0 && value <= values[index - 1]) {
            return Err(Error::Order { axis, index, value });
        }
    }
    Ok(())
}
