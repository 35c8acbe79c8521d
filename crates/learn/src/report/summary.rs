//! The result of a run as a few lines of text.

use super::verdict::{Ranking, best, sentences};
use super::{RunReport, format};
use engram_api::printable;
use std::fmt::Write;

/// A run in a few lines for a terminal, without colours, ending with a line end.
pub fn summary(report: &RunReport) -> String {
    let mut text = String::new();
    write_to(&mut text, report).expect("a string takes whatever is written to it");
    printable(&text).into_owned()
}

fn write_to(text: &mut String, report: &RunReport) -> std::fmt::Result {
    let (epochs, events, memories) = (report.epochs.len() as u64, report.events(), report.memories());
    let source = [report.source.kind.as_str(), &report.source.name].join(" ");
    writeln!(text, "run {} on cluster {} ({})", report.run, report.cluster, source.trim_end())?;
    writeln!(
        text,
        "  {} epoch{}, {} update{}, {} memor{}, {}",
        format::count(epochs),
        format::plural(epochs),
        format::count(events),
        format::plural(events),
        format::count(memories),
        if memories == 1 { "y" } else { "ies" },
        format::seconds(report.elapsed_s)
    )?;
    writeln!(
        text,
        "  {} epochs/s, {} updates/s",
        format::per_second(report.epochs_per_s),
        format::per_second(report.updates_per_s)
    )?;
    if !report.prediction.is_empty() {
        writeln!(text, "  hit rate   {:>9} {:>14} {:>12}", "memory", "most frequent", "most recent")?;
        for rate in &report.prediction {
            write!(text, "  top {:<6}", rate.hits.k)?;
            for (ranking, width) in Ranking::ALL.into_iter().zip([9, 14, 12]) {
                let mark = if best(rate) == ranking { "*" } else { "" };
                write!(text, " {:>width$}", format!("{mark}{:.4}", ranking.rate(rate)))?;
            }
            writeln!(text)?;
        }
    }
    if let Some(experiment) = &report.experiment {
        write!(text, "  separation {:.6}", experiment.separation)?;
        if let Some(factor) = experiment.convergence_factor {
            write!(text, ", convergence factor {factor:.6}")?;
        }
        write!(text, ", inversion ratio {:.6}", experiment.inversion_ratio)?;
        if experiment.inversion_error > 0.0 {
            write!(text, " (+-{:.1e})", experiment.inversion_error)?;
        }
        for coverage in &experiment.coverage {
            write!(text, ", coverage of group {} {}/{}", coverage.group, coverage.complete, coverage.memories)?;
        }
        writeln!(text)?;
    }
    for sentence in sentences(report) {
        writeln!(text, "  {} {}", if sentence.good { "+" } else { "!" }, sentence.text)?;
    }
    if !report.top.is_empty() {
        let names: Vec<String> = report.top.iter().take(10).map(super::RankedMemory::name).collect();
        writeln!(text, "  now on top: {}", names.join(", "))?;
    }
    writeln!(text, "  digest {}", report.digest)
}
