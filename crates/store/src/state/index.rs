//! Hash index from ids to local slots: open addressing with linear probing, four bytes per entry.
//!
//! An entry holds a local slot in its low bits (log2 of the table size) and bits of the hash in the others, so that lookups rarely
//! read a wrong id. Ids are stored in the column only: a table is rebuilt from them. The index is not replicated, and its order
//! is never visible.

/// Empty entry. Its low bits are no valid slot, since a table is never full.
const EMPTY: u32 = u32::MAX;
/// Smallest size of a non-empty table.
const FEWEST: usize = 16;
/// Largest size of a table: leaves at least one bit of hash.
const MOST: usize = 1 << 31;

/// A table of local slots. The caller computes hashes; their top bits select the home entry.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: Vec<u32>,
    len: usize,
}

impl Index {
    /// Number of slots.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the table.
    pub(crate) const fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<u32>()) as u64
    }

    /// Whether an insertion needs [`Index::rebuild`] first.
    pub(crate) const fn is_full(&self) -> bool {
        self.len >= self.entries.len() / 8 * 7
    }

    /// Creates a table with capacity for `count` slots and the given (hash, slot) pairs. The old one is freed first.
    pub(crate) fn rebuild(&mut self, count: usize, pairs: impl Iterator<Item = (u64, u32)>) {
        let entries = (count * 8 / 7 + 1).next_power_of_two().max(FEWEST);
        assert!(entries <= MOST, "{count} memories in one partition exceed the slots of a device");
        self.entries = Vec::new();
        self.entries = vec![EMPTY; entries];
        self.len = 0;
        pairs.for_each(|(hash, slot)| self.insert(hash, slot));
    }

    /// Adds a slot whose id is not in the table.
    ///
    /// # Panics
    /// When the table is full.
    pub(crate) fn insert(&mut self, hash: u64, slot: u32) {
        assert!(!self.is_full(), "a table is rebuilt before it is full");
        let mut at = self.home(hash);
        while self.entries[at] != EMPTY {
            at = self.after(at);
        }
        self.entries[at] = self.tag(hash) | slot;
        self.len += 1;
    }

    /// Finds the slot of this hash for which `right` holds.
    #[inline]
    pub(crate) fn find(&self, hash: u64, right: impl Fn(u32) -> bool) -> Option<u32> {
        self.find_entry(hash, right).map(|at| self.slot(self.entries[at]))
    }

    /// Returns the home entry of a hash, [`EMPTY`] in an empty table. Calling it for many hashes before using the results overlaps
    /// the cache misses.
    #[inline]
    pub(crate) fn peek(&self, hash: u64) -> u32 {
        if self.entries.is_empty() { EMPTY } else { self.entries[self.home(hash)] }
    }

    /// Returns the first slot whose hash bits match `hash`, given the result of [`Index::peek`]; rarely a wrong one, so the caller
    /// compares the id.
    #[inline]
    pub(crate) fn candidate(&self, hash: u64, peeked: u32) -> Option<u32> {
        if peeked == EMPTY {
            return None;
        }
        if self.has_tag(peeked, hash) {
            return Some(self.slot(peeked));
        }
        self.find(hash, |_| true)
    }

    /// Replaces slot `from` by `to`.
    ///
    /// # Panics
    /// When `from` is not in the table.
    pub(crate) fn replace(&mut self, hash: u64, from: u32, to: u32) {
        let at = self.find_entry(hash, |slot| slot == from).expect("every memory is indexed");
        self.entries[at] = self.tag(hash) | to;
    }

    /// Removes a slot; later entries of its probe sequence move up, so that no lookup ends early.
    ///
    /// # Panics
    /// When it is not in the table.
    pub(crate) fn remove(&mut self, hash: u64, slot: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.find_entry(hash, |entry| entry == slot).expect("every memory is indexed");
        let mut at = hole;
        loop {
            at = self.after(at);
            let moved = self.entries[at];
            if moved == EMPTY {
                break;
            }
            // It may move into the hole unless its home is after the hole.
            let home = self.home(hash_of(self.slot(moved)));
            let mask = self.entries.len() - 1;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = moved;
                hole = at;
            }
        }
        self.entries[hole] = EMPTY;
        self.len -= 1;
    }

    #[inline]
    fn find_entry(&self, hash: u64, right: impl Fn(u32) -> bool) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at];
            if entry == EMPTY {
                return None;
            }
            if self.has_tag(entry, hash) && right(self.slot(entry)) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    /// Number of slot bits of an entry.
    #[inline]
    const fn bits(&self) -> u32 {
        self.entries.len().trailing_zeros()
    }

    #[inline]
    const fn home(&self, hash: u64) -> usize {
        (hash >> (u64::BITS - self.bits())) as usize
    }

    #[inline]
    const fn after(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }

    #[inline]
    const fn tag(&self, hash: u64) -> u32 {
        (hash as u32) << self.bits()
    }

    #[inline]
    const fn has_tag(&self, entry: u32, hash: u64) -> bool {
        (entry ^ self.tag(hash)) >> self.bits() == 0
    }

    #[inline]
    const fn slot(&self, entry: u32) -> u32 {
        entry & ((1 << self.bits()) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::Index;
    use engram_memory::mix64;
    use std::collections::BTreeMap;

    /// Compared with a map, with hashes that collide and wrap around the end of the table.
    #[test]
    fn an_index_equals_a_map_under_colliding_hashes() {
        for crowd in [u64::MAX, !0 << 60 | 3, 0xF000_0000_0000_0001] {
            let hash = |id: u64| mix64(id) | !crowd;
            let (mut index, mut expected) = (Index::default(), BTreeMap::new());
            let mut ids: Vec<u64> = Vec::new();
            for step in 0..6_000_u64 {
                let draw = mix64(step ^ crowd);
                if draw % 5 < 3 || ids.is_empty() {
                    if index.is_full() {
                        let pairs = ids.iter().enumerate().map(|(slot, id)| (hash(*id), slot as u32));
                        index.rebuild(ids.len() + 1, pairs);
                    }
                    index.insert(hash(step), ids.len() as u32);
                    expected.insert(step, ids.len() as u32);
                    ids.push(step);
                } else {
                    let slot = (draw >> 32) as usize % ids.len();
                    index.remove(hash(ids[slot]), slot as u32, |slot| hash(ids[slot as usize]));
                    expected.remove(&ids[slot]);
                    let (last, moved) = (ids.len() - 1, ids[ids.len() - 1]);
                    if slot != last {
                        index.replace(hash(moved), last as u32, slot as u32);
                        expected.insert(moved, slot as u32);
                    }
                    ids.swap_remove(slot);
                }
                assert_eq!(index.len(), ids.len());
                for id in [step, step / 2, step / 3] {
                    let entry = index.find(hash(id), |slot| ids[slot as usize] == id);
                    assert_eq!(entry, expected.get(&id).copied(), "id {id} after step {step}");
                    let candidate = index.candidate(hash(id), index.peek(hash(id)));
                    assert!(entry.is_none() || candidate.is_some());
                }
            }
            for (id, slot) in &expected {
                assert_eq!(index.find(hash(*id), |slot| ids[slot as usize] == *id), Some(*slot));
            }
        }
    }
}
