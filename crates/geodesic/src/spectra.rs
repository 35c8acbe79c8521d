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

/// A measured spectrum of unknown concentration.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Its name in reports.
    pub name: String,
    /// Absorbance per wavelength of the spectra it came with.
    pub absorbance: Vec<f64>,
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
        let (spectra, samples) = Self::with_samples(text)?;
        match samples.first() {
            None => Ok(spectra),
            Some(sample) => Err(Error::Table(format!("row {:?} has no concentration", sample.name))),
        }
    }

    /// As [`from_csv`](Self::from_csv); rows whose first cell is a question mark, with or without a name after it, are
    /// samples of unknown concentration, in the order of the table.
    ///
    /// # Errors
    /// As [`from_csv`](Self::from_csv).
    pub fn with_samples(text: &str) -> Result<(Self, Vec<Sample>), Error> {
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
        let (mut ppb, mut rows, mut samples) = (Vec::new(), Vec::new(), Vec::new());
        for (line, row) in lines {
            let cells: Vec<&str> = row.split(',').map(str::trim).collect();
            if cells.len() > names.len() {
                let problem = format!("line {} has {} cells, the header has {}", line + 1, cells.len(), names.len());
                return Err(Error::Table(problem));
            }
            let unknown = cells[0].strip_prefix('?');
            if unknown.is_none() {
                ppb.push(cell(line, cells[0], names[0], cells[0])?);
            }
            let mut values = Vec::with_capacity(nm.len());
            for (i, name) in names.iter().enumerate().skip(1) {
                values.push(cell(line, cells[0], name, cells.get(i).copied().unwrap_or(""))?);
            }
            match unknown.map(str::trim) {
                None => rows.push(values),
                Some("") => samples.push((format!("sample {}", samples.len() + 1), values)),
                Some(name) => samples.push((name.to_owned(), values)),
            }
            if (rows.len() + samples.len()) * nm.len() > MAX_CELLS {
                return Err(Error::Table(format!("more than {MAX_CELLS} cells")));
            }
        }
        if rows.is_empty() {
            return Err(Error::Table("no rows of spectra".into()));
        }
        let (by_row, by_column) = (order(&ppb), order(&nm));
        let sorted = |row: &[f64]| by_column.iter().map(|&c| row[c]).collect::<Vec<f64>>();
        let absorbance = by_row.iter().flat_map(|&r| sorted(&rows[r])).collect();
        let samples =
            samples.iter().map(|(name, row)| Sample { name: name.clone(), absorbance: sorted(row) }).collect();
        let nm = by_column.iter().map(|&c| nm[c]).collect();
        Ok((Self::new(by_row.iter().map(|&r| ppb[r]).collect(), nm, absorbance)?, samples))
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

    /// Standard deviation of all absorbances, at least 1e-12.
    pub(crate) fn deviation(&self) -> f64 {
        let n = self.absorbance.len() as f64;
        let mean = self.absorbance.iter().sum::<f64>() / n;
        (self.absorbance.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / n).sqrt().max(1e-12)
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
    fn rows_without_concentration_are_samples_with_sorted_columns() {
        let text = "ppb,201,200\n? river,5,4\n10,2,1\n?,7,6\n0,0,0\n";
        let (spectra, samples) = Spectra::with_samples(text).unwrap();
        assert_eq!((spectra.ppb(), spectra.row(1)), (&[0.0, 10.0][..], &[1.0, 2.0][..]));
        let read: Vec<_> = samples.iter().map(|it| (&*it.name, &*it.absorbance)).collect();
        assert_eq!(read, [("river", &[4.0, 5.0][..]), ("sample 2", &[6.0, 7.0][..])]);
        assert!(matches!(Spectra::from_csv(text), Err(Error::Table(problem)) if problem.contains("river")));
        let missing = Spectra::with_samples("ppb,200,201\n0,1,2\n? a,1,\n").unwrap_err();
        assert!(matches!(missing, Error::Cell { line: 3, .. }), "{missing}");
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
