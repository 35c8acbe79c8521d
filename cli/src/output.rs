//! How results are printed: a table for people, tab-separated values in a pipe, JSON or YAML for programs.

use comfy_table::{CellAlignment, ContentArrangement, Table as Drawing, presets};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, IsTerminal as _, Write as _};

/// A format of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// As `table`, with more columns.
    Wide,
    /// A line per object, fields separated by tabs, with a head line.
    Tsv,
    /// One JSON value; lists carry `kind: List`.
    Json,
    /// The same as YAML.
    Yaml,
    /// The name of each object, a line each.
    Name,
}

/// When to use colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless the environment says otherwise.
    Auto,
    /// In every case.
    Always,
    /// Not at all.
    Never,
}

impl ColorChoice {
    /// Decides for one stream: the flag, then `NO_COLOR`, `CLICOLOR_FORCE`, `TERM`, then whether it is a terminal.
    fn decide(self, terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
        let set = |name| variable(name).is_some_and(|value| !value.is_empty());
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto if set("NO_COLOR") => false,
            Self::Auto if variable("CLICOLOR_FORCE").is_some_and(|value| !matches!(value.as_str(), "" | "0")) => true,
            Self::Auto => terminal && variable("TERM").is_none_or(|term| term != "dumb"),
        }
    }
}

/// How this process prints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// The format that was asked for, else what suits stdout.
    pub(crate) format: Format,
    /// Colour on stdout.
    pub(crate) color: bool,
    /// Colour on stderr.
    pub(crate) stderr_color: bool,
    /// Results and errors only.
    pub(crate) quiet: bool,
    /// Whether stderr can show what moves.
    pub(crate) live: bool,
}

impl Output {
    /// Looks at the terminal and the environment.
    pub(crate) fn new(format: Option<Format>, color: ColorChoice, quiet: bool) -> Self {
        let (stdout, stderr) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        let variable = |name: &str| std::env::var(name).ok();
        let dumb = variable("TERM").is_some_and(|term| term == "dumb");
        Self {
            format: format.unwrap_or(if stdout { Format::Table } else { Format::Tsv }),
            color: color.decide(stdout, variable),
            stderr_color: color.decide(stderr, variable),
            quiet,
            live: stderr && !dumb && !quiet,
        }
    }

    /// Whether results are for a program that parses JSON or YAML.
    pub(crate) const fn is_structured(&self) -> bool {
        matches!(self.format, Format::Json | Format::Yaml)
    }

    /// Tells people something, on stderr.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            // Nobody listens on a closed stderr, and that is no reason to fail.
            let _ = writeln!(io::stderr(), "{}", text.as_ref());
        }
    }

    /// Prints text on stdout.
    ///
    /// # Errors
    /// Whoever reads has gone.
    pub(crate) fn text(&self, text: &str) -> io::Result<()> {
        io::stdout().lock().write_all(text.as_bytes())
    }

    /// Prints one object: `fields` for people, `object` for programs.
    ///
    /// # Errors
    /// Whoever reads has gone, or the object has no JSON.
    pub(crate) fn object(&self, object: &impl Serialize, fields: &Table) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => self.value(&serde_json::to_value(object)?)?,
            _ => self.text(&fields.render(self))?,
        }
        Ok(())
    }

    /// Prints a list: `table` for people, `items` inside a `kind: List` for programs.
    ///
    /// # Errors
    /// Whoever reads has gone, or an item has no JSON.
    pub(crate) fn list<T: Serialize>(&self, items: &[T], table: &Table) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => {
                self.value(&json!({ "apiVersion": engram_api::API_VERSION, "kind": "List", "items": items }))?;
            }
            _ => self.text(&table.render(self))?,
        }
        Ok(())
    }

    /// Prints a value as JSON or YAML, whichever was asked for; JSON where neither was.
    ///
    /// # Errors
    /// Whoever reads has gone.
    pub(crate) fn value(&self, value: &Value) -> anyhow::Result<()> {
        let text = match self.format {
            Format::Yaml => serde_saphyr::to_string(value)?,
            _ => serde_json::to_string_pretty(value)? + "\n",
        };
        Ok(self.text(&text)?)
    }

    /// `text` in a style for stdout, where colour is wanted.
    pub(crate) fn paint(&self, style: Style, text: &str) -> String {
        style.paint(text, self.color)
    }
}

/// What a text is, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// As it should be.
    Good,
    /// Worth a look.
    Warning,
    /// Not as it should be.
    Bad,
    /// Less important.
    Dim,
    /// A heading.
    Bold,
}

