//! `engram quality`: weight statistics per group and in total.

use super::reads::Reads;
use crate::context::Context;
use crate::output::{Style, Table, count};
use crate::target;
use engram_api::{API_VERSION, ExitCode};
use engram_client::QualityOptions;
use engram_memory::{GroupQuality, ONE};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Length of the longest bar in characters.
const BAR: u64 = 50;

/// Show count, mean, minimum and maximum weight per group and in total
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram quality
  engram quality --histogram                         histogram with 16 bins
  engram quality --histogram=6                       histogram with 2^6 bins
  engram quality --read replica --max-lag 5000       read replicas that lag by at most 5 s
  engram quality -o json                             include exact sums in units of 2^-30")]
pub(crate) struct Quality {
    /// Show a histogram of the weights with 2^BITS bins
    #[arg(
        long,
        value_name = "BITS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "4",
        value_parser = clap::value_parser!(u32).range(0..=12)
    )]
    histogram: Option<u32>,
    #[command(flatten)]
    reads: Reads,
}

pub(crate) async fn run(arguments: &Quality, context: &Context) -> anyhow::Result<ExitCode> {
    let options = QualityOptions { histogram_bits: arguments.histogram, ..QualityOptions::default() };
    let quality = target::connect(context).await?.with_read_mode(arguments.reads.mode()).quality(options).await?;
    // Reported by replica reads only.
    let lag_ms = quality.versions.iter().filter_map(|version| version.lag_ms).max();
    let total = quality.vector.total();
    let mut table = Table::new(&["group", ">memories", ">mean", ">min", ">max"]);
    let groups = quality.vector.groups().iter().map(|(group, quality)| (group.0.to_string(), *quality));
    let lines: Vec<(String, GroupQuality)> = groups.chain([("all".to_owned(), total)]).collect();
    for (name, quality) in &lines {
        table.row([
            name.clone(),
            count(quality.count),
            mean(quality),
            bound(quality, quality.min),
            bound(quality, quality.max),
        ]);
    }
    if context.output.is_structured() {
        let groups: Vec<Value> =
            quality.vector.groups().iter().map(|(group, it)| object(&json!(group.0), it)).collect();
        let mut value = json!({
            "apiVersion": API_VERSION, "kind": "Quality", "groups": groups, "total": object(&json!("all"), &total),
        });
        if let Some(histogram) = &quality.histogram {
            let groups = histogram.groups().iter();
            value["histogram"] = groups.map(|(group, bins)| json!({ "group": group.0, "bins": bins })).collect();
        }
        if lag_ms.is_some() {
            let versions = quality.versions.iter();
            value["versions"] = versions
                .map(|at| json!({ "partition": at.partition, "term": at.term, "lsn": at.lsn, "lagMs": at.lag_ms }))
                .collect();
        }
        context.output.value(&value)?;
        return Ok(ExitCode::Ok);
    }
    context.output.text(&table.render(&context.output))?;
    if let Some(lag_ms) = lag_ms {
        context.output.text(&format!("replication lag: at most {lag_ms} ms\n"))?;
    }
    if let Some(histogram) = &quality.histogram {
        let bars = bars(&histogram.total());
        context
            .output
            .text(&format!("\n{}{bars}", context.output.paint(Style::Bold, "weight            memories\n")))?;
    }
    Ok(ExitCode::Ok)
}

fn weight(units: u32) -> f64 {
    f64::from(units) / f64::from(ONE)
}

fn mean(quality: &GroupQuality) -> String {
    quality.mean().map_or_else(|| "-".into(), |mean| format!("{mean:.9}"))
}

fn bound(quality: &GroupQuality, units: u32) -> String {
    if quality.count == 0 { "-".into() } else { format!("{:.9}", weight(units)) }
}

fn object(group: &Value, quality: &GroupQuality) -> Value {
    let is_occupied = quality.count > 0;
    json!({
        "group": group,
        "count": quality.count,
        // As a string: few JSON parsers read 128-bit integers.
        "sumUnits": quality.sum.to_string(),
        "mean": quality.mean(),
        "min": is_occupied.then(|| weight(quality.min)),
        "max": is_occupied.then(|| weight(quality.max)),
    })
}

/// Renders one bar per bin; bins with memories have at least one character.
fn bars(bins: &[u64]) -> String {
    let largest = bins.iter().copied().max().unwrap_or(0).max(1);
    let width = 1.0 / bins.len() as f64;
    let mut text = String::new();
    for (index, &memories) in bins.iter().enumerate() {
        let low = index as f64 * width;
        // u128: count times width can exceed u64.
        let length = (u128::from(memories) * u128::from(BAR)).div_ceil(u128::from(largest)) as usize;
        writeln!(text, "{low:.4}-{:.4} {:>10} {}", low + width, count(memories), "\u{25a0}".repeat(length))
            .expect("writing to a string cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_bin_has_a_proportional_bar() {
        let text = super::bars(&[0, 1, 1_000_000, 500_000]);
        let lengths: Vec<usize> = text.lines().map(|line| line.matches('\u{25a0}').count()).collect();
        assert_eq!(lengths, [0, 1, 50, 25]);
        assert!(text.starts_with("0.0000-0.2500 "), "{text}");
        assert!(super::bars(&[0, 0]).contains("0.5000-1.0000"));
    }
}
