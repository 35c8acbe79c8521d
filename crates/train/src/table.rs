//! Tables as samples: a header line, a number in every cell, one column is the target.

use crate::dataset::{Dataset, sample_at};

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
        data.standardize();
        Ok(data)
    }

    fn standardize(&mut self) {
        let count = self.training_len();
        for column in 0..self.features {
            let at = |sample: usize| f64::from(self.values[sample * self.features + column]);
            let mean = (0..count).map(at).sum::<f64>() / count as f64;
            let variance = (0..count).map(|sample| (at(sample) - mean).powi(2)).sum::<f64>() / count as f64;
            let factor = if variance > 0.0 { variance.sqrt().recip() } else { 0.0 };
            for value in self.values.iter_mut().skip(column).step_by(self.features) {
                *value = ((f64::from(*value) - mean) * factor) as f32;
            }
        }
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
