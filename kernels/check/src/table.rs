//! Results as Markdown, for docs/results/gpu.md.

use std::fmt::Write as _;

use crate::report::{Report, Row};

/// Formats device, checks and measurements.
pub(crate) fn markdown(report: &Report) -> String {
    let mut text = String::new();
    write(report, &mut text).expect("writing to a string cannot fail");
    text
}

fn write(report: &Report, text: &mut String) -> std::fmt::Result {
    let device = &report.device;
    writeln!(
        text,
        "{}, compute capability {}, {:.0} GiB, driver of CUDA {}; engram {}\n",
        device.name,
        device.capability,
        device.memory_bytes as f64 / f64::from(1_u32 << 30),
        device.driver,
        report.engram
    )?;
    writeln!(text, "| check | outcome | seconds | what |\n| --- | --- | --- | --- |")?;
    for check in &report.checks {
        let detail = check.detail.replace('|', "\\|").replace('\n', " ");
        writeln!(text, "| {} | {} | {:.1} | {detail} |", check.name, check.outcome.label(), check.seconds)?;
    }
    if report.rows.is_empty() {
        return Ok(());
    }
    if let Some(copy) = report.copy_gb_per_s {
        writeln!(text, "\nA copy within the device's memory reads and writes {copy:.0} GB/s.")?;
    }
    writeln!(text, "\n| pass | memories | device ms | call ms | GB/s | of the copy | peers, device ms |")?;
    writeln!(text, "| --- | --- | --- | --- | --- | --- | --- |")?;
    for row in &report.rows {
        writeln!(
            text,
            "| {} | {} | {:.4} | {:.4}{} | {} | {} | {} |",
            row.pass,
            grouped(row.memories),
            row.device.median,
            row.call.median,
            promised(row),
            if row.bytes > 0 { format!("{:.0}", row.bytes as f64 / (row.device.median * 1e6)) } else { "-".to_owned() },
            row.of_copy.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
            peers(row)
        )?;
    }
    Ok(())
}

fn promised(row: &Row) -> String {
    let Some(promised) = row.promised_ms else { return String::new() };
    let verdict = if row.call.median <= promised { "met" } else { "missed" };
    format!(" (promised {promised}: {verdict})")
}

fn peers(row: &Row) -> String {
    let peers = row.peers.iter().map(|peer| {
        let ratio = peer.device.median / row.device.median;
        format!("{} {:.4} ({ratio:.2}x)", peer.name, peer.device.median)
    });
    match peers.collect::<Vec<_>>() {
        none if none.is_empty() => "-".to_owned(),
        some => some.join(", "),
    }
}

/// `64,000,000`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::tests::row;
    use crate::report::{Check, Device, Figure, Outcome, Peer};

    #[test]
    fn table_has_a_line_for_each_check_and_pass() {
        let mut rank_row = row("rank", 10_000_000);
        rank_row.peers.push(Peer { name: "CUB".to_owned(), device: Figure { best: 1.0, median: 1.5, repeats: 9 } });
        let report = Report {
            engram: "0.1.0".to_owned(),
            device: Device {
                name: "NVIDIA X".to_owned(),
                ordinal: 0,
                capability: "9.0".to_owned(),
                driver: "13.0".to_owned(),
                memory_bytes: 80 << 30,
            },
            checks: vec![Check {
                name: "passes".to_owned(),
                outcome: Outcome::Failed,
                detail: "a | b\nc".to_owned(),
                seconds: 1.25,
            }],
            copy_gb_per_s: Some(2.3),
            rows: vec![Row { promised_ms: Some(2.5), ..row("epoch", 999) }, rank_row],
        };
        let text = markdown(&report);
        assert!(text.starts_with("NVIDIA X, compute capability 9.0, 80 GiB, driver of CUDA 13.0; engram 0.1.0\n"));
        assert!(text.contains("| passes | FAILED | 1.2 | a \\| b c |"), "{text}");
        assert!(
            text.contains("| the pass epoch | 999 | 2.0000 | 3.0000 (promised 2.5: missed) | 2 | 88 % | - |"),
            "{text}"
        );
        assert!(text.contains("| 10,000,000 | 2.0000 | 3.0000 | 2 | 88 % | CUB 1.5000 (0.75x) |"), "{text}");
        // Round trip.
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
    }
}
