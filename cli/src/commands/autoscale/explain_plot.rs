//! Plot of past decisions in the terminal.

use super::explain::is_change;
use super::time_text;
use engram_forecast::history::Record;

const WIDTH: usize = 72;
const HEIGHT: usize = 10;
/// Bars by eighths of a line.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The decisions of a stretch of time.
#[derive(Default)]
struct Column {
    /// Highest load.
    load: Option<f64>,
    /// Highest upper bound of the forecast.
    upper: Option<f64>,
    workers: Option<(u32, u32)>,
    mark: Option<char>,
}

impl Column {
    fn add(&mut self, record: &Record) {
        self.load = self.load.max_by_value(record.load);
        self.upper = self.upper.max_by_value(record.upper);
        let (low, high) = self.workers.unwrap_or((record.workers, record.workers));
        self.workers = Some((low.min(record.workers), high.max(record.workers)));
        if is_change(record) {
            self.mark = Some(match record.desired.cmp(&record.workers) {
                _ if record.reason == "Conflict" => '!',
                std::cmp::Ordering::Greater => '▲',
                std::cmp::Ordering::Less => '▼',
                std::cmp::Ordering::Equal => '!',
            });
        }
    }
}

/// Greater of two values of which either may be unknown.
trait MaxByValue {
    fn max_by_value(self, other: Self) -> Self;
}

impl MaxByValue for Option<f64> {
    fn max_by_value(self, other: Self) -> Self {
        match (self, other) {
            (Some(left), Some(right)) => Some(left.max(right)),
            (left, right) => left.or(right),
        }
    }
}

/// Returns the plot of decisions: load as bars, the upper bound of the forecast as a line, changes as marks. There is at least one decision.
pub(super) fn plot(title: &str, records: &[&Record]) -> String {
    let ends = [records.first(), records.last()].map(|record| record.map_or(0, |record| record.seconds));
    let span = (ends[1] - ends[0]).max(1);
    let width = WIDTH.min(records.len());
    let mut columns: Vec<Column> = std::iter::repeat_with(Column::default).take(width).collect();
    for record in records {
        let place = i128::from(record.seconds - ends[0]) * width as i128 / i128::from(span);
        let place = usize::try_from(place).unwrap_or(0).min(width.saturating_sub(1));
        columns[place].add(record);
    }
    let values = columns.iter().flat_map(|column| [column.load, column.upper]).flatten();
    let highest = values.fold(f64::MIN_POSITIVE, f64::max);
    let mut text = format!(
        "{title}: {} decisions\nload █, upper bound of the forecast ─, more workers ▲, fewer workers ▼, conflict !\n",
        records.len()
    );
    for line in (0..HEIGHT).rev() {
        let label = if line + 1 == HEIGHT { format!("{highest:.0}") } else { String::new() };
        let cells: String = columns.iter().map(|column| cell(column, line, highest)).collect();
        text += format!("{label:>10} │{cells}").trim_end();
        text.push('\n');
    }
    text += &format!("{:>10} └{}\n", "0", "─".repeat(width));
    let marks: String = columns.iter().map(|column| column.mark.unwrap_or(' ')).collect();
    text += format!("{:>10}  {marks}", "").trim_end();
    let [first, last] = ends.map(|seconds| time_text(seconds as f64));
    text += &format!("\n{:>10}  {first}{last:>rest$}\n", "", rest = width.saturating_sub(first.chars().count()));
    let workers = columns.iter().filter_map(|column| column.workers);
    let (low, high) = workers.fold((u32::MAX, 0), |(low, high), (from, to)| (low.min(from), high.max(to)));
    let now = records.last().map_or(0, |record| record.desired);
    text + &format!("{:>10}  workers: {low} to {high}, {now} at the end\n\n", "")
}

/// Returns the character of a column in a line; line 0 is the lowest.
fn cell(column: &Column, line: usize, highest: f64) -> char {
    let scaled = |value: f64| value / highest * HEIGHT as f64;
    let bound = column.upper.map(|upper| (scaled(upper).ceil() as usize).saturating_sub(1));
    let fill = column.load.map_or(0, |load| ((scaled(load) - line as f64) * 8.0).round().clamp(0.0, 8.0) as usize);
    if bound == Some(line) && fill < 8 { '─' } else { BARS[fill] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_shows_load_bound_and_changes() {
        let record = |seconds, load, upper, workers, desired| Record {
            seconds,
            load: Some(load),
            upper,
            workers,
            desired,
            ..Record::default()
        };
        let records = [
            record(1_700_000_000, 50.0, None, 2, 2),
            record(1_700_000_060, 100.0, Some(80.0), 2, 4),
            record(1_700_000_120, 10.0, Some(100.0), 4, 3),
        ];
        let text = plot("words", &records.iter().collect::<Vec<_>>());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2], "       100 │ █─");
        assert_eq!(lines[7], "           │██");
        assert_eq!(lines[11], "           │███");
        assert_eq!(lines[13], "             ▲▼");
        assert_eq!(lines[15], "            workers: 2 to 4, 3 at the end");
    }
}
