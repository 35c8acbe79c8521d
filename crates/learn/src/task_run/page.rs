//! The report of a run of tasks as one self-contained HTML page, in the style of the other reports.

use super::TaskError;
use crate::report::{Frame, Hint, Ink, Line, PAGE_STYLE, escape};
use std::fmt::Write;

/// Parts of a report. Texts are plain; the page escapes them.
#[derive(Default)]
pub(super) struct Page {
    /// Kind of the report: `Tropical run`.
    pub(super) kind: &'static str,
    /// Heading.
    pub(super) title: String,
    /// One sentence on data and settings.
    pub(super) about: String,
    /// Sentences with the result, each with whether it is a good one.
    pub(super) verdicts: Vec<(bool, String)>,
    /// Name, value and note of the main figures.
    pub(super) tiles: Vec<(&'static str, String, String)>,
    /// Sections in order.
    pub(super) sections: Vec<Section>,
    /// Last sentence.
    pub(super) foot: String,
}

/// A section with a chart, a table, or both.
pub(super) struct Section {
    /// Heading.
    pub(super) title: String,
    /// What is shown and how to read it.
    pub(super) caption: String,
    /// Chart, if any.
    pub(super) chart: Option<Chart>,
    /// Table, if any: the header and the rows.
    pub(super) table: Option<(Vec<String>, Vec<Vec<String>>)>,
}

/// Opacity of the inside of an outline.
const AREA_OPACITY: f64 = 0.22;

fn is_outline(points: &Points) -> bool {
    points.len() > 2 && points.first() == points.last()
}

/// Points of a line in order of x.
pub(super) type Points = Vec<(f64, f64)>;

/// Lines over one x axis.
pub(super) struct Chart {
    /// Name, ink and points of each line; x ascending, or a closed outline, whose inside is filled.
    pub(super) lines: Vec<(String, Ink, Points)>,
    /// Whether y is a power of ten.
    pub(super) logarithmic: bool,
    /// Name of the x axis, below it and in the tooltips.
    pub(super) x_name: &'static str,
}

impl Page {
    /// Renders the page.
    ///
    /// # Errors
    /// A chart has a number that is not finite.
    pub(super) fn render(&self) -> Result<String, TaskError> {
        let (kind, title) = (escape(self.kind), escape(&self.title));
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <title>{title} - Engram run</title>\n<style>\n{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n\
             <header><p class=\"kind\">{kind}</p><h1>{title}</h1><p class=\"about\">{}</p></header>\n",
            escape(&self.about)
        );
        html.push_str(&self.result());
        for (index, section) in self.sections.iter().enumerate() {
            html.push_str(&section.render(index)?);
        }
        write!(html, "<footer><p>{}</p></footer>\n</main>\n</body>\n</html>\n", escape(&self.foot))
            .expect("a string takes whatever is written to it");
        Ok(html)
    }

