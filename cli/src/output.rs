//! Output of results: tables on a terminal, tab-separated values in a pipe, JSON or YAML for programs.

use comfy_table::{CellAlignment, ContentArrangement, Table as TextTable, presets};
use engram_api::{printable, printable_line};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, IsTerminal as _, Write as _};

/// Output format of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns.
    Table,
    /// `table` with additional columns.
    Wide,
    /// Tab-separated values with a header line.
    Tsv,
    /// One JSON value; lists have `kind: List`.
    Json,
    /// The JSON value as YAML.
    Yaml,
    /// The name of each object, one per line.
    Name,
}

/// When to use color.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless the environment overrides it.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl ColorChoice {
    /// Returns whether one stream is colored: by the flag, then `NO_COLOR`, `CLICOLOR_FORCE`, `TERM`, then whether it is a terminal.
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

/// Output settings of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Output format; defaults to `table` on a terminal and `tsv` otherwise.
    pub(crate) format: Format,
    /// Color on stdout.
    pub(crate) color: bool,
    /// Color on stderr.
    pub(crate) stderr_color: bool,
    /// Results and errors only.
    pub(crate) quiet: bool,
    /// Whether stderr can show progress bars.
    pub(crate) live: bool,
    /// Options of the command line that select the cluster, for commands in hints.
    selection: &'static str,
}

impl Output {
    /// Detects the terminal and reads the environment.
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
            selection: "",
        }
    }

    /// Repeats the options that select the cluster in commands of hints.
    pub(crate) fn with_selection(self, selection: String) -> Self {
        // Once per process, which needs it to its end.
        Self { selection: selection.leak(), ..self }
    }

    /// Returns a command line for a hint: `engram`, the arguments, and the options that select the cluster.
    pub(crate) fn command_line(&self, arguments: &str) -> String {
        format!("engram {arguments}{}", self.selection)
    }

    /// Whether the output format is JSON or YAML.
    pub(crate) const fn is_structured(&self) -> bool {
        matches!(self.format, Format::Json | Format::Yaml)
    }

    /// Prints a message to stderr, unless `--quiet` is set.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            // A closed stderr is no reason to fail.
            let _ = writeln!(io::stderr(), "{}", printable(text.as_ref()));
        }
    }

    /// Prints text on stdout.
    ///
    /// # Errors
    /// stdout is closed.
    pub(crate) fn text(&self, text: &str) -> io::Result<()> {
        io::stdout().lock().write_all(text.as_bytes())
    }

    /// Prints one object: `object` as JSON or YAML, `fields` in all other formats.
    ///
    /// # Errors
    /// stdout is closed, or serialization fails.
    pub(crate) fn object(&self, object: &impl Serialize, fields: &Table) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => self.value(&serde_json::to_value(object)?)?,
            _ => self.text(&fields.render(self))?,
        }
        Ok(())
    }

    /// Prints a list: `items` in a `kind: List` as JSON or YAML, `table` in all other formats.
    ///
    /// # Errors
    /// stdout is closed, or serialization fails.
    pub(crate) fn list<T: Serialize>(&self, items: &[T], table: &Table) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => {
                self.value(&json!({ "apiVersion": engram_api::API_VERSION, "kind": "List", "items": items }))?;
            }
            _ => self.text(&table.render(self))?,
        }
        Ok(())
    }

    /// Prints a value as YAML for `-o yaml`, else as JSON.
    ///
    /// # Errors
    /// stdout is closed.
    pub(crate) fn value(&self, value: &Value) -> anyhow::Result<()> {
        let text = match self.format {
            Format::Yaml => serde_saphyr::to_string(value)?,
            _ => serde_json::to_string_pretty(value)? + "\n",
        };
        Ok(self.text(&text)?)
    }

    /// Styles `text` for stdout if color is enabled.
    pub(crate) fn paint(&self, style: Style, text: &str) -> String {
        style.paint(text, self.color)
    }
}

/// Style of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Healthy state.
    Good,
    /// Needs attention.
    Warning,
    /// Error.
    Bad,
    /// Less important.
    Dim,
    /// A heading.
    Bold,
}

impl Style {
    /// Returns `text` in this style if `color` is set.
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

/// A table with named columns.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    right: bool,
    wide: bool,
}

impl Table {
    /// Creates a table. A column name with prefix `>` is right-aligned; one with prefix `+` is shown only with `-o wide` and `-o tsv`.
    /// `-o name` prints the first column.
    pub(crate) fn new(columns: &[&str]) -> Self {
        let column = |name: &&str| {
            let bare = name.trim_start_matches(['>', '+']);
            let marks = &name[..name.len() - bare.len()];
            Column { name: bare.to_owned(), right: marks.contains('>'), wide: marks.contains('+') }
        };
        Self { columns: columns.iter().map(column).collect(), rows: Vec::new() }
    }

