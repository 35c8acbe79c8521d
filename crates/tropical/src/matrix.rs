//! Dense matrices of extended reals without positive infinity.

use crate::Error;

/// The two tropical semirings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Semiring {
    /// Addition is the maximum: longest paths, Viterbi decoding.
    #[default]
    MaxPlus,
    /// Addition is the minimum: shortest paths. Computed as max-plus on negated values, where missing is positive infinity.
    MinPlus,
}

/// A dense matrix in row-major order. Entries are finite or negative infinity; zeros are +0.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    entries: Vec<f32>,
}

impl Matrix {
    /// Creates a `rows` x `columns` matrix from row-major `entries`. `name` is used in errors.
    ///
    /// # Errors
    /// The number of entries differs from `rows * columns`, or an entry is NaN or positive infinity.
    pub fn new(name: &'static str, rows: usize, columns: usize, mut entries: Vec<f32>) -> Result<Self, Error> {
        Error::dimension("number of entries", entries.len(), rows * columns)?;
        for (index, entry) in entries.iter_mut().enumerate() {
            if entry.is_nan() || *entry == f32::INFINITY {
                return Err(Error::Entry { name, row: index / columns, column: index % columns, value: *entry });
            }
            // -0 + +0 is +0.
            *entry += 0.0;
        }
        Ok(Self { rows, columns, entries })
    }

    /// Creates a matrix of missing entries (negative infinity), the zero of the semiring.
    pub fn missing(rows: usize, columns: usize) -> Self {
        Self { rows, columns, entries: vec![f32::NEG_INFINITY; rows * columns] }
    }

    /// Creates the identity of the product: 0 on the diagonal, missing elsewhere.
    pub fn identity(size: usize) -> Self {
        let mut identity = Self::missing(size, size);
        for index in 0..size {
            identity.entries[index * size + index] = 0.0;
        }
        identity
    }

    pub(crate) const fn from_entries(rows: usize, columns: usize, entries: Vec<f32>) -> Self {
        Self { rows, columns, entries }
    }

    /// Returns the number of rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the row-major entries.
    pub fn entries(&self) -> &[f32] {
        &self.entries
    }

    /// Returns one row.
    ///
    /// # Panics
    /// `row` is out of range.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.entries[row * self.columns..][..self.columns]
    }

    /// Returns the transposed matrix.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let mut entries = Vec::with_capacity(self.entries.len());
        for column in 0..self.columns {
            entries.extend((0..self.rows).map(|row| self.entries[row * self.columns + column]));
        }
        Self { rows: self.columns, columns: self.rows, entries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_entry_is_named_by_row_column_and_value() {
        let refused = Matrix::new("left", 2, 2, vec![0.0, 1.0, 2.0, f32::INFINITY]).unwrap_err();
        assert_eq!(refused.to_string(), "left[1][1]: inf is not allowed; allowed: finite numbers and -inf");
        assert!(Matrix::new("left", 1, 2, vec![0.0, f32::NAN]).is_err());
        assert!(Matrix::new("left", 1, 2, vec![0.0]).unwrap_err().to_string().contains('2'));
    }

    #[test]
    fn negative_zero_is_stored_as_positive_zero() {
        let matrix = Matrix::new("a", 1, 2, vec![-0.0, f32::NEG_INFINITY]).unwrap();
        assert_eq!(matrix.entries()[0].to_bits(), 0);
        assert_eq!(matrix.entries()[1], f32::NEG_INFINITY);
    }
}
