//! Which local slot holds which id: open addressing with linear probing, four bytes a place.
//!
//! A place holds a local slot in its low bits, as many as the table has places, and bits of the hash in the others, so that
//! hardly any lookup touches an id that is not the one sought. Ids are in the column, not here: a table is rebuilt from them.
//! The index is no replicated state, and its order never shows.

/// No memory. Its low bits are no slot: a table is never full.
const EMPTY: u32 = u32::MAX;
/// Fewest places of a table that holds something.
const FEWEST: usize = 16;
/// Most places of a table: at least one bit of hash stays.
const MOST: usize = 1 << 31;

/// A table of local slots. Hashes come from the caller; home places are their top bits.
#[derive(Debug, Default)]
pub(crate) struct Index {
    places: Vec<u32>,
    len: usize,
}

impl Index {
    /// Number of slots in it.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the table.
    pub(crate) const fn bytes(&self) -> u64 {
        (self.places.capacity() * size_of::<u32>()) as u64
    }

    /// Whether one more needs a larger table: [`Index::rebuild`] it then.
    pub(crate) const fn is_full(&self) -> bool {
        self.len >= self.places.len() / 8 * 7
    }

    /// Makes a table with room for `count` slots and the given (hash, slot) pairs. The old one is freed first.
    pub(crate) fn rebuild(&mut self, count: usize, pairs: impl Iterator<Item = (u64, u32)>) {
        let places = (count * 8 / 7 + 1).next_power_of_two().max(FEWEST);
        assert!(places <= MOST, "{count} memories of one partition are above what a device has slots for");
        self.places = Vec::new();
        self.places = vec![EMPTY; places];
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
        while self.places[at] != EMPTY {
            at = self.after(at);
        }
        self.places[at] = self.tag(hash) | slot;
        self.len += 1;
    }

    /// The slot of this hash that is `right`.
    #[inline]
    pub(crate) fn find(&self, hash: u64, right: impl Fn(u32) -> bool) -> Option<u32> {
        self.place(hash, right).map(|at| self.slot(self.places[at]))
    }

    /// What stands at the home place of a hash: asked for many hashes before any answer is looked at, the answers of memory
    /// come together. [`EMPTY`] in an empty table.
    #[inline]
    pub(crate) fn peek(&self, hash: u64) -> u32 {
        if self.places.is_empty() { EMPTY } else { self.places[self.home(hash)] }
    }

    /// The first slot whose bits of the hash are those of `hash`, given what [`Index::peek`] said of it; it is hardly ever another
    /// one than the one sought, but it may be.
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

    /// Puts `to` in the place of `from`.
    ///
    /// # Panics
    /// When `from` is not there.
    pub(crate) fn replace(&mut self, hash: u64, from: u32, to: u32) {
        let at = self.place(hash, |slot| slot == from).expect("every memory is indexed");
        self.places[at] = self.tag(hash) | to;
    }

    /// Removes a slot; the ones behind it move up, so that no lookup ends too early.
    ///
    /// # Panics
    /// When it is not there.
    pub(crate) fn remove(&mut self, hash: u64, slot: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.place(hash, |found| found == slot).expect("every memory is indexed");
        let mut at = hole;
        loop {
            at = self.after(at);
            let moved = self.places[at];
            if moved == EMPTY {
                break;
            }
            // It may move into the hole unless its home lies behind the hole.
            let home = self.home(hash_of(self.slot(moved)));
            let mask = self.places.len() - 1;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.places[hole] = moved;
                hole = at;
            }
        }
        self.places[hole] = EMPTY;
        self.len -= 1;
    }

    #[inline]
    fn place(&self, hash: u64, right: impl Fn(u32) -> bool) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let found = self.places[at];
            if found == EMPTY {
                return None;
            }
            if self.has_tag(found, hash) && right(self.slot(found)) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    /// Bits of a place that are the slot.
    #[inline]
    const fn bits(&self) -> u32 {
        self.places.len().trailing_zeros()
    }

    #[inline]
    const fn home(&self, hash: u64) -> usize {
        (hash >> (u64::BITS - self.bits())) as usize
    }

    #[inline]
    const fn after(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    #[inline]
    const fn tag(&self, hash: u64) -> u32 {
        (hash as u32) << self.bits()
    }

    #[inline]
    const fn has_tag(&self, place: u32, hash: u64) -> bool {
        (place ^ self.tag(hash)) >> self.bits() == 0
    }

    #[inline]
    const fn slot(&self, place: u32) -> u32 {
        place & ((1 << self.bits()) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::Index;
    use engram_memory::mix64;
    use std::collections::BTreeMap;

    /// Against a map, with hashes that crowd into few homes and wrap around the end of the table.
    #[test]
    fn an_index_finds_what_is_in_it_and_nothing_else() {
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
                    let found = index.find(hash(id), |slot| ids[slot as usize] == id);
                    assert_eq!(found, expected.get(&id).copied(), "id {id} after step {step}");
                    let candidate = index.candidate(hash(id), index.peek(hash(id)));
                    assert!(found.is_none() || candidate.is_some());
                }
            }
            for (id, slot) in &expected {
                assert_eq!(index.find(hash(*id), |slot| ids[slot as usize] == *id), Some(*slot));
            }
        }
    }
}
