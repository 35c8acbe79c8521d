//! A bounded cache of payloads; the least recently used one is evicted.

use bytes::Bytes;
use std::collections::{BTreeMap, HashMap};

/// Partition, segment and offset of a payload.
pub(super) type Key = (u32, u32, u32);
/// Bytes counted per entry in addition to the payload.
const ENTRY_BYTES: u64 = 128;
/// A payload above this share of the capacity is not kept: it would evict many others.
const MAX_SHARE: u64 = 8;

/// Payloads by place.
#[derive(Debug, Default)]
pub(super) struct Cache {
    capacity: u64,
    bytes: u64,
    entries: HashMap<Key, (Bytes, u64)>,
    /// Keys by last use.
    order: BTreeMap<u64, Key>,
    uses: u64,
}

impl Cache {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a payload of this length may be kept.
    pub(super) const fn accepts(&self, length: usize) -> bool {
        length as u64 + ENTRY_BYTES <= self.capacity / MAX_SHARE
    }

    pub(super) fn contains(&self, key: Key) -> bool {
        self.entries.contains_key(&key)
    }

    pub(super) fn get(&mut self, key: Key) -> Option<Bytes> {
        let (bytes, used) = self.entries.get_mut(&key)?;
        self.uses += 1;
        self.order.remove(used);
        self.order.insert(self.uses, key);
        *used = self.uses;
        Some(bytes.clone())
    }

    pub(super) fn insert(&mut self, key: Key, bytes: Bytes) {
        if !self.accepts(bytes.len()) {
            return;
        }
        self.remove(key);
        self.uses += 1;
        self.bytes += bytes.len() as u64 + ENTRY_BYTES;
        self.entries.insert(key, (bytes, self.uses));
        self.order.insert(self.uses, key);
        while self.bytes > self.capacity
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            self.remove(*oldest);
        }
    }

    pub(super) fn remove(&mut self, key: Key) {
        if let Some((bytes, used)) = self.entries.remove(&key) {
            self.order.remove(&used);
            self.bytes -= bytes.len() as u64 + ENTRY_BYTES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_payload_is_evicted_and_large_ones_are_not_kept() {
        let payload = |byte: u8| Bytes::from(vec![byte; 1_000]);
        let mut cache = Cache::new(9 * (1_000 + ENTRY_BYTES));
        (0..9).for_each(|at| cache.insert((0, 0, at), payload(at as u8)));
        assert_eq!(cache.get((0, 0, 0)), Some(payload(0)));
        cache.insert((0, 0, 9), payload(9));
        assert_eq!(cache.get((0, 0, 1)), None, "the first one was used later");
        assert!((2..10).chain([0]).all(|at| cache.get((0, 0, at)).is_some()));
        cache.insert((1, 0, 0), Bytes::from(vec![0; 1_200]));
        assert_eq!(cache.get((1, 0, 0)), None);
        (0..10).for_each(|at| cache.remove((0, 0, at)));
        assert_eq!((cache.bytes(), cache.order.len(), cache.entries.len()), (0, 0, 0));
    }
}
