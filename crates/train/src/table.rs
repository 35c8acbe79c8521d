//! Tables as samples: a header line, a number in every cell, one column is the target.

use serde::{Deserialize, Serialize};

use crate::dataset::{Dataset, sample_at};
use crate::job::Rows;

/// What a model reads of a table: its columns in the order of the inputs, with their scale, and the target.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TableColumns {
    /// Column that the model predicts.
    pub target: String,
    /// Columns of the inputs.
    pub columns: Vec<TableColumn>,
}

/// A column: the model reads `(value - mean) * factor`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TableColumn {
    /// Name in the header line.
    pub name: String,
    /// Mean of the training samples.
    pub mean: f64,
    /// Inverse of their standard deviation; 0 of a column with one value.
    pub factor: f64,
}

impl TableColumns {
    /// Converts samples with the columns `names`, in any order, to inputs of the model. The target may be among the columns and is not
    /// read.
    ///
    /// # Errors
    /// A column is missing, unknown or repeated, or a sample has another number of values.
    pub fn rows(&self, names: &[String], samples: &[&[f32]]) -> Result<Rows, String> {
        let known = || self.columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>().join(", ");
        let is_known = |name: &String| *name == self.target || self.columns.iter().any(|column| column.name == *name);
        if let Some(name) = names.iter().find(|name| !is_known(name)) {
            return Err(format!("column {name} is not read by the model; allowed: {}", known()));
        }
        if let Some((_, name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return Err(format!("column {name} occurs twice; allowed: each column once"));
        }
        let position = |column: &TableColumn| {
            let at = names.iter().position(|name| *name == column.name);
            at.ok_or_else(|| format!("column {} is missing; required: {}", column.name, known()))
        };
        let positions = self.columns.iter().map(position).collect::<Result<Vec<_>, _>>()?;
        let mut rows = Rows { width: self.columns.len(), ..Rows::default() };
        for (number, sample) in samples.iter().enumerate() {
            if sample.len() != names.len() {
                let (values, columns) = (sample.len(), names.len());
                return Err(format!("samples[{number}] has {values} values; allowed: {columns}, one per column"));
            }
            rows.dense.extend(self.columns.iter().zip(&positions).map(|(column, at)| column.scaled(sample[*at])));
        }
        Ok(rows)
    }
}

impl TableColumn {
    fn scaled(&self, value: f32) -> f32 {
        ((f64::from(value) - self.mean) * self.factor) as f32
    }
}

/// Most classes of a target.
const MAX_CLASSES: usize = 10_000;

impl Dataset {
    /// Parses a table. Samples are in a random order that depends on `seed` alone, so that a sorted file has the same kinds of samples among those
    /// that are held out. Features are shifted and scaled to mean 0 and variance 1 of the training samples.
    ///
    /// With `is_class` the target is a class from 0 on.
    ///
    /// # Errors
    /// The target is no column, or a cell is missing or no number: row, column and what is allowed.
    pub fn table(content: &[u8], target: &str, is_class: bool, seed: u64) -> Result<Self, String> {
        let mut data = Self::unscaled_table(content, target, is_class, seed)?;
        data.standardize();
        Ok(data)
    }

    /// As [`Self::table`], with the features as they are: their means and variances are no part of the result.
    ///
    /// # Errors
    /// As [`Self::table`].
    pub fn unscaled_table(content: &[u8], target: &str, is_class: bool, seed: u64) -> Result<Self, String> {
        let text = std::str::from_utf8(content).map_err(|error| format!("the table is not UTF-8: {error}"))?;
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let header: Vec<String> = lines.next().map(|(_, line)| cells(line)).unwrap_or_default();
        let Some(at) = header.iter().position(|name| name == target) else {
            return Err(format!("the target {target} is no column of the table; allowed: {}", header.join(", ")));
        };
        let mut rows: Vec<(Vec<f32>, f32)> = Vec::new();
        for (line, text) in lines {
            let mut row = numbers(line + 1, text, &header)?;
            let target = row.remove(at);
            if is_class && !(target.fract() == 0.0 && (0.0..MAX_CLASSES as f32).contains(&target)) {
                let column = &header[at];
                return Err(format!(
                    "line {}, column {column}: {target}; allowed: a class from 0 to {}",
                    line + 1,
                    MAX_CLASSES - 1
                ));
            }
            rows.push((row, target));
        }
        if rows.len() < 2 || header.len() < 2 {
            return Err(format!(
                "the table has {} rows and {} columns; allowed: 2 or more of each",
                rows.len(),
                header.len()
            ));
        }
        let mut data = Self { features: header.len() - 1, ..Self::default() };
        for position in 0..rows.len() as u64 {
            let (row, target) = &rows[sample_at(seed, rows.len(), position)];
            data.values.extend(row);
            data.targets.push(*target);
        }
        if is_class {
            data.classes = data.targets.iter().fold(0, |most, class| most.max(*class as usize + 1));
        }
        let names = header.iter().enumerate().filter(|(column, _)| *column != at);
        let columns = names.map(|(_, name)| TableColumn { name: name.clone(), mean: 0.0, factor: 1.0 }).collect();
        data.table = Some(TableColumns { target: target.to_owned(), columns });
        Ok(data)
    }

