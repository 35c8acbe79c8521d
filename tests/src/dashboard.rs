//! Dashboards of the chart: their panels, checks of their form, and pictures of their results.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Width and height of a picture's grid cell, in pixels.
const CELL: (u64, u64) = (44, 30);
/// Colors of series, in order.
const COLORS: [&str; 8] = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f"];
/// Series named in the legend of a panel.
const NAMED: usize = 4;

/// A panel with its expressions.
#[derive(Debug)]
pub struct Panel {
    /// Its title.
    pub title: String,
    kind: String,
    grid: [u64; 4],
    /// Expressions with their legends.
    pub targets: Vec<(String, String)>,
}

/// A dashboard.
#[derive(Debug)]
pub struct Dashboard {
    /// Its title.
    pub title: String,
    /// Its panels, rows included.
    pub panels: Vec<Panel>,
}

fn text<'a>(value: &'a Value, what: &str) -> &'a str {
    value.as_str().unwrap_or_else(|| panic!("{what} is no text: {value}"))
}

impl Dashboard {
    /// Parses a dashboard and checks the form that Grafana's schema of version 39 demands of what is used here: names and types of
    /// fields, unique ids, a grid of 24 columns without overlaps, data sources and queries that refer to existing variables.
    ///
    /// # Panics
    /// A check fails.
    pub fn parse(json: &str) -> Self {
        let dashboard: Value = serde_json::from_str(json).expect("a dashboard is JSON");
        let title = text(&dashboard["title"], "title").to_owned();
        assert_eq!(dashboard["schemaVersion"], 39, "{title}");
        assert!(dashboard["editable"].is_boolean() && dashboard["graphTooltip"].is_u64(), "{title}");
        for key in ["uid", "description", "refresh", "timezone"] {
            text(&dashboard[key], key);
        }
        let variables = variables(&dashboard["templating"]["list"]);
        assert!(
            ["datasource", "traces", "namespace", "cluster"].iter().all(|name| variables.contains(*name)),
            "{variables:?}"
        );
        let mut ids = BTreeSet::new();
        let mut taken = BTreeSet::new();
        let mut panels = Vec::new();
        for panel in dashboard["panels"].as_array().expect("panels are a list") {
            let id = panel["id"].as_u64().expect("a panel has an id");
            assert!(ids.insert(id), "{title}: two panels have the id {id}");
            let panel = parse_panel(panel, &variables);
            let [x, y, w, h] = panel.grid;
            assert!(x + w <= 24 && w > 0 && h > 0, "{title}: {} leaves the grid", panel.title);
            for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
                assert!(taken.insert(cell), "{title}: {} overlaps another panel", panel.title);
            }
            panels.push(panel);
        }
        Self { title, panels }
    }

    /// Draws the panels with the results of their expressions over a time: a list of series per target.
    pub fn render(&self, results: impl Fn(&str) -> Vec<Value>) -> String {
        let bottom = self.panels.iter().map(|panel| panel.grid[1] + panel.grid[3]).max().unwrap_or(1);
        let (width, height) = (24 * CELL.0 + 16, bottom * CELL.1 + 48);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#f4f5f7\"/>\n<text x=\"12\" y=\"26\" font-size=\"18\">{}</text>\n",
            escape(&self.title)
        );
        for panel in &self.panels {
            panel.draw(&mut svg, &results);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Returns the names of the variables.
fn variables(list: &Value) -> BTreeSet<String> {
    let list = list.as_array().expect("variables are a list");
    let name = |variable: &Value| {
        let name = text(&variable["name"], "name").to_owned();
        let kind = text(&variable["type"], "type");
        assert!(matches!(kind, "datasource" | "query"), "variable {name} has the type {kind}");
        let query = if kind == "query" { &variable["query"]["query"] } else { &variable["query"] };
        text(query, "query");
        name
    };
    list.iter().map(name).collect()
}

fn parse_panel(panel: &Value, variables: &BTreeSet<String>) -> Panel {
    let title = text(&panel["title"], "title").to_owned();
    let kind = text(&panel["type"], "type").to_owned();
    let grid = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().expect("a position is a number"));
    if kind == "row" {
        return Panel { title, kind, grid, targets: Vec::new() };
    }
    assert!(matches!(kind.as_str(), "timeseries" | "stat"), "{title}: {kind}");
    assert!(!text(&panel["description"], "description").is_empty(), "{title}");
    assert!(
        panel["fieldConfig"]["defaults"]["unit"].is_string() && panel["fieldConfig"]["overrides"].is_array(),
        "{title}"
    );
    assert_eq!(panel["datasource"]["uid"], "$datasource", "{title}");
    for link in panel["links"].as_array().into_iter().flatten() {
        let url = text(&link["url"], "url");
        assert!(url.starts_with("/explore?left=") && url.contains("$traces"), "{title}: {url}");
    }
    let targets = panel["targets"].as_array().expect("targets are a list").iter().map(|target| {
        let expression = text(&target["expr"], "expr").to_owned();
        let is_known = |word: &str| variables.contains(word) || word == "__rate_interval";
        let words = expression
            .split('$')
            .skip(1)
            .map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default());
        words.for_each(|word| assert!(is_known(word), "{title}: ${word} is no variable"));
        text(&target["refId"], "refId");
        (expression, text(&target["legendFormat"], "legendFormat").to_owned())
    });
    let targets = targets.collect();
    Panel { title, kind, grid, targets }
}

