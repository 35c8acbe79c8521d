//! One answer of the parts that devices gave: the bits are those of one device that had looked at everything.
//!
//! Sums are of integers, and wrap where digests do; a partition's quality is on one device; orders are total, since no two memories
//! share an id. So neither the assignment nor the order in which parts come shows.

use crate::recall::Alike;
use crate::{Order, Slot, Tiles};
use engram_memory::{Digest, Histogram, MemoryId, QualityVector};
use std::cmp::Ordering;

/// By partition: the one that is not empty.
pub(super) fn qualities(parts: Vec<Vec<QualityVector>>, out: &mut Vec<QualityVector>) {
    let mut parts = parts.into_iter();
    *out = parts.next().unwrap_or_default();
    for part in parts {
        for (sum, own) in out.iter_mut().zip(part).filter(|(_, own)| !own.groups().is_empty()) {
            *sum = own;
        }
    }
}

pub(super) fn digests(parts: Vec<Vec<Digest>>, out: &mut Vec<Digest>) {
    let mut parts = parts.into_iter();
    *out = parts.next().unwrap_or_default();
    parts.for_each(|part| out.iter_mut().zip(part).for_each(|(sum, own)| sum.merge(own)));
}

pub(super) fn histograms(parts: Vec<Histogram>) -> Option<Histogram> {
    parts.into_iter().reduce(|mut sum, part| {
        sum.merge(&part);
        sum
    })
}

/// The first `limit` of rankings, each in `order`.
pub(super) fn ranked(
    parts: Vec<Vec<(Slot, u32)>>,
    order: Order,
    limit: Option<usize>,
    ids: &Tiles<MemoryId>,
    out: &mut Vec<(Slot, u32)>,
) {
    let heaviest_first = |one: &(Slot, u32), other: &(Slot, u32)| {
        other.1.cmp(&one.1).then_with(|| ids.get(one.0).cmp(&ids.get(other.0)))
    };
    merged(parts, limit.unwrap_or(usize::MAX), out, |one, other| match order {
        Order::HeaviestFirst => heaviest_first(one, other),
        Order::LightestFirst => heaviest_first(other, one),
    });
}

/// The first `limit` of what was recalled, each by score.
pub(super) fn recalled(parts: Vec<Vec<Alike>>, limit: usize, ids: &Tiles<MemoryId>, out: &mut Vec<Alike>) {
    merged(parts, limit, out, |one, other| {
        other.score.total_cmp(&one.score).then_with(|| ids.get(one.slot).cmp(&ids.get(other.slot)))
    });
}

fn merged<T>(parts: Vec<Vec<T>>, limit: usize, out: &mut Vec<T>, order: impl FnMut(&T, &T) -> Ordering) {
    let mut parts = parts.into_iter().filter(|part| !part.is_empty());
    *out = parts.next().unwrap_or_default();
    let mut is_merged = true;
    for part in parts {
        out.extend(part);
        is_merged = false;
    }
    if !is_merged {
        // A stable sort finds the runs that are in order, and merges them.
        out.sort_by(order);
    }
    out.truncate(limit);
}