    /// Shifts and scales the columns, and remembers how.
    fn standardize(&mut self) {
        let Some(mut table) = self.table.take() else { return };
        let count = self.training_len();
        for (column, scale) in table.columns.iter_mut().enumerate() {
            let at = |sample: usize| f64::from(self.values[sample * self.features + column]);
            let mean = (0..count).map(at).sum::<f64>() / count as f64;
            let variance = (0..count).map(|sample| (at(sample) - mean).powi(2)).sum::<f64>() / count as f64;
            let factor = if variance > 0.0 { variance.sqrt().recip() } else { 0.0 };
            (scale.mean, scale.factor) = (mean, factor);
            for value in self.values.iter_mut().skip(column).step_by(self.features) {
                *value = scale.scaled(*value);
            }
        }
        self.table = Some(table);
    }
}

/// Splits a line; a cell may be in double quotes.
fn cells(line: &str) -> Vec<String> {
    let (mut all, mut cell, mut is_quoted) = (Vec::new(), String::new(), false);
    for character in line.trim_end_matches('\r').chars() {
        match character {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => all.push(std::mem::take(&mut cell).trim().to_owned()),
            other => cell.push(other),
        }
    }
    all.push(cell.trim().to_owned());
    all
}

fn numbers(line: usize, text: &str, header: &[String]) -> Result<Vec<f32>, String> {
    let cells = cells(text);
    if cells.len() > header.len() {
        return Err(format!(
            "line {line}: {} cells; allowed: {}, the columns of the header",
            cells.len(),
            header.len()
        ));
    }
    let number = |(column, name): (usize, &String)| {
        let cell = cells.get(column).map_or("", String::as_str);
        let parsed = cell.parse::<f32>().ok().filter(|number| number.is_finite());
        let shown = if cell.is_empty() { "missing" } else { cell };
        parsed.ok_or_else(|| format!("line {line}, column {name}: {shown}; allowed: a number"))
    };
    header.iter().enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_columns_become_the_inputs_that_the_model_was_trained_on() {
        let text: String = (0..50).fold("a,b,y\n".to_owned(), |text, i| text + &format!("{i},{},{}\n", i * i, i % 2));
        let data = Dataset::table(text.as_bytes(), "y", true, 1).unwrap();
        let table = data.table.clone().unwrap();
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let first = sample_at(1, 50, 0) as f32;
        let rows = table.rows(&names(&["b", "y", "a"]), &[&[first * first, 7.0, first]]).unwrap();
        assert_eq!(rows.dense, data.row(0), "the same bits in any order of the columns");
        let fails = |list: &[&str], sample: &[f32]| table.rows(&names(list), &[sample]).unwrap_err();
        assert_eq!(fails(&["a"], &[1.0]), "column b is missing; required: a, b");
        assert_eq!(fails(&["a", "b", "c"], &[1.0; 3]), "column c is not read by the model; allowed: a, b");
        assert_eq!(fails(&["a", "b", "a"], &[1.0; 3]), "column a occurs twice; allowed: each column once");
        assert_eq!(fails(&["a", "b"], &[1.0]), "samples[0] has 1 values; allowed: 2, one per column");
    }

    #[test]
    fn tables_are_parsed_scaled_and_shuffled_and_errors_name_line_and_column() {
        let text: String =
            (0..100).fold("a,\"b, c\",y\n".to_owned(), |text, i| text + &format!("{i}, {},{}\n", 7, i % 3));
        let data = Dataset::table(text.as_bytes(), "y", true, 1).unwrap();
        assert_eq!((data.features, data.len(), data.training_len(), data.classes), (2, 100, 90, 3));
        assert_ne!(data.targets[..4], [0.0, 1.0, 2.0, 0.0], "rows are shuffled");
        let mean: f32 = (0..90).map(|sample| data.row(sample)[0]).sum::<f32>() / 90.0;
        assert!(mean.abs() < 1e-5 && data.values.iter().skip(1).step_by(2).all(|value| *value == 0.0));
        let fails = |text: &str, target: &str| Dataset::table(text.as_bytes(), target, true, 1).unwrap_err();
        assert_eq!(fails("a,b\n1,2\n", "c"), "the target c is no column of the table; allowed: a, b");
        assert_eq!(fails("a,b\n1,2\n\n3,\n", "b"), "line 4, column b: missing; allowed: a number");
        assert_eq!(fails("a,b\n1,2\n3\n", "b"), "line 3, column b: missing; allowed: a number");
        assert_eq!(fails("a,b\n1,2\nx,2\n", "b"), "line 3, column a: x; allowed: a number");
        assert_eq!(fails("a,b\n1,2,3\n", "b"), "line 2: 3 cells; allowed: 2, the columns of the header");
        assert!(fails("a,b\n1,0.5\n", "b").contains("line 2, column b: 0.5; allowed: a class from 0"));
        assert!(fails("a,b\n1,0\n", "b").contains("1 rows and 2 columns"));
    }
}
