//! Pages of `docs/results` that suites write: devices, one column per number of devices; algebra, one line per row and peer.

use std::fmt::Write;

use super::row::{Budget, Report, Row};
use super::table;

/// Renders the page of suite algebra.
pub(super) fn algebra(report: &Report, machine: &str, commit: &str) -> String {
    let mut text = format!(
        "# Max-plus products and Fisher matrices\n\n\
         Command: `cargo xtask bench algebra`. Machine: {machine}, with other work. Commit: {commit}. The peer runs in turn with Engram in the same \
         run; each figure is the median round. A ratio above 1 means that Engram is faster.\n\n\
         | work | size | Engram | peer | ratio | floor |\n| --- | --- | --- | --- | --- | --- |\n"
    );
    for row in &report.rows {
        let (title, size, ours) = (&row.title, row.memories, row.ours.median);
        for peer in &row.peers {
            let floor = row.budgets.iter().find_map(|budget| match budget {
                Budget::Ratio { peer: name, at_least } if *name == peer.name => Some(format!("{at_least}x")),
                _ => None,
            });
            let (theirs, unit, floor) = (peer.figure.median, &row.unit, floor.unwrap_or_else(|| "-".to_owned()));
            let ratio = table::ratio(row.better, ours, theirs);
            writeln!(
                text,
                "| {title} | {size} | {} {unit} | {}: {} {unit} | {ratio:.2}x | {floor} |",
                figure(ours),
                peer.name,
                figure(theirs)
            )
            .expect("a string can be written");
        }
    }
    text
}

/// Renders the page of suite devices.
pub(super) fn devices(report: &Report, memories: &[String], machine: &str, commit: &str) -> String {
    let memories = memories.join(",");
    let mut text = format!(
        "# Several devices\n\n\
         Command: `cargo xtask bench devices --memories {memories}`. Machine: {machine}, with other work. Commit: {commit}. A logical device is one thread on the CPU. \
         Computations compare the result of every repeat, bit by bit, with that of one device, within the measured time. Efficiency is the \
         speed over the sum of the solo speeds of the devices; it cannot exceed cores / devices. Load deviation is the busy time of the busiest \
         device over the mean, minus 1; with more devices than cores it is that of the operating system. Medians.{}\n\n\
         | figure | 1 device | 2 devices | 4 devices |\n| --- | --- | --- | --- |\n",
        absent_gpus(&report.rows)
    );
    let (with_counts, others): (Vec<_>, Vec<_>) = groups(&report.rows).into_iter().partition(|group| group.len() > 1);
    for group in with_counts {
        let of = |devices: u64| {
            let row = group.iter().find(|row| row.memories == devices);
            row.map_or_else(|| "-".to_owned(), |row| figure(row.ours.median))
        };
        let (title, unit) = (&group[0].title, &group[0].unit);
        writeln!(text, "| {title} ({unit}) | {} | {} | {} |", of(1), of(2), of(4)).expect("a string can be written");
    }
    text.push_str("\n| other figures | size | measured | budget |\n| --- | --- | --- | --- |\n");
    for row in others.into_iter().flatten() {
        let budget = row.budgets.iter().find_map(|budget| match budget {
            Budget::Absolute(bound) => Some(format!("{} {}", figure(*bound), row.unit)),
            Budget::Ratio { .. } => None,
        });
        let (title, size, unit) = (&row.title, row.memories, &row.unit);
        let (median, budget) = (figure(row.ours.median), budget.unwrap_or_else(|| "-".to_owned()));
        writeln!(text, "| {title} | {size} | {median} {unit} | {budget} |").expect("a string can be written");
    }
    text
}

/// Returns what the page says about real GPUs if it has no rows of them.
fn absent_gpus(rows: &[Row]) -> &'static str {
    match rows.iter().any(|row| row.title.starts_with("GPUs: ")) {
        true => "",
        false => " The machine has no GPU: the rows of Fisher matrices and max-plus products on GPUs are absent.",
    }
}

/// Returns the rows of each title.
fn groups(rows: &[Row]) -> Vec<&[Row]> {
    rows.chunk_by(|one, next| one.title == next.title).collect()
}

fn figure(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::{Better, Figure};

    #[test]
    fn rows_of_one_title_become_one_line() {
        let row = |title: &str, memories, median| Row {
            title: title.to_owned(),
            workloads: Vec::new(),
            memories,
            unit: "ms".to_owned(),
            better: Better::Lower,
            ours: Figure { best: median, median, repeats: 1 },
            peers: Vec::new(),
            budgets: vec![Budget::Absolute(5.0)],
        };
        let rows = vec![row("batch: time", 1, 120.4), row("batch: time", 2, 61.0), row("decision", 64, 0.25)];
        let page = devices(&Report { threads: 2, rows }, &["10".to_owned()], "2 cores", "abc");
        assert!(page.contains("Machine: 2 cores, with other work. Commit: abc."));
        assert!(page.contains("Medians. The machine has no GPU:"), "{page}");
        let on_gpu = vec![row("GPUs: batch: time", 1, 3.0)];
        assert!(!devices(&Report { threads: 2, rows: on_gpu }, &[], "", "").contains("no GPU"));
        assert!(page.contains("| batch: time (ms) | 120 | 61.0 | - |\n"), "{page}");
        assert!(page.contains("| decision | 64 | 0.25 ms | 5.00 ms |\n"), "{page}");
    }
}