impl Style {
    /// `text` in this style, if `color`.
    pub(crate) fn paint(self, text: &str, color: bool) -> String {
        let code = match self {
            Self::Good => "32",
            Self::Warning => "33",
            Self::Bad => "31",
            Self::Dim => "2",
            Self::Bold => "1",
        };
        if color { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// Rows under names of columns.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

#[derive(Debug, Clone)]
struct Column {
    name: &'static str,
    right: bool,
    wide: bool,
}

impl Table {
    /// Columns by name: `>` in front aligns to the right, `+` in front shows it with `-o wide` (and in TSV) only.
    /// The first column is what `-o name` prints.
    pub(crate) fn new(columns: &[&'static str]) -> Self {
        let column = |name: &&'static str| {
            let bare = name.trim_start_matches(['>', '+']);
            let marks = &name[..name.len() - bare.len()];
            Column { name: bare, right: marks.contains('>'), wide: marks.contains('+') }
        };
        Self { columns: columns.iter().map(column).collect(), rows: Vec::new() }
    }

    /// Adds a row, a cell per column.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        debug_assert_eq!(cells.len(), self.columns.len(), "a cell per column");
        self.rows.push(cells);
    }

    /// The text of the table in the format that was asked for.
    pub(crate) fn render(&self, output: &Output) -> String {
        match output.format {
            Format::Name => self.rows.iter().filter_map(|row| row.first()).map(|name| format!("{name}\n")).collect(),
            Format::Tsv => self.separated(),
            _ => self.drawn(output),
        }
    }

    fn separated(&self) -> String {
        // What separates must not be in what is separated.
        let cell = |cell: &str| cell.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n");
        let head: Vec<String> = self.columns.iter().map(|column| column.name.to_owned()).collect();
        let lines = std::iter::once(&head).chain(&self.rows);
        lines.map(|row| row.iter().map(|text| cell(text)).collect::<Vec<_>>().join("\t") + "\n").collect()
    }

    fn drawn(&self, output: &Output) -> String {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&index| !self.columns[index].wide || output.format == Format::Wide)
            .collect();
        let mut drawing = Drawing::new();
        drawing.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        drawing.set_header(shown.iter().map(|&index| self.columns[index].name.to_uppercase()));
        for row in &self.rows {
            drawing.add_row(shown.iter().map(|&index| printable(&row[index])));
        }
        let last = shown.len().saturating_sub(1);
        for (position, &index) in shown.iter().enumerate() {
            if let Some(column) = drawing.column_mut(position) {
                column.set_padding((0, if position == last { 0 } else { 2 }));
                if self.columns[index].right {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        drawing.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// A cell without what a terminal would obey: keys come from anywhere.
fn printable(cell: &str) -> String {
    let safe =
        |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.to_string() };
    cell.chars().map(safe).collect()
}

/// `1234567` as `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes for people: `1.5 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Seconds for people: `0.4s`, `12s`, `3m 5s`, `2h 10m`, `3d 4h`.
pub(crate) fn seconds(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "-".into();
    }
    let whole = seconds as u64;
    match whole {
        0..10 => format!("{seconds:.1}s"),
        10..60 => format!("{whole}s"),
        60..3_600 => format!("{}m {}s", whole / 60, whole % 60),
        3_600..86_400 => format!("{}h {}m", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{}d {}h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(format: Format) -> Output {
        Output { format, color: false, stderr_color: false, quiet: false, live: false }
    }

    #[test]
    fn the_environment_decides_about_colour_unless_a_flag_does() {
        let with = |choice: ColorChoice, terminal, variables: &[(&str, &str)]| {
            choice.decide(terminal, |name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(with(ColorChoice::Auto, true, &[]));
        assert!(!with(ColorChoice::Auto, false, &[]));
        assert!(!with(ColorChoice::Auto, true, &[("NO_COLOR", "1")]));
        assert!(with(ColorChoice::Auto, true, &[("NO_COLOR", "")]), "an empty value is none");
        assert!(!with(ColorChoice::Auto, true, &[("TERM", "dumb")]));
        assert!(with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "1")]));
        assert!(!with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "0")]));
        assert!(!with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
        assert!(with(ColorChoice::Always, false, &[("NO_COLOR", "1")]));
        assert!(!with(ColorChoice::Never, true, &[("CLICOLOR_FORCE", "1")]));
    }

    #[test]
    fn a_table_is_the_same_rows_in_every_format() {
        let mut table = Table::new(&["key", ">weight", "+>id"]);
        table.row(["war", "0.9", "17"]);
        table.row(["a\tb", "0.25", "4"]);
        let drawn = table.render(&output(Format::Table));
        assert_eq!(drawn, "KEY   WEIGHT\nwar      0.9\na\\tb    0.25\n", "nothing in a cell moves the terminal");
        assert_eq!(table.render(&output(Format::Tsv)), "key\tweight\tid\nwar\t0.9\t17\na\\tb\t0.25\t4\n");
        assert_eq!(table.render(&output(Format::Name)), "war\na\tb\n");
        assert!(table.render(&output(Format::Wide)).starts_with("KEY"));
        assert!(table.render(&output(Format::Wide)).contains("ID"));
    }

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1_023, 1_536, 3 << 30].map(bytes), ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]);
        assert_eq!(
            [0.44, 12.9, 185.0, 7_800.0, 273_600.0, -1.0].map(seconds),
            ["0.4s", "12s", "3m 5s", "2h 10m", "3d 4h", "-"]
        );
    }
}
