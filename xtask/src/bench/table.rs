//! The budget table: one heading per title and one line per size, with the figure, each peer, the ratio, and whether the budget holds.

use super::row::{Better, Budget, Row};

/// Renders `rows`; rows of one title share a heading.
pub(super) fn render(rows: &[Row]) -> String {
    let mut text = String::new();
    for group in rows.chunk_by(|one, next| one.title == next.title) {
        text.push_str(&format!("\n{} ({})\n", group[0].title, group[0].unit));
        text.push_str(&align(&lines(group)));
    }
    text
}

/// Returns the cells of one heading: the column names, then one line per row.
fn lines(group: &[Row]) -> Vec<Vec<String>> {
    let mut peers: Vec<&str> = Vec::new();
    for peer in group.iter().flat_map(|row| &row.peers) {
        if !peers.contains(&peer.name.as_str()) {
            peers.push(&peer.name);
        }
    }
    let mut names = vec!["memories".to_owned(), "median".to_owned(), "best".to_owned()];
    for peer in &peers {
        names.extend([(*peer).to_owned(), "ratio".to_owned()]);
    }
    names.push("budget".to_owned());

    let mut lines = vec![names];
    for row in group {
        let mut cells = vec![grouped(row.memories), figure(row.ours.median), figure(row.ours.best)];
        for name in &peers {
            match row.peers.iter().find(|peer| peer.name == *name) {
                Some(peer) => {
                    let ratio = ratio(row.better, row.ours.median, peer.figure.median);
                    cells.extend([figure(peer.figure.median), format!("{}x", figure(ratio))]);
                }
                None => cells.extend(["-".to_owned(), "-".to_owned()]),
            }
        }
        let verdicts: Vec<String> = row.budgets.iter().map(|budget| verdict(row, budget)).collect();
        cells.push(if verdicts.is_empty() { "-".to_owned() } else { verdicts.join("; ") });
        lines.push(cells);
    }
    lines
}

fn verdict(row: &Row, budget: &Budget) -> String {
    let (promise, held) = match budget {
        Budget::Ratio { peer, at_least } => {
            let measured = row.peers.iter().find(|candidate| candidate.name == *peer);
            let held = measured.map(|peer| ratio(row.better, row.ours.median, peer.figure.median) >= *at_least);
            (format!(">= {}x {peer}", figure(*at_least)), held)
        }
        Budget::Absolute(bound) => {
            let sign = if row.better == Better::Lower { "<=" } else { ">=" };
            (format!("{sign} {}", figure(*bound)), Some(ratio(row.better, row.ours.median, *bound) >= 1.0))
        }
    };
    let outcome = match held {
        Some(true) => "met",
        Some(false) => "MISSED",
        None => "not measured",
    };
    format!("{promise}: {outcome}")
}

/// Returns how many times better `ours` is than `theirs`; above 1 is better.
pub(super) fn ratio(better: Better, ours: f64, theirs: f64) -> f64 {
    match better {
        Better::Lower => theirs / ours,
        Better::Higher => ours / theirs,
    }
}

/// Formats three significant digits.
fn figure(value: f64) -> String {
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else if value >= 1.0 {
        2
    } else {
        3
    };
    format!("{value:.digits$}")
}

/// Formats `1000000` as `1,000,000`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Right-aligns all columns except the last.
fn align(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let widths: Vec<usize> =
        (0..columns).map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for line in lines {
        for (column, cell) in line.iter().enumerate() {
            let width = if column + 1 == columns { 0 } else { widths[column] };
            text.push_str(&format!("  {cell:>width$}"));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::{Figure, Peer};

    #[test]
    fn table_shows_ratios_and_budget_verdicts() {
        let figure = |median| Figure { best: median / 2.0, median, repeats: 5 };
        let budget = |at_least| Budget::Ratio { peer: "numpy".to_owned(), at_least };
        let row = |memories, better, peers, budgets| Row {
            title: "an epoch".to_owned(),
            workloads: Vec::new(),
            memories,
            unit: "ms".to_owned(),
            better,
            ours: figure(0.5),
            peers,
            budgets,
        };
        let numpy = vec![Peer { name: "numpy".to_owned(), figure: figure(2.0) }];
        let rows = [
            row(100_000, Better::Lower, numpy.clone(), vec![budget(4.0), budget(4.5), Budget::Absolute(0.4)]),
            row(1_000_000, Better::Higher, numpy, vec![budget(0.2), Budget::Absolute(0.4)]),
            row(2_000, Better::Lower, Vec::new(), vec![budget(4.0)]),
        ];
        let expected = "
an epoch (ms)
   memories  median   best  numpy   ratio  budget
    100,000   0.500  0.250   2.00   4.00x  >= 4.00x numpy: met; >= 4.50x numpy: MISSED; <= 0.400: MISSED
  1,000,000   0.500  0.250   2.00  0.250x  >= 0.200x numpy: met; >= 0.400: met
      2,000   0.500  0.250      -       -  >= 4.00x numpy: not measured
";
        assert_eq!(render(&rows), expected);
    }
}
