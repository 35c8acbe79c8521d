//! Charts of a report and their content.

use super::chart::{Frame, Hint, Ink, Line};
use super::format::{count, escape};
use super::tables::{Table, sampled};
use super::verdict::Ranking;
use super::{EpochRow, ReportError, RunReport};
use crate::prediction::Hits;

/// Maximum number of points of a line: more are indistinguishable on a screen.
const POINTS: usize = 400;
/// Bars of a histogram, dividing its bins evenly.
const BARS: usize = 64;

/// A chart with its texts, in HTML.
pub(super) struct Figure {
    pub(super) id: String,
    pub(super) title: String,
    pub(super) caption: String,
    pub(super) legend: Vec<(Ink, String)>,
    pub(super) svg: String,
    pub(super) table: Table,
}

/// All figures of a report, in order.
pub(super) fn figures(report: &RunReport) -> Result<Vec<Figure>, ReportError> {
    let mut figures = Vec::new();
    for rate in &report.prediction {
        figures.extend(hit_rate(report, rate.hits.k)?);
    }
    figures.extend(separation(report)?);
    figures.extend(histogram(report)?);
    figures.extend(memories(report)?);
    Ok(figures)
}

const fn ink(ranking: Ranking) -> Ink {
    match ranking {
        Ranking::Memory => Ink::Memory,
        Ranking::Frequent => Ink::Frequent,
        Ranking::Recent => Ink::Recent,
    }
}

fn rate(ranking: Ranking, hits: &Hits) -> f64 {
    let count = match ranking {
        Ranking::Memory => hits.memory,
        Ranking::Frequent => hits.frequent,
        Ranking::Recent => hits.recent,
    };
    count as f64 / f64::from(hits.k)
}

fn hit_rate(report: &RunReport, k: u32) -> Result<Option<Figure>, ReportError> {
    let scored: Vec<(&EpochRow, &Hits)> =
        report.epochs.iter().filter_map(|row| Some((row, row.hits.iter().find(|hits| hits.k == k)?))).collect();
    let Some(((first, _), (last, _))) = scored.first().zip(scored.last()) else { return Ok(None) };
    let (first, last) = (first.epoch.number as f64, last.epoch.number as f64);
    // Lines in reverse, so that the memory lies on top.
    let mut lines = Vec::new();
    let smooth = window(scored.len());
    for ranking in Ranking::ALL.into_iter().rev() {
        let points: Vec<(f64, f64)> =
            scored.iter().map(|(row, hits)| (row.epoch.number as f64, rate(ranking, hits))).collect();
        let ink = ink(ranking);
        if smooth > 1 {
            lines.push(Line { ink, points: thinned(&points), width: 1, opacity: 0.28 });
        }
        lines.push(Line { ink, points: thinned(&smoothed(&points, smooth)), width: 3, opacity: 1.0 });
    }
    let top = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let described = |row: &EpochRow, hits: &Hits| {
        let rates: Vec<String> = Ranking::ALL.iter().map(|r| format!("{} {:.3}", r.name(), rate(*r, hits))).collect();
        format!("{}: {}", name(row), rates.join(", "))
    };
    let hints = hints(&scored, |&(row, _)| row.epoch.number, |&(row, hits)| described(row, hits));
    let id = format!("hits-{k}");
    let svg = Frame {
        id: &id,
        title: &format!("Hit rate of the top {k} by epoch"),
        description: "Share of the top memories that the next epoch touched, for the memory's ranking, the most \
                      frequent and the most recent. The numbers are in the table below.",
        x: spread(first, last),
        y: (0.0, (top * 1.08).clamp(1e-3, 1.02)),
        x_label: &|x| tick(report, x),
        y_label: &|y| format!("{y:.2}"),
    }
    .lines(&lines, &hints)?;
    let total = report.prediction.iter().find(|rate| rate.hits.k == k);
    let legend = Ranking::ALL
        .iter()
        .map(|&ranking| {
            (ink(ranking), total.map_or_else(String::new, |t| format!("{} {:.3}", ranking.name(), ranking.rate(t))))
        })
        .collect();
    let shown =
        if smooth > 1 { format!(" Thick: mean over {smooth} epochs; thin: each epoch.") } else { String::new() };
    let rows = sampled(&scored).map(|(row, hits)| {
        let rates = Ranking::ALL.iter().map(|r| format!("{:.3}", rate(*r, hits)));
        std::iter::once(name(row)).chain(rates).collect()
    });
    Ok(Some(Figure {
        id,
        title: format!("Hit rate of the top {}", count(u64::from(k))),
        caption: format!(
            "Before each epoch: how many of the {} memories ranked highest does it then touch?{shown}",
            count(u64::from(k))
        ),
        legend,
        svg,
        table: Table::new(&["epoch", "memory", "most frequent", "most recent"], rows, scored.len()),
    }))
}

