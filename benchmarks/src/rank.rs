//! Full ranking and top 1,000 over all partitions, with uniform and with equal weights.

use anyhow::{Result, ensure};
use engram_kernels::{Device, Order, RankRequest, Scope};

use crate::arena::{self, Arena};
use crate::measure;
use crate::population;
use crate::row::{Better, Budget, Row, Workload};

/// Limit of the top-k ranking.
const TOP: usize = 1_000;

/// Measures one size.
///
/// # Errors
/// When the device fails, or memories are missing.
pub(crate) fn rank_rows(memories: u32, threads: usize) -> Result<Vec<Row>> {
    let mut rows = measure_kind("random", "random weights", Arena::new(memories, threads, population::uniform)?)?;
    rows.extend(measure_kind("tied", "all weights equal", Arena::new(memories, threads, arena::tied)?)?);
    Ok(rows)
}

/// `kind` is the peers' name of the weight distribution, `words` the display name.
fn measure_kind(kind: &str, words: &str, mut arena: Arena) -> Result<Vec<Row>> {
    eprintln!("rank: {} memories, {words}", arena.slots.len());
    [None, Some(TOP)].into_iter().map(|limit| row(&mut arena, kind, words, limit)).collect()
}

fn row(arena: &mut Arena, kind: &str, words: &str, limit: Option<usize>) -> Result<Row> {
    let memories = arena.slots.len();
    let expected = limit.unwrap_or(memories).min(memories);
    let mut out = Vec::new();
    let ours = measure::milliseconds(|| -> Result<()> {
        let Arena { device, segments, ids, .. } = &mut *arena;
        device.rank(&RankRequest { segments, ids, scope: Scope::All, order: Order::HeaviestFirst, limit }, &mut out)?;
        ensure!(out.len() == expected, "{} of {expected} memories ranked", out.len());
        Ok(())
    })?;

    let (title, workloads) = match limit {
        None => (
            format!("full rank, ties by id, {words}"),
            vec![workload(format!("rank-{kind}"), ""), workload(format!("rank-{kind}-by-id"), ", ties by id")],
        ),
        Some(limit) => (
            format!("top {limit}, ties by id, {words}"),
            vec![workload(format!("top-{kind}"), ""), workload(format!("top-{kind}-by-id"), ", ties by id")],
        ),
    };
    let budgets = match (memories, limit, kind) {
        // Unordered equal weights are no work: the peer that orders them by id counts.
        (10_000_000, None, "tied") => vec![ratio("numpy, ties by id", 6.0)],
        (10_000_000, Some(_), "tied") => vec![ratio("numpy, ties by id", 10.0)],
        (10_000_000, None, _) => vec![ratio("numpy", 6.0)],
        (10_000_000, Some(_), _) => vec![ratio("numpy", 10.0)],
        _ => Vec::new(),
    };
    Ok(Row {
        title,
        workloads,
        memories: memories as u64,
        unit: "ms".to_owned(),
        better: Better::Lower,
        ours,
        peers: Vec::new(),
        budgets,
    })
}

fn workload(name: String, remark: &str) -> Workload {
    Workload { name, remark: remark.to_owned() }
}

fn ratio(peer: &str, at_least: f64) -> Budget {
    Budget::Ratio { peer: peer.to_owned(), at_least }
}