    fn result(&self) -> String {
        let sentence = |(good, text): &(bool, String)| {
            let (class, sign) = if *good { ("good", "\u{2713}") } else { ("bad", "!") };
            format!("<li class=\"{class}\"><span aria-hidden=\"true\">{sign}</span><p>{}</p></li>", escape(text))
        };
        let tile = |(name, value, note): &(&str, String, String)| {
            let (name, value, note) = (escape(name), escape(value), escape(note));
            format!("<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>")
        };
        format!(
            "<section aria-label=\"Result\"><ul class=\"verdict\">{}</ul></section>\n\
             <section aria-label=\"Figures\"><dl class=\"tiles\">{}</dl></section>\n",
            self.verdicts.iter().map(sentence).collect::<String>(),
            self.tiles.iter().map(tile).collect::<String>()
        )
    }
}

impl Section {
    fn render(&self, index: usize) -> Result<String, TaskError> {
        let (title, caption) = (escape(&self.title), escape(&self.caption));
        let mut html = format!("<section><h2 id=\"s{index}\">{title}</h2><p class=\"caption\">{caption}</p>");
        if let Some(chart) = &self.chart {
            let svg = chart.render(&format!("c{index}"), &self.title, &self.caption)?;
            write!(
                html,
                "<ul class=\"legend\">{}</ul><figure aria-labelledby=\"s{index}\"><div class=\"plot\">{svg}</div>\
                 <figcaption>{}</figcaption></figure>",
                chart.legend(),
                escape(chart.x_name)
            )
            .expect("a string takes whatever is written to it");
        }
        if let Some((header, rows)) = &self.table {
            html.push_str(&table(header, rows));
        }
        Ok(html + "</section>\n")
    }
}

/// Returns a number of three significant digits or fewer for an axis: `20`, `0.316`, `1e-6`.
fn number(value: f64) -> String {
    let power = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    if !(-3..5).contains(&power) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let text = format!("{value:.*}", (2 - power).max(0) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Renders a table.
pub(super) fn table(header: &[String], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"scroll\"><table><thead><tr>");
    header.iter().for_each(|cell| html.push_str(&format!("<th scope=\"col\">{}</th>", escape(cell))));
    html.push_str("</tr></thead><tbody>");
    for row in rows {
        let cell = |(at, text): (usize, &String)| {
            let text = escape(text);
            if at == 0 { format!("<th scope=\"row\">{text}</th>") } else { format!("<td>{text}</td>") }
        };
        html.push_str(&format!("<tr>{}</tr>", row.iter().enumerate().map(cell).collect::<String>()));
    }
    html + "</tbody></table></div>"
}

impl Chart {
    fn legend(&self) -> String {
        let entry = |(name, ink, points): &(String, Ink, Points)| {
            let (name, variable) = (escape(name), ink.variable());
            let opacity = if is_outline(points) { format!(";opacity:{AREA_OPACITY}") } else { String::new() };
            format!("<li><span class=\"swatch\" style=\"background:var({variable}){opacity}\"></span>{name}</li>")
        };
        self.lines.iter().map(entry).collect()
    }

    fn render(&self, id: &str, title: &str, description: &str) -> Result<String, TaskError> {
        let points = || self.lines.iter().flat_map(|(.., points)| points);
        let y_of = |y: f64| if self.logarithmic { y.log10() } else { y };
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), it| (low.min(it), high.max(it)));
            if low < high { (low, high) } else { (low - 0.5, low + 0.5) }
        };
        let (x, y) = (range(&mut points().map(|it| it.0)), range(&mut points().map(|it| y_of(it.1))));
        let frame = Frame {
            id,
            title,
            description,
            x,
            y,
            x_label: &|x| format!("{x:.0}"),
            // A tick that is zero but for rounding is 0.
            y_label: &|value| match self.logarithmic {
                true => number(10_f64.powf(value)),
                false => number(if value.abs() < 1e-9 * (y.1 - y.0) { 0.0 } else { value }),
            },
        };
        let lines: Vec<Line> = self.lines.iter().map(|(_, ink, points)| self.line(*ink, points)).collect();
        frame.lines(&lines, &self.hints(x)).map_err(|error| TaskError::Failed(error.to_string()))
    }

    fn line(&self, ink: Ink, points: &Points) -> Line {
        let y_of = |y: f64| if self.logarithmic { y.log10() } else { y };
        let mut line =
            Line { ink, points: points.iter().map(|&(x, y)| (x, y_of(y))).collect(), width: 2, opacity: 1.0 };
        if is_outline(points) {
            line.opacity = AREA_OPACITY;
        }
        line
    }

    /// Tooltips at no more than 60 places of the x axis.
    fn hints(&self, x: (f64, f64)) -> Vec<Hint> {
        let step = (x.1 - x.0) / 60.0;
        let hint = |place: usize| {
            let (from, to) = (x.0 + step * place as f64, x.0 + step * (place + 1) as f64);
            let value = |(name, _, points): &(String, Ink, Points)| {
                if is_outline(points) {
                    return None;
                }
                let point = points.iter().find(|point| point.0 >= from && point.0 <= to)?;
                let y = point.1;
                Some(if self.logarithmic { format!("{name} {y:.3e}") } else { format!("{name} {y:.4}") })
            };
            let values: Vec<String> = self.lines.iter().filter_map(value).collect();
            Hint { from, to, text: format!("{} {from:.0}: {}", self.x_name, values.join(", ")) }
        };
        (0..60).map(hint).filter(|hint| !hint.text.ends_with(": ")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_of_an_axis_have_no_digits_without_meaning() {
        let shown =
            [20.0, 5.0, 0.0, -0.25, 0.316_227, 1.0, 3.162_28, 12_345.6, 1e-6, 3.162e-7, 1e6, -2e9, 0.001].map(number);
        let expected =
            ["20", "5", "0", "-0.25", "0.316", "1", "3.16", "12346", "1e-6", "3.2e-7", "1e6", "-2e9", "0.001"];
        assert_eq!(shown, expected);
    }
}
