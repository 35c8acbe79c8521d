//! Loads from CSV files, as one point per interval.

use crate::error::failure;
use anyhow::Context as _;
use engram_api::ExitCode;
use engram_forecast::simulate::LoadPoint;
use jiff::Timestamp;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most lines of a file, and most intervals of a simulation.
const MOST_POINTS: usize = 2_000_000;
/// Size limit of a file in bytes: that of the longest lines.
const MOST_BYTES: u64 = 256 << 20;
/// Longest time between two decisions, in seconds.
const LONGEST_INTERVAL: f64 = 3_600.0;

/// A load with one point per interval.
#[derive(Debug, PartialEq)]
pub(super) struct LoadSeries {
    pub(super) interval_seconds: u32,
    pub(super) points: Vec<LoadPoint>,
}

/// One line of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    seconds: f64,
    load: Option<f64>,
}

/// Reads a file. `interval` is the time between two points in seconds; by default the median distance of the lines.
///
/// # Errors
/// The file cannot be read, or a line is invalid; the error names line and column.
pub(super) fn read(path: &Path, interval: Option<u32>) -> anyhow::Result<LoadSeries> {
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| format!("failed to open {name}"))?;
    let samples = parse(file.take(MOST_BYTES), &name)?;
    series(&samples, interval, &name)
}

fn invalid(message: String) -> anyhow::Error {
    failure(ExitCode::Usage, message)
}

fn parse(reader: impl Read, name: &str) -> anyhow::Result<Vec<Sample>> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(reader);
    let headers = reader.headers().with_context(|| format!("failed to read {name}"))?.clone();
    let column = |wanted: &str| {
        let position = headers.iter().position(|header| header == wanted);
        position.ok_or_else(|| {
            let present: Vec<&str> = headers.iter().collect();
            invalid(format!(
                "{name}, line 1: column {wanted} is missing in {:?}; required: time,load",
                present.join(",")
            ))
        })
    };
    let (time_column, load_column) = (column("time")?, column("load")?);
    let mut samples: Vec<Sample> = Vec::new();
    for record in reader.into_records() {
        let record = record.map_err(|error| invalid(format!("{name}: {error}")))?;
        let line = record.position().map_or(0, csv::Position::line);
        let place = |column: &str| format!("{name}, line {line}, column {column}");
        let time_text = record.get(time_column).unwrap_or("");
        let seconds = parse_time(time_text).ok_or_else(|| {
            invalid(format!(
                "{}: {time_text:?} is no time; allowed: seconds, or RFC 3339 with a time zone",
                place("time")
            ))
        })?;
        if let Some(last) = samples.last().filter(|last| last.seconds >= seconds) {
            let before = last.seconds;
            return Err(invalid(format!("{}: {time_text} is not after the line before ({before})", place("time"))));
        }
        let load = parse_load(record.get(load_column).unwrap_or("")).map_err(|text| {
            invalid(format!("{}: {text:?} is no load; allowed: a number of at least 0, or nothing", place("load")))
        })?;
        if samples.len() == MOST_POINTS {
            return Err(invalid(format!("{name} has more than {MOST_POINTS} lines")));
        }
        samples.push(Sample { seconds, load });
    }
    Ok(samples)
}

fn parse_time(text: &str) -> Option<f64> {
    let seconds = text.parse::<f64>().ok();
    let timestamp = || text.parse::<Timestamp>().ok().map(|timestamp| timestamp.as_millisecond() as f64 / 1_000.0);
    seconds.or_else(timestamp).filter(|seconds| seconds.abs() < 1e12)
}

fn parse_load(text: &str) -> Result<Option<f64>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    match text.parse::<f64>() {
        Ok(load) if load.is_finite() && load >= 0.0 => Ok(Some(load)),
        _ => Err(text.to_owned()),
    }
}

/// Returns one point per interval. An interval has the mean of its lines, or the last line if that is near; otherwise the metric is missing.
/// The demand of an interval without metric is interpolated.
fn series(samples: &[Sample], interval: Option<u32>, name: &str) -> anyhow::Result<LoadSeries> {
    let known: Vec<(f64, f64)> = samples.iter().filter_map(|it| it.load.map(|load| (it.seconds, load))).collect();
    let ([first, .., last], false) = (samples, known.is_empty()) else {
        return Err(invalid(format!("{name} has {} lines with a load; required: 2 lines or more", known.len())));
    };
    let distance = median_distance(samples);
    let interval_seconds = interval.unwrap_or_else(|| distance.round().clamp(1.0, LONGEST_INTERVAL) as u32);
    let width = f64::from(interval_seconds);
    let intervals = ((last.seconds - first.seconds) / width).floor() + 1.0;
    if intervals > MOST_POINTS as f64 {
        let message = format!("{name} spans {intervals} intervals of {interval_seconds} s; allowed: {MOST_POINTS}");
        return Err(invalid(message + "; --interval sets a longer one"));
    }
    let mut points = Vec::with_capacity(intervals as usize);
    let mut next = 0;
    for index in 0..intervals as usize {
        // Half a millisecond, since a quotient of times has a rounding error.
        let start = first.seconds + index as f64 * width - 5e-4;
        let from = next;
        while samples.get(next).is_some_and(|sample| sample.seconds < start + width) {
            next += 1;
        }
        let metric = match mean(&samples[from..next]) {
            None if from == next => {
                samples[..next].last().filter(|it| start - it.seconds < 1.5 * distance).and_then(|it| it.load)
            }
            mean => mean,
        };
        let demand = metric.unwrap_or_else(|| interpolate(&known, start));
        points.push(LoadPoint { demand, metric, wall_seconds: first.seconds + index as f64 * width });
    }
    Ok(LoadSeries { interval_seconds, points })
}

