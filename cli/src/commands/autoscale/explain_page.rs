//! Page of past decisions: load and forecast, workers, and the changes with their reasons. One file without scripts.

use super::explain::is_change;
use super::time_text;
use engram_forecast::history::Record;
use std::fmt::Write as _;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 260.0;
/// Space for labels on the left and below.
const MARGIN: (f64, f64) = (60.0, 24.0);
/// Decisions further apart than this many usual distances are not connected.
const GAP: i64 = 3;
const STYLE: &str = ":root{color-scheme:light dark;--load:#1f77b4;--expected:#2ca02c;--upper:#8fd08f;--workers:#d62728;--grid:#8884}\
body{font:14px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}svg{width:100%;height:auto}\
text{fill:currentColor;font-size:12px}table{border-collapse:collapse}td,th{text-align:left;padding:.25em .8em .25em 0;vertical-align:top;\
border-bottom:1px solid var(--grid)}.legend span{margin-right:1.5em}.legend i{display:inline-block;width:1.5em;height:.25em;\
margin-right:.4em;vertical-align:middle}";

/// Times and values of a chart.
struct Scale {
    first: i64,
    span: f64,
    highest: f64,
    /// Seconds above which two decisions are not connected.
    gap: i64,
}

impl Scale {
    fn point(&self, seconds: i64, value: f64) -> String {
        let x = MARGIN.0 + (seconds - self.first) as f64 / self.span * (WIDTH - MARGIN.0);
        let y = (HEIGHT - MARGIN.1) * (1.0 - value / self.highest) + 8.0;
        format!("{x:.1},{y:.1}")
    }

    /// Draws a line through the known values of a column, interrupted where there are none.
    fn line(&self, svg: &mut String, records: &[&Record], color: &str, value: impl Fn(&Record) -> Option<f64>) {
        let mut points: Vec<String> = Vec::new();
        let mut last = i64::MIN;
        let mut finish = |points: &mut Vec<String>| {
            if !points.is_empty() {
                let _ = writeln!(
                    svg,
                    "<polyline fill=\"none\" stroke=\"var(--{color})\" stroke-width=\"1.5\" points=\"{}\"/>",
                    points.join(" ")
                );
                points.clear();
            }
        };
        for record in records {
            let value = value(record);
            if value.is_none() || record.seconds.saturating_sub(last) > self.gap {
                finish(&mut points);
            }
            if let Some(value) = value {
                points.push(self.point(record.seconds, value));
                last = record.seconds;
            }
        }
        finish(&mut points);
    }

    fn frame(&self, svg: &mut String, last: i64) {
        let _ = writeln!(svg, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
        for share in [0.0, 0.5, 1.0] {
            let value = self.highest * share;
            let place = self.point(self.first, value);
            let (x, y) = place.split_once(',').unwrap_or_default();
            let text = if self.highest < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
            let _ = writeln!(
                svg,
                "<path d=\"M{x} {y}H{WIDTH}\" stroke=\"var(--grid)\"/><text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{text}</text>",
                MARGIN.0 - 6.0
            );
        }
        let [first, last] = [self.first, last].map(|seconds| escape(&time_text(seconds as f64)));
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\">{first}</text><text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{last}</text>",
            MARGIN.0,
            HEIGHT - 2.0,
            HEIGHT - 2.0
        );
    }
}

