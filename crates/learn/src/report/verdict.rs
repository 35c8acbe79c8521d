//! The result of a run in plain sentences: the same words in the terminal and on the page.

use super::{RunReport, format};
use crate::prediction::HitRate;

/// The three rankings, by rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ranking {
    Memory,
    Frequent,
    Recent,
}

impl Ranking {
    pub(super) const ALL: [Self; 3] = [Self::Memory, Self::Frequent, Self::Recent];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Frequent => "most frequent",
            Self::Recent => "most recent",
        }
    }

    pub(super) fn rate(self, rate: &HitRate) -> f64 {
        match self {
            Self::Memory => rate.memory(),
            Self::Frequent => rate.frequent(),
            Self::Recent => rate.recent(),
        }
    }
}

/// Returns the best ranking; a tie goes to the memory.
pub(super) fn best(rate: &HitRate) -> Ranking {
    let hits = rate.hits;
    if hits.memory >= hits.frequent.max(hits.recent) {
        Ranking::Memory
    } else if hits.frequent >= hits.recent {
        Ranking::Frequent
    } else {
        Ranking::Recent
    }
}

/// A sentence and whether it is good news.
pub(super) struct Sentence {
    pub(super) good: bool,
    pub(super) text: String,
}

/// Returns the results of the run in plain sentences; empty if there is nothing to judge.
pub(super) fn sentences(report: &RunReport) -> Vec<Sentence> {
    let mut sentences: Vec<Sentence> = report.prediction.iter().map(predicted).collect();
    if let Some(experiment) = &report.experiment {
        for coverage in &experiment.coverage {
            if coverage.complete < coverage.memories {
                sentences.push(Sentence {
                    good: false,
                    text: format!(
                        "Group {}: only {} of {} memories were updated in every epoch. The convergence factor does not show that.",
                        coverage.group,
                        format::count(coverage.complete),
                        format::count(coverage.memories)
                    ),
                });
            }
        }
        let complete = experiment.coverage.iter().all(|coverage| coverage.complete == coverage.memories);
        if complete && !experiment.coverage.is_empty() {
            let text = "Every memory of both groups was updated in every epoch.".to_owned();
            sentences.push(Sentence { good: true, text });
        }
        let good = experiment.separation > 0.2 && experiment.inversion_ratio > 0.9;
        let verb = if good { "stand apart" } else { "do not stand apart" };
        sentences.push(Sentence {
            good,
            text: format!(
                "Rewarded and punished memories {verb}: separation {:.4}, {:.2} % of the pairs in the right order.",
                experiment.separation,
                experiment.inversion_ratio * 100.0
            ),
        });
    }
    sentences
}

fn predicted(rate: &HitRate) -> Sentence {
    let best = best(rate);
    let k = format::count(u64::from(rate.hits.k));
    let (memory, frequent, recent) = (rate.memory(), rate.frequent(), rate.recent());
    let text = match best {
        Ranking::Memory => format!(
            "Top {k}: the memory predicts best. {:.1} % of its top {k} come up in the next epoch, against {:.1} % of the \
             most frequent and {:.1} % of the most recent.",
            memory * 100.0,
            frequent * 100.0,
            recent * 100.0
        ),
        Ranking::Frequent => format!(
            "Top {k}: simply counting predicts better. {:.1} % of the most frequent come up in the next epoch, against \
             {:.1} % of the memory's.",
            frequent * 100.0,
            memory * 100.0
        ),
        Ranking::Recent => format!(
            "Top {k}: what came last predicts better. {:.1} % of the most recent come up in the next epoch, against \
             {:.1} % of the memory's.",
            recent * 100.0,
            memory * 100.0
        ),
    };
    Sentence { good: best == Ranking::Memory, text }
}
