//! Pages of `docs/results` that suites write: devices, one column per number of devices; others, one line per row and peer.

use std::fmt::Write;

use super::row::{Budget, Report, Row};
use super::table;

/// Title of the page of suite train, which `cargo xtask chaos --training` writes too.
pub(crate) const TRAIN_TITLE: &str = "Steps, efficiency and recovery of trainings";
/// Section of suite train.
pub(super) const TRAIN_SECTION: &str = "Next to PyTorch and torchft";

/// Renders the page of suite algebra.
pub(super) fn algebra(report: &Report, machine: &str, commit: &str) -> String {
    let head = provenance("algebra", machine, commit);
    format!("# Max-plus products and Fisher matrices\n\n{head}\n\n{}", comparison(report))
}

/// Renders the page of suite reduce.
pub(super) fn reduce(report: &Report, machine: &str, commit: &str) -> String {
    let head = provenance("reduce --peers gloo", machine, commit);
    format!(
        "# All-reduce\n\n{head} Each rank is a process; every result is verified. Workers of one host and user reduce through shared memory, others over \
         TCP. gloo uses one connection over loopback, or splits messages above 64 kB over four.\n\n{}",
        comparison(report)
    )
}

/// Renders the section of suite train. `skipped` names the peers without figures, with the reason.
pub(super) fn train(report: &Report, peers: &[String], machine: &str, commit: &str, skipped: &[String]) -> String {
    let head = provenance(&format!("train --peers {}", peers.join(",")), machine, commit);
    let mut text = format!("{head}\n\n{}", comparison(report));
    if !skipped.is_empty() {
        writeln!(text, "\nNot measured: {}.", skipped.join("; ")).expect("a string can be written");
    }
    text
}

/// Says where the figures of a page are from.
fn provenance(command: &str, machine: &str, commit: &str) -> String {
    format!(
        "Command: `cargo xtask bench {command}`. Machine: {machine}, with other work. Commit: {commit}. The peer runs in turn with Engram in the same \
         run; each figure is the median round. A ratio above 1 means that Engram is faster."
    )
}

/// Renders a table of one line per row and peer.
fn comparison(report: &Report) -> String {
    let mut text =
        "| work | size | Engram | peer | ratio | floor |\n| --- | --- | --- | --- | --- | --- |\n".to_owned();
    for row in &report.rows {
        let (title, size, unit) = (&row.title, row.memories, &row.unit);
        let ours = format!("{} {unit}", figure(row.ours.median));
        let absolute = row.budgets.iter().find_map(|budget| match budget {
            Budget::Absolute(bound) => Some(format!("{} {unit}", figure(*bound))),
            Budget::Ratio { .. } => None,
        });
        if row.peers.is_empty() {
            let floor = absolute.clone().unwrap_or_else(|| "-".to_owned());
            text.push_str(&format!("| {title} | {size} | {ours} | - | - | {floor} |\n"));
        }
        for peer in &row.peers {
            let least = row.budgets.iter().find_map(|budget| match budget {
                Budget::Ratio { peer: name, at_least } if *name == peer.name => Some(format!("{at_least}x")),
                _ => None,
            });
            let (theirs, floor) = (peer.figure.median, least.or(absolute.clone()).unwrap_or_else(|| "-".to_owned()));
            let ratio = table::ratio(row.better, row.ours.median, theirs);
            let peer = format!("{}: {} {unit}", peer.name, figure(theirs));
            text.push_str(&format!("| {title} | {size} | {ours} | {peer} | {ratio:.2}x | {floor} |\n"));
        }
    }
    text
}

/// Renders the page of suite devices.
pub(super) fn devices(report: &Report, memories: &[String], machine: &str, commit: &str) -> String {
    let memories = memories.join(",");
    let mut text = format!(
        "# Several devices\n\n\
         Command: `cargo xtask bench devices --memories {memories}`. Machine: {machine}, with other work. Commit: {commit}. A logical device is one thread on the CPU. Over workers, each device \
         belongs to a member of a group, which exchanges messages with the others over loopback TCP and ends with all cells of a grid. \
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
    use crate::bench::row::{Better, Figure, Peer};

    #[test]
    fn rows_without_peer_show_their_floor_and_others_the_ratio() {
        let row = |peers, budgets| Row {
            title: "step".to_owned(),
            workloads: Vec::new(),
            memories: 2,
            unit: "ms".to_owned(),
            better: Better::Lower,
            ours: Figure { best: 1.0, median: 2.0, repeats: 1 },
            peers,
            budgets,
        };
        let peer = Peer { name: "gloo".to_owned(), figure: Figure { best: 3.0, median: 5.0, repeats: 1 } };
        let ratio = Budget::Ratio { peer: "gloo".to_owned(), at_least: 1.3 };
        let rows = vec![row(Vec::new(), vec![Budget::Absolute(9.0)]), row(vec![peer], vec![ratio])];
        let page = reduce(&Report { threads: 1, rows }, "2 cores", "abc");
        assert!(page.contains("| step | 2 | 2.00 ms | - | - | 9.00 ms |\n"), "{page}");
        assert!(page.contains("| step | 2 | 2.00 ms | gloo: 5.00 ms | 2.50x | 1.3x |\n"), "{page}");
    }

    #[test]
    fn peers_without_figures_are_listed_with_the_reason_under_the_table() {
        let row = Row {
            title: "recovery".to_owned(),
            workloads: Vec::new(),
            memories: 2,
            unit: "ms".to_owned(),
            better: Better::Lower,
            ours: Figure { best: 1.0, median: 2.0, repeats: 1 },
            peers: Vec::new(),
            budgets: Vec::new(),
        };
        let report = Report { threads: 1, rows: vec![row] };
        let page = |skipped: &[String]| train(&report, &["torch".to_owned()], "2 cores", "abc", skipped);
        let text = page(&["torchft: no package for this machine".to_owned(), "other: not requested".to_owned()]);
        assert!(text.starts_with("Command: `cargo xtask bench train --peers torch`. Machine: 2 cores"), "{text}");
        let end = "| recovery | 2 | 2.00 ms | - | - | - |\n\nNot measured: torchft: no package for this machine; other: not requested.\n";
        assert!(text.ends_with(end), "{text}");
        assert!(!page(&[]).contains("Not measured"));
    }

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
