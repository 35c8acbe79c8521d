//! Combines several rounds of measurements. Programs run in turn, so that a temporary slowdown of the machine affects all of them, and the median
//! round excludes it.

use super::row::{Figure, Report};

/// Returns the rows with the median figure of all rounds, for Engram and for each peer; `None` without rounds.
pub(super) fn merge_rounds(mut rounds: Vec<Report>) -> Option<Report> {
    let mut report = rounds.pop()?;
    for (at, row) in report.rows.iter_mut().enumerate() {
        let others = || rounds.iter().filter_map(|round| round.rows.get(at));
        row.ours = median_figure(row.ours, others().map(|other| other.ours));
        for peer in &mut row.peers {
            let figures = others().flat_map(|other| &other.peers).filter(|other| other.name == peer.name);
            peer.figure = median_figure(peer.figure, figures.map(|other| other.figure));
        }
    }
    Some(report)
}

/// Returns the figure with the median of medians, the higher one of two; it counts the repeats of all.
fn median_figure(figure: Figure, others: impl Iterator<Item = Figure>) -> Figure {
    let mut all = vec![figure];
    all.extend(others);
    all.sort_by(|one, other| one.median.total_cmp(&other.median));
    Figure { repeats: all.iter().map(|figure| figure.repeats).sum(), ..all[all.len() / 2] }
}

#[cfg(test)]
mod tests {
    use super::super::row::{Better, Peer, Row};
    use super::*;

    fn round(ours: f64, theirs: f64) -> Report {
        let figure = |median: f64| Figure { best: median / 2.0, median, repeats: 10 };
        let row = Row {
            title: "work".to_owned(),
            workloads: Vec::new(),
            memories: 1,
            unit: "ms".to_owned(),
            better: Better::Lower,
            ours: figure(ours),
            peers: vec![Peer { name: "peer".to_owned(), figure: figure(theirs) }],
            budgets: Vec::new(),
        };
        Report { threads: 1, rows: vec![row] }
    }

    #[test]
    fn each_figure_has_its_own_median_round() {
        let report = merge_rounds(vec![round(1.0, 9.0), round(7.0, 8.0), round(2.0, 30.0)]).unwrap();
        let row = &report.rows[0];
        assert_eq!((row.ours.median, row.ours.best, row.ours.repeats), (2.0, 1.0, 30));
        assert_eq!((row.peers[0].figure.median, row.peers[0].figure.repeats), (9.0, 30));
        assert!(merge_rounds(Vec::new()).is_none());
    }
}
