//! Timeline of a run of tasks: what each worker and the driver did, and when.

use super::page::table;
use crate::report::{PAGE_STYLE, escape};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Activity of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TimelineKind {
    /// A worker executes a task and returns its result.
    Task,
    /// A worker receives specification, data and input of a task.
    Transfer,
    /// The driver computes the tasks of the next stage.
    Plan,
    /// The driver writes a result to the replicated record of the run.
    Record,
}

/// A time interval of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineSpan {
    /// The worker; absent for the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// Activity.
    pub kind: TimelineKind,
    /// Name of the task, or of the stage.
    pub name: String,
    /// Stage of the run, from 0.
    pub stage: u32,
    /// Microseconds of work of the run, over all drivers, until the begin.
    pub begin_us: u64,
    /// As `begin_us`; not before it.
    pub end_us: u64,
    /// Whether the worker was lost, so that another one repeats the task.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// What computed a task; empty for other spans, and for tasks without result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<SpanDevice>,
}

/// Share of a device in a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpanDevice {
    /// Name of a GPU, or `CPU` with the number of threads.
    pub name: String,
    /// Size of its memory in bytes; 0 = unknown.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Time that the task was computed by it, in microseconds.
    pub busy_us: u64,
    /// Computations of a GPU; those of a CPU are not counted.
    #[serde(default)]
    pub computations: u64,
}

/// A row of the chart: name of a device, and its spans as (class, name, begin, end) in microseconds.
pub type TimelineRow = (String, Vec<(&'static str, String, u64, u64)>);

/// Width of the chart in units of its view box.
const WIDTH: f64 = 1_000.0;
/// Width of the names.
const NAMES: f64 = 120.0;
/// Height of a row.
const ROW: usize = 28;
/// Spans that the chart shows: more cannot be seen and would make the page slow.
const MAX_SPANS: usize = 20_000;
/// Colours of the classes of spans: computing, transfers, waits, and lost work.
const STYLE: &str = ".kernel{fill:#2a78b5}.copy{fill:#d9822b}.wait{fill:#9aa0a6}.lost{fill:#c0392b}.names{fill:currentColor;font-size:13px}\
                     .axis{stroke:currentColor;stroke-opacity:.25}";

/// Renders a timeline as a self-contained HTML page. `sentences` hold the analysis; `tables` have a heading, and their header first.
pub fn timeline_page(
    run: &str,
    sentences: &[String],
    tables: &[(&str, Vec<Vec<String>>)],
    rows: &[TimelineRow],
) -> String {
    let title = escape(&format!("Timeline of run {run}"));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header><p class=\"kind\">Profile</p><h1>{title}</h1></header>\n<section aria-label=\"Result\">"
    );
    let paragraphs: String = sentences.iter().map(|text| format!("<p>{}</p>", escape(text))).collect();
    html.push_str(&paragraphs);
    html.push_str("</section>\n<section><h2 id=\"timeline\">Timeline</h2><p class=\"caption\">Blue: tasks and plans; orange: transfers; \
                   grey: waits; red: work of a lost worker. Names appear under the pointer.</p>");
    html.push_str(&chart(rows));
    for (heading, content) in tables {
        write!(html, "</section>\n<section><h2>{}</h2>", escape(heading)).expect("a string can be written");
        if let Some((header, body)) = content.split_first() {
            html.push_str(&table(header, body));
        }
    }
    html.push_str("</section>\n</main>\n</body>\n</html>\n");
    html
}

fn chart(rows: &[TimelineRow]) -> String {
    let spans = || rows.iter().flat_map(|(_, spans)| spans);
    let (begin, end) = (spans().map(|it| it.2).min().unwrap_or(0), spans().map(|it| it.3).max().unwrap_or(0));
    let scale = (WIDTH - NAMES) / end.saturating_sub(begin).max(1) as f64;
    let x = |at: u64| NAMES + (at - begin) as f64 * scale;
    let height = rows.len() * ROW + ROW;
    let mut svg = format!(
        "<figure aria-labelledby=\"timeline\"><div class=\"plot\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Timeline\">"
    );
    for (row, (name, spans)) in rows.iter().enumerate() {
        let y = row * ROW;
        let name = escape(name);
        write!(svg, "<text class=\"names\" x=\"0\" y=\"{}\">{name}</text>", y + 18).expect("a string can be written");
        for (class, name, begin, end) in spans.iter().take(MAX_SPANS / rows.len().max(1)) {
            let (left, width) = (x(*begin), (end - begin) as f64 * scale);
            let (width, milliseconds) = (width.max(0.3), (end - begin) as f64 / 1e3);
            write!(
                svg,
                "<rect class=\"{class}\" x=\"{left:.2}\" y=\"{}\" width=\"{width:.2}\" height=\"20\"><title>{}: {milliseconds:.1} ms</title></rect>",
                y + 4,
                escape(name)
            )
            .expect("a string can be written");
        }
    }
    for tick in 0..=4_u64 {
        let at = begin + end.saturating_sub(begin) * tick / 4;
        let (x, seconds) = (x(at), at as f64 / 1e6);
        let anchor = if tick == 4 { "end" } else { "middle" };
        write!(
            svg,
            "<line class=\"axis\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{}\"/><text class=\"names\" text-anchor=\"{anchor}\" x=\"{x:.1}\" y=\"{}\">{seconds:.2} s</text>",
            rows.len() * ROW,
            height - 8
        )
        .expect("a string can be written");
    }
    svg + "</svg></div></figure>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_shows_every_span_and_escapes_names() {
        let rows = [
            ("worker 0".to_owned(), vec![("kernel", "fold <1>".to_owned(), 1_000, 3_000)]),
            ("driver".to_owned(), vec![("copy", "record".to_owned(), 3_000, 5_000)]),
        ];
        let shares =
            vec![vec!["device".to_owned(), "tasks".to_owned()], vec!["worker 0".to_owned(), "50 %".to_owned()]];
        let tables = [("Shares & more", shares)];
        let page = timeline_page("a&b", &["bottleneck: host".to_owned()], &tables, &rows);
        assert!(page.contains("<h2>Shares &amp; more</h2>"));
        assert!(page.contains("<h1>Timeline of run a&amp;b</h1>") && page.contains("<p>bottleneck: host</p>"));
        assert_eq!(page.matches("<rect").count(), 2);
        assert!(
            page.contains("x=\"120.00\" y=\"4\" width=\"440.00\"") && page.contains("fold &lt;1&gt;: 2.0 ms"),
            "{page}"
        );
        assert!(page.contains("<th scope=\"row\">worker 0</th>"));
        assert!(timeline_page("empty", &[], &[], &[]).contains("</html>"));
    }
}
