//! Tables in HTML.

use super::format::{count, escape};
use std::fmt::Write;

/// Maximum number of rows of a table next to a chart.
const ROWS: usize = 400;

/// A table whose first column names the row and whose others are numbers.
pub(super) struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Number of rows before sampling.
    of: usize,
}

impl Table {
    pub(super) fn new(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>, of: usize) -> Self {
        Self { head: head.iter().map(|&name| name.to_owned()).collect(), rows: rows.into_iter().collect(), of }
    }

    /// Returns the table, collapsed.
    pub(super) fn collapsed(&self, title: &str) -> String {
        let mut html = String::from("<details><summary>The numbers</summary><div class=\"scroll\"><table>");
        let chosen = if self.rows.len() < self.of {
            format!(", {} of {} epochs", count(self.rows.len() as u64), count(self.of as u64))
        } else {
            String::new()
        };
        write!(html, "<caption>{}{chosen}</caption><thead><tr>", escape(title))
            .expect("a string takes whatever is written to it");
        self.head.iter().for_each(|name| html.push_str(&format!("<th scope=\"col\">{}</th>", escape(name))));
        html.push_str("</tr></thead><tbody>");
        for row in &self.rows {
            html.push_str("<tr>");
            for (at, cell) in row.iter().enumerate() {
                let cell = escape(cell);
                html.push_str(&if at == 0 {
                    format!("<th scope=\"row\">{cell}</th>")
                } else {
                    format!("<td>{cell}</td>")
                });
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></div></details>");
        html
    }
}

/// Samples rows evenly, including the first, at most [`ROWS`].
pub(super) fn sampled<T>(rows: &[T]) -> impl Iterator<Item = &T> {
    rows.iter().step_by(rows.len().div_ceil(ROWS).max(1))
}
