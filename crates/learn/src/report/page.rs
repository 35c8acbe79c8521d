//! The report as one HTML file: no script, no font, no image, nothing loaded from anywhere. A content security policy in
//! the page itself makes sure of that.

use super::figures::{Figure, figures, legend};
use super::format::{count, escape, per_second, plural, seconds, setting};
use super::verdict::{Ranking, best, sentences};
use super::{RankedMemory, RunReport, Standing};
use std::fmt::Write;

/// Style sheet of all reports.
pub(crate) const PAGE_STYLE: &str = include_str!("page.css");

/// A chart could not be drawn: a number in it is not finite.
#[derive(Debug, thiserror::Error)]
#[error("failed to draw the chart {chart:?}: {cause}")]
pub struct ReportError {
    pub(super) chart: String,
    pub(super) cause: String,
}

/// The report as a self-contained page, in light and dark.
///
/// # Errors
/// A chart cannot be drawn.
pub fn page(report: &RunReport) -> Result<String, ReportError> {
    let title = escape(&format!("{} - Engram run", report.run));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
    );
    let figures = figures(report)?;
    let parts = [heading(report), verdict(report), tiles(report), rates(report)];
    parts.into_iter().filter(|part| !part.is_empty()).for_each(|part| html.push_str(&part));
    figures.iter().for_each(|figure| html.push_str(&drawn(figure)));
    html.push_str(&ranked(
        report,
        "top",
        "On top now",
        "The heaviest memories, and where each stood before.",
        &report.top,
    ));
    html.push_str(&ranked(report, "risen", "Risen", &risen(report), &report.risen));
    let fallen = "What decay took back: those that lost most since they were at their heaviest.";
    html.push_str(&ranked(report, "fallen", "Fallen", fallen, &report.fallen));
    html.push_str(&foot(report));
    html.push_str("</main>\n</body>\n</html>\n");
    Ok(html)
}

fn heading(report: &RunReport) -> String {
    let source = match report.source.name.as_str() {
        "" => escape(&report.source.kind),
        name => format!("{} <bdi>{}</bdi>", escape(&report.source.kind), escape(name)),
    };
    format!(
        "<header><p class=\"kind\">Engram run</p><h1><bdi>{}</bdi></h1><p class=\"about\">{source} on cluster <bdi>{}</bdi>, \
         {} worker{}, {} partition{}. Decay {} an epoch, learning rate {}, initial weight {}.</p></header>\n",
        escape(&report.run),
        escape(&report.cluster),
        report.workers,
        plural(u64::from(report.workers)),
        report.partitions,
        plural(u64::from(report.partitions)),
        setting(report.settings.decay),
        setting(report.settings.rate),
        setting(report.settings.initial_weight)
    )
}

fn verdict(report: &RunReport) -> String {
    let sentences = sentences(report);
    if sentences.is_empty() {
        return String::new();
    }
    let mut html = String::from("<section aria-label=\"Result\"><ul class=\"verdict\">");
    for sentence in sentences {
        let (class, sign) = if sentence.good { ("good", "\u{2713}") } else { ("bad", "!") };
        write!(
            html,
            "<li class=\"{class}\"><span aria-hidden=\"true\">{sign}</span><p>{}</p></li>",
            escape(&sentence.text)
        )
        .expect("a string takes whatever is written to it");
    }
    html + "</ul></section>\n"
}

fn tiles(report: &RunReport) -> String {
    let epochs = report.epochs.len() as u64;
    let mut tiles = vec![
        ("epochs", count(epochs), format!("in {}", seconds(report.elapsed_s))),
        ("reinforcements", count(report.events()), format!("{} a second", per_second(report.updates_per_s))),
        ("memories", count(report.memories()), mean_of(report)),
        ("epochs a second", per_second(report.epochs_per_s), "decay, reinforce, aggregate, broadcast".to_owned()),
    ];
    if let Some(experiment) = &report.experiment {
        tiles.push(("separation", format!("{:.6}", experiment.separation), "of the groups' mean weights".to_owned()));
        let factor = experiment.convergence_factor.map_or_else(|| "-".to_owned(), |factor| format!("{factor:.6}"));
        tiles.push(("convergence factor", factor, "separation now over that after one epoch".to_owned()));
        let error = match experiment.inversion_error {
            0.0 => "of all pairs, counted exactly".to_owned(),
            error => format!("of all pairs, within {error:.1e}"),
        };
        tiles.push(("pairs in order", format!("{:.6}", experiment.inversion_ratio), error));
        if !experiment.coverage.is_empty() {
            let (complete, memories) =
                experiment.coverage.iter().fold((0, 0), |sum, c| (sum.0 + c.complete, sum.1 + c.memories));
            let share = if memories == 0 { 0.0 } else { complete as f64 / memories as f64 };
            let missed = format!("{} of {} missed an update", count(memories - complete), count(memories));
            tiles.push(("coverage", format!("{share:.6}"), missed));
        }
    }
    let tile = |(name, value, note): (&str, String, String)| {
        format!("<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>")
    };
    format!(
        "<section aria-label=\"Figures\"><dl class=\"tiles\">{}</dl></section>\n",
        tiles.into_iter().map(tile).collect::<String>()
    )
}

