//! Labelled samples from CSV: a header line, one column of labels, numbers in the others.

use super::Dataset;
use crate::task_run::TaskError;

/// Most classes: each has a row of weights in every model.
const MAX_CLASSES: usize = 256;
/// Most values per sample.
const MAX_WIDTH: usize = 4_096;

/// Parses the content of the file at `path`. Errors name line and column.
pub(super) fn parse(content: &[u8], path: &str, label: &str) -> Result<Dataset, TaskError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(content);
    let damaged = |error: csv::Error| TaskError::Invalid(format!("{path}: {error}"));
    let header = reader.headers().map_err(damaged)?.clone();
    let label_at = label_column(&header, path, label)?;
    let mut dataset = Dataset {
        name: path.to_owned(),
        width: header.len() - 1,
        values: Vec::new(),
        labels: Vec::new(),
        classes: Vec::new(),
        lines: Vec::new(),
        standardize: true,
    };
    if !(1..=MAX_WIDTH).contains(&dataset.width) {
        let width = dataset.width;
        return Err(TaskError::Invalid(format!("{path}: {width} numeric columns; allowed: 1 to {MAX_WIDTH}")));
    }
    for row in reader.records() {
        let row = row.map_err(damaged)?;
        let line = row.position().map_or(0, csv::Position::line);
        for (column, cell) in row.iter().enumerate().filter(|(column, _)| *column != label_at) {
            dataset.values.push(number(cell, path, line, &header[column])?);
        }
        dataset.push_label(&row[label_at], path, line, label)?;
    }
    if dataset.classes.len() < 2 {
        let count = dataset.classes.len();
        return Err(TaskError::Invalid(format!(
            "{path}: {count} classes in column {label}; allowed: 2 to {MAX_CLASSES}"
        )));
    }
    Ok(dataset)
}

fn label_column(header: &csv::StringRecord, path: &str, label: &str) -> Result<usize, TaskError> {
    header.iter().position(|name| name == label).ok_or_else(|| {
        let names: Vec<&str> = header.iter().take(8).collect();
        TaskError::Invalid(format!("{path}: no column is named {label}; the columns are {}", names.join(", ")))
    })
}

fn number(cell: &str, path: &str, line: u64, column: &str) -> Result<f32, TaskError> {
    let value = cell.parse::<f32>().ok().filter(|value| value.is_finite());
    value.ok_or_else(|| {
        TaskError::Invalid(format!(
            "{path}, line {line}, column {column}: {cell:?} is not allowed; allowed: finite numbers"
        ))
    })
}

impl Dataset {
    fn push_label(&mut self, name: &str, path: &str, line: u64, label: &str) -> Result<(), TaskError> {
        let known = self.classes.iter().position(|class| class == name);
        let class = known.unwrap_or(self.classes.len());
        if known.is_none() {
            if name.is_empty() || class == MAX_CLASSES {
                return Err(TaskError::Invalid(format!(
                    "{path}, line {line}, column {label}: {name:?} is not allowed; allowed: labels of at most {MAX_CLASSES} classes"
                )));
            }
            self.classes.push(name.to_owned());
        }
        self.labels.push(class as u32);
        self.lines.push(line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_labels_are_read_by_column() {
        let data = parse(b"a,kind,b\n1,x,-2.5\n 3 , y ,4e1\n0,x,0\n", "t.csv", "kind").unwrap();
        assert_eq!((data.width, &data.labels[..], data.classes.join("")), (2, &[0, 1, 0][..], "xy".to_owned()));
        assert_eq!(data.values, [1.0, -2.5, 3.0, 40.0, 0.0, 0.0]);
    }

    #[test]
    fn refused_cells_are_named_by_line_and_column() {
        let refused = |text: &str| parse(text.as_bytes(), "t.csv", "kind").unwrap_err().to_string();
        assert_eq!(
            refused("a,kind,b\n1,x,2\n1,y,oops\n"),
            "t.csv, line 3, column b: \"oops\" is not allowed; allowed: finite numbers"
        );
        assert!(refused("a,kind\nNaN,x\n").contains("line 2, column a"));
        assert!(refused("a,kind\ninf,x\n").contains("\"inf\""));
        assert!(refused("a,kind\n1,\n").contains("line 2, column kind"));
        assert!(refused("a,b\n1,2\n").contains("no column is named kind; the columns are a, b"));
        assert!(refused("kind\nx\n").contains("0 numeric columns"));
        assert!(refused("a,kind\n1,x\n2,x\n").contains("1 classes in column kind"));
        assert!(refused("a,kind\n1,x,3\n").contains("t.csv"));
    }
}