fn separation(report: &RunReport) -> Result<Option<Figure>, ReportError> {
    let rows: Vec<(&EpochRow, f64)> = report.epochs.iter().filter_map(|row| Some((row, row.separation?))).collect();
    let Some((first, last)) = rows.first().zip(rows.last()) else { return Ok(None) };
    let points: Vec<(f64, f64)> = rows.iter().map(|(row, s)| (row.epoch.number as f64, *s)).collect();
    let low = points.iter().map(|point| point.1).fold(0.0, f64::min);
    let hints = hints(&rows, |&(row, _)| row.epoch.number, |&(row, s)| format!("{}: {s:.6}", name(row)));
    let svg = Frame {
        id: "separation",
        title: "Separation by epoch",
        description: "Mean weight of the rewarded memories minus that of the punished ones, after each epoch.",
        x: spread(first.0.epoch.number as f64, last.0.epoch.number as f64),
        y: (low, 1.05),
        x_label: &|x| tick(report, x),
        y_label: &|y| format!("{y:.1}"),
    }
    .lines(&[Line { ink: Ink::Memory, points: thinned(&points), width: 3, opacity: 1.0 }], &hints)?;
    let cells = sampled(&rows).map(|(row, s)| vec![name(row), format!("{s:.9}")]);
    Ok(Some(Figure {
        id: "separation".to_owned(),
        title: "Separation".to_owned(),
        caption: "Mean weight of the rewarded memories minus that of the punished ones.".to_owned(),
        legend: vec![(Ink::Memory, format!("{:.6} after the last epoch", last.1))],
        svg,
        table: Table::new(&["epoch", "separation"], cells, rows.len()),
    }))
}