fn mean_of(report: &RunReport) -> String {
    let sum: f64 = report.quality.iter().map(|group| group.mean * group.count as f64).sum();
    match report.memories() {
        0 => "none".to_owned(),
        memories => format!("mean weight {:.4}", sum / memories as f64),
    }
}

fn rates(report: &RunReport) -> String {
    let Some(first) = report.prediction.first() else { return String::new() };
    let mut html = format!(
        "<section><h2>Does it know what comes next?</h2><p class=\"caption\">Mean share of the top k that the next epoch touched, \
         over {} epoch{}. Ties are broken by id in all three rankings.</p><div class=\"scroll\"><table class=\"rates\"><thead><tr>\
         <th scope=\"col\">top</th>",
        count(first.epochs),
        plural(first.epochs)
    );
    for ranking in Ranking::ALL {
        html.push_str(&format!("<th scope=\"col\">{}</th>", ranking.name()));
    }
    html.push_str("<th scope=\"col\">memory against best baseline</th></tr></thead><tbody>");
    for rate in &report.prediction {
        html.push_str(&format!("<tr><th scope=\"row\">{}</th>", count(u64::from(rate.hits.k))));
        for ranking in Ranking::ALL {
            let (class, note) =
                if best(rate) == ranking { (" class=\"best\"", "<span class=\"mark\">best</span> ") } else { ("", "") };
            html.push_str(&format!("<td{class}>{note}{:.4}</td>", ranking.rate(rate)));
        }
        let baseline = rate.frequent().max(rate.recent());
        let (class, difference) =
            (if rate.memory() >= baseline { "up" } else { "down" }, (rate.memory() - baseline) * 100.0);
        html.push_str(&format!("<td class=\"{class}\">{difference:+.2} points</td></tr>"));
    }
    html + "</tbody></table></div></section>\n"
}

fn drawn(figure: &Figure) -> String {
    let Figure { id, title, caption, legend: entries, svg, table } = figure;
    let (title, caption) = (escape(title), escape(caption));
    let legend =
        if entries.is_empty() { String::new() } else { format!("<ul class=\"legend\">{}</ul>", legend(entries)) };
    format!(
        "<section><h2 id=\"{id}-heading\">{title}</h2><p class=\"caption\">{caption}</p>{legend}\
         <figure aria-labelledby=\"{id}-heading\"><div class=\"plot\">{svg}</div></figure>{}</section>\n",
        table.collapsed(&figure.title)
    )
}

fn ranked(report: &RunReport, id: &str, title: &str, caption: &str, memories: &[RankedMemory]) -> String {
    if memories.is_empty() {
        return String::new();
    }
    let mut html = format!(
        "<section><h2 id=\"{id}\">{title}</h2><p class=\"caption\">{caption}{}</p><div class=\"scroll\">\
         <table class=\"ranks\" aria-labelledby=\"{id}\"><thead><tr><th scope=\"col\">now</th><th scope=\"col\">memory</th>\
         <th scope=\"col\">weight</th>",
        if id == "top" && !report.earlier.is_empty() {
            " Equal weights share a rank; the shade shows the weight; a dot: not among the heaviest then."
        } else {
            ""
        }
    );
    for epoch in &report.earlier {
        let full = epoch.label.clone().unwrap_or_else(|| format!("epoch {}", epoch.number));
        let short = full.split_whitespace().next().filter(|_| epoch.label.is_some()).unwrap_or(&full);
        html.push_str(&format!("<th scope=\"col\" title=\"{}\">{}</th>", escape(&full), escape(short)));
    }
    html.push_str("</tr></thead><tbody>");
    for memory in memories {
        let rank = memory.rank.map_or_else(|| "\u{b7}".to_owned(), count);
        let width = (memory.weight.clamp(0.0, 1.0) * 100.0).round();
        html.push_str(&format!(
            "<tr><td>{rank}</td><th scope=\"row\"><bdi title=\"id {}\">{}</bdi></th><td class=\"weight\">\
             <span class=\"bar\" style=\"--share:{width}%\"></span>{:.4}</td>",
            memory.id,
            escape(&memory.name()),
            memory.weight
        ));
        memory.earlier.iter().for_each(|rank| html.push_str(&earlier(*rank)));
        html.push_str("</tr>");
    }
    html + "</tbody></table></div></section>\n"
}

fn risen(report: &RunReport) -> String {
    let since = report.earlier.get(report.earlier.len() / 2);
    let since = since.map(|epoch| epoch.label.clone().unwrap_or_else(|| format!("epoch {}", epoch.number)));
    format!("Those that gained most since {}.", since.as_deref().map_or_else(|| "the start".to_owned(), escape))
}

/// Formats a past rank; the background is stronger the heavier the memory was.
fn earlier(standing: Option<Standing>) -> String {
    let Some(Standing { rank, weight }) = standing else { return "<td class=\"past none\">\u{b7}</td>".to_owned() };
    let heat = weight.clamp(0.0, 1.0) * 55.0;
    format!("<td class=\"past\" style=\"--heat:{heat:.0}%\" title=\"weight {weight:.4}\">{}</td>", count(rank))
}

fn foot(report: &RunReport) -> String {
    format!(
        "<footer><p>Digest of the store after the last epoch: <code>{}</code>. The same manifest gives the same digest on any \
         number of workers, however the partitions are placed.</p></footer>\n",
        escape(&report.digest)
    )
}
