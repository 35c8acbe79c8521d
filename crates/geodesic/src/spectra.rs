//! Spectra at several concentrations, and their CSV form.

use crate::error::{Error, increasing};

/// Most cells of a table: 16 Mi values are 128 MiB.
const MAX_CELLS: usize = 1 << 24;

/// Absorbance [concentration, wavelength] on two increasing axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Spectra {
    ppb: Vec<f64>,
    nm: Vec<f64>,
    absorbance: Vec<f64>,
}

/// The concentrations of the reference task, in ppb.
pub const REFERENCE_PPB: [f64; 6] = [0.0, 10.0, 20.0, 30.0, 40.0, 60.0];

/// The wavelengths of the reference task: 200 to 800 nm in steps of 1 nm.
pub fn reference_nm() -> Vec<f64> {
    (200..=800).map(f64::from).collect()
}

impl Spectra {
    /// Spectra on increasing axes: concentrations in ppb, wavelengths in nm, `absorbance` [concentration, wavelength].
    ///
    /// # Errors
    /// If an axis is not strictly increasing, the length does not fit, or a value is not finite.
    pub fn new(ppb: Vec<f64>, nm: Vec<f64>, absorbance: Vec<f64>) -> Result<Self, Error> {
        increasing("concentrations", &ppb, 1)?;
        increasing("wavelengths", &nm, 2)?;
        let expected = ppb.len() * nm.len();
        if absorbance.len() != expected {
            return Err(Error::Length { field: "absorbance", actual: absorbance.len(), expected });
        }
        if let Some(&value) = absorbance.iter().find(|a| !a.is_finite()) {
            return Err(Error::Range { field: "absorbance", value, allowed: "finite" });
        }
        Ok(Self { ppb, nm, absorbance })
    }

    /// Reads a table: the first row holds a label and the wavelengths in nm, each further row a concentration in ppb and
    /// its absorbances, separated by commas. Rows and columns may come in any order and are sorted. Blank lines and
    /// lines that start with `#` are skipped.
    ///
    /// # Errors
    /// [`Error::Cell`] with row and column for a missing or malformed cell, [`Error::Table`] for a table without data,
    /// with rows of different length, or with more than 16 Mi cells, [`Error::Order`] for a repeated axis value.
    pub fn from_csv(text: &str) -> Result<Self, Error> {
        let mut lines = text
            .trim_start_matches('\u{feff}')
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
        let (header_line, header) = lines.next().ok_or_else(|| Error::Table("no header row".into()))?;
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let mut nm = Vec::new();
        for name in &names[1..] {
            nm.push(cell(header_line, "header", name, name)?);
        }
        let (mut ppb, mut rows) = (Vec::new(), Vec::new());
        for (line, row) in lines {
            let cells: Vec<&str> = row.split(',').map(str::trim).collect();
            if cells.len() > names.len() {
                let problem = format!("line {} has {} cells, the header has {}", line + 1, cells.len(), names.len());
                return Err(Error::Table(problem));
            }
            ppb.push(cell(line, cells[0], names[0], cells[0])?);
            let mut values = Vec::with_capacity(nm.len());
            for (i, name) in names.iter().enumerate().skip(1) {
                values.push(cell(line, cells[0], name, cells.get(i).copied().unwrap_or(""))?);
            }
            rows.push(values);
            if rows.len() * nm.len() > MAX_CELLS {
                return Err(Error::Table(format!("more than {MAX_CELLS} cells")));
            }
        }
        if rows.is_empty() {
            return Err(Error::Table("no rows of spectra".into()));
        }
        let (by_row, by_column) = (order(&ppb), order(&nm));
        let absorbance =
            by_row.iter().flat_map(|&r| by_column.iter().map(|&c| rows[r][c]).collect::<Vec<_>>()).collect();
        Self::new(by_row.iter().map(|&r| ppb[r]).collect(), by_column.iter().map(|&c| nm[c]).collect(), absorbance)
    }

    /// Writes the table that [`from_csv`](Self::from_csv) reads, with all digits.
    pub fn to_csv(&self) -> String {
        let mut out = "ppb".to_owned();
        self.nm.iter().for_each(|nm| out.push_str(&format!(",{nm}")));
        for (i, ppb) in self.ppb.iter().enumerate() {
            out.push_str(&format!("\n{ppb}"));
            self.row(i).iter().for_each(|a| out.push_str(&format!(",{a}")));
        }
        out.push('\n');
        out
    }

    /// Concentrations in ppb.
    pub fn ppb(&self) -> &[f64] {
        &self.ppb
    }

    /// Wavelengths in nm.
    pub fn nm(&self) -> &[f64] {
        &self.nm
    }

    /// The spectrum at concentration number `i`.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.absorbance[i * self.nm.len()..(i + 1) * self.nm.len()]
    }

    /// The spectra without concentration number `i`.
    ///
    /// # Errors
    /// If fewer than 2 spectra remain or `i` does not exist.
    pub fn without(&self, i: usize) -> Result<Self, Error> {
        if i >= self.ppb.len() || self.ppb.len() < 3 {
            return Err(Error::Length { field: "concentrations", actual: self.ppb.len(), expected: (i + 1).max(3) });
        }
        let mut rest = self.clone();
        rest.ppb.remove(i);
        rest.absorbance.drain(i * self.nm.len()..(i + 1) * self.nm.len());
        Ok(rest)
    }

    /// The same axes with spectrum `i` replaced.
    ///
    /// # Errors
    /// If the length differs or a value is not finite.
    pub fn with_row(&self, i: usize, row: &[f64]) -> Result<Self, Error> {
        if row.len() != self.nm.len() {
            return Err(Error::Length { field: "row", actual: row.len(), expected: self.nm.len() });
        }
        let mut absorbance = self.absorbance.clone();
        absorbance[i * self.nm.len()..(i + 1) * self.nm.len()].copy_from_slice(row);
        Self::new(self.ppb.clone(), self.nm.clone(), absorbance)
    }
}

/// Positions of `values` in increasing order.
fn order(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    order
}

fn cell(line: usize, row: &str, column: &str, text: &str) -> Result<f64, Error> {
    let problem = match text.parse::<f64>() {
        Ok(value) if value.is_finite() => return Ok(value),
        _ if text.is_empty() => "the cell is missing".to_owned(),
        _ => format!("{text:?} is not a finite number"),
    };
    Err(Error::Cell { line: line + 1, row: row.to_owned(), column: column.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permuted_rows_and_columns_give_the_same_spectra() {
        let sorted = Spectra::from_csv("ppb,200,201,202\n0,1,2,3\n10,4,5,6\n").unwrap();
        let permuted = Spectra::from_csv("# instrument 7\nppb,202,200,201\n\n10, 6,4,5\n0,3,1,2").unwrap();
        assert_eq!(sorted, permuted);
        assert_eq!(Spectra::from_csv(&sorted.to_csv()).unwrap(), sorted);
    }

    #[test]
    fn missing_cells_are_refused_with_row_and_column() {
        for text in ["ppb,200,201\n0,1,2\n10,4,\n", "ppb,200,201\n0,1,2\n10,4\n", "ppb,200,201\n0,1,2\n10,4,nan\n"] {
            let error = Spectra::from_csv(text).unwrap_err();
            assert!(
                matches!(&error, Error::Cell { line: 3, row, column, .. } if row == "10" && column == "201"),
                "{error}"
            );
        }
        assert!(matches!(Spectra::from_csv("ppb,200,201\n5,1,2\n5,1,2\n"), Err(Error::Order { .. })));
    }
}