    /// Adds a row with one cell per column.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        debug_assert_eq!(cells.len(), self.columns.len(), "a cell per column");
        self.rows.push(cells);
    }

    /// Renders the table in the output format.
    pub(crate) fn render(&self, output: &Output) -> String {
        match output.format {
            Format::Name => {
                self.rows.iter().filter_map(|row| row.first()).map(|name| printable_line(name) + "\n").collect()
            }
            Format::Tsv => self.to_tsv(),
            _ => self.to_text(output),
        }
    }

    fn to_tsv(&self) -> String {
        let header: Vec<String> = self.columns.iter().map(|column| column.name.clone()).collect();
        let lines = std::iter::once(&header).chain(&self.rows);
        lines.map(|row| row.iter().map(|text| tsv_cell(text)).collect::<Vec<_>>().join("\t") + "\n").collect()
    }

    fn to_text(&self, output: &Output) -> String {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&index| !self.columns[index].wide || output.format == Format::Wide)
            .collect();
        let mut text_table = TextTable::new();
        text_table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        text_table.set_header(shown.iter().map(|&index| self.columns[index].name.to_uppercase()));
        for row in &self.rows {
            text_table.add_row(shown.iter().map(|&index| printable_line(&row[index])));
        }
        let last = shown.len().saturating_sub(1);
        for (position, &index) in shown.iter().enumerate() {
            if let Some(column) = text_table.column_mut(position) {
                column.set_padding((0, if position == last { 0 } else { 2 }));
                if self.columns[index].right {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        text_table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// Escapes separators, other control characters, and the escape character itself in a cell of tab-separated values.
pub(crate) fn tsv_cell(cell: &str) -> String {
    printable_line(&cell.replace('\\', "\\\\")).into_owned()
}

/// Formats `1234567` as `1,234,567`.
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

/// Formats a number of bytes: `1.5 MiB`.
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

/// Formats a duration: `0.4s`, `12s`, `3m 5s`, `2h 10m`, `3d 4h`.
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

/// Returns a time that can be far below a second, for humans: `850 us`, `12.5 ms`, `3.2s`.
pub(crate) fn short_seconds(short: f64) -> String {
    match short {
        0.0..1e-3 => format!("{:.0} us", short * 1e6),
        1e-3..1.0 => format!("{:.1} ms", short * 1e3),
        _ => seconds(short),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(format: Format) -> Output {
        Output { format, color: false, stderr_color: false, quiet: false, live: false, selection: "" }
    }

    #[test]
    fn environment_decides_on_color_unless_the_flag_is_set() {
        let with = |choice: ColorChoice, terminal, variables: &[(&str, &str)]| {
            choice.decide(terminal, |name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(with(ColorChoice::Auto, true, &[]));
        assert!(!with(ColorChoice::Auto, false, &[]));
        assert!(!with(ColorChoice::Auto, true, &[("NO_COLOR", "1")]));
        assert!(with(ColorChoice::Auto, true, &[("NO_COLOR", "")]), "an empty value counts as unset");
        assert!(!with(ColorChoice::Auto, true, &[("TERM", "dumb")]));
        assert!(with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "1")]));
        assert!(!with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "0")]));
        assert!(!with(ColorChoice::Auto, false, &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
        assert!(with(ColorChoice::Always, false, &[("NO_COLOR", "1")]));
        assert!(!with(ColorChoice::Never, true, &[("CLICOLOR_FORCE", "1")]));
    }

    #[test]
    fn times_below_a_second_keep_their_digits() {
        let shown = [0.0, 0.000_85, 0.012_5, 0.999, 3.2, 90.0].map(short_seconds);
        assert_eq!(shown, ["0 us", "850 us", "12.5 ms", "999.0 ms", "3.2s", "1m 30s"]);
    }

    #[test]
    fn every_format_shows_the_same_rows() {
        let mut table = Table::new(&["key", ">weight", "+>id"]);
        table.row(["war", "0.9", "17"]);
        table.row(["a\tb", "0.25", "4"]);
        let text = table.render(&output(Format::Table));
        assert_eq!(text, "KEY   WEIGHT\nwar      0.9\na\\tb    0.25\n", "control characters are escaped");
        assert_eq!(table.render(&output(Format::Tsv)), "key\tweight\tid\nwar\t0.9\t17\na\\tb\t0.25\t4\n");
        assert_eq!(table.render(&output(Format::Name)), "war\na\\tb\n");
        assert!(table.render(&output(Format::Wide)).starts_with("KEY"));
        assert!(table.render(&output(Format::Wide)).contains("ID"));
    }

    #[test]
    fn numbers_are_human_readable() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1_023, 1_536, 3 << 30].map(bytes), ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]);
        assert_eq!(
            [0.44, 12.9, 185.0, 7_800.0, 273_600.0, -1.0].map(seconds),
            ["0.4s", "12s", "3m 5s", "2h 10m", "3d 4h", "-"]
        );
    }
}