fn median_distance(samples: &[Sample]) -> f64 {
    let mut distances: Vec<f64> = samples.windows(2).map(|pair| pair[1].seconds - pair[0].seconds).collect();
    distances.sort_unstable_by(f64::total_cmp);
    distances[distances.len() / 2]
}

fn mean(samples: &[Sample]) -> Option<f64> {
    let loads: Vec<f64> = samples.iter().filter_map(|sample| sample.load).collect();
    (!loads.is_empty()).then(|| loads.iter().sum::<f64>() / loads.len() as f64)
}

/// Returns the load at `seconds` on the line between the two samples around it; `known` is not empty.
fn interpolate(known: &[(f64, f64)], seconds: f64) -> f64 {
    let after = known.partition_point(|(time, _)| *time <= seconds);
    match (after.checked_sub(1).map(|before| known[before]), known.get(after)) {
        (Some((from, low)), Some((to, high))) => low + (high - low) * (seconds - from) / (to - from),
        (Some((_, load)), None) | (None, Some(&(_, load))) => load,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str, interval: Option<u32>) -> Result<LoadSeries, String> {
        let samples = parse(text.as_bytes(), "load.csv").map_err(|error| error.to_string())?;
        series(&samples, interval, "load.csv").map_err(|error| error.to_string())
    }

    #[test]
    fn both_time_formats_give_the_same_load() {
        let seconds = read_text("time,load\n1700000040,5\n1700000100,6.5\n", None).unwrap();
        let text = "load, time\n5, 2023-11-14T22:14:00Z\n6.5, 2023-11-14T23:15:00+01:00\n";
        assert_eq!(read_text(text, None).unwrap(), seconds);
        assert_eq!(seconds.interval_seconds, 60);
        assert_eq!(seconds.points, [LoadPoint::exact(5.0, 1.70000004e9), LoadPoint::exact(6.5, 1.7000001e9)]);
    }

    #[test]
    fn errors_name_line_and_column() {
        let error = |text: &str| read_text(text, None).unwrap_err();
        let cases = [
            (
                "time,load\n0,1\nnoon,2\n",
                "load.csv, line 3, column time: \"noon\" is no time; allowed: seconds, or RFC 3339",
            ),
            (
                "time,load\n0,1\n60,-2\n",
                "load.csv, line 3, column load: \"-2\" is no load; allowed: a number of at least 0",
            ),
            ("time,load\n0,1\n60,NaN\n", "load.csv, line 3, column load: \"NaN\" is no load"),
            ("time,load\n60,1\n60,2\n", "load.csv, line 3, column time: 60 is not after the line before (60)"),
            ("time,value\n0,1\n", "load.csv, line 1: column load is missing in \"time,value\"; required: time,load"),
            ("time,load\n0,1,2\n", "line: 2"),
            ("time,load\n0,1\n", "load.csv has 1 lines with a load; required: 2 lines or more"),
            ("time,load\n0,\n1,\n", "load.csv has 0 lines with a load"),
            ("time,load\n0,1\n1,1\n2,1\n1e11,1\n", "; --interval sets a longer one"),
        ];
        for (text, expected) in cases {
            let error = error(text);
            assert!(error.contains(expected), "{error}\nshould contain\n{expected}");
        }
    }

    #[test]
    fn gaps_are_missing_metrics_with_an_interpolated_demand() {
        let series = read_text("time,load\n0,10\n60,\n120,30\n180,30\n360,60\n", None).unwrap();
        let metrics: Vec<Option<f64>> = series.points.iter().map(|point| point.metric).collect();
        assert_eq!(metrics, [Some(10.0), None, Some(30.0), Some(30.0), Some(30.0), None, Some(60.0)]);
        let rounded: Vec<f64> = series.points.iter().map(|point| point.demand.round()).collect();
        assert_eq!(rounded, [10.0, 20.0, 30.0, 30.0, 30.0, 50.0, 60.0]);
    }

    #[test]
    fn lines_of_one_interval_are_averaged_and_distant_lines_are_held() {
        let metrics = |interval| {
            let series = read_text("time,load\n0,10\n60,20\n120,30\n180,50\n", Some(interval)).unwrap();
            series.points.iter().map(|point| point.metric.unwrap()).collect::<Vec<f64>>()
        };
        assert_eq!(metrics(120), [15.0, 40.0]);
        assert_eq!(metrics(30), [10.0, 10.0, 20.0, 20.0, 30.0, 30.0, 50.0]);
    }
}
