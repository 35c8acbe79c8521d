//! `engram quality`: how good the memories are, per group and in total.

use super::reads::Reads;
use crate::args::Context;
use crate::output::{Style, Table, count};
use crate::target;
use engram_api::{API_VERSION, ExitCode};
use engram_client::QualityOptions;
use engram_memory::{GroupQuality, ONE};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Characters of the longest bar.
const BAR: u64 = 50;

/// Show count, mean, lowest and highest weight per group and in total
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram quality
  engram quality --histogram        16 bins of equal width
  engram quality --histogram=6      2^6 bins
  engram quality --read replica --max-lag 5000
                                    of copies, at most 5 s old
  engram quality -o json            with exact sums in units of 2^-30")]
pub(crate) struct Arguments {
    /// Show how weights are distributed, in 2^BITS bins
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

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let options = QualityOptions { histogram_bits: arguments.histogram, ..QualityOptions::default() };
    let quality = target::connect(context).await?.reading(arguments.reads.mode()).quality(options).await?;
    // Told by copies alone.
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
        context.output.text(&format!("copies lag by at most {lag_ms} ms\n"))?;
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
    let some = quality.count > 0;
    json!({
        "group": group,
        "count": quality.count,
        // A u128 as JSON would be a number that few programs read.
        "sumUnits": quality.sum.to_string(),
        "mean": quality.mean(),
        "min": some.then(|| weight(quality.min)),
        "max": some.then(|| weight(quality.max)),
    })
}

/// A bar per bin; a bin with memories has at least a dot.
fn bars(bins: &[u64]) -> String {
    let most = bins.iter().copied().max().unwrap_or(0).max(1);
    let width = 1.0 / bins.len() as f64;
    let mut text = String::new();
    for (index, &memories) in bins.iter().enumerate() {
        let low = index as f64 * width;
        // A bar is proportional; u128, since counts times the width may pass u64.
        let length = (u128::from(memories) * u128::from(BAR)).div_ceil(u128::from(most)) as usize;
        writeln!(text, "{low:.4}-{:.4} {:>10} {}", low + width, count(memories), "\u{25a0}".repeat(length))
            .expect("a string takes whatever is written to it");
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_bin_has_a_bar_in_proportion_and_none_is_lost() {
        let text = super::bars(&[0, 1, 1_000_000, 500_000]);
        let lengths: Vec<usize> = text.lines().map(|line| line.matches('\u{25a0}').count()).collect();
        assert_eq!(lengths, [0, 1, 50, 25]);
        assert!(text.starts_with("0.0000-0.2500 "), "{text}");
        assert!(super::bars(&[0, 0]).contains("0.5000-1.0000"));
    }
}
