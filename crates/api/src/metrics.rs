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
