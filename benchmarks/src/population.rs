//! The memories of every suite: hashed ids, two groups, weights uniform in [0, 1).

use anyhow::{Context, Result};
use engram_memory::hash::{mix64, partition_of};
use engram_memory::{Command, Group, MemoryId, OnMissing, PartitionId, Record, Updates, Upsert, Weight, edge, law};

/// Default number of partitions of a cluster.
pub(crate) const PARTITIONS: u32 = 256;

/// Updates of one learning epoch, and of one batch.
pub(crate) const UPDATES: usize = 10_000;

/// Decay of one epoch.
pub(crate) const DECAY: f64 = 0.01;

/// Quality of every update.
pub(crate) const QUALITY: f32 = 0.8;

/// Returns the id of memory 0, 1, 2, ...
pub(crate) fn id(number: u32) -> MemoryId {
    MemoryId(mix64(u64::from(number)))
}

/// Returns group 0 or 1.
pub(crate) fn group(id: MemoryId) -> Group {
    Group((mix64(id.0) >> 63) as u8)
}

/// Returns a weight in [0, 1), uniform over ids.
pub(crate) fn uniform(id: MemoryId) -> Weight {
    Weight::from_units((mix64(id.0 ^ 0x5eed) >> 34) as u32).expect("a 30-bit value is below ONE")
}

/// Returns up to `count` distinct memory numbers in random order: the first steps of a shuffle.
pub(crate) fn distinct(count: usize, memories: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..memories).collect();
    let wanted = count.min(numbers.len());
    for place in 0..wanted {
        let rest = (numbers.len() - place) as u64;
        numbers.swap(place, place + (mix64(place as u64) % rest) as usize);
    }
    numbers.truncate(wanted);
    numbers
}

/// Returns `count` ids drawn with repetition, depending on `seed`.
pub(crate) fn drawn(count: usize, memories: u32, seed: u64) -> Vec<MemoryId> {
    let number = |draw: u64| (mix64(mix64(seed) ^ draw) % u64::from(memories)) as u32;
    (0..count as u64).map(|draw| id(number(draw))).collect()
}

/// Returns the weight change of [`QUALITY`] at learning rate 0.05.
///
/// # Errors
/// Never: all figures are in range.
pub(crate) fn delta() -> Result<i32> {
    let rate = edge::rate(0.05).context("the learning rate is out of range")?;
    let quality = edge::quality(QUALITY).context("the quality is out of range")?;
    Ok(law::delta(rate, quality))
}

/// Groups `ids` by partition, in order.
pub(crate) fn by_partition(ids: &[MemoryId]) -> Vec<Vec<MemoryId>> {
    let mut parts = vec![Vec::new(); PARTITIONS as usize];
    for &id in ids {
        parts[partition_of(id, PARTITIONS).0 as usize].push(id);
    }
    parts
}

/// Returns one record for each partition of `ids`.
pub(crate) fn records(ids: &[MemoryId], command: impl Fn(Vec<MemoryId>) -> Command) -> Vec<(PartitionId, Record)> {
    let parts = (0..).map(PartitionId).zip(by_partition(ids)).filter(|(_, ids)| !ids.is_empty());
    parts.map(|(partition, ids)| (partition, Record::bare(command(ids)))).collect()
}

/// Returns a command that inserts memories of this population.
pub(crate) fn upsert(ids: Vec<MemoryId>) -> Command {
    let weights = ids.iter().map(|id| uniform(*id).units()).collect();
    let groups = ids.iter().map(|id| group(*id)).collect();
    Command::Upsert(Upsert { ids, weights, groups, ..Upsert::default() })
}

/// Returns the same change for all `ids`.
pub(crate) fn by_id(ids: Vec<MemoryId>, delta: i32) -> Updates {
    let deltas = vec![delta; ids.len()];
    Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None }
}
