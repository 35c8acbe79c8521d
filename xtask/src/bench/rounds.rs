//! Several measurements of the same rows, with everybody in turn: a machine that is slow for a while is slow for all of them then, and the
//! middle one is not of that while.

use super::row::{Figure, Report};

/// The rows with the middle figure of all rounds, of ours and of each peer; none without a round.
pub(super) fn middle(mut rounds: Vec<Report>) -> Option<Report> {
    let mut report = rounds.pop()?;
    for (at, row) in report.rows.iter_mut().enumerate() {
        let others = || rounds.iter().filter_map(|round| round.rows.get(at));
        row.ours = of(row.ours, others().map(|other| other.ours));
        for peer in &mut row.peers {
            let figures = others().flat_map(|other| &other.peers).filter(|other| other.name == peer.name);
            peer.figure = of(peer.figure, figures.map(|other| other.figure));
        }
    }
    Some(report)
}

/// The figure whose median is the middle one, the higher of two; it counts the repeats of all.
fn of(figure: Figure, others: impl Iterator<Item = Figure>) -> Figure {
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
    fn each_has_its_own_middle_round() {
        let report = middle(vec![round(1.0, 9.0), round(7.0, 8.0), round(2.0, 30.0)]).unwrap();
        let row = &report.rows[0];
        assert_eq!((row.ours.median, row.ours.best, row.ours.repeats), (2.0, 1.0, 30));
        assert_eq!((row.peers[0].figure.median, row.peers[0].figure.repeats), (9.0, 30));
        assert!(middle(Vec::new()).is_none());
    }
}
