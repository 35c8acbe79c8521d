//! Writes the metrics that the operator exports to standard output, for `cargo xtask generate`: name, type, unit, labels and help with
//! tabs between them.

fn main() {
    for metric in engram_operator::telemetry::metrics::catalog() {
        let (labels, unit) = (metric.labels.join(" "), metric.unit().unwrap_or_default());
        println!("{}\t{}\t{unit}\t{labels}\t{}", metric.name, metric.metric_type, metric.help);
    }
}
