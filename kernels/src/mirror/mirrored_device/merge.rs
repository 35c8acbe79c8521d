//! Merges the results of several devices into those of a single device, bit for bit.
//!
//! Sums are integers (wrapping for digests), a partition's quality comes from one device, and orders are total because ids are unique. Neither
//! the assignment nor the order of results has an effect.

use crate::recall::RecallMatch;
use crate::{Order, Slot, Tiles};
use engram_memory::{Digest, Histogram, MemoryId, QualityVector};
use std::cmp::Ordering;

/// Takes the non-empty vector of each partition.
pub(super) fn merge_qualities(parts: Vec<Vec<QualityVector>>, out: &mut Vec<QualityVector>) {
    let mut parts = parts.into_iter();
    *out = parts.next().unwrap_or_default();
    for part in parts {
        for (sum, own) in out.iter_mut().zip(part).filter(|(_, own)| !own.groups().is_empty()) {
            *sum = own;
        }
    }
}

pub(super) fn merge_digests(parts: Vec<Vec<Digest>>, out: &mut Vec<Digest>) {
    let mut parts = parts.into_iter();
    *out = parts.next().unwrap_or_default();
    parts.for_each(|part| out.iter_mut().zip(part).for_each(|(sum, own)| sum.merge(own)));
}

pub(super) fn merge_histograms(parts: Vec<Histogram>) -> Option<Histogram> {
    parts.into_iter().reduce(|mut sum, part| {
        sum.merge(&part);
        sum
    })
}

/// Merges the first `limit` of rankings, each in `order`.
pub(super) fn merge_rankings(
    parts: Vec<Vec<(Slot, u32)>>,
    order: Order,
    limit: Option<usize>,
    ids: &Tiles<MemoryId>,
    out: &mut Vec<(Slot, u32)>,
) {
    let heaviest_first = |one: &(Slot, u32), other: &(Slot, u32)| {
        other.1.cmp(&one.1).then_with(|| ids.get(one.0).cmp(&ids.get(other.0)))
    };
    merge_sorted(parts, limit.unwrap_or(usize::MAX), out, |one, other| match order {
        Order::HeaviestFirst => heaviest_first(one, other),
        Order::LightestFirst => heaviest_first(other, one),
    });
}

/// Merges the first `limit` matches, each list ordered by score.
pub(super) fn merge_matches(
    parts: Vec<Vec<RecallMatch>>,
    limit: usize,
    ids: &Tiles<MemoryId>,
    out: &mut Vec<RecallMatch>,
) {
    merge_sorted(parts, limit, out, |one, other| {
        other.score.total_cmp(&one.score).then_with(|| ids.get(one.slot).cmp(&ids.get(other.slot)))
    });
}

fn merge_sorted<T>(parts: Vec<Vec<T>>, limit: usize, out: &mut Vec<T>, order: impl FnMut(&T, &T) -> Ordering) {
    let mut parts = parts.into_iter().filter(|part| !part.is_empty());
    *out = parts.next().unwrap_or_default();
    let mut is_merged = true;
    for part in parts {
        out.extend(part);
        is_merged = false;
    }
    if !is_merged {
        // A stable sort detects sorted runs and merges them.
        out.sort_by(order);
    }
    out.truncate(limit);
}