fn histogram(report: &RunReport) -> Result<Option<Figure>, ReportError> {
    let is_experiment = report.experiment.is_some();
    let groups: Vec<(Ink, String, Vec<u64>)> = if is_experiment {
        let inks = [Ink::Rewarded, Ink::Punished];
        let names = ["rewarded", "punished"];
        let group = |(at, group): (usize, &super::GroupBins)| (inks[at], names[at].to_owned(), group.bins.clone());
        report.histogram.iter().take(2).enumerate().map(group).collect()
    } else {
        let most = report.histogram.iter().map(|group| group.bins.len()).max().unwrap_or(0);
        let mut total = vec![0; most];
        report.histogram.iter().flat_map(|group| group.bins.iter().enumerate()).for_each(|(at, n)| total[at] += n);
        vec![(Ink::Memory, "memories".to_owned(), total)]
    };
    let Some(bins) = groups.first().map(|group| group.2.len()).filter(|&bins| bins > 0) else { return Ok(None) };
    let faded: u64 = groups.iter().map(|group| group.2.first().copied().unwrap_or(0)).sum();
    let (bars, per_bar) = (BARS.min(bins), bins.div_ceil(BARS));
    let merged = |counts: &[u64], with_faded: bool| -> Vec<u64> {
        let mut merged: Vec<u64> = counts.chunks(per_bar).map(|chunk| chunk.iter().sum()).collect();
        if !with_faded && let (Some(bar), Some(bin)) = (merged.first_mut(), counts.first()) {
            *bar -= bin;
        }
        merged
    };
    let highest = |with_faded| groups.iter().flat_map(|group| merged(&group.2, with_faded)).max().unwrap_or(0);
    // Memories of weight 0 are often most of the store and would flatten all other bars.
    let with_faded = highest(true) <= 3 * highest(false).max(1);
    let top = highest(with_faded).max(1) as f64 * 1.06;
    let mut rectangles = Vec::new();
    let mut rows: Vec<Vec<String>> = Vec::new();
    for bar in 0..bars {
        let edge = |at: usize| at as f64 / bars as f64;
        let mut row = vec![format!("{:.3} to {:.3}", edge(bar), edge(bar + 1))];
        let share = 1.0 / (groups.len() as f64 * bars as f64);
        for (at, (ink, _, counts)) in groups.iter().enumerate() {
            let height = merged(counts, with_faded)[bar];
            let left = edge(bar) + share * at as f64;
            rectangles.push((*ink, left + share * 0.08, left + share * 0.92, height as f64));
            row.push(count(merged(counts, true)[bar]));
        }
        rows.push(row);
    }
    let hints: Vec<Hint> = rows
        .iter()
        .enumerate()
        .map(|(bar, row)| Hint {
            from: bar as f64 / bars as f64,
            to: (bar + 1) as f64 / bars as f64,
            text: format!("weight {}: {}", row[0], row[1..].join(" and ")),
        })
        .collect();
    let svg = Frame {
        id: "histogram",
        title: "Weights after the last epoch",
        description: "How many memories have which weight, from 0 to 1. The numbers are in the table below.",
        x: (0.0, 1.0),
        y: (0.0, top),
        x_label: &|x| format!("{x:.1}"),
        y_label: &|y| count(y.round() as u64),
    }
    .bars(&rectangles, &hints)?;
    let threshold = 1.0 / bins as f64;
    let caption = match (with_faded, faded) {
        (_, 0) => "Number of memories by weight.".to_owned(),
        (true, _) => format!("Number of memories by weight; {} have faded to below {threshold:.4}.", count(faded)),
        (false, _) => format!(
            "Number of memories by weight. {} that have faded to below {threshold:.4} are not drawn: they would flatten the rest.",
            count(faded)
        ),
    };
    let legend =
        if is_experiment { groups.iter().map(|group| (group.0, group.1.clone())).collect() } else { Vec::new() };
    let names: Vec<&str> = std::iter::once("weight").chain(groups.iter().map(|group| group.1.as_str())).collect();
    Ok(Some(Figure {
        id: "histogram".to_owned(),
        title: "Weights after the last epoch".to_owned(),
        caption,
        legend,
        svg,
        table: Table::new(&names, rows, bars),
    }))
}

fn memories(report: &RunReport) -> Result<Option<Figure>, ReportError> {
    let Some((first, last)) = report.epochs.first().zip(report.epochs.last()) else { return Ok(None) };
    if report.epochs.iter().all(|row| row.created == 0) {
        return Ok(None);
    }
    let rows: Vec<&EpochRow> = report.epochs.iter().collect();
    let line = |ink, width, value: fn(&EpochRow) -> u64| {
        let points: Vec<(f64, f64)> = rows.iter().map(|row| (row.epoch.number as f64, value(row) as f64)).collect();
        Line { ink, points: thinned(&points), width, opacity: 1.0 }
    };
    let lines = [line(Ink::Recent, 2, |row| row.events), line(Ink::Memory, 3, |row| row.memories)];
    let top = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(1.0, f64::max);
    let described = |row: &EpochRow| {
        format!(
            "{}: {} touched, {} new, {} known",
            name(row),
            count(row.events),
            count(row.created),
            count(row.memories)
        )
    };
    let hints = hints(&rows, |row| row.epoch.number, |row| described(row));
    let svg = Frame {
        id: "memories",
        title: "Memories by epoch",
        description: "Memories known after each epoch, and how many reinforcements it brought.",
        x: spread(first.epoch.number as f64, last.epoch.number as f64),
        y: (0.0, top * 1.06),
        x_label: &|x| tick(report, x),
        y_label: &|y| count(y.round() as u64),
    }
    .lines(&lines, &hints)?;
    let mean = |row: &EpochRow| row.mean.map_or_else(|| "-".to_owned(), |mean| format!("{mean:.4}"));
    let cells = sampled(&rows)
        .map(|row| vec![name(row), count(row.events), count(row.created), count(row.memories), mean(row)]);
    Ok(Some(Figure {
        id: "memories".to_owned(),
        title: "What came in".to_owned(),
        caption: "Memories known after each epoch, and reinforcements that it brought.".to_owned(),
        legend: vec![(Ink::Memory, "memories".to_owned()), (Ink::Recent, "reinforcements".to_owned())],
        svg,
        table: Table::new(&["epoch", "reinforcements", "new", "memories", "mean weight"], cells, rows.len()),
    }))
}

