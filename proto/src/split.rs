//! Splits columns by partition: in clients before they send to each owner, and in workers for clients without a map.
//!
//! A split depends only on the rows and P, so that a retry sends equal parts. Rows keep their order within a partition. Columns must have been checked ([`crate::columns::check_updates`], [`crate::columns::check_lengths`]).

use crate::v1;
use engram_memory::{MemoryId, PartitionId, partition_of};

/// Maximum ids per part: records stay small relative to the 8 MiB limit of a log record.
pub const PART_IDS: usize = 16 << 10;
/// Maximum bytes per part, not counting its first row.
pub const PART_BYTES: usize = 1 << 20;

/// Splits updates by id. Updates by group belong to every partition and are not split: the result is then empty.
pub fn updates(from: &v1::Updates, partitions: u32) -> Vec<(PartitionId, v1::Updates)> {
    let keys = from.keys.as_ref();
    let cost = |row: usize| 12 + keys.map_or(0, |keys| keys.entry(row).len() + 4);
    Order::of(&from.ids, partitions, cost).map(|rows| v1::Updates {
        ids: pick(&from.ids, rows),
        quality: from.quality,
        qualities: pick(&from.qualities, rows),
        deltas: pick(&from.deltas, rows),
        on_missing: from.on_missing,
        keys: keys.and_then(|keys| pick_blobs(keys, rows)),
        groups: Vec::new(),
    })
}

/// Splits rows to insert; partition and seq of the parts stay unset.
pub fn upsert(from: &v1::UpsertPart, partitions: u32) -> Vec<(PartitionId, v1::UpsertPart)> {
    let dimension = from.features.len().checked_div(from.ids.len()).unwrap_or(0);
    let blob = |column: Option<&v1::Blobs>, row| column.map_or(0, |column| column.entry(row).len() + 4);
    let (keys, payloads) = (from.keys.as_ref(), from.payloads.as_ref());
    let cost = |row: usize| 13 + 4 * dimension + blob(keys, row) + blob(payloads, row);
    Order::of(&from.ids, partitions, cost).map(|rows| v1::UpsertPart {
        partition: None,
        seq: 0,
        ids: pick(&from.ids, rows),
        weights: pick(&from.weights, rows),
        groups: pick(&from.groups, rows).into(),
        keys: keys.and_then(|keys| pick_blobs(keys, rows)),
        features: rows
            .iter()
            .flat_map(|&row| &from.features[row as usize * dimension..][..dimension])
            .copied()
            .collect(),
        payloads: payloads.and_then(|payloads| pick_blobs(payloads, rows)),
    })
}

/// Splits ids without columns.
pub fn ids(from: &[u64], partitions: u32) -> Vec<(PartitionId, Vec<u64>)> {
    Order::of(from, partitions, |_| 8).map(|rows| pick(from, rows))
}

/// Row numbers sorted by partition, stable.
struct Order {
    rows: Vec<u32>,
    /// Ranges of `rows`: one part each.
    parts: Vec<(PartitionId, std::ops::Range<usize>)>,
}

impl Order {
    /// Counting sort by partition, then cuts each partition where a part would exceed its limits.
    fn of(ids: &[u64], partitions: u32, cost: impl Fn(usize) -> usize) -> Self {
        let homes: Vec<u32> = ids.iter().map(|&id| partition_of(MemoryId(id), partitions).0).collect();
        let mut ends = vec![0_usize; partitions as usize + 1];
        for &home in &homes {
            ends[home as usize + 1] += 1;
        }
        for partition in 0..partitions as usize {
            ends[partition + 1] += ends[partition];
        }
        let mut next = ends.clone();
        let mut rows = vec![0; ids.len()];
        for (row, &home) in homes.iter().enumerate() {
            rows[next[home as usize]] = u32::try_from(row).expect("a batch has fewer than 2^32 rows");
            next[home as usize] += 1;
        }
        let mut parts = Vec::new();
        for partition in 0..partitions {
            let (mut start, end) = (ends[partition as usize], ends[partition as usize + 1]);
            while start < end {
                let cut = start + part_rows(&rows[start..end], &cost);
                parts.push((PartitionId(partition), start..cut));
                start = cut;
            }
        }
        Self { rows, parts }
    }

    fn map<T>(&self, gather: impl Fn(&[u32]) -> T) -> Vec<(PartitionId, T)> {
        self.parts.iter().map(|(partition, part)| (*partition, gather(&self.rows[part.clone()]))).collect()
    }
}

/// Returns how many of `rows`, at least one, form one part.
fn part_rows(rows: &[u32], cost: impl Fn(usize) -> usize) -> usize {
    let mut bytes = 0;
    let full = rows.iter().take(PART_IDS).position(|&row| {
        bytes += cost(row as usize);
        bytes > PART_BYTES
    });
    full.unwrap_or(rows.len().min(PART_IDS)).max(1)
}

fn pick<T: Copy>(column: &[T], rows: &[u32]) -> Vec<T> {
    if column.is_empty() { Vec::new() } else { rows.iter().map(|&row| column[row as usize]).collect() }
}

/// Returns `None` if all picked entries are empty: an absent column has the same meaning.
fn pick_blobs(column: &v1::Blobs, rows: &[u32]) -> Option<v1::Blobs> {
    v1::Blobs::column(rows.iter().map(|&row| column.entry(row as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns;

    #[test]
    fn split_keeps_every_row_once_in_order_and_in_its_partition() {
        let ids: Vec<u64> = (0..50_000).map(|row| row % 7_000).collect();
        let qualities: Vec<f32> = (0..50_000).map(|row| row as f32 / 50_000.0).collect();
        let from = v1::Updates { ids: ids.clone(), qualities, ..Default::default() };
        let mut seen = 0;
        for (partition, part) in updates(&from, 3) {
            assert!(part.ids.len() <= PART_IDS && part.ids.len() == part.qualities.len());
            assert!(part.qualities.is_sorted(), "rows of one partition keep their order");
            assert_eq!(columns::check_partition(&part.ids, partition, 3), Ok(()));
            for (id, quality) in part.ids.iter().zip(&part.qualities) {
                assert_eq!(*id, ids[(quality * 50_000.0).round() as usize]);
            }
            seen += part.ids.len();
        }
        assert_eq!(seen, 50_000);
    }

    #[test]
    fn large_payloads_are_split_into_parts_below_the_limit() {
        let payloads = (0..40).map(|row| vec![row; 60_000]);
        let from = v1::UpsertPart {
            ids: (0..40).collect(),
            features: (0..80).map(|value| value as f32).collect(),
            payloads: v1::Blobs::column(payloads),
            ..Default::default()
        };
        let parts = upsert(&from, 1);
        assert_eq!(parts.len(), 3, "2.4 MB in parts of at most 1 MiB");
        let mut row = 0;
        for (_, part) in parts {
            for index in 0..part.ids.len() {
                assert_eq!(part.ids[index], row);
                assert_eq!(part.features[2 * index..2 * index + 2], [(2 * row) as f32, (2 * row + 1) as f32]);
                assert_eq!(part.payloads.as_ref().unwrap().entry(index), vec![row as u8; 60_000]);
                row += 1;
            }
        }
        assert_eq!(row, 40);
    }
}