/// Returns the page of decisions. There is at least one decision.
pub(super) fn history_page(title: &str, records: &[&Record]) -> String {
    let title = escape(title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Autoscaling of {title}</title><style>{STYLE}</style></head>\n\
         <body><h1>Autoscaling of {title}</h1>\n<p>{} decisions. The forecast is the highest load that is expected until a worker that starts \
         at the time of the decision would be ready, with its upper bound.</p>\n",
        records.len()
    );
    let legend = |page: &mut String, entries: &[(&str, &str)]| {
        page.push_str("<p class=\"legend\">");
        for (color, label) in entries {
            let _ = write!(page, "<span><i style=\"background:var(--{color})\"></i>{label}</span>");
        }
        page.push_str("</p>\n");
    };
    let loads = records.iter().flat_map(|record| [record.load, record.upper]).flatten().fold(0.0, f64::max);
    page.push_str("<h2>Load and forecast</h2>\n");
    legend(&mut page, &[("load", "load"), ("expected", "expected"), ("upper", "upper bound")]);
    chart(&mut page, records, loads, |scale, svg| {
        scale.line(svg, records, "upper", |record| record.upper);
        scale.line(svg, records, "expected", |record| record.expected);
        scale.line(svg, records, "load", |record| record.load);
    });
    let most = records.iter().map(|record| record.workers.max(record.desired)).max().unwrap_or(1);
    page.push_str("<h2>Workers</h2>\n");
    legend(&mut page, &[("load", "workers"), ("workers", "decision to change")]);
    chart(&mut page, records, f64::from(most), |scale, svg| {
        scale.line(svg, records, "load", |record| Some(f64::from(record.workers)));
        for record in records.iter().filter(|record| is_change(record)) {
            let place = scale.point(record.seconds, f64::from(record.desired));
            let (x, y) = place.split_once(',').unwrap_or_default();
            let message = escape(&record.message);
            let _ = writeln!(
                svg,
                "<circle cx=\"{x}\" cy=\"{y}\" r=\"3.5\" fill=\"var(--workers)\"><title>{message}</title></circle>"
            );
        }
    });
    table(&mut page, records);
    page.push_str("</body></html>\n");
    page
}

fn chart(page: &mut String, records: &[&Record], highest: f64, draw: impl FnOnce(&Scale, &mut String)) {
    let ends = [records.first(), records.last()].map(|record| record.map_or(0, |record| record.seconds));
    let mut distances: Vec<i64> = records.windows(2).map(|pair| pair[1].seconds - pair[0].seconds).collect();
    distances.sort_unstable();
    let usual = distances.get(distances.len() / 2).copied().unwrap_or(60).max(1);
    let scale = Scale {
        first: ends[0],
        span: (ends[1] - ends[0]).max(1) as f64,
        highest: highest.max(f64::MIN_POSITIVE),
        gap: GAP * usual,
    };
    scale.frame(page, ends[1]);
    draw(&scale, page);
    page.push_str("</svg>\n");
}

fn table(page: &mut String, records: &[&Record]) {
    page.push_str(
        "<h2>Changes</h2>\n<table><tr><th>time</th><th>from</th><th>to</th><th>reason</th><th>message</th></tr>\n",
    );
    for record in records.iter().rev().filter(|record| is_change(record)) {
        let time = escape(&time_text(record.seconds as f64));
        let (reason, message) = (escape(&record.reason), escape(&record.message));
        let _ = writeln!(
            page,
            "<tr><td>{time}</td><td>{}</td><td>{}</td><td>{reason}</td><td>{message}</td></tr>",
            record.workers, record.desired
        );
    }
    page.push_str("</table>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_draws_every_known_value_and_lists_changes_as_text() {
        let record = |minute: i64, load, upper, desired| Record {
            seconds: 1_700_000_000 + minute * 60,
            load,
            upper,
            expected: upper,
            workers: 2,
            desired,
            reason: "LoadAboveTarget".into(),
            message: if desired == 2 { String::new() } else { "a <b> & \"c\"".into() },
            ..Record::default()
        };
        let records = [
            record(0, Some(10.0), None, 2),
            record(1, Some(20.0), Some(30.0), 2),
            record(2, None, Some(30.0), 2),
            record(3, Some(30.0), Some(30.0), 5),
            record(60, Some(30.0), Some(30.0), 2),
        ];
        let page = history_page("a/b", &records.iter().collect::<Vec<_>>());
        let lines = |color: &str| page.matches(&format!("stroke=\"var(--{color})\" stroke-width")).count();
        assert_eq!((lines("upper"), lines("expected")), (2, 2), "interrupted by the hour without decisions");
        assert_eq!(lines("load"), 3 + 2, "loads are interrupted by a missing one too; workers are not");
        assert_eq!(page.matches("<circle").count(), 1);
        assert!(page.contains("<td>2</td><td>5</td><td>LoadAboveTarget</td><td>a &lt;b&gt; &amp; &quot;c&quot;</td>"));
        assert!(!page.contains("<b>") && page.ends_with("</body></html>\n"));
    }
}