impl Panel {
    /// Returns an expression with values for the variables of the dashboard.
    pub fn expression(expression: &str) -> String {
        expression.replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$cluster", ".*")
    }

    fn draw(&self, svg: &mut String, results: &impl Fn(&str) -> Vec<Value>) {
        let [x, y, w, h] = self.grid;
        let (left, top) = (x * CELL.0 + 8, y * CELL.1 + 40);
        let (width, height) = (w * CELL.0 - 6, h * CELL.1 - 6);
        if self.kind == "row" {
            let _ = writeln!(
                svg,
                "<text x=\"{left}\" y=\"{}\" font-size=\"14\" font-weight=\"bold\">{}</text>",
                top + 18,
                escape(&self.title)
            );
            return;
        }
        let _ = writeln!(
            svg,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"white\" stroke=\"#d0d4da\"/>\n\
             <text x=\"{}\" y=\"{}\" font-size=\"12\" font-weight=\"bold\">{}</text>",
            left + 8,
            top + 18,
            escape(&self.title)
        );
        let series: Vec<(String, Vec<(f64, f64)>)> = self
            .targets
            .iter()
            .flat_map(|(expression, legend)| {
                results(&Self::expression(expression))
                    .into_iter()
                    .map(move |series| (name(legend, &series["metric"]), points(&series)))
            })
            .collect();
        let area = [left + 46, top + 28, width.saturating_sub(58), height.saturating_sub(62)];
        if self.kind == "stat" {
            let last = series
                .first()
                .and_then(|(_, points)| points.last())
                .map_or_else(|| "-".to_owned(), |(_, value)| format(*value));
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" font-size=\"30\" fill=\"#2ca02c\">{last}</text>",
                left + 16,
                top + height / 2 + 10
            );
            return;
        }
        draw_lines(svg, area, &series);
        for (at, (label, _)) in series.iter().enumerate().take(NAMED) {
            let (at_x, color) = (left + 10 + (at as u64 % 2) * (width / 2), COLORS[at % COLORS.len()]);
            let at_y = top + height - 18 + (at as u64 / 2) * 13;
            let short: String = label.chars().take((width / 14) as usize).collect();
            let _ = writeln!(
                svg,
                "<text x=\"{at_x}\" y=\"{at_y}\" font-size=\"10\" fill=\"{color}\">{}</text>",
                escape(&short)
            );
        }
    }
}

fn draw_lines(svg: &mut String, [left, top, width, height]: [u64; 4], series: &[(String, Vec<(f64, f64)>)]) {
    let all = || series.iter().flat_map(|(_, points)| points.iter());
    let Some(first) = all().map(|point| point.0).reduce(f64::min) else {
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\" fill=\"#999\">no data</text>", left + 20, top + height / 2);
        return;
    };
    let last = all().map(|point| point.0).fold(first + 1.0, f64::max);
    let highest = all().map(|point| point.1).fold(0.0, f64::max);
    let lowest = all().map(|point| point.1).fold(0.0, f64::min);
    let span = if highest > lowest { highest - lowest } else { 1.0 };
    for (share, value) in [(0.0, lowest), (0.5, lowest + span / 2.0), (1.0, lowest + span)] {
        let y = top as f64 + height as f64 * (1.0 - share);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{}\" y2=\"{y:.1}\" stroke=\"#e6e8eb\"/>\n<text x=\"{}\" y=\"{:.1}\" font-size=\"9\" \
             text-anchor=\"end\" fill=\"#666\">{}</text>",
            left + width,
            left - 4,
            y + 3.0,
            format(value)
        );
    }
    for (at, (_, points)) in series.iter().enumerate() {
        let place = |(time, value): &(f64, f64)| {
            let x = left as f64 + (time - first) / (last - first) * width as f64;
            let y = top as f64 + height as f64 * (1.0 - (value - lowest) / span);
            format!("{x:.1},{y:.1}")
        };
        let line: Vec<String> = points.iter().map(place).collect();
        let color = COLORS[at % COLORS.len()];
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\"/>",
            line.join(" ")
        );
    }
}

/// Returns the finite points of a series.
fn points(series: &Value) -> Vec<(f64, f64)> {
    let values = series["values"].as_array().map_or(&[][..], Vec::as_slice);
    let point = |value: &Value| Some((value[0].as_f64()?, value[1].as_str()?.parse().ok()?));
    values.iter().filter_map(point).filter(|(_, value): &(f64, f64)| value.is_finite()).collect()
}

/// Fills the legend of a series with its labels.
fn name(legend: &str, labels: &Value) -> String {
    let mut name = legend.to_owned();
    for (label, value) in labels.as_object().into_iter().flatten() {
        name = name.replace(&format!("{{{{{label}}}}}"), value.as_str().unwrap_or_default());
    }
    name
}

/// Formats a value with a prefix of the metric system.
fn format(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size >= 1e9 => format!("{:.1}G", value / 1e9),
        _ if size >= 1e6 => format!("{:.1}M", value / 1e6),
        _ if size >= 1e4 => format!("{:.1}k", value / 1e3),
        _ if size == 0.0 || size >= 100.0 => format!("{value:.0}"),
        _ if size >= 1.0 => format!("{value:.1}"),
        _ if size >= 1e-3 => format!("{:.1}m", value * 1e3),
        _ => format!("{:.1}u", value * 1e6),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
