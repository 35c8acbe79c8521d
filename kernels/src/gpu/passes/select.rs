//! First entries by (key, id): a radix select narrows a cut from the highest bits down.

use super::rank::KeyedSlots;
use crate::Error;
use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{THREADS, View};

const BINS: usize = 2_048;
/// Items per block.
const ITEMS: usize = THREADS * 8;
/// Accepted surplus: this many extra items are collected and sorted rather than narrowing the cut once more.
const SPARE: usize = 1_024;
/// Rounds: whether the digit is of the id, its lowest bit, its width.
const ROUNDS: [(bool, u32, u32); 9] = [
    (false, 21, 11),
    (false, 10, 11),
    (false, 0, 10),
    (true, 53, 11),
    (true, 42, 11),
    (true, 31, 11),
    (true, 20, 11),
    (true, 9, 11),
    (true, 0, 9),
];

/// Items at or before this (key, id) are taken. Complements of both if the order is reversed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    key: u32,
    id: u64,
}

impl<D: Driver> View<'_, D> {
    /// Returns a superset of the first `limit` (at least 1) by key ascending, then id ascending, or by the reverse order: few more, unordered.
    pub(in crate::gpu) fn select(
        &mut self,
        keyed: &KeyedSlots<D::Buffer>,
        limit: usize,
        reverse: bool,
    ) -> Result<KeyedSlots<D::Buffer>, Error> {
        let (mut cut, mut taken) = (Cut { key: u32::MAX, id: u64::MAX }, keyed.count);
        let columns = self.columns;
        let given = [
            Argument::Buffer(&keyed.keys),
            Argument::Buffer(&keyed.slots),
            Argument::Buffer(&columns.ids),
            Argument::U32(keyed.count as u32),
            Argument::U32(u32::from(reverse)),
        ];
        // Number of items before those that match the cut so far; and the cut's upper bits, zero below.
        let (mut before, mut upper) = (0, Cut { key: 0, id: 0 });
        for (of_id, shift, bits) in ROUNDS {
            if taken <= limit.saturating_add(SPARE) {
                break;
            }
            let bins = self.memory.zeroed::<u32>(BINS)?;
            let digit = [
                Argument::U32(u32::from(of_id)),
                Argument::U32(shift),
                Argument::U32(bits),
                Argument::U32(upper.key),
                Argument::U64(upper.id),
                Argument::Buffer(&bins),
            ];
            self.memory.launch("select_histogram", keyed.count, ITEMS, &[&given[..], &digit].concat())?;
            let mut bin = 0;
            for (next, count) in self.memory.downloaded::<u32>(&bins, BINS)?.into_iter().enumerate() {
                bin = next as u64;
                taken = before + count as usize;
                if taken >= limit {
                    break;
                }
                before = taken;
            }
            if of_id {
                upper.id |= bin << shift;
                cut.id = upper.id | ((1 << shift) - 1);
            } else {
                upper.key |= (bin as u32) << shift;
                cut.key = upper.key | ((1 << shift) - 1);
            }
        }
        let (keys, slots) = (self.memory.undefined::<u32>(taken)?, self.memory.undefined::<u32>(taken)?);
        let kept = self.memory.zeroed::<u32>(1)?;
        let collected = [
            Argument::U32(cut.key),
            Argument::U64(cut.id),
            Argument::Buffer(&keys),
            Argument::Buffer(&slots),
            Argument::Buffer(&kept),
        ];
        self.memory.launch("select_collect", keyed.count, ITEMS, &[&given[..], &collected].concat())?;
        Ok(KeyedSlots { keys, slots, count: taken })
    }
}