/// Returns the name of an epoch for tables and hints.
pub(super) fn name(row: &EpochRow) -> String {
    row.epoch.label.clone().unwrap_or_else(|| format!("epoch {}", row.epoch.number))
}

/// Returns the tick label: the first word of the epoch's label, truncated, or its number.
fn tick(report: &RunReport, x: f64) -> String {
    const LETTERS: usize = 10;
    let number = x.round().max(0.0) as u64;
    let index = report.epochs.binary_search_by_key(&number, |row| row.epoch.number).ok();
    let label = index.and_then(|at| report.epochs[at].epoch.label.as_deref());
    match label.and_then(|label| label.split_whitespace().next()) {
        Some(word) => word.chars().take(LETTERS).collect(),
        None if index.is_some() => number.to_string(),
        None => String::new(),
    }
}

/// A range of x that is not empty.
fn spread(first: f64, last: f64) -> (f64, f64) {
    if last > first { (first, last) } else { (first - 0.5, last + 0.5) }
}

/// Epochs over which a line is smoothed: one in twenty-five, an odd number; short runs are drawn as they are.
fn window(epochs: usize) -> usize {
    if epochs < 60 { 1 } else { (epochs / 25) | 1 }
}

/// Centred moving mean; near the ends over what there is.
fn smoothed(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let mut sums = vec![0.0];
    for point in points {
        sums.push(sums.last().expect("it begins with one") + point.1);
    }
    let mean = |at: usize| {
        let (from, to) = (at.saturating_sub(window / 2), (at + window / 2 + 1).min(points.len()));
        (sums[to] - sums[from]) / (to - from) as f64
    };
    points.iter().enumerate().map(|(at, point)| (point.0, mean(at))).collect()
}

/// At most [`POINTS`] points: means of neighbours where there are more, with the last one kept.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let per_point = points.len().div_ceil(POINTS).max(1);
    if per_point == 1 {
        return points.to_vec();
    }
    let mean = |chunk: &[(f64, f64)]| {
        let (x, y) = chunk.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (x / chunk.len() as f64, y / chunk.len() as f64)
    };
    let mut thin: Vec<(f64, f64)> = points.chunks(per_point).map(mean).collect();
    thin.extend(points.last());
    thin
}

/// A hint for each row, or for evenly chosen ones where there are too many.
fn hints<T>(rows: &[T], number: impl Fn(&T) -> u64, text: impl Fn(&T) -> String) -> Vec<Hint> {
    let step = rows.len().div_ceil(POINTS).max(1);
    let half = step as f64 / 2.0;
    rows.iter()
        .step_by(step)
        .map(|row| {
            let at = number(row) as f64;
            Hint { from: at - half, to: at + half, text: text(row) }
        })
        .collect()
}

/// A legend in HTML.
pub(super) fn legend(entries: &[(Ink, String)]) -> String {
    entries
        .iter()
        .map(|(ink, text)| {
            let (colour, text) = (ink.variable(), escape(text));
            format!(r#"<li><span class="swatch" style="background:var({colour})"></span>{text}</li>"#)
        })
        .collect()
}
