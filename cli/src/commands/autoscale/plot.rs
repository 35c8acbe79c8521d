//! Plot of a simulation in the terminal: the load as bars, the capacity of the workers as a line.

use super::{LoadSeries, rule_name, time_text};
use engram_forecast::simulate::{RuleReport, Step};

const WIDTH: usize = 72;
const HEIGHT: usize = 8;
/// Bars by eighths of a line.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One column of the plot.
struct Column {
    /// Highest load.
    load: f64,
    /// Lowest capacity.
    capacity: f64,
    is_violated: bool,
}

fn column(steps: &[Step], worker_capacity: f64) -> Column {
    let capacity = |step: &Step| f64::from(step.ready) * worker_capacity;
    Column {
        load: steps.iter().map(|step| step.demand).fold(0.0, f64::max),
        capacity: steps.iter().map(capacity).fold(f64::INFINITY, f64::min),
        is_violated: steps.iter().any(|step| step.demand > capacity(step)),
    }
}

/// Returns the plot of a rule over the whole time, with `!` below the parts that have a violation.
pub(super) fn plot(report: &RuleReport, series: &LoadSeries, worker_capacity: f64) -> String {
    let steps = &report.steps;
    let width = WIDTH.min(steps.len());
    let part = |index: usize| &steps[index * steps.len() / width..(index + 1) * steps.len() / width];
    let columns: Vec<Column> = (0..width).map(|index| column(part(index), worker_capacity)).collect();
    let highest = columns.iter().map(|column| column.load.max(column.capacity)).fold(f64::MIN_POSITIVE, f64::max);
    let mut text = format!("\n{}: load █, capacity of the workers ─, violation !\n", rule_name(report.rule));
    for line in (0..HEIGHT).rev() {
        let label = if line + 1 == HEIGHT { format!("{highest:.0}") } else { String::new() };
        let cells: String = columns.iter().map(|column| cell(column, line, highest)).collect();
        text += format!("{label:>10} │{cells}").trim_end();
        text.push('\n');
    }
    let marks: String = columns.iter().map(|column| if column.is_violated { '!' } else { ' ' }).collect();
    text += format!("{:>10} └{}\n{:>10}  {marks}", "0", "─".repeat(width), "").trim_end();
    text.push('\n');
    let ends = [series.points.first(), series.points.last()].map(|point| point.map_or(0.0, |it| it.wall_seconds));
    let [first, last] = ends.map(time_text);
    text + &format!("{:>10}  {first}{last:>rest$}\n", "", rest = width.saturating_sub(first.len()))
}

/// Returns the character of a column in a line; line 0 is the lowest.
fn cell(column: &Column, line: usize, highest: f64) -> char {
    let scaled = |value: f64| value / highest * HEIGHT as f64;
    let capacity_line = (scaled(column.capacity).ceil() as usize).saturating_sub(1);
    let fill = ((scaled(column.load) - line as f64) * 8.0).round().clamp(0.0, 8.0) as usize;
    // The line of the capacity is drawn over a bar that is higher, so that a violation shows.
    if line == capacity_line && (fill == 0 || column.is_violated) { '─' } else { BARS[fill] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_forecast::Settings;
    use engram_forecast::simulate::{ClusterModel, LoadPoint, Rule, replay};

    #[test]
    fn plot_shows_load_capacity_and_violations() {
        let load = [100.0, 100.0, 800.0, 800.0].map(|demand| LoadPoint::exact(demand, 0.0));
        let model = ClusterModel { startup_seconds: 60.0, drain_seconds: 0.0 };
        let settings = Settings { target_utilization: 1.0, ..Settings::new(100.0) };
        let report = replay(Rule::Reactive, &load, &settings, model).unwrap();
        let series = LoadSeries { interval_seconds: 60, points: load.to_vec() };
        let text = plot(&report, &series, 100.0);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "reactive: load █, capacity of the workers ─, violation !");
        assert_eq!(lines[2], "       800 │  ██");
        assert_eq!(lines[9], "           │██─█");
        assert_eq!(lines[11].trim_end(), "              !");
        assert_eq!(lines[12], "            0  0");
    }
}
