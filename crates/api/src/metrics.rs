//! Descriptions of the metrics that Engram's processes export, from which the reference page is generated.

use std::fmt;

/// Type of a metric, as in Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    /// A monotonic total.
    Counter,
    /// A value that can go up and down.
    Gauge,
    /// Observations counted in buckets.
    Histogram,
}

impl fmt::Display for MetricType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// One exported metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricDescriptor {
    /// Full name as in a query, with `_total` for a counter.
    pub name: String,
    /// Type.
    pub metric_type: MetricType,
    /// Help text, without a full stop.
    pub help: String,
    /// Names of all labels that its series carry.
    pub labels: Vec<&'static str>,
}

impl MetricDescriptor {
    /// Returns the base unit, `seconds` or `bytes`, by the name; `None` for plain numbers.
    pub fn unit(&self) -> Option<&'static str> {
        let name = self.name.strip_suffix("_total").unwrap_or(&self.name);
        ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(&format!("_{unit}")))
    }
}

/// Content type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of the Prometheus text format.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Chooses the format of a metrics page by the `Accept` header of the request: OpenMetrics where the client prefers it, else the
/// Prometheus text format. Returns content type and page; `page` is in OpenMetrics format.
pub fn negotiate(accept: Option<&str>, page: String) -> (&'static str, String) {
    let quality = |is_type: fn(&str) -> bool| {
        let ranges = accept.unwrap_or_default().split(',').map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse::<f32>().ok()).unwrap_or(1.0);
            if is_type(&media) { quality } else { 0.0 }
        });
        ranges.fold(0.0, f32::max)
    };
    let open = quality(|media| media == "application/openmetrics-text");
    let plain = quality(|media| matches!(media, "text/plain" | "text/*" | "*/*"));
    if open > 0.0 && open >= plain { (OPEN_METRICS, page) } else { (PROMETHEUS_TEXT, prometheus_text(&page)) }
}

/// Converts OpenMetrics into the Prometheus text format, whose metadata name a counter with its suffix.
fn prometheus_text(page: &str) -> String {
    let kind_of = |name: &str| {
        let prefix = format!("# TYPE {name} ");
        page.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default()
    };
    let mut text = String::with_capacity(page.len());
    for line in page.lines() {
        let metadata = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        let Some((keyword, rest)) = metadata else {
            if !line.starts_with('#') {
                // An exemplar follows the value.
                text.push_str(line.rsplit_once(" # {").map_or(line, |(sample, _)| sample));
                text.push('\n');
            }
            continue;
        };
        let Some((name, value)) = rest.split_once(' ').filter(|_| matches!(keyword, "HELP" | "TYPE")) else { continue };
        let (suffix, kind) = match kind_of(name) {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            "stateset" => ("", "gauge"),
            "unknown" => ("", "untyped"),
            kind => ("", kind),
        };
        let value = if keyword == "TYPE" { kind } else { value };
        text.push_str(&format!("# {keyword} {name}{suffix} {value}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP engram_reads Reads.\n# TYPE engram_reads counter\n# UNIT engram_reads reads\n\
        engram_reads_total{a=\"b # c\"} 3\n# HELP engram_build Build.\n# TYPE engram_build info\nengram_build_info{v=\"1\"} 1\n\
        # HELP engram_lag_seconds Lag.\n# TYPE engram_lag_seconds gauge\nengram_lag_seconds 0.5\n# EOF\n";

    #[test]
    fn the_format_follows_the_accept_header() {
        let of = |accept: Option<&str>| negotiate(accept, PAGE.into()).0;
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        assert_eq!(of(Some(prometheus)), OPEN_METRICS);
        assert_eq!(negotiate(Some(prometheus), PAGE.into()).1, PAGE);
        for accept in [
            None,
            Some(""),
            Some("*/*"),
            Some("text/plain"),
            Some("application/json"),
            Some("application/openmetrics-text;q=0.1,text/plain"),
            Some("application/openmetrics-text;q=0"),
        ] {
            assert_eq!(of(accept), PROMETHEUS_TEXT, "{accept:?}");
        }
    }

    #[test]
    fn the_text_format_names_counters_with_their_suffix() {
        let text = negotiate(None, PAGE.into()).1;
        let expected = "# HELP engram_reads_total Reads.\n# TYPE engram_reads_total counter\nengram_reads_total{a=\"b # c\"} 3\n\
            # HELP engram_build_info Build.\n# TYPE engram_build_info gauge\nengram_build_info{v=\"1\"} 1\n\
            # HELP engram_lag_seconds Lag.\n# TYPE engram_lag_seconds gauge\nengram_lag_seconds 0.5\n";
        assert_eq!(text, expected);
    }
}
